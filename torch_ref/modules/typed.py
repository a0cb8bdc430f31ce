"""A `torch.nn.Module` whose results type checkers know.

Only in torch_ref: Flax types the calls of its modules.
"""

from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import nn

_Forward_co = TypeVar("_Forward_co", covariant=True)


class _HasForward(Protocol[_Forward_co]):
    @property
    def forward(self) -> _Forward_co: ...


class TypedModule(nn.Module):
    """A `torch.nn.Module` whose call has the type of its `forward`; torch's own returns `Any`.

    Example:
        >>> from torch import Tensor
        >>> class Identity(TypedModule):
        ...     def forward(self, x: Tensor) -> Tensor:
        ...         return x
    """

    if TYPE_CHECKING:

        @property
        def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
            self: _HasForward[_Forward_co],
        ) -> _Forward_co: ...

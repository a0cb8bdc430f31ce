"""Self-attention without parameters: the idea alone."""

from typing import Literal, overload

from torch import Tensor

from attn_spec.checks import check_tokens
from torch_ref.attention import check_backend, single_head_attention
from torch_ref.functional.shapes import Tokens
from torch_ref.modules.typed import TypedModule


class SimplifiedSelfAttention(TypedModule):
    """`softmax(x x^T) x`: no parameters, no scaling.

    Args:
        backend: name of an attention backend, or `"auto"`.

    Shapes:
        `(t, d)` or `(b, t, d)`, kept; the weights are `(t, t)` or `(b, t, t)`.

    Raises:
        ValueError: if the backend is unknown; in the call, if the input has another rank.

    Example:
        >>> import torch
        >>> SimplifiedSelfAttention()(torch.eye(2))
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
    """

    def __init__(self, *, backend: str = "auto"):
        super().__init__()
        check_backend(backend)
        self.backend = backend

    @overload
    def forward(self, x: Tensor, *, return_weights: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, return_weights: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tokens, *, return_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the context vectors, followed by the weights if `return_weights`."""
        check_tokens("x", x, "d", x.shape[-1], None)
        return single_head_attention(
            x, x, x, scale=1.0, backend=self.backend, return_weights=return_weights
        )

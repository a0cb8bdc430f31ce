"""A fault is a row of data.

It says what is replaced by what, in which variant, and which check detects it first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from unittest import mock

import torch
from torch import nn

from flax_attn.proof.variants import Variant, select


@dataclass(frozen=True)
class Patch:
    """`target.attribute` becomes `replacement`.

    Args:
        target: a class or a file of `torch_ref`, or the path of a submodule of the variant, such as
            `"norm1"`; `""` is its module itself.
        attribute: attribute of the target, which must have it.
        replacement: the new value.

    Example:
        >>> norm = torch.nn.LayerNorm(3)
        >>> with patched(norm, [Patch("", "eps", 0.1)]):
        ...     norm.eps
        0.1
        >>> norm.eps
        1e-05
    """

    target: object
    attribute: str
    replacement: object

    def value(self, original: object, module: torch.nn.Module) -> object:
        """Return the new value, given the original one and the module of the variant."""
        return self.replacement


@dataclass(frozen=True)
class Modify(Patch):
    """`target.attribute` becomes `replacement(target.attribute)`.

    Example:
        >>> norm = torch.nn.LayerNorm(3)
        >>> with patched(norm, [Modify("", "eps", lambda eps: 10 * eps)]):
        ...     norm.eps
        0.0001
    """

    replacement: Callable[..., object]

    def value(self, original: object, module: torch.nn.Module) -> object:
        return self.replacement(original)


@dataclass(frozen=True)
class Wrap(Patch):
    """Calls of `target.attribute` become `replacement(function, *arguments, **options)`.

    `function` is the original value of `target.attribute`.

    Example:
        >>> class Doubles:
        ...     def forward(self, x):
        ...         return 2 * x
        >>> one_more = Wrap(Doubles, "forward", lambda forward, self, x: forward(self, x) + 1)
        >>> with patched(torch.nn.Module(), [one_more]):
        ...     Doubles().forward(3)
        7
    """

    replacement: Callable[..., object]

    def value(self, original: object, module: torch.nn.Module) -> object:
        return lambda *arguments, **options: self.replacement(original, *arguments, **options)


@dataclass(frozen=True)
class Copy(Patch):
    """`target.attribute` becomes what the module of the variant has at the path `replacement`.

    Example:
        >>> norm = torch.nn.LayerNorm(3)
        >>> with patched(norm, [Copy("", "bias", "weight")]):
        ...     norm.bias is norm.weight
        True
    """

    replacement: str

    def value(self, original: object, module: torch.nn.Module) -> object:
        return attrgetter(self.replacement)(module)


# Of heads, where the layer has one for queries and one for keys.
NO_HEAD_NORMS = (Patch("", "q_norm", None), Patch("", "k_norm", None))


def zeros(parameter: torch.Tensor) -> nn.Parameter:
    """Return a parameter of zeros: what takes it away and leaves its gradient."""
    return nn.Parameter(torch.zeros_like(parameter))


def swapped(first: str, second: str) -> tuple[Patch, Patch]:
    """Return the patches that swap the values at two paths of the module.

    Example:
        >>> swapped("norm1.scale", "norm2.scale")[0]
        Copy(target='norm1', attribute='scale', replacement='norm2.scale')
    """
    return _copied(second, first), _copied(first, second)


def _copied(source: str, path: str) -> Patch:
    target, _, attribute = path.rpartition(".")
    return Copy(target, attribute, source)


@contextmanager
def patched(module: torch.nn.Module, patches: Sequence[Patch]) -> Iterator[None]:
    """Apply patches to a module and to `torch_ref`; undo them afterwards, also after an error."""
    values = []
    # All values are taken before the first is replaced.
    for patch in patches:
        target = patch.target
        if isinstance(target, str):
            target = module.get_submodule(target)
        original = getattr(target, patch.attribute)
        values.append((target, patch.attribute, patch.value(original, module)))
    with ExitStack() as stack:
        for target, attribute, value in values:
            stack.enter_context(_replaced(target, attribute, value))
        yield


@contextmanager
def _replaced(target: object, attribute: str, value: object) -> Iterator[None]:
    if not isinstance(target, torch.nn.Module):
        with mock.patch.object(target, attribute, value):
            yield
        return
    # `mock` would delete the attribute first, and with it its place among the parameters.
    original = getattr(target, attribute)
    # Such as None, in whose place a module is registered.
    plain = attribute in vars(target)
    setattr(target, attribute, value)
    try:
        yield
    finally:
        if plain:
            delattr(target, attribute)
        setattr(target, attribute, original)


@dataclass(frozen=True)
class Fault:
    """A fault that ports are known for.

    Args:
        name: name of the fault.
        what: what goes wrong, in one sentence.
        row: name of the variant that is patched.
        patches: patches that make the fault.
        check: name of the first check that detects it.
    """

    name: str
    what: str
    row: str
    patches: tuple[Patch, ...]
    check: str

    @property
    def variant(self) -> Variant:
        """The row of the table of variants."""
        return select([self.row])[0]


def fault(name: str, what: str, row: str, *patches: Patch, check: str = "forward") -> Fault:
    """Return a fault.

    Example:
        >>> patch = Patch("", "eps", 0.0)
        >>> fault("no_epsilon", "The epsilon is missing.", "rms_norm", patch).variant.module
        'RMSNorm'
    """
    return Fault(name, what, row, patches, check)

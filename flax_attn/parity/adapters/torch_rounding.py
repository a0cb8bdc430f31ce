"""What rounding does to a PyTorch program in float64: every operation rounds once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flax_attn.parity.adapters.adapter import rounding_factors
from flax_attn.parity.adapters.torch_tensors import multiply

aten = torch.ops.aten
# Half of a rounding would often be rounded off again.
ONE_MORE = 2 * torch.finfo(torch.float64).eps


def _softplus(x: torch.Tensor, beta: int | float = 1, threshold: Any = 20) -> torch.Tensor:
    return torch.logaddexp(x * beta, torch.zeros_like(x)) / beta


def _softplus_backward(
    gradient: torch.Tensor, x: torch.Tensor, beta: int | float, threshold: Any
) -> torch.Tensor:
    return gradient * torch.sigmoid(x * beta)


# What PyTorch computes to the digits of float32 alone: beyond 20 its softplus is the identity.
EXACT: dict[Any, Callable[..., torch.Tensor]] = {
    aten.softplus.default: _softplus,
    aten.softplus_backward.default: _softplus_backward,
}


class MoreRounding(TorchDispatchMode):
    """Round what each operation returns in float64 up or down at random, its gradients as well.

    What comes out exact of exact numbers stays so: masks, positions and what is made of them. What
    PyTorch computes in float64 to fewer digits is computed to all.

    Args:
        seed: seed of the directions.

    Example:
        >>> x = torch.linspace(0.1, 1, 50, dtype=torch.float64)
        >>> with MoreRounding(seed=1):
        ...     moved = x.sin()
        >>> float((moved - x.sin()).abs().max())
        2.220446049250313e-16
    """

    def __init__(self, seed: int):
        super().__init__()
        self._factors = rounding_factors(seed, ONE_MORE)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        """Call an operation, and round what it has written."""
        exact = all(map(_is_exact, _float64([args, kwargs])))
        computed: Any = EXACT.get(func, func)
        found = computed(*args, **(kwargs or {}))
        for tensor in _float64(list(_written(func, found))):
            if not (exact and _is_exact(tensor)):
                multiply([tensor], self._factors)
        return found


def _written(func: Any, found: Any) -> Iterator[Any]:
    """Yield what an operation has computed: a view shares numbers that were rounded before."""
    results = found if isinstance(found, tuple | list) else (found,)
    for result, declared in zip(results, func._schema.returns, strict=False):
        alias = declared.alias_info
        if alias is None or alias.is_write:
            yield result


def _float64(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.dtype == torch.float64]


def _is_exact(tensor: torch.Tensor) -> bool:
    """Whether all numbers are short, such as 0, 1 and whole ones, so that none was rounded."""
    return bool((tensor == tensor.float()).all())

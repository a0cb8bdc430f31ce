"""The operations that a module asks for, whatever program computes them.

Only in flax_attn: `flax-attn plan` counts with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import jax
from flax import nnx


@dataclass(frozen=True)
class Work:
    """Floating-point operations: a multiplication and an addition are two.

    Args:
        parameters: operations of products with parameters.
        attention: operations of queries with keys and values, or with a state.

    Example:
        >>> 3 * (Work(10, 2) + Work(attention=5))
        Work(parameters=30, attention=21)
    """

    parameters: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.parameters + self.attention

    def __add__(self, other: Work) -> Work:
        return Work(self.parameters + other.parameters, self.attention + other.attention)

    def __rmul__(self, factor: int) -> Work:
        return Work(factor * self.parameters, factor * self.attention)


def work(module: nnx.Module, t: int, s: int) -> Work:
    """Return the operations of one call of a module on one sequence.

    A module that has a method `work(t, s)` is asked. In any other each kernel multiplies all
    queries, and the modules in it add theirs.

    Args:
        module: any module; of its parameters only the shapes are read.
        t: number of queries, which are the last of the sequence.
        s: number of keys.

    Raises:
        ValueError: if an attention does not say what it computes.

    Example:
        >>> from flax_attn import FeedForward, MultiHeadAttention, TransformerBlock
        >>> rngs = nnx.Rngs(0)
        >>> att = MultiHeadAttention(4, 4, None, 0.0, 2, rngs=rngs)
        >>> block = TransformerBlock(att, FeedForward(4, 6, rngs=rngs), None, None)
        >>> work(block, t=3, s=3)
        Work(parameters=672, attention=96)
    """
    # What computes more than its parts says so itself: no list of classes is kept here.
    asked = getattr(module, "work", None)
    return work_of_parts(module, t, s) if asked is None else asked(t, s)


def work_of_parts(module: nnx.Module, t: int, s: int) -> Work:
    """Return the operations of a module's own kernel and of the modules in it.

    What a module with a method `work` adds to, where it computes more than its parts.
    """
    found = Work()
    kernel = getattr(module, "kernel", None)
    if isinstance(kernel, nnx.Param):
        found += Work(2 * t * prod(kernel.shape))
    for part in _parts(module):
        found += work(part, t, s)
    return found


def products(module: nnx.Module, t: int) -> Work:
    """Return the operations of `t` tokens with all kernels in a module."""
    params = nnx.to_flat_state(nnx.state(module, nnx.Param))
    # Norms and biases are additions that no product does: they count as nothing.
    sizes = [prod(param.shape) for path, param in params if path[-1] == "kernel"]
    return Work(2 * t * sum(sizes))


def count_pairs(t: int, s: int, window: int | None) -> int:
    """Return how many keys the last `t` of `s` tokens see together, where each sees none behind it.

    Example:
        >>> count_pairs(3, 3, None), count_pairs(1, 8, None), count_pairs(4, 4, window=2)
        (6, 8, 7)
    """
    # Keys that all queries see.
    before = s - t
    limit = s if window is None else min(window, s)
    # Queries that see less than the window.
    growing = min(max(limit - before, 0), t)
    # The sum of an arithmetic series, and of what every query behind it sees.
    return growing * before + growing * (growing + 1) // 2 + (t - growing) * limit


def _parts(module: nnx.Module) -> Iterator[nnx.Module]:
    """Yield the modules directly in a module, those in its lists included."""
    # Only the values are modules: the module itself would be the first leaf.
    leaves = jax.tree.leaves(vars(module), is_leaf=lambda x: isinstance(x, nnx.Module))
    for leaf in leaves:
        if isinstance(leaf, nnx.Module):
            yield leaf

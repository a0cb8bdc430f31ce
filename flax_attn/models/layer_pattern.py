"""Which layers of a model can be stacked: those of equal shape and options, alone or in turns.

Only in flax_attn: it saves compiling.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.cross_block import CrossBlock
from flax_attn.sharding.parameters import name_first_axis

Block = TransformerBlock | CrossBlock
M = TypeVar("M")


class UnequalLayersError(ValueError):
    """Layers that cannot be stacked."""


def take_numbers(block: Block) -> tuple[float, ...]:
    """Return the numbers that a block has of its own, and leave 0 in their place."""
    names = getattr(block.att, "per_layer", ())
    taken = tuple(getattr(block.att, name) for name in names)
    give_numbers(block, (0.0,) * len(names))
    return taken


def give_numbers(block: Block, numbers: Sequence[Any]) -> Block:
    """Return a block after giving it the numbers that it has of its own."""
    for name, number in zip(getattr(block.att, "per_layer", ()), numbers, strict=True):
        setattr(block.att, name, nnx.data(number) if isinstance(number, Array) else number)
    return block


def kind_of(block: Block) -> object:
    """Return what blocks that can be stacked have in common."""
    graph, state = nnx.split(block)
    return graph, jax.tree.map(lambda x: (x.shape, x.dtype), state)


def group_by_pattern(kinds: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each stacked block, for the fewest blocks.

    Blocks before the first turn hold one layer each; then each block of a turn follows.

    Raises:
        UnequalLayersError: if no turn is repeated.

    Example:
        >>> group_by_pattern("FLLFLLFLL"), group_by_pattern("ALLFLLF")
        (((0, 3, 6), (1, 4, 7), (2, 5, 8)), ((0,), (1, 4), (2, 5), (3, 6)))
    """
    n = len(kinds)
    # The fewest kinds of layers first: each is a stack of its own, and compiled once.
    for count in range(1, n):
        for first in range(count):
            size = count - first
            if _repeats(kinds[first:], size):
                alone = [(i,) for i in range(first)]
                turns = [tuple(range(m, n, size)) for m in range(first, count)]
                return *alone, *turns
    if n == 1:
        return ((0,),)
    other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
    raise UnequalLayersError(
        "scan_layers=True stacks layers of equal shapes and options, or those that take turns;"
        f" layer {other} differs from layer 0, in a window, a width or a dtype, and no turn is"
        " repeated to the last layer. Pass scan_layers=False"
    )


def _repeats(kinds: Sequence[object], size: int) -> bool:
    """Return whether these are turns of `size` layers, and nothing after the last turn."""
    if len(kinds) % size:
        return False
    following = zip(kinds, kinds[size:], strict=False)
    return all(kind == later for kind, later in following)


def stack_modules(modules: Sequence[M]) -> M:
    """Return modules of equal shape as one, whose variables have them as their first axis."""
    split = [nnx.split(module) for module in modules]
    # All have the graph of the first.
    graph, _ = split[0]
    stacked = nnx.merge(graph, _stack([state for _, state in split]))
    change_variables(stacked, name_first_axis)
    return stacked


def change_variables(module: Any, change: Callable[[nnx.Variable], None]) -> None:
    """Call a function that changes variables in place on each of a module."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            change(node)


@jax.jit
def _stack(states: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)

"""Constants that a module holds in float32, such as the frequencies of rotary positions.

They were rounded where they were made. The other side computes the same numbers with roundings of
its own, so that two right ports agree to 1e-8 in float64. Where such constants, or what is
computed of nothing else, are within roundings of float32 of numbers that the other side computes,
they get the values with which both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import LAYOUTS
from flax_attn.parity.trace.program import Node, Program
from flax_attn.parity.trace.runs import flax_forward, torch_forward

Framework = Literal["flax", "torch"]
# It gives the constant with some values other ones, and returns its name; "" if it is not held.
SetConstant = Callable[[np.ndarray, np.ndarray], str]

NAMES = {"flax": "JAX", "torch": "PyTorch"}
SINGLE = float(np.finfo(np.float32).eps)
# The last bits of a number in float32, which are 0 in short fractions.
LAST_BITS = 0xFF
# The most numbers of a constant that are found from what is computed of them.
UNKNOWN = 512


def share_constants(pair: Pair) -> list[str]:
    """Give float32 constants that a module holds the values that the other side computes.

    Those of PyTorch come first: where they are what JAX computes, JAX's own are left as they are.

    Returns:
        A note for each constant that has other values now.
    """
    flax: Any = pair.flax
    torch: Any = pair.own_torch
    _, program = flax_forward(pair)
    ours = _Side(program, flax.shapes)
    theirs = _Side(torch_forward(pair), torch.shapes)
    notes = _shared("torch", theirs, ours.tables, torch.set_constant)
    return notes or _shared("flax", ours, theirs.tables, flax.set_constant)


def _shared(
    framework: Framework, side: _Side, tables: Sequence[np.ndarray], set_constant: SetConstant
) -> list[str]:
    other = NAMES["torch" if framework == "flax" else "flax"]
    notes = []
    for held in side.held:
        values = side.values_from(held, tables)
        name = "" if values is None else set_constant(held.value, values)
        if values is None or not name:
            continue
        apart = np.max(tolerance.REORDERED * np.abs(values - held.value) / _allowed(held.value))
        notes.append(
            f"{NAMES[framework]} holds {name} in float32: in float64 it has the values that"
            f" {other} computes, at most {apart:.2g} roundings of float32 away"
        )
    return notes


def is_rounded(array: np.ndarray) -> bool:
    """Whether an array of several numbers was rounded to float32.

    Example:
        >>> is_rounded(np.float32([1, 1 / 3])), is_rounded(np.float32([0, 0.5, -1e9]))
        (True, False)
    """
    if array.dtype.kind != "f" or array.size < 2:
        return False
    # What hides in float64 is infinite in float32.
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
        whole = single == np.round(single)
    last_bits = single.view(np.uint32) & LAST_BITS
    return np.array_equal(single, array) and bool((last_bits * ~whole).any())


class _Side:
    """The run of one side, and what of it depends on nothing that both sides are given.

    Args:
        program: the run.
        shared: names of the parameters and running statistics.
    """

    def __init__(self, program: Program, shared: Collection[str]):
        self.program = program
        given = {f"parameter {name}" for name in shared}
        held = {node.name for node in program.nodes if node.name.startswith("parameter ")} - given
        varying: set[Node] = set()
        self.fixed: list[Node] = []
        for node in program.nodes:
            is_given = node.operation == "source" and node.name not in held
            if is_given or not varying.isdisjoint(node.operands):
                varying.add(node)
            elif node.value.dtype.kind == "f" and not node.constant:
                self.fixed.append(node)

    @property
    def held(self) -> list[Node]:
        """The constants that the module holds, and that were rounded to float32."""
        return [node for node in self.fixed if not node.operands and is_rounded(node.value)]

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """The values of all constants, held or computed."""
        return [node.value for node in self.fixed]

    def values_from(self, held: Node, tables: Sequence[np.ndarray]) -> np.ndarray | None:
        """Return the values of a constant with which the other side has all that is made of it.

        Args:
            held: the constant.
            tables: constants of the other side.
        """
        values = _nearest(held.value, tables)
        if values is None:
            values = self._by_parts(held, tables)
        if values is None and held.value.size <= UNKNOWN:
            values = self._by_results(held, tables)
        return values

    def _made_of(self, held: Node) -> list[Node]:
        downstream = set(self.program.downstream([held]))
        return [node for node in self.fixed if node in downstream]

    def _by_parts(self, held: Node, tables: Sequence[np.ndarray]) -> np.ndarray | None:
        """Return the constant with the rows that a run takes as the other side has them."""
        numbers = np.arange(held.value.size, dtype=np.float64)
        taken = self.program.rerun({held: numbers.reshape(held.value.shape)}, {})
        values = held.value.astype(np.float64)
        found = False
        for node in self._made_of(held):
            index = taken.get(node)
            if index is None or not np.isin(index, numbers).all():
                continue
            at = index.astype(int)
            nearest = _nearest(node.value, tables)
            if nearest is not None and np.array_equal(held.value.flat[at], node.value):
                values.flat[at] = nearest
                found = True
        return values if found else None

    def _by_results(self, held: Node, tables: Sequence[np.ndarray]) -> np.ndarray | None:
        """Return the constant of which the module computes what the other side has.

        What is computed of it is linear in moves as small as roundings.
        """
        wanted = {}
        for node in self._made_of(held):
            nearest = _nearest(node.value, tables)
            if nearest is not None:
                wanted[node] = nearest
        if not wanted:
            return None
        before = _joined(node.value for node in wanted)
        columns = []
        steps = SINGLE * np.abs(held.value)
        for at in np.ndindex(held.value.shape):
            moved = held.value.astype(np.float64)
            moved[at] += steps[at] or SINGLE
            found = self.program.rerun({held: moved}, {}, until=[*wanted][-1])
            after = _joined(found.get(node, node.value) for node in wanted)
            columns.append((after - before) / (moved[at] - held.value[at]))
        gap = _joined(wanted.values()) - before
        move, *_ = np.linalg.lstsq(np.stack(columns, axis=1), gap)
        values = held.value + move.reshape(held.value.shape)
        if (np.abs(values - held.value) > _allowed(held.value)).any():
            return None
        found = self.program.rerun({held: values}, {}, until=[*wanted][-1])
        results = {str(node.order): found.get(node, node.value) for node in wanted}
        targets = {str(node.order): value for node, value in wanted.items()}
        errors = tolerance.relative(results, targets)
        return values if tolerance.within(errors, tolerance.FORWARD) else None


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _nearest(values: np.ndarray, tables: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the numbers of the table in which all values are, up to roundings of float32."""
    allowed = _allowed(values)
    # Of single numbers others may be nearer by chance than those in the place of the values.
    for candidates in (_in_layout, _one_by_one):
        best, smallest = None, np.inf
        for table in tables:
            for near in candidates(values, table):
                apart = np.abs(near - values)
                if (apart <= allowed).all() and apart.max() < smallest:
                    best, smallest = near, apart.max()
        if best is not None:
            return best
    return None


def _in_layout(values: np.ndarray, table: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a table, or a part of it, in layouts that have the shape of the values."""
    parts = [table]
    times, rest = divmod(table.size, values.size)
    if times > 1 and not rest and table.shape[-1] % times == 0:
        # Rotary positions repeat their angles, side by side or one by one.
        width = table.shape[-1] // times
        parts = [table[..., :width], table[..., ::times]]
    for part in parts:
        yield from islice(laid_out(part, values.shape), LAYOUTS)


def _one_by_one(values: np.ndarray, table: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the number of a table that is nearest to each value."""
    numbers = np.unique(table)
    right = np.searchsorted(numbers, values).clip(1, len(numbers) - 1)
    below, above = numbers[right - 1], numbers[right]
    yield np.where(values - below < above - values, below, above)


def _allowed(values: np.ndarray) -> np.ndarray:
    """Return by how much each number may differ in another order of evaluation in float32.

    A number near 0 beside others of both signs has the roundings of those, as in tables of sines.
    Their angles are as large as the position, and are rounded accordingly.
    """
    # What is 0 is allowed next to nothing.
    sizes = np.abs(values.astype(np.float64)) + np.finfo(np.float64).tiny
    if (values < 0).any() and (values > 0).any():
        roundings = max(tolerance.REORDERED, *values.shape)
        return np.full(values.shape, roundings * SINGLE * sizes.max())
    return tolerance.REORDERED * SINGLE * sizes

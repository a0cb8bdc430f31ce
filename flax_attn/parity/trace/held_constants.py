"""Constants that a module holds in float32, such as the frequencies of rotary positions.

They were rounded where they were made. The other side computes the same numbers with roundings of
its own, so that two right ports agree to 1e-8 in float64. Where such constants, or what is
computed of nothing else, are within roundings of float32 of numbers that the other side computes,
they get the values with which both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    ours = _Side(program)
    theirs = _Side(torch_forward(pair))
    notes = _shared("torch", theirs, ours.tables, torch.set_constant)
    return notes or _shared("flax", ours, theirs.tables, flax.set_constant)


def _shared(
    framework: Framework, side: _Side, tables: Sequence[np.ndarray], set_constant: SetConstant
) -> list[str]:
    other = NAMES["torch" if framework == "flax" else "flax"]
    notes = []
    for held, values in side.values_from(tables).items():
        name = set_constant(held.value, values)
        # Another constant with the same values was set together with the first.
        if not name:
            continue
        apart = np.max(tolerance.REORDERED * np.abs(values - held.value) / _allowed(held.value))
        notes.append(
            f"{NAMES[framework]} holds {name} in float32: in float64 it has the values that"
            f" {other} computes, at most {apart:.2g} roundings of float32 away"
        )
    return notes


def is_rounded(array: np.ndarray) -> bool:
    """Whether an array holds numbers that were rounded to float32.

    Example:
        >>> is_rounded(np.float32([1, 1 / 3])), is_rounded(np.float32([0, 0.5, -1e9]))
        (True, False)
    """
    if array.dtype.kind != "f":
        return False
    # What hides in float64 is infinite in float32.
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
        whole = single == np.round(single)
    last_bits = np.atleast_1d(single).view(np.uint32) & LAST_BITS
    return np.array_equal(single, array) and bool((last_bits * ~np.atleast_1d(whole)).any())


class _Side:
    """The run of one side, and what of it depends on nothing that both sides are given."""

    def __init__(self, program: Program):
        self.program = program
        computed = [node for node in program.nodes if node not in program.depending]
        self.fixed = [node for node in computed if node.value.dtype.kind == "f" and node.value.size]

    @property
    def held(self) -> list[Node]:
        """The constants that the module holds, and that were rounded to float32."""
        return [node for node in self.fixed if not node.operands and is_rounded(node.value)]

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """The values of all constants, held or computed."""
        return [node.value for node in self.fixed]

    def values_from(self, tables: Sequence[np.ndarray]) -> dict[Node, np.ndarray]:
        """Return the values of held constants with which the other side has what is made of them.

        Args:
            tables: constants of the other side.
        """
        found = {}
        left = []
        for held in self.held:
            values = _nearest(held.value, tables)
            if values is None:
                values = self._by_parts(held, tables)
            if values is not None:
                found[held] = values
            elif held.value.size <= UNKNOWN:
                left.append(held)
        return found | self._by_results(found, left, tables)

    def _made_of(self, held: Node) -> list[Node]:
        downstream = set(self.program.downstream([held]))
        return [node for node in self.fixed if node in downstream]

    def _by_parts(self, held: Node, tables: Sequence[np.ndarray]) -> np.ndarray | None:
        """Return the constant with the rows that a run takes as the other side has them."""
        numbers = np.arange(held.value.size, dtype=np.float64)
        places = {held: numbers.reshape(held.value.shape)}
        taken = self.program.rerun(places, {}, fixed=self.program.depending)
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

    def _by_results(
        self, known: Mapping[Node, np.ndarray], left: Sequence[Node], tables: Sequence[np.ndarray]
    ) -> dict[Node, np.ndarray]:
        """Return the constants of which the module computes what the other side has.

        What is computed of them is linear in moves as small as roundings.

        Args:
            known: values of other constants.
            left: the constants.
            tables: constants of the other side.
        """
        start = {held: held.value.astype(np.float64) for held in left}
        made = {node for held in left for node in self._made_of(held)}
        before = self._computed({**known, **start}, made)
        wanted = {}
        for node, value in before.items():
            numbers = _numbers_in(value, tables)
            if numbers is not None:
                wanted[node] = numbers
        if not wanted:
            return {}

        def gap(values: Mapping[Node, np.ndarray]) -> np.ndarray:
            """Return by how much what is made of the constants misses the other side's numbers."""
            after = self._computed({**known, **values}, wanted)
            missing = [right - after[node].flat[at] for node, (at, right) in wanted.items()]
            return np.concatenate(missing)

        missing = gap(start)
        columns = []
        for held, at in _elements(left):
            moved = start[held].copy()
            step = SINGLE * (abs(moved[at]) or 1.0)
            moved[at] += step
            columns.append((missing - gap({**start, held: moved})) / step)
        moves, *_ = np.linalg.lstsq(np.stack(columns, axis=1), missing)
        values = {held: value.copy() for held, value in start.items()}
        for (held, at), move in zip(_elements(left), moves, strict=True):
            values[held][at] += move
        if any((np.abs(values[held] - start[held]) > _allowed(start[held])).any() for held in left):
            return {}
        sizes = np.concatenate([np.abs(right) for _, right in wanted.values()])
        if np.abs(gap(values)).max() > tolerance.FORWARD * sizes.max():
            return {}
        return {held: value for held, value in values.items() if (value != start[held]).any()}

    def _computed(
        self, held: Mapping[Node, np.ndarray], wanted: Collection[Node]
    ) -> dict[Node, np.ndarray]:
        """Return the values of some nodes with these values of constants."""
        last = max(wanted, key=lambda node: node.order, default=None)
        found = self.program.rerun(held, {}, until=last, fixed=self.program.depending)
        return {node: found.get(node, node.value) for node in wanted}


def _elements(nodes: Sequence[Node]) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Yield each number of some nodes, with its index."""
    for node in nodes:
        for at in np.ndindex(node.value.shape):
            yield node, at


def _numbers_in(
    values: np.ndarray, tables: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the indices of values that a table has, and its numbers there.

    Either all values are in a table, or a table of several fractions is in the values, as where a
    scan computes the decay of a few steps only.
    """
    nearest = _nearest(values, tables)
    if nearest is not None:
        return np.arange(values.size), nearest.reshape(-1)
    order = np.argsort(values, axis=None)
    sorted_values = values.flat[order]
    best = None
    for table in tables:
        numbers = np.unique(table)
        fractions = numbers[numbers != np.round(numbers)]
        if len(fractions) < 2 or (best is not None and len(fractions) <= len(best[1])):
            continue
        at = _places(fractions, sorted_values)
        apart = np.abs(sorted_values[at] - fractions)
        if (apart <= _allowed(fractions)).all():
            best = order[at], fractions
    return best


def _places(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return which of some sorted numbers is nearest to each value."""
    if len(numbers) == 1:
        return np.zeros(np.shape(values), int)
    right = np.searchsorted(numbers, values).clip(1, len(numbers) - 1)
    is_below = values - numbers[right - 1] < numbers[right] - values
    return np.where(is_below, right - 1, right)


def _nearest(values: np.ndarray, tables: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the numbers of the table in which all values are, up to roundings of float32."""
    shape = values.shape
    values = np.atleast_1d(values)
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
            return np.reshape(best, shape)
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
    yield numbers[_places(values, numbers)]


def _allowed(values: np.ndarray) -> np.ndarray:
    """Return by how much each number may differ in another order of evaluation in float32.

    A number near 0 beside others of both signs has the roundings of those, as in tables of sines.
    Their angles are as large as the position, and are rounded accordingly.
    """
    # What is 0 is allowed next to nothing.
    sizes = np.abs(np.atleast_1d(values).astype(np.float64)) + np.finfo(np.float64).tiny
    if (values < 0).any() and (values > 0).any():
        roundings = max(tolerance.REORDERED, *values.shape)
        return np.full(values.shape, roundings * SINGLE * sizes.max())
    return tolerance.REORDERED * SINGLE * sizes

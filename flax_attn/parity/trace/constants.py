"""Tables and masks that differ, wherever a run takes them.

A table that several layers take is wrong in each of them, so that no single value of the run
makes the outputs agree. The tables themselves do, all of them put in at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from flax_attn.parity.trace.align import Alignment, cone
from flax_attn.parity.trace.explain import of_constants
from flax_attn.parity.trace.hypothesis import Hypothesis, grouped_by_kind
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import LAYOUTS, same_array
from flax_attn.parity.trace.program import Node, Program

# An array of JAX, all nodes that hold it, the node of PyTorch that stands for it, and its value.
Replaced = tuple[list[Node], Node, np.ndarray]
# What differs, and the alignment without it.
Found = tuple[tuple[Hypothesis, ...], Alignment]
# A function of a run that returns all nodes that hold each of its tables.
Tables = Callable[[Program], list[list[Node]]]
# The tables of one size, each of which may be the one.
MOST = 24


def with_torch_constants(alignment: Alignment) -> Found | None:
    """Return the tables that differ, and the alignment with those of PyTorch in their place.

    It is None where no more values agree with them than without.
    """
    most = None
    for tables in _tables, _sources:
        found = _with_torch_tables(alignment, tables)
        if found is not None and (most is None or _says_more(found, most)):
            most = found
    return most


def _says_more(found: Found, other: Found) -> bool:
    """Whether more values agree with some tables than with others, or as many with fewer."""
    (hypotheses, alignment), (others, without) = found, other
    more = len(alignment.flax_of) - len(without.flax_of)
    return more > 0 or (more == 0 and len(hypotheses) < len(others))


def _with_torch_tables(alignment: Alignment, tables: Tables) -> Found | None:
    ours, theirs = tables(alignment.flax), tables(alignment.torch)
    choices = _choices(ours, theirs)
    if not choices:
        return None
    replaced, changed = _chosen(alignment, choices)
    # Some are tables of the same numbers that both sides write differently.
    for one in list(replaced):
        fewer = [other for other in replaced if other is not one]
        without = _put_in(alignment, fewer)
        if len(without.flax_of) >= len(changed.flax_of):
            replaced, changed = fewer, without
    if not replaced:
        return None
    hypotheses = []
    for nodes, torch, value in replaced:
        # Of masks that hide and that show the same, the numbers of True differ.
        opposite = value.dtype.kind == "b" and _once(value).sum() != _once(torch.value).sum()
        meant = _meant(alignment, nodes[0], torch, theirs)
        hypotheses.append(of_constants(alignment, nodes[0], meant, bool(opposite)))
    return grouped_by_kind(hypotheses), changed


def _meant(alignment: Alignment, table: Node, torch: Node, theirs: Sequence[list[Node]]) -> Node:
    """Return the node that PyTorch computes with where JAX does with a table.

    Several layers may hold the same numbers.
    """
    (equal,) = [nodes for nodes in theirs if torch in nodes]
    quantities = alignment.quantities
    beside = cone(alignment.flax.users[table][:1], quantities)
    known = [quantities.get(operand, 0) for node in beside for operand in node.operands]
    after = max(known, default=0)
    users = alignment.torch.users
    later = [node for node in equal if users[node][0].order > after]
    return min(later, key=lambda node: users[node][0].order, default=torch)


def _put_in(alignment: Alignment, replaced: Sequence[Replaced]) -> Alignment:
    """Return the alignment with tables of PyTorch in the place of those of JAX."""
    values = {}
    for nodes, _, value in replaced:
        values |= dict.fromkeys(nodes, value)
    return alignment.with_changed(alignment.rerun(values), values)


def _chosen(
    alignment: Alignment, choices: Sequence[Sequence[Replaced]]
) -> tuple[list[Replaced], Alignment]:
    """Return one of the choices for each table, and the alignment with them in their place."""
    replaced = [first for first, *_ in choices]
    changed = _put_in(alignment, replaced)
    for i, (_, *others) in enumerate(choices):
        for other in others:
            instead = [*replaced[:i], other, *replaced[i + 1 :]]
            after = _put_in(alignment, instead)
            if len(after.flax_of) > len(changed.flax_of):
                replaced, changed = instead, after
    return replaced, changed


def _choices(ours: Sequence[list[Node]], theirs: Sequence[list[Node]]) -> list[list[Replaced]]:
    """Return the tables that JAX alone has, each with those of PyTorch that may be meant.

    First comes the nearest that PyTorch alone has, then the nearest of all: what is wrong in one
    layer may be right in another.
    """
    unknown = [nodes for nodes in ours if not _nearest(nodes[0].value, theirs, exact=True)]
    left = [nodes for nodes in theirs if not _nearest(nodes[0].value, ours, exact=True)]
    found = []
    for nodes in unknown:
        choices: list[Replaced] = []
        for tables in (left, theirs):
            near = _nearest(nodes[0].value, tables)
            if near is not None and near[0] not in [torch for _, torch, _ in choices]:
                choices.append((nodes, *near))
        if choices:
            found.append(choices)
    return found


def _tables(program: Program) -> list[list[Node]]:
    """Return the arrays that depend on no input and that the run computes with, each once."""
    used = []
    for node in program.nodes:
        if node in program.depending:
            used += [operand for operand in node.operands if operand not in program.depending]
    return _each_once(used)


def _sources(program: Program) -> list[list[Node]]:
    """Return the arrays that tables are made of, such as one that a table is a slice of."""
    sources = [node for node in program.nodes if not node.operands]
    return _each_once(node for node in sources if node not in program.depending)


def _each_once(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return the nodes that hold each array, but numbers."""
    tables: dict[tuple, dict[Node, None]] = {}
    for node in nodes:
        if not node.constant:
            value = node.value
            key = value.shape, value.dtype.str, value.tobytes()
            tables.setdefault(key, {})[node] = None
    return [list(nodes) for nodes in tables.values()]


def _nearest(
    value: np.ndarray, tables: Sequence[list[Node]], exact: bool = False
) -> tuple[Node, np.ndarray] | None:
    """Return the table with most numbers of another one at the same places, in its layout.

    Args:
        value: array of the other side.
        tables: nodes that hold each table.
        exact: whether all have to be the same.
    """
    best = None
    most = -1.0
    own = _once(value)
    for nodes in islice(tables, MOST):
        for array in _layouts(_once(nodes[0].value), own.shape):
            for right in _meanings(array, own):
                share = 1.0 if same_array(own, right) else _share(own, right)
                if share > most:
                    best, most = (nodes[0], np.broadcast_to(right, value.shape)), share
    return None if exact and most < 1 else best


def _layouts(array: np.ndarray, shape: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield an array in the layouts that it may have: of a square one the transpose is another."""
    sizes = [size for size in array.shape if size > 1]
    most = 1 if sizes == [size for size in shape if size > 1] else LAYOUTS
    yield from islice(laid_out(array, shape), most)


def _once(array: np.ndarray) -> np.ndarray:
    """Return an array with one of all numbers along each axis that only repeats them."""
    for axis in range(array.ndim):
        first = array.take([0], axis)
        if (array == first).all():
            array = first
    return array


def _meanings(array: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """Return an array as another one has its numbers: of masks, either may say what is hidden."""
    flags = value.dtype.kind == "b"
    if flags != (array.dtype.kind == "b"):
        binary = not flags or set(np.unique(array)) <= {0, 1}
        return [array.astype(value.dtype)] if binary else []
    return [array, ~array] if flags else [array.astype(value.dtype)]


def _share(value: np.ndarray, other: np.ndarray) -> float:
    """Return how much two arrays have in common: below 1."""
    if value.dtype.kind != "f":
        return float((value == other).mean()) * 0.999
    apart = np.abs(value - other).sum()
    return float(0.999 / (1 + apart / (np.abs(value).sum() + np.abs(other).sum())))

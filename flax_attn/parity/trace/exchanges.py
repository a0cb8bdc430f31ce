"""Values that JAX takes for one another, or in another order, before what is written otherwise.

Where both sides compute the same in ways that have no step in common, such as a scan over tokens
beside one over blocks of them, no value inside of it can be replaced. What goes in can.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

import numpy as np

from flax_attn.parity.trace.align import Alignment, Repair, cone
from flax_attn.parity.trace.explain import exchanged, explain
from flax_attn.parity.trace.hypothesis import Hypothesis, grouped_by_kind
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import is_laid_out, same_array
from flax_attn.parity.trace.patterns import LAYOUT
from flax_attn.parity.trace.program import Node

# The values that are exchanged in pairs.
MOST = 8
# The layers in which one after another is put in order.
LAYERS = 12
# What an alignment becomes, and why.
Found = tuple[tuple[Hypothesis, ...], Alignment]


def taken_otherwise(alignment: Alignment) -> Found | None:
    """Return what makes all outputs agree if values are put in order, or two are exchanged."""
    return _put_in_order(alignment) or _exchanged(alignment)


def _put_in_order(alignment: Alignment) -> Found | None:
    """Put all values in order whose numbers both sides have, layer by layer."""
    hypotheses: list[Hypothesis] = []
    for _ in range(LAYERS):
        wrong = alignment.wrong()
        if not wrong:
            return grouped_by_kind(hypotheses), alignment
        repairs = list(_out_of_order(alignment, wrong))
        if not repairs:
            return None
        hypotheses += chain.from_iterable(map(explain, repairs))
        replaced = {repair.flax: repair.value for repair in repairs}
        alignment = alignment.with_changed(alignment.rerun(replaced), list(replaced))
    return None


def _out_of_order(alignment: Alignment, wrong: Sequence[str]) -> Iterator[Repair]:
    """Yield what puts the values in order that JAX computes wrong ones with."""
    outputs = [alignment.torch.outputs[name] for name in wrong]
    theirs = cone(outputs, alignment.flax_of)
    taken = {operand for node in theirs for operand in node.operands}
    for flax in _given(alignment, wrong):
        value = alignment.value(flax)
        others = [torch for torch in alignment.torch_of[flax] if torch.value.size == value.size]
        # Of another shape, a repeated array is in order in some layout whatever was repeated.
        alike = [torch for torch in others if torch.value.shape == value.shape]
        if any(_is_in_order(value, torch.value) for torch in alike or others):
            continue
        first = min(alike or others, key=lambda torch: torch not in taken, default=None)
        right = None if first is None else next(laid_out(first.value, value.shape), None)
        if first is not None and right is not None:
            yield Repair(flax, first, alignment, right)


def _is_in_order(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two arrays of the same numbers have them in the same order, or in one of axes."""
    if ours.shape == theirs.shape:
        return same_array(ours, theirs)
    return is_laid_out(ours, theirs)


def _exchanged(alignment: Alignment) -> Found | None:
    """Exchange two values that both sides have, in all layers."""
    given = list(_given(alignment, alignment.wrong()))[:MOST]
    for first, second in combinations(given, 2):
        if first.value.shape != second.value.shape:
            continue
        if same_array(alignment.value(first), alignment.value(second)):
            continue
        pairs = list(zip(_repeated(alignment, first), _repeated(alignment, second), strict=False))
        replaced: dict[Node, np.ndarray] = {}
        changed: dict[Node, np.ndarray] = {}
        for one, other in pairs:
            # In a later layer they depend on what is exchanged in an earlier one.
            values = [changed.get(node, alignment.value(node)) for node in (other, one)]
            replaced |= dict(zip((one, other), values, strict=True))
            changed = alignment.rerun(replaced)
        if not alignment.wrong(changed):
            hypothesis = exchanged(alignment, first, second)
            return (hypothesis,), alignment.with_changed(changed, list(replaced))
    return None


def _given(alignment: Alignment, wrong: Sequence[str]) -> Iterator[Node]:
    """Yield the values of both sides that JAX computes wrong ones with, as whole arrays."""
    outputs = [alignment.flax.outputs[name] for name in wrong]
    found: dict[Node, None] = {}
    for node in cone(outputs, alignment.torch_of):
        for operand in node.operands:
            whole = _whole(operand)
            shared = whole in alignment.torch_of and whole in alignment.flax.varying
            # A parameter has a name, by which it was paired.
            if shared and whole.operands and alignment.numbers(whole).telling:
                found[whole] = None
    yield from found


def _whole(node: Node) -> Node:
    """Return the array of which a scan takes an element, before it is laid out for that."""
    while node.operation == "element" or (node.operation in LAYOUT and node.operands):
        node = node.operands[0]
    return node


def _repeated(alignment: Alignment, node: Node) -> list[Node]:
    """Return what the same line computes in each layer."""
    found = []
    for other in alignment.flax.nodes:
        same = other.operation == node.operation and other.parameters == node.parameters
        if same and other.line == node.line and other.value.shape == node.value.shape:
            found.append(other)
    return found

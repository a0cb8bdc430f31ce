"""Which values of both runs are one quantity in an expression."""

from __future__ import annotations

from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.numbers import is_laid_out
from flax_attn.parity.trace.program import Node, Program

# Operations that put numbers to other places, beside those that reorder axes.
REARRANGING = ("concat", "flip", "gather", "stack", "roll")


def in_order(alignment: Alignment) -> dict[Node, int]:
    """Return the quantities of nodes; what only rearranges numbers is another one than these."""
    found = dict(alignment.quantities)
    for node in alignment.flax_of:
        if _rearranges(node, alignment.torch) and node in found:
            del found[node]
    for node, others in alignment.torch_of.items():
        if not _rearranges(node, alignment.flax):
            continue
        same = [theirs for theirs in others if theirs.value.size == node.value.size]
        same = [one for one in same if is_laid_out(alignment.value(node), one.value)]
        if not same:
            del found[node]
            continue
        moving = [one for one in same if _rearranges(one, alignment.torch)]
        if moving:
            found |= dict.fromkeys([node, *moving], moving[0].order)
    return found


def _rearranges(node: Node, program: Program) -> bool:
    """Whether a value that varies has the numbers of another one at other places."""
    return node.operation in REARRANGING and node in program.varying

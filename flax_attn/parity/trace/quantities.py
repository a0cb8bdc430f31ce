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
        if _rearranges(node, alignment.torch):
            found.pop(node)
    for node in alignment.torch_of:
        if not _rearranges(node, alignment.flax):
            continue
        same = _laid_out_like(alignment, node)
        if not same:
            del found[node]
            continue
        # Both sides rearrange alike, which is a quantity of its own.
        moving = [other for other in same if _rearranges(other, alignment.torch)]
        for other in moving:
            found[node] = found[other] = moving[0].order
    return found


def _laid_out_like(alignment: Alignment, node: Node) -> list[Node]:
    """Return the nodes of PyTorch that hold a value of JAX in a layout of its axes."""
    value = alignment.value(node)
    others = [other for other in alignment.torch_of[node] if other.value.size == value.size]
    return [other for other in others if is_laid_out(value, other.value)]


def _rearranges(node: Node, program: Program) -> bool:
    """Whether a value that varies has the numbers of another one at other places."""
    return node.operation in REARRANGING and node in program.varying

"""Tables of both runs that agree to float32: sinusoids, angles, slopes.

Each side builds them with roundings of its own, so that their last digits differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from flax_attn.parity.trace.align import Alignment, Repair
from flax_attn.parity.trace.apart import LAYOUTS, rounded_by
from flax_attn.parity.trace.explain import explain
from flax_attn.parity.trace.hypothesis import Hypothesis
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.program import Node


def rounded_tables(alignment: Alignment) -> list[Repair]:
    """Return the replacements of tables that JAX computes with by those of PyTorch."""
    users = alignment.torch.users
    found = []
    for node in _tables(alignment):
        agreeing = {}
        for other in alignment.torch.nodes:
            value = _agreeing(node, other)
            if value is not None:
                agreeing[other] = value
        # A table that is rounded at its end agrees before and after.
        last = [other for other in agreeing if agreeing.keys().isdisjoint(users[other])]
        if last:
            found.append(Repair(node, last[0], alignment, agreeing[last[0]]))
    return found


def explain_table(repair: Repair) -> list[Hypothesis]:
    """Return what differs about a table: nothing but its rounding, whatever it is built of."""
    error = rounded_by(repair.before.value(repair.flax), repair.value)
    note = f"{error:.1e}"
    return [replace(one, parameter="rounding", note=note) for one in explain(repair)[:1]]


def _tables(alignment: Alignment) -> Iterator[Node]:
    """Yield what JAX computes without what it is given, and PyTorch does not have."""
    varying = alignment.flax.varying
    for node in alignment.flax.nodes:
        if node in varying or node.value.dtype.kind != "f" or node in alignment.torch_of:
            continue
        used = any(user in varying for user in alignment.flax.users[node])
        if used and alignment.numbers(node).telling:
            yield node


def _agreeing(node: Node, other: Node) -> np.ndarray | None:
    """Return PyTorch's numbers in the layout of JAX's node, if they agree to float32."""
    if other.value.dtype.kind != "f" or other.value.size != node.value.size:
        return None
    for value in islice(laid_out(other.value, node.value.shape), LAYOUTS):
        if rounded_by(node.value, value):
            return value
    return None

"""The check of state: what a module returns after another call of it."""

from __future__ import annotations

from flax_attn.parity import tolerance
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.pair import Pair


def twice(pair: Pair) -> Check:
    """Outputs of a second call of the same modules, on other inputs than the first."""
    # A module that keeps what it computed returns that of the first.
    spec = pair.run_spec("twice", before=pair.halved, eager=True)
    ours, theirs = pair.both(spec)
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    once = tolerance.relative(theirs.outputs, pair.plain.outputs)
    note = ""
    if not tolerance.within(once, tolerance.FORWARD):
        note = "a call of PyTorch changes what the next one returns"
    arrays = {"flax": ours.outputs, "torch": theirs.outputs}
    return worst_of("twice", errors, tolerance.FORWARD, note, **arrays)

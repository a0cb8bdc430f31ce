"""The check of state: what a module returns after another call of it."""

from __future__ import annotations

from flax_attn.parity import tolerance
from flax_attn.parity.check import Check, worst_output
from flax_attn.parity.pair import Pair

CHANGES = "a call of PyTorch changes what the next one returns"


def twice(pair: Pair) -> Check:
    """Outputs of a second call of the same modules, on other inputs than the first."""
    # A module that keeps what it computed returns that of the first.
    spec = pair.run_spec("twice", before=pair.halved, eager=True)
    ours, theirs = pair.both(spec)
    once = tolerance.relative(theirs.outputs, pair.plain.outputs)
    note = "" if tolerance.within(once, tolerance.FORWARD) else CHANGES
    return worst_output("twice", ours.outputs, theirs.outputs, note)

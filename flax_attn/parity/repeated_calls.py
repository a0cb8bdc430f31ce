"""The check of state: what a module returns after another call of it."""

from __future__ import annotations

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import is_floating
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.pair import Pair


def twice(pair: Pair) -> Check:
    """Outputs of a second call of the same modules, on other inputs than the first."""
    # A module that keeps what it computed returns that of the first.
    before = {name: x / 2 if is_floating(x) else x for name, x in pair.inputs.items()}
    ours, theirs = pair.both(pair.run_spec("twice", before=before, eager=True))
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    once = tolerance.relative(theirs.outputs, pair.plain.outputs)
    stateful = max(once.values(), default=0.0) > tolerance.FORWARD
    note = "a call of PyTorch changes what the next one returns" if stateful else ""
    return worst_of(
        "twice", errors, tolerance.FORWARD, note, flax=ours.outputs, torch=theirs.outputs
    )

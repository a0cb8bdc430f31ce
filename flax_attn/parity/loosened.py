"""What a caller asked for that makes a pass worth less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flax_attn.parity.adapters.recording import Recording
from flax_attn.parity.checks import CHECKS
from flax_attn.parity.listed import listed
from flax_attn.parity.pair import Pair
from flax_attn.parity.training import Recipe

# Names that are listed, at most.
_NAMED = 4


def loosened(pair: Pair, checks: Sequence[str] | None) -> tuple[str, ...]:
    """Return what the caller loosened, in words; empty where all rules are the defaults.

    Args:
        pair: pair of modules that is compared.
        checks: names of the requested checks; None is all.
    """
    return tuple(_loosened(pair, checks))


def _loosened(pair: Pair, checks: Sequence[str] | None) -> Iterator[str]:
    if checks is not None and not CHECKS.keys() <= set(checks):
        yield f"{len(set(checks))} of {len(CHECKS)} checks asked for: {listed(checks, _NAMED)}"
    if pair.entries:
        yield from _of_weights(pair)
    elif pair.has_parameters:
        yield "layout=None: weights are neither drawn nor shown to be the same"
    taken, steps = pair.recipe.steps, Recipe().steps
    if taken < steps:
        yield f"training takes {taken} steps instead of {steps}"


def _of_weights(pair: Pair) -> Iterator[str]:
    # The weights of a recording were drawn when it was made.
    if not pair.redraw and not isinstance(pair.torch, Recording):
        yield "redraw=False: weights that are 0 or 1 may hide a difference"
    paired = {entry.theirs for entry in pair.entries}
    left = [name for name in pair.torch.shapes if name not in paired]
    if left:
        yield f"the layout leaves out {listed(left, _NAMED)}"

"""The check of train mode: both sides drop the same elements."""

from __future__ import annotations

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, NotRun, Result, Untested
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.pair import Pair

NO_KEY = "the calls take no dropout_key, so they cannot be made to drop the same elements"


def dropout(pair: Pair) -> Check:
    """Outputs and gradients in train mode, with the same dropout key in both."""
    ours, theirs = _in_train_mode(pair)
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    errors |= tolerance.gradient_errors(ours.gradients, pair.shared(theirs.gradients))
    return worst_of("dropout", errors, tolerance.GRADIENT, flax=ours.arrays, torch=theirs.arrays)


def _in_train_mode(pair: Pair) -> tuple[Result, Result]:
    if not pair.takes("dropout_key"):
        raise Untested(NO_KEY) if _drops(pair) else NotRun(NO_KEY)
    ours, theirs = pair.both(pair.training())
    if _are_equal(theirs.outputs, pair.plain.outputs):
        raise NotRun("nothing is dropped: train mode returns what eval mode does")
    return ours, theirs


def _drops(pair: Pair) -> bool:
    """Whether dropout changes what PyTorch returns in train mode."""
    try:
        train = pair.run("torch", pair.run_spec("train mode", mode="train", eager=True))
        without = pair.run("torch", pair.run_spec("no dropout", mode="statistics", eager=True))
    # One row has no batch statistics: `running statistics` says that PyTorch refuses it. The same
    # holds for random numbers that are not those of dropout.
    except (AdapterError, NotRun):
        return False
    return not _are_equal(train.outputs, without.outputs)


def _are_equal(ours: Arrays, theirs: Arrays) -> bool:
    return all(np.array_equal(ours[name], theirs[name], equal_nan=True) for name in ours)

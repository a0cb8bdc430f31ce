"""The checks of a pair, the fastest first. Each returns what it measured beside its rule.

A check that does not apply to a pair raises `NotRun` with the reason, which becomes a line in the
report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import jax
import numpy as np

from attn_spec.checks import check_choice
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    NothingCompared,
    NotRun,
    PairingError,
    ReplacedError,
    Untested,
)
from flax_attn.parity.adapters.recording import ExportError
from flax_attn.parity.check import THE_CALL, Check
from flax_attn.parity.dropout import dropout
from flax_attn.parity.float64_checks import (
    cache,
    eager,
    forward,
    gradients,
    shapes,
    training,
    unbatched,
    weights,
)
from flax_attn.parity.ids import ids
from flax_attn.parity.lower_dtype import lower_dtype
from flax_attn.parity.masks import masks
from flax_attn.parity.other_shapes import other_shapes
from flax_attn.parity.pair import LOWER, Pair
from flax_attn.parity.precision import precision
from flax_attn.parity.repeated_calls import twice
from flax_attn.parity.running_statistics import running_statistics
from flax_attn.parity.second_derivatives import second
from flax_attn.parity.stress import STRESS_INPUTS, stress

#: The checks of a comparison by name, in the order in which they run.
CHECKS: dict[str, Callable[[Pair], Check]] = {
    "shapes": shapes,
    "weights": weights,
    "forward": forward,
    "gradients": gradients,
    "second": second,
    **{dtype: partial(lower_dtype, dtype) for dtype in LOWER},
    "precision": precision,
    "jit = eager": eager,
    "twice": twice,
    "dropout": dropout,
    "running statistics": running_statistics,
    "unbatched": unbatched,
    "other shapes": other_shapes,
    "masks": masks,
    "ids": ids,
    "cache = full": cache,
    **{name: partial(stress, name) for name in STRESS_INPUTS},
    "training": training,
}


def run_checks(
    pair: Pair,
    names: Sequence[str] | None = None,
    wanted: bool = True,
    watch: Callable[[str], None] = lambda name: None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Check]:
    """Yield the checks one by one; one that does not apply, or raises, comes with the reason.

    Args:
        pair: pair of modules to check.
        names: names from `CHECKS`; None is all.
        wanted: whether a check in `names` that does not apply is a failure.
        watch: function called with the name of each check before it runs.
        left_out: reason for each check that must not run.

    Raises:
        ValueError: if a name is unknown, or the names are one string.
        ExportError: if the PyTorch side is an export of another comparison.
        ReplacedError: if a function of PyTorch was replaced.
    """
    # All names are checked before the first check runs, which may take minutes.
    _check_names(names)
    return _run_checks(pair, names, wanted, watch, left_out)


def _check_names(names: Sequence[str] | None) -> None:
    if isinstance(names, str):
        raise ValueError(f"checks are names in a list or tuple; got {names!r}: pass [{names!r}]")
    for name in names or ():
        check_choice("check", name, CHECKS)


def _run_checks(
    pair: Pair,
    names: Sequence[str] | None,
    wanted: bool,
    watch: Callable[[str], None],
    left_out: Mapping[str, str],
) -> Iterator[Check]:
    for name in CHECKS if names is None else names:
        if name in left_out:
            yield Check(name, np.inf, 0.0, nothing=left_out[name])
            continue
        watch(name)
        try:
            yield CHECKS[name](pair)
        except NotRun as reason:
            yield _not_run(name, reason, wanted and names is not None)
        except NothingCompared as reason:
            yield Check(name, np.inf, 0.0, nothing=str(reason))
        # One that raises, in whatever library below it, must not cost what the others find.
        except Exception as error:
            # No check can use the export of other inputs, or a PyTorch that is none.
            if isinstance(error.__cause__, ExportError | ReplacedError):
                raise error.__cause__ from None
            yield _raised(name, error)


def _not_run(name: str, reason: NotRun, wanted: bool) -> Check:
    untested = (f"{name}: {reason}",) if isinstance(reason, Untested) else ()
    return Check(name, np.inf, 0.0, skipped=str(reason), wanted=wanted, untested=untested)


def _raised(name: str, error: Exception) -> Check:
    cause = error.__cause__
    # Outputs that cannot be compared, or an array that a call keeps while JAX traces it.
    incomparable = isinstance(cause, PairingError | jax.errors.UnexpectedTracerError)
    if isinstance(error, AdapterError) and not incomparable:
        return Check(name, np.inf, 0.0, worst=THE_CALL, note=str(error))
    # That is no difference, and neither is a fault of the check.
    raised = cause if incomparable else error
    reason = f"the check raised {type(raised).__name__}: {raised}"
    return Check(name, np.inf, 0.0, nothing=reason)

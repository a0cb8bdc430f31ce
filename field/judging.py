"""Judge one port: run the checks, and find the extent of any difference."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from field.port import FlaxError, Port
from flax_attn.parity import Check, PairingError, compare, tolerance
from flax_attn.parity.report.report import Report

EQUAL, FLOAT32, EMPTY, DIFFERENT, OTHER, RAISES, NOT_RUN = VERDICTS = (
    "equal",
    "equal up to float32",
    "differs in empty rows",
    "different",
    "other parameters",
    "Flax raises",
    "does not run",
)
PADDING = "padded rows"
# What float32 may change: of outputs, by the order of operations; of gradients, where small ones
# come of large terms.
LOW = tolerance.REORDERED * float(np.finfo(np.float32).eps)
LOW_GRADIENT = float(np.finfo(np.float32).eps) ** 0.5


def judge(port: Port) -> dict[str, Any]:
    """Return the verdict on a port with what it rests on, for JSON."""
    torch.set_num_threads(1)
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    try:
        report, layout = _report(port, "float64", port.checks)
    except Exception as error:  # whatever keeps a port from running is the verdict on it
        if os.environ.get("FIELD_RAISE"):
            raise
        return {
            "verdict": _refusal(error),
            "reason": f"{type(error).__name__}: {str(error).strip()[:600]}",
        }
    failed = {check.name: check for check in report.failed}
    again = _without_empty_rows(port, failed)
    verdict, single = _verdict(port, failed | again, report.causes)
    only_empty = bool(again) and verdict != DIFFERENT
    found = {
        "verdict": EMPTY if only_empty and verdict == EQUAL else verdict,
        "layout": layout,
        "empty rows differ": only_empty,
        **_kept(report),
        "in float32": [_record(check) for check in single],
    }
    return _told(found)


def _refusal(error: Exception) -> str:
    if isinstance(error, FlaxError) or "do not go through the flax module" in str(error):
        return RAISES
    return OTHER if "do not pair in this layout" in str(error) else NOT_RUN


def _without_empty_rows(port: Port, failed: Mapping[str, Check]) -> dict[str, Check]:
    """Return the padding check without fully padded rows, if it does better than with them."""
    if PADDING not in failed:
        return {}
    check = _report(port, "float64", [PADDING], empty=False)[0].checks[0]
    return {PADDING: check} if check.passed or (_low(check) and not _low(failed[PADDING])) else {}


def _verdict(
    port: Port, found: Mapping[str, Check], causes: Sequence[str]
) -> tuple[str, list[Check]]:
    """Return the verdict, and the check in float32 if it rests on one."""
    failed = [check for check in found.values() if not check.passed]
    if not failed:
        return EQUAL, []
    if "forward" not in found or not all(_low(check) for check in failed):
        return DIFFERENT, []
    single = _report(port, "float32", ["float32"])[0].checks
    only_casts = bool(causes) and all("float32" in cause for cause in causes)
    return FLOAT32 if single[0].passed or only_casts else DIFFERENT, single


def _low(check: Check) -> bool:
    """Whether the errors of a check are no larger than those of float32."""
    gradients = {
        name
        for name in check.errors
        if check.name == "gradients" or name.startswith("gradient of ")
    }
    # Of stress inputs, the error is given as a multiple of the rule.
    unit = {
        name: tolerance.GRADIENT if name in gradients else tolerance.FORWARD
        for name in check.errors
    }
    unit = unit if check.limit == 1.0 else dict.fromkeys(unit, 1.0)
    return bool(check.errors) and all(
        error * unit[name] <= (LOW_GRADIENT if name in gradients else LOW)
        for name, error in check.errors.items()
    )


def _report(
    port: Port, dtype: str, checks: Sequence[str], empty: bool = True
) -> tuple[Report, str]:
    """Return the report on a port, and which of its layouts it was made with."""
    built, problems = port.build(dtype), []
    masked = bool(_takes_mask(built.flax_call))
    wanted = [name for name in checks if name != PADDING or masked]
    calls = {
        "flax_call": _call(built.flax_call, jnp, empty),
        "torch_call": _call(built.torch_call, torch, empty),
    }
    for layout in built.layouts:
        try:
            made = layout(built.flax, built.torch) if callable(layout) else layout
            report = compare(
                built.flax,
                built.torch,
                list(built.inputs),
                layout=made,
                checks=wanted,
                name=port.name,
                **calls,
                **built.options,
            )
            return report, _described(layout)
        except (PairingError, ValueError) as error:
            problems.append(error)
    raise problems[-1]


def _described(layout: Any) -> str:
    if layout is None:
        return "the weights that both were built with"
    return {"auto": "auto"}.get(layout, layout) if isinstance(layout, str) else "rules"


def _takes_mask(call: Callable | None) -> bool:
    return call is not None and "mask" in inspect.signature(call).parameters


def _call(call: Callable | None, xp: Any, empty: bool) -> Callable | None:
    """Wrap a call that takes a mask as one that takes lengths; set outputs at padding to 0.

    Args:
        call: call of a port.
        xp: `jax.numpy` or `torch`.
        empty: whether rows may be all padding; otherwise one token of each is kept.
    """
    if call is None:
        return None
    call = _with_plain_kernel(call) if xp is torch else call
    if not _takes_mask(call):
        return call

    def with_lengths(module, *inputs, lengths=None):
        if lengths is None:
            return call(module, *inputs, mask=None)
        kept = lengths if empty else xp.clip(lengths, 1)
        mask = xp.arange(inputs[0].shape[1])[None] < kept[:, None]
        # What a model computes at padding is seen by nobody; an empty row is kept, to be compared
        # on its own.
        seen = mask | (kept == 0)[:, None]
        return _seen(call(module, *inputs, mask=mask), seen, xp)

    return with_lengths


def _with_plain_kernel(call: Callable) -> Callable:
    # The fused kernel for CPUs keeps the log-sum-exp of scores for its backward pass. Where a whole
    # row is masked by the lowest number, that cannot hold the logarithm, and gradients of the row
    # are wrong: no fault of a port.
    @wraps(call)
    def plain(*arguments, **keywords):
        with sdpa_kernel(SDPBackend.MATH):
            return call(*arguments, **keywords)

    return plain


def _seen(outputs: Any, seen: Any, xp: Any) -> Any:
    if isinstance(outputs, dict):
        return {name: _seen(output, seen, xp) for name, output in outputs.items()}
    if isinstance(outputs, tuple | list):
        return tuple(_seen(output, seen, xp) for output in outputs)
    if tuple(outputs.shape[:2]) != tuple(seen.shape):
        return outputs
    return xp.where(seen.reshape(*seen.shape, *(1,) * (outputs.ndim - 2)), outputs, 0.0)


def _record(check: Check) -> dict[str, Any]:
    """Return what is kept of a check, which passed if its error is at most its limit."""
    error = _rounded(check.error)
    if error is not None and (error <= check.limit) != check.passed:
        error = check.error  # so close to the limit that three digits do not tell
    found = {"name": check.name, "limit": check.limit, "worst": check.worst}
    return _told({**found, "note": (check.note or check.skipped)[:300]}) | {"error": error}


def _told(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result without what says nothing: None, False, no words, none of several."""
    return {name: value for name, value in found.items() if value or isinstance(value, float)}


def _rounded(error: float) -> float | None:
    return float(f"{error:.3g}") if np.isfinite(error) else None


def _kept(report: Report) -> dict[str, Any]:
    difference = report.difference
    found: dict[str, Any] = {"checks": [_record(check) for check in report.checks]}
    if difference is None:
        return found | {"notes": [note[:300] for note in report.notes if "located" in note]}
    nodes = [hypothesis.node or "." for hypothesis in difference.hypotheses]
    return found | {
        "first": nodes[0] if nodes else None,
        "repaired": difference.repaired,
        "causes": report.causes,
    }

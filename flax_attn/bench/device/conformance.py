"""Each backend on small calls, beside the formula in float64 on a processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.backends.call import Unsupported
from flax_attn.bench.calls import ModelCall, forward_and_backward
from flax_attn.bench.device.calls import CALLS, NAN, drawn, in_dtype
from flax_attn.bench.device.clock import Clock
from flax_attn.bench.device.report import Judgement
from flax_attn.parity import tolerance

DTYPES = ("float32", "bfloat16", "float16")
# What was seen is NaN for all that a row reads: only what stands by queries is compared.
BY_QUERIES = ("output", "query")


def judgements(
    backends: Sequence[str], clock: Clock, share: float, calls: Sequence[ModelCall] = CALLS
) -> Iterator[Judgement]:
    """Yield what was found of each backend on each call; once a share of the time is spent, nothing.

    Calls come first, so that every backend is judged on as many.
    """
    for call in calls:
        for dtype in DTYPES:
            for backend in backends:
                if clock.over(share):
                    yield Judgement(backend, call.name, dtype, "not reached")
                else:
                    yield judge(backend, call, dtype)


def judge(backend: str, call: ModelCall, dtype: str) -> Judgement:
    """Return whether a backend computes a call as the formula does, within the rule of a dtype.

    The formula in that dtype, on this device and on a processor, says what rounding may do. An
    error that is too large may be luck: it is drawn a few times.
    """
    call = in_dtype(call, dtype)
    try:
        error = _excess(backend, call, 0)
        if not error <= 1:
            errors = [error, *(_excess(backend, call, i) for i in range(1, tolerance.DRAWS))]
            error = float(np.median(errors))
    except Unsupported as refusal:
        return Judgement(backend, call.name, dtype, "refused", note=str(refusal))
    except Exception as failure:  # of a compiler or a driver: the others go on
        note = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Judgement(backend, call.name, dtype, "failed", note=note)
    return Judgement(backend, call.name, dtype, "equal" if error <= 1 else "differs", error)


def _excess(backend: str, call: ModelCall, seed: int) -> float:
    """Return the largest error over the allowed one; infinite where NaN is in other places."""
    arrays, cotangent = drawn(call, seed)
    found = _results(backend, call, arrays, cotangent)
    processor = jax.devices("cpu")[0]
    with jax.default_device(processor):
        plain = [_results("reference", call, arrays, cotangent)]
        with jax.enable_x64(True):
            wide, wide_cotangent = jax.tree.map(_wide, (arrays, cotangent))
            exact = _results("reference", call, wide, wide_cotangent)
    if jax.default_backend() != "cpu":
        plain.append(_results("reference", call, arrays, cotangent))
    if call.name == NAN:
        exact = {name: exact[name] for name in BY_QUERIES}
    if any(not np.array_equal(np.isnan(found[x]), np.isnan(exact[x])) for x in exact):
        return np.inf
    eps = float(jnp.finfo(call.arrays["query"].dtype).eps)
    output = {"output": exact.pop("output")}
    errors = tolerance.lower_dtype(found, plain, output, tolerance.LOW_FORWARD, eps)
    errors |= tolerance.lower_dtype(found, plain, exact, tolerance.LOW_GRADIENT, eps)
    return max(errors.values())


def _wide(x: Any) -> Any:
    floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x, np.float64) if floating else x


def _results(
    backend: str, call: ModelCall, arrays: dict[str, Any], cotangent: Any
) -> dict[str, np.ndarray]:
    run = jax.jit(forward_and_backward(call, backend))
    output, gradients = run(arrays, cotangent)
    found = {"output": output, **gradients}
    return {name: np.asarray(x, np.float64) for name, x in found.items()}

"""Each backend on small calls, beside the formula in float64 on a processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.backends.call import Unsupported
from flax_attn.bench.calls import ModelCall, forward_and_backward
from flax_attn.device.calls import CALLS, NAN, drawn, in_dtype
from flax_attn.device.clock import Clock
from flax_attn.device.report import Judgement, first_line
from flax_attn.device.threads import in_threads
from flax_attn.parity import tolerance

# In the order in which models use them.
DTYPES = ("bfloat16", "float32", "float16")
# What was seen is NaN for all that a row reads: only what stands by queries is compared.
BY_QUERIES = ("output", "query")

Results = Mapping[str, np.ndarray]


def judgements(
    backends: Sequence[str], clock: Clock, share: float, calls: Sequence[ModelCall] = CALLS
) -> Iterator[Judgement]:
    """Yield what was found of each backend on each call, until a share of the time is spent.

    The last dtype is the one that may not be reached.
    """
    judges = [Judge(in_dtype(call, dtype)) for dtype in DTYPES for call in calls]
    over = partial(clock.over, share)
    tasks = [partial(_judged, judge, backends, over) for judge in judges]
    for found in in_threads(tasks):
        yield from found


def _judged(judge: Judge, backends: Sequence[str], over: Callable[[], bool]) -> list[Judgement]:
    return [judge.not_reached(name) if over() else judge(name) for name in backends]


class Judge:
    """Whether backends compute a call as the formula does, within the rule of its dtype.

    The formula in that dtype, on this device and on a processor, says what rounding may do. An
    error that is too large may be luck: it is drawn a few times.
    """

    def __init__(self, call: ModelCall):
        self.call = call
        self.expected = cache(self._expected)

    def __call__(self, backend: str) -> Judgement:
        result = partial(Judgement, backend, self.call.name, self.dtype.name)
        try:
            error = self._error(backend)
        except Unsupported as refusal:
            return result("refused", note=str(refusal))
        # Of a compiler or a driver: the others go on.
        except Exception as failure:
            return result("failed", note=first_line(failure))
        status = "equal" if error <= 1 else "differs"
        return result(status, error)

    def not_reached(self, backend: str) -> Judgement:
        """Return that the time ended before a backend was judged."""
        return Judgement(backend, self.call.name, self.dtype.name, "not reached")

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the call."""
        return self.call.arrays["query"].dtype

    def _error(self, backend: str) -> float:
        """Return the largest error over the allowed one, or the median of a few if it is large."""
        error = self._excess(backend, 0)
        # Infinity is more, and NaN is no number: both are drawn again.
        if error <= 1:
            return error
        others = [self._excess(backend, seed) for seed in range(1, tolerance.DRAWS)]
        return float(np.median([error, *others]))

    def _expected(self, seed: int) -> tuple[Results, list[Results]]:
        """Return the formula in float64, and in the dtype of the call."""
        numbers = drawn(self.call, seed)
        formula = partial(_results, "reference", self.call)
        with jax.default_device(jax.devices("cpu")[0]):
            plain = [formula(*numbers)]
            with jax.enable_x64(True):
                exact = formula(*jax.tree.map(_wide, numbers))
        # An accelerator rounds products otherwise than a processor.
        if jax.default_backend() != "cpu":
            plain.append(formula(*numbers))
        return exact, plain

    def _excess(self, backend: str, seed: int) -> float:
        """Return the largest error over the allowed one; infinite where NaN is in other places."""
        found = _results(backend, self.call, *drawn(self.call, seed))
        exact, plain = self.expected(seed)
        if self.call.name == NAN:
            exact = {name: exact[name] for name in BY_QUERIES}
        if not _same_nans(found, exact):
            return np.inf
        return _largest_error(found, plain, exact, self.dtype)


def _largest_error(found: Results, plain: list[Results], exact: Results, dtype: Any) -> float:
    gradients = dict(exact)
    output = {"output": gradients.pop("output")}
    eps = float(jnp.finfo(dtype).eps)
    errors = tolerance.lower_dtype(found, plain, output, tolerance.LOW_FORWARD, eps)
    errors |= tolerance.lower_dtype(found, plain, gradients, tolerance.LOW_GRADIENT, eps)
    return max(errors.values())


def _same_nans(found: Results, exact: Results) -> bool:
    pairs = [(found[name], x) for name, x in exact.items()]
    return all(np.array_equal(np.isnan(own), np.isnan(x)) for own, x in pairs)


def _wide(x: Any) -> Any:
    # Lengths, keys and functions stay as they are.
    floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x, np.float64) if floating else x


def _results(backend: str, call: ModelCall, arrays: dict[str, Any], cotangent: Any) -> Results:
    run = jax.jit(forward_and_backward(call, backend))
    output, gradients = run(arrays, cotangent)
    found = {"output": output, **gradients}
    return {name: np.asarray(x, np.float64) for name, x in found.items()}

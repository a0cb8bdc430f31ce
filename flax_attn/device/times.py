"""The calls of models with every backend, and beside them the kernels of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax

from flax_attn.bench import timing
from flax_attn.bench.calls import ModelCall, forward, forward_and_backward, with_gradients
from flax_attn.device.calls import drawn
from flax_attn.device.clock import Clock
from flax_attn.device.kernels import kernel
from flax_attn.device.report import Timing, first_line
from flax_attn.device.torch_kernels import torch_timers
from flax_attn.sharding.explain import Explanation, explain

TURNS = 5


@dataclass(frozen=True)
class TimedCall:
    """The times of a kernel.

    Args:
        forward: seconds of the output.
        backward: seconds of the output and the gradients.
        temporaries: bytes beside arguments and outputs with the gradients; None where unknown.
    """

    forward: float
    backward: float
    temporaries: int | None = None


Timer = Callable[[ModelCall], TimedCall]


def timings(
    backends: Sequence[str], calls: Sequence[ModelCall], clock: Clock, share: float
) -> Iterator[Timing]:
    """Yield the times of every kernel on every call, until a share of the time is spent."""
    for call in calls:
        found = explain(**call.arguments)
        for name, timer in (_ours(backends) | rivals()).items():
            yield _timing(name, timer, call, found, clock.over(share))


def _timing(name: str, timer: Timer, call: ModelCall, found: Explanation, over: bool) -> Timing:
    known = {
        "call": call.name,
        "kernel": name,
        "ours": name in found.refusals and name != "tokamax",
        "chosen": name == found.backend,
        "predicted": found.seconds.get(name),
    }
    reason = found.refusals.get(name)
    if reason is not None:
        return Timing(status="refused", note=reason, **known)
    if over:
        return Timing(status="not reached", **known)
    try:
        measured = timer(call)
    # Of any library: that one fails is a finding, and the others go on.
    except Exception as error:
        return Timing(status="failed", note=first_line(error), **known)
    return Timing(status="timed", **known, **vars(measured))


def _ours(backends: Sequence[str]) -> dict[str, Timer]:
    return {name: _backend_timer(name) for name in backends}


def _backend_timer(name: str) -> Timer:
    return partial(_timed_backend, name)


def _timed_backend(name: str, call: ModelCall) -> TimedCall:
    return timed(call, forward(call, name), forward_and_backward(call, name))


def rivals() -> dict[str, Timer]:
    """Return the kernels of other libraries that are installed here, by name."""
    found = {"jax.nn": _plain("reference")}
    if jax.default_backend() == "gpu":
        found["jax.nn, cudnn"] = _plain("cudnn")
        if find_spec("tokamax"):
            found["tokamax, plain"] = _plain("tokamax")
    return found | torch_timers(TimedCall)


def _plain(name: str) -> Timer:
    attend = kernel(name).plain
    assert attend is not None, "these three have one"
    return partial(_timed_plainly, attend)


def _timed_plainly(attend: Callable, call: ModelCall) -> TimedCall:
    def run(arrays: dict[str, Any]) -> Any:
        return attend(**arrays, **call.options)

    return timed(call, run, with_gradients(call, run))


def timed(call: ModelCall, one: Callable, both: Callable) -> TimedCall:
    """Return the times of two functions: of a call's arrays, and of these and its cotangent."""
    arrays, cotangent = jax.device_put(drawn(call))
    alone = _compiled(one, arrays)
    whole = _compiled(both, arrays, cotangent)
    forward_seconds = _least(partial(alone, arrays))
    backward_seconds = _least(partial(whole, arrays, cotangent))
    return TimedCall(forward_seconds, backward_seconds, _temporaries(whole))


def _compiled(function: Callable, *arguments: Any) -> Any:
    # Before it is timed, so that no time has that in it.
    return jax.jit(function).lower(*arguments).compile()


def _temporaries(compiled: Any) -> int | None:
    memory = compiled.memory_analysis()
    # Not every platform says how much it needs.
    return None if memory is None else memory.temp_size_in_bytes


def _least(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, the least of several turns."""
    run = partial(_repeat, call)
    # The first is slower.
    run(1)
    once = timing.seconds_per_call(run)
    turns = 1 if once > timing.BUDGET else TURNS
    repeats = _repeats(once)
    return min(timing.seconds_per_call(run, repeats) for _ in range(turns))


def _repeat(call: Callable[[], Any], repeats: int) -> None:
    # Sent on end, so that what the host does between two calls is hidden.
    found = [call() for _ in range(repeats)]
    jax.block_until_ready(found[-1])


def _repeats(once: float) -> int:
    fitting = int(timing.TURN / max(once, 1e-9))
    # All results are in memory until the last is there: few at a time.
    return max(1, min(8, fitting))

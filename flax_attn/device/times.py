"""The calls of models with every backend, and beside them the kernels of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, TypeVar

import jax
import numpy as np

from flax_attn.bench import timing
from flax_attn.bench.calls import ModelCall, forward, forward_and_backward, with_gradients
from flax_attn.device.calls import drawn
from flax_attn.device.clock import Clock
from flax_attn.device.kernels import kernel
from flax_attn.device.report import Timing, first_line
from flax_attn.device.threads import in_threads
from flax_attn.device.torch_kernels import torch_timers
from flax_attn.sharding.explain import Explanation, explain

TURNS = 5

T = TypeVar("T")


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


Numbers = tuple[dict[str, Any], np.ndarray]
Measure = Callable[[Numbers], TimedCall]
# Compiles a call, and returns the function that times it on numbers.
Timer = Callable[[ModelCall], Measure]


def timings(
    backends: Sequence[str], calls: Sequence[ModelCall], clock: Clock, share: float
) -> Iterator[Timing]:
    """Yield the times of every kernel on every call, until a share of the time is spent.

    Compilers keep all processors busy: all is compiled before the first call is timed. Last, and
    alone, come the kernels of tokamax, which may take minutes to compile.
    """
    timers = _ours(backends) | rivals()
    over = partial(clock.over, share)
    tasks = [task for call in calls for task in _tasks(call, timers, over)]
    fast = [task for task in tasks if not task.slow]
    compiled = list(in_threads(task.compiled for task in fast))
    for task, measure in zip(fast, compiled, strict=True):
        yield task.timing(measure)
    for task in tasks:
        if task.slow:
            measure = task.compiled()
            yield task.timing(measure)


def _tasks(call: ModelCall, timers: Mapping[str, Timer], over: Callable[[], bool]) -> list[_Task]:
    found = explain(**call.arguments)
    numbers = cache(partial(drawn, call))
    return [_Task(name, timer, call, found, numbers, over) for name, timer in timers.items()]


@dataclass(frozen=True)
class _Task:
    """A kernel on a call.

    Args:
        name: name of the kernel.
        timer: function that compiles it.
        call: the call.
        found: what `explain` says of it.
        numbers: function that draws numbers for it, once.
        over: function that says whether nothing is compiled or timed any more.
    """

    name: str
    timer: Timer
    call: ModelCall
    found: Explanation
    numbers: Callable[[], Numbers]
    over: Callable[[], bool]

    @property
    def slow(self) -> bool:
        """Whether it may take minutes to compile."""
        return self.name.startswith("tokamax")

    def compiled(self) -> Measure | Timing:
        """Return what times the kernel, or why nothing does."""
        reason = self.found.refusals.get(self.name)
        if reason is not None:
            return self._result("refused", note=reason)
        if self.over():
            return self._result("not reached")
        return self._tried(lambda: self.timer(self.call))

    def timing(self, measure: Measure | Timing) -> Timing:
        """Return the times of the kernel, which was compiled."""
        if isinstance(measure, Timing):
            return measure
        if self.over():
            return self._result("not reached")
        measured = self._tried(lambda: measure(self.numbers()))
        if isinstance(measured, Timing):
            return measured
        return self._result("timed", **vars(measured))

    def _tried(self, task: Callable[[], T]) -> T | Timing:
        try:
            return task()
        # Of any library: that one fails is a finding, and the others go on.
        except Exception as error:
            return self._result("failed", note=first_line(error))

    def _result(self, status: str, **more: Any) -> Timing:
        return Timing(
            call=self.call.name,
            kernel=self.name,
            ours=self.name in self.found.refusals and self.name != "tokamax",
            chosen=self.name == self.found.backend,
            predicted=self.found.seconds.get(self.name),
            status=status,
            **more,
        )


def _ours(backends: Sequence[str]) -> dict[str, Timer]:
    return {name: partial(_compiled_backend, name) for name in backends}


def _compiled_backend(name: str, call: ModelCall) -> Measure:
    return compiled(call, forward(call, name), forward_and_backward(call, name))


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
    return partial(_compiled_plainly, attend)


def _compiled_plainly(attend: Callable, call: ModelCall) -> Measure:
    def run(arrays: dict[str, Any]) -> Any:
        return attend(**arrays, **call.options)

    return compiled(call, run, with_gradients(call, run))


def compiled(call: ModelCall, one: Callable, both: Callable) -> Measure:
    """Return what times two functions: of a call's arrays, and of these and its cotangent."""
    alone = _program(one, call.arrays)
    whole = _program(both, call.arrays, call.cotangent)
    return partial(_measured, alone, whole)


def _program(function: Callable, *arguments: Any) -> Any:
    # Before it is timed, so that no time has that in it.
    return jax.jit(function).lower(*arguments).compile()


def _measured(alone: Any, whole: Any, numbers: Numbers) -> TimedCall:
    arrays, cotangent = jax.device_put(numbers)
    forward_seconds = _least(partial(alone, arrays))
    backward_seconds = _least(partial(whole, arrays, cotangent))
    return TimedCall(forward_seconds, backward_seconds, _temporaries(whole))


def _temporaries(program: Any) -> int | None:
    memory = program.memory_analysis()
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
    found = None
    for _ in range(repeats):
        found = call()
    jax.block_until_ready(found)


def _repeats(once: float) -> int:
    fitting = int(timing.TURN / max(once, 1e-9))
    # A runtime that has too many calls before it waits.
    return max(1, min(30, fitting))

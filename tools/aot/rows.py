"""Calls compiled with several kernels, forward and backward, on one device and on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
from jaxtyping import Array

from flax_attn.bench.calls import ModelCall, with_gradients
from flax_attn.device.kernels import ComparedKernel
from tools.aot.compiled import CompiledCost, compile_for
from tools.aot.devices import AbsentDevices


@dataclass(frozen=True)
class Row:
    """A call with one kernel.

    Args:
        call: name of the call.
        kernel: name of the kernel.
        forward: program of the output.
        backward: program of the output and the gradients; None where forward does not compile.
        plain: both programs for the kernel called without us; None where there is none, or where
            ours does not compile.
        spread: program like `backward`, with as many batches as devices and one on each; None where
            that does not compile.
    """

    call: str
    kernel: str
    forward: CompiledCost
    backward: CompiledCost | None = None
    plain: tuple[CompiledCost, CompiledCost] | None = None
    spread: CompiledCost | None = None

    @property
    def reason(self) -> str:
        """Why not all of it compiled, or nothing."""
        if self.forward.reason:
            return self.forward.reason
        assert self.backward is not None
        if self.backward.reason:
            return f"backward: {self.backward.reason}"
        if self.spread and self.spread.reason:
            return f"several devices: {self.spread.reason}"
        return ""


def rows(
    target: AbsentDevices,
    calls: Sequence[ModelCall],
    kernels: Sequence[ComparedKernel],
    workers: int,
) -> Iterator[Row]:
    """Compile every call with every kernel, so many at a time; the rows come in order."""
    pairs = product(calls, kernels)
    # Compiling leaves Python's lock to others.
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda pair: row(target, *pair), pairs)


def row(target: AbsentDevices, call: ModelCall, kernel: ComparedKernel) -> Row:
    """Compile one call with one kernel."""
    ours, plain = kernel.ours, kernel.plain
    # What does not compile is not asked for more: the reason would be the same.
    forward = _forward(target, call, ours)
    found = Row(call.name, kernel.name, forward)
    if forward.reason:
        return found
    backward = _backward(target, call, ours)
    found = replace(found, backward=backward)
    if plain:
        plain_forward = _forward(target, call, plain)
        plain_backward = _backward(target, call, plain)
        found = replace(found, plain=(plain_forward, plain_backward))
    if backward.reason:
        return found
    devices = len(target.devices)
    spread = _backward(target, call, ours, devices)
    return replace(found, spread=spread)


def _forward(target: AbsentDevices, call: ModelCall, attend: Callable[..., Array]) -> CompiledCost:
    return compile_for(target, _function(call, attend), (call.arrays,), _batch(call))


def _backward(
    target: AbsentDevices, call: ModelCall, attend: Callable[..., Array], devices: int = 1
) -> CompiledCost:
    call = grown(call, devices)
    function = with_gradients(call, _function(call, attend))
    arguments = call.arrays, call.cotangent
    return compile_for(target, function, arguments, _batch(call), devices)


def _function(call: ModelCall, attend: Callable[..., Array]) -> Callable[[dict[str, Any]], Array]:
    return lambda arrays: attend(**arrays, **call.options)


def _batch(call: ModelCall) -> int:
    return call.arrays["query"].shape[0]


def _grow(x: Any, batch: int, factor: int) -> Any:
    # A number has no axis.
    if x.shape[:1] != (batch,):
        return x
    shape = (factor * batch, *x.shape[1:])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def grown(call: ModelCall, factor: int) -> ModelCall:
    """Return the call with `factor` times the batch.

    What has no axis of that size, such as a bias, stays.

    Example:
        >>> from flax_attn.bench.calls import MODEL_CALLS
        >>> call = grown(MODEL_CALLS[0], 8)
        >>> call.arrays["query"].shape, call.arrays["dropout"].key.shape
        ((64, 1024, 12, 64), (2,))
    """
    grow = partial(_grow, batch=_batch(call), factor=factor)
    # The bias, sinks and dropout key may have an axis as long as the batch that is another.
    arrays = dict(call.arrays)
    for name in ("query", "key", "value", "mask"):
        if name in arrays:
            arrays[name] = jax.tree.map(grow, arrays[name])
    return replace(call, arrays=arrays)

"""Calls compiled with several kernels, forward and backward, on one device and on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import jax
from jaxtyping import Array

from flax_attn.aot.target import Target
from flax_attn.bench.aot.kernels import Kernel
from flax_attn.bench.aot.program import Program, compile_for
from flax_attn.bench.calls import ModelCall, with_gradients


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
    forward: Program
    backward: Program | None = None
    plain: tuple[Program, Program] | None = None
    spread: Program | None = None

    @property
    def reason(self) -> str:
        """Why not all of it compiled, or nothing."""
        if self.forward.reason:
            return self.forward.reason
        assert self.backward is not None
        if self.backward.reason:
            return f"backward: {self.backward.reason}"
        return (
            f"several devices: {self.spread.reason}" if self.spread and self.spread.reason else ""
        )


def rows(
    target: Target, calls: Sequence[ModelCall], kernels: Sequence[Kernel], workers: int
) -> Iterator[Row]:
    """Compile every call with every kernel, so many at a time; the rows come in order."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda pair: row(target, *pair), product(calls, kernels))


def row(target: Target, call: ModelCall, kernel: Kernel) -> Row:
    """Compile one call with one kernel."""
    found = Row(call.name, kernel.name, _forward(target, call, kernel.ours))
    if found.forward.reason:
        return found
    found = replace(found, backward=_backward(target, call, kernel.ours))
    if kernel.plain:
        found = replace(
            found,
            plain=(_forward(target, call, kernel.plain), _backward(target, call, kernel.plain)),
        )
    if found.backward is None or found.backward.reason:
        return found
    return replace(found, spread=_backward(target, call, kernel.ours, len(target.devices)))


def _forward(target: Target, call: ModelCall, attend: Callable[..., Array]) -> Program:
    return compile_for(target, _function(call, attend), (call.arrays,), _batch(call))


def _backward(
    target: Target, call: ModelCall, attend: Callable[..., Array], devices: int = 1
) -> Program:
    call = grown(call, devices)
    function = with_gradients(call, _function(call, attend))
    return compile_for(target, function, (call.arrays, call.cotangent), _batch(call), devices)


def _function(call: ModelCall, attend: Callable[..., Array]) -> Callable[[dict[str, Any]], Array]:
    return lambda arrays: attend(**arrays, **call.options)


def _batch(call: ModelCall) -> int:
    return call.arrays["query"].shape[0]


def grown(call: ModelCall, factor: int) -> ModelCall:
    """Return the call with `factor` times the batch.

    What has no axis of that size, such as a bias, stays.

    Example:
        >>> from flax_attn.bench.calls import MODEL_CALLS
        >>> call = grown(MODEL_CALLS[0], 8)
        >>> call.arrays["query"].shape, call.arrays["dropout"].key.shape
        ((64, 1024, 12, 64), (2,))
    """
    batch = _batch(call)

    def grow(x: Any) -> jax.ShapeDtypeStruct:
        rest = x.shape[1:] if x.shape[:1] == (batch,) else None
        return x if rest is None else jax.ShapeDtypeStruct((batch * factor, *rest), x.dtype)

    names = [name for name in ("query", "key", "value", "mask") if name in call.arrays]
    return replace(
        call, arrays=call.arrays | {name: jax.tree.map(grow, call.arrays[name]) for name in names}
    )

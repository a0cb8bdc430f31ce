"""A long call with each kind of mask, compiled with `blocked` for an H200: a table in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array

from flax_attn.aot import gpu
from flax_attn.backends.chips import CHIPS
from flax_attn.bench.calls import MODEL_CALLS, ModelCall, forward, forward_and_backward
from flax_attn.functional.masks import Mask
from flax_attn.plan.hlo import read
from tools.aot.compiled import compiled
from tools.aot.devices import AbsentDevices
from tools.aot.launches import launches

MIB = 2**20
_LLAMA = MODEL_CALLS[1]
T = _LLAMA.arrays["query"].shape[1]


def _traced(make: Callable[[Any], Mask], *shape: int, dtype: Any = jnp.int32) -> Mask:
    # A mask of an array that is known only at run time.
    return jax.eval_shape(make, ShapeDtypeStruct(shape, dtype))


def _is_multiple(b: Array, n: Array, i: Array, j: Array) -> Array:
    return (i - j) % (n + 2) == 0


MASKS = {
    "causal": Mask.causal(),
    "causal, window of 4096": Mask.sliding_window(4096),
    "prefix": _traced(Mask.prefix, 1),
    "causal and segments": _traced(lambda ids: Mask.causal() & Mask.segments(ids), 1, T),
    "causal and lengths": _traced(lambda rows: Mask.causal() & Mask.lengths(key=rows), 1),
    "causal and a function": Mask.causal() & Mask.where(_is_multiple),
    "an array": _traced(Mask.dense, 1, 1, T, T, dtype=jnp.bool_),
    "causal at a traced offset": _traced(Mask.causal, 1),
}
CALLS = tuple(ModelCall(name, _LLAMA.arrays | {"mask": mask}) for name, mask in MASKS.items())


class Figures(NamedTuple):
    """What a program of one call asks of a GPU.

    Args:
        launches: number of kernels.
        temporaries: bytes beside arguments and outputs.
        waits: number of loops whose end the host waits for.
    """

    launches: int
    temporaries: int
    waits: int


def figures(target: AbsentDevices, function: Callable, arguments: tuple) -> Figures:
    """Return what `function(*arguments)` asks for, whose first argument has a query."""
    arrays, *_ = arguments
    program = compiled(target, function, arguments, arrays["query"].shape[0])
    memory = program.memory_analysis()
    assert memory is not None, "XLA reports memory for GPUs"
    text = program.as_text() or ""
    return Figures(launches(read(text)), memory.temp_size_in_bytes, _waits(text))


def _waits(text: str) -> int:
    # The host waits for a loop whose count is not known.
    return text.count(" while(") - text.count('"known_trip_count"')


def table(calls: Sequence[ModelCall] = CALLS, backend: str = "blocked") -> Iterator[str]:
    """Compile the calls for an H200, and return the lines of the table as they are done."""
    yield "| mask | forward | forward+backward |"
    yield "| --- | --- | --- |"
    with gpu.described(1) as devices:
        target = AbsentDevices("H200", devices, CHIPS["h200"].memory)
        for call in calls:
            yield _line(target, call, backend)


def _line(target: AbsentDevices, call: ModelCall, backend: str) -> str:
    one = figures(target, forward(call, backend), (call.arrays,))
    both = call.arrays, call.cotangent
    two = figures(target, forward_and_backward(call, backend), both)
    return f"| {call.name} | {_cell(one)} | {_cell(two)} |"


def _cell(found: Figures) -> str:
    return f"{found.launches} in {found.temporaries / MIB:.0f} MiB"

"""The kernels that `blocked` launches on an H200 that is not there, and its temporaries.

The environment of `make gpu` has what it takes; elsewhere all of it is skipped. The masks take
minutes each: they run where FLAX_ATTN_ALL_OF_BLOCKED is set.
"""

import os

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

from flax_attn import Mask
from flax_attn.bench.calls import MODEL_CALLS, ModelCall, forward, forward_and_backward
from flax_attn.plan.hlo import read
from tools.aot.compiled import compiled
from tools.aot.launches import launches

pytestmark = pytest.mark.usefixtures("no_shape_checks")

FORWARD = 120  # launches
# With the backward pass. A tile has five products, a softmax, a gradient of the scores, and what
# lays out its queries and writes their gradient: nine launches and a half. What is computed at once
# is bounded by the memory, of which a score takes eight bytes: its gradient in float32, its weight
# and its gradient in bfloat16, which XLA does not write over each other.
BOTH = 480
MEMORY = 512 * 2**20

CALLS = MODEL_CALLS[:2]  # GPT-2 in training; Llama, 8192 tokens

T = 8192


def tokens(heads: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct((1, T, heads, 128), jnp.bfloat16)


def integers(make, *shape: int) -> Mask:
    return jax.eval_shape(make, ShapeDtypeStruct(shape, jnp.int32))


ARRAYS = {"query": tokens(32), "key": tokens(8), "value": tokens(8)}
DENSE = jax.eval_shape(Mask.dense, ShapeDtypeStruct((1, 1, T, T), jnp.bool_))
MASKS = {
    "causal": {"mask": Mask.causal()},
    "window": {"mask": Mask.sliding_window(1024)},
    "prefix": {"mask": Mask.prefix(1000)},
    "lengths": {"mask": integers(lambda rows: Mask.lengths(key=rows), 1)},
    "segments": {"mask": integers(lambda ids: Mask.causal() & Mask.segments(ids), 1, T)},
    "dense": {"mask": DENSE},
    "bias": {"bias": ShapeDtypeStruct((1, 32, 1, T), jnp.bfloat16)},
    "function": {"mask": Mask.where(lambda b, n, i, j: (i // 64) % 4 == (j // 64) % 4)},
}


def figures(gpu_target, call: ModelCall, backward: bool) -> tuple[int, int]:
    """Return the launches and the bytes of temporaries; no loop is one that the host waits for."""
    rows = call.arrays["query"].shape[0]
    arguments = (call.arrays, call.cotangent) if backward else (call.arrays,)
    function = (forward_and_backward if backward else forward)(call, "blocked")
    program = compiled(gpu_target, function, arguments, rows)
    text, memory = program.as_text() or "", program.memory_analysis()
    # A loop that the host waits for has no count that is known.
    assert text.count(" while(") == text.count('"known_trip_count"')
    return launches(read(text)), memory.temp_size_in_bytes


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_launches_and_temporaries_forward_are_few(call, gpu_target):
    launched, temporaries = figures(gpu_target, call, backward=False)
    assert launched <= FORWARD
    assert temporaries <= MEMORY


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_launches_and_temporaries_with_the_backward_pass(call, gpu_target):
    launched, temporaries = figures(gpu_target, call, backward=True)
    assert launched <= BOTH
    assert temporaries <= MEMORY


@pytest.mark.skipif("FLAX_ATTN_ALL_OF_BLOCKED" not in os.environ, reason="minutes each")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("name", MASKS)
def test_each_kind_of_mask(name, backward, gpu_target):
    call = ModelCall(name, ARRAYS | MASKS[name])
    launched, temporaries = figures(gpu_target, call, backward)
    assert launched <= 4 * (BOTH if backward else FORWARD)
    assert temporaries <= 2 * MEMORY

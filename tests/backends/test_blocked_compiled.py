"""The kernels that `blocked` launches on an H200 that is not there, and its temporaries.

The environment of `make gpu` has what it takes; elsewhere all of it is skipped.
"""

import pytest

from flax_attn.bench.calls import MODEL_CALLS, forward, forward_and_backward
from flax_attn.plan.hlo import read
from tools.aot.compiled import compiled
from tools.aot.launches import launches

pytestmark = pytest.mark.usefixtures("no_shape_checks")

MIB = 2**20
FORWARD = 120, 512 * MIB  # launches, and temporaries

# With the backward pass. A tile has five products, a softmax, a gradient of the scores, and what
# lays out its queries and writes their gradient: ten launches. What is computed at once
# is bounded by the memory, of which a score takes eight bytes: its gradient in float32, its weight
# and its gradient in bfloat16, which XLA does not write over each other. Adding up the
# gradients of keys and values takes those before and after.
BOTH = {MODEL_CALLS[0].name: (125, 610 * MIB), MODEL_CALLS[1].name: (455, 560 * MIB)}

CALLS = MODEL_CALLS[:2]  # GPT-2 in training; Llama, 8192 tokens


def figures(gpu_target, function, arguments):
    """Return the launches and the bytes of temporaries; the host waits for no loop."""
    arrays, *_ = arguments
    program = compiled(gpu_target, function, arguments, arrays["query"].shape[0])
    text = program.as_text() or ""
    # A loop that the host waits for has no count that is known.
    assert text.count(" while(") == text.count('"known_trip_count"')
    return launches(read(text)), program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_launches_and_temporaries_forward_are_few(call, gpu_target):
    found = figures(gpu_target, forward(call, "blocked"), (call.arrays,))
    assert found[0] <= FORWARD[0]
    assert found[1] <= FORWARD[1]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_launches_and_temporaries_with_the_backward_pass(call, gpu_target):
    both = call.arrays, call.cotangent
    found = figures(gpu_target, forward_and_backward(call, "blocked"), both)
    assert found[0] <= BOTH[call.name][0]
    assert found[1] <= BOTH[call.name][1]

"""The kernels that `blocked` launches on an H200 that is not there, and its temporaries.

The environment of `make gpu` has what it takes; elsewhere all of it is skipped.
"""

import pytest

from flax_attn.bench.calls import MODEL_CALLS, forward, forward_and_backward
from tools.aot.masks import CALLS as MASKED
from tools.aot.masks import figures

pytestmark = pytest.mark.usefixtures("no_shape_checks")

MIB = 2**20
GPT2, LLAMA = MODEL_CALLS[:2]  # in training; 8192 tokens
WINDOW = MASKED[1]  # whose tiles begin at other keys than the first
CALLS = GPT2, LLAMA, WINDOW

# Launches, and temporaries. XLA computes the softmax of a row in one kernel where its keys are a
# power of two. In a window they are not, and scores are written once more.
FORWARD = {
    GPT2.name: (120, 512 * MIB),
    LLAMA.name: (120, 512 * MIB),
    WINDOW.name: (120, 600 * MIB),
}

# With the backward pass. A tile has five products, a softmax, a gradient of the scores, and what
# lays out its queries and writes their gradient. What is computed at once is bounded by the memory,
# of which a score takes eight bytes: its gradient in float32, its weight and its gradient in
# bfloat16, which XLA does not write over each other. Adding up the gradients of keys and values
# takes those before and after, and in a window also those of the keys of a tile.
BOTH = {
    GPT2.name: (125, 540 * MIB),
    LLAMA.name: (420, 560 * MIB),
    WINDOW.name: (460, 920 * MIB),
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_launches_and_temporaries_forward_are_few(call, gpu_target):
    check(figures(gpu_target, forward(call, "blocked"), (call.arrays,)), FORWARD[call.name])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_launches_and_temporaries_with_the_backward_pass(call, gpu_target):
    both = call.arrays, call.cotangent
    check(figures(gpu_target, forward_and_backward(call, "blocked"), both), BOTH[call.name])


def check(found, most):
    launches, temporaries = most
    assert found.waits == 0
    assert found.launches <= launches
    assert found.temporaries <= temporaries

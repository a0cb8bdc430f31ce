"""The kernels that `blocked` launches on an H200 that is not there, and its temporaries.

The environment of `make gpu` has what it takes; elsewhere all of it is skipped.
"""

import pytest

from flax_attn.bench.calls import MODEL_CALLS, forward
from flax_attn.plan.hlo import read
from tools.aot.compiled import compiled
from tools.aot.launches import launches

pytestmark = pytest.mark.usefixtures("no_shape_checks")

FORWARD = 120  # launches
MEMORY = 512 * 2**20


CALLS = MODEL_CALLS[:2]  # GPT-2 in training; Llama, 8192 tokens


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_launches_and_temporaries_forward_are_few(call, gpu_target):
    rows = call.arrays["query"].shape[0]
    program = compiled(gpu_target, forward(call, "blocked"), (call.arrays,), rows)
    text, memory = program.as_text() or "", program.memory_analysis()
    assert launches(read(text)) <= FORWARD
    assert memory.temp_size_in_bytes <= MEMORY
    # A loop that the host waits for has no count that is known.
    assert text.count(" while(") == text.count('"known_trip_count"')

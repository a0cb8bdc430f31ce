"""What `fused` compiles to for an H200 and for a TPU that are not there.

The environments of `make gpu` and `make tpu` have what it takes; elsewhere all of it is skipped.
"""

import re

import pytest

from flax_attn.bench.calls import MODEL_CALLS, forward, forward_and_backward
from tools.aot.compiled import compiled

pytestmark = [
    pytest.mark.usefixtures("no_shape_checks"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

LAUNCH = re.compile(r'custom_call_target="(tpu_custom_call|[^"]*triton[^"]*)"')
CALLS = [MODEL_CALLS[at] for at in (0, 1, 2, 8, 9)]  # dropout, causal, packed, sinks, bias


def launched(program):
    return len(LAUNCH.findall(program.as_text() or ""))


def prepares(target):
    """How many kernels ask whether all numbers are finite."""
    return int(target.name == "H200")


def saved(call):
    """What forward keeps for backward, a few numbers a query, in bytes: four with their copies."""
    b, t, n, _ = call.arrays["query"].shape
    return 32 * b * n * t


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_launches_one_kernel_forward_and_few_backward(call, target):
    rows = call.arrays["query"].shape[0]
    one = compiled(target, forward(call, "fused"), (call.arrays,), rows)
    assert launched(one) == prepares(target) + 1
    both = compiled(
        target, forward_and_backward(call, "fused"), (call.arrays, call.cotangent), rows
    )
    # Queries; keys and values; the bias where it is learned.
    backward = 2 + ("bias" in call.learned)
    assert launched(both) == prepares(target) + 1 + backward
    # On a TPU there are copies with heads first.
    if target.name == "H200":
        memory = both.memory_analysis()
        learned = call.arrays["bias"].size * 4 if "bias" in call.learned else 0
        sums = 4 * call.cotangent.size if "sinks" in call.learned else 0
        assert memory.temp_size_in_bytes <= saved(call) + learned + sums + 2**20


@pytest.mark.parametrize("call", [CALLS[0], CALLS[2]], ids=lambda call: call.name)
@pytest.mark.usefixtures("x64")
def test_compiles_with_x64(call, target):
    both = forward_and_backward(call, "fused")
    program = compiled(target, both, (call.arrays, call.cotangent), call.cotangent.shape[0])
    assert launched(program) == prepares(target) + 3


@pytest.mark.parametrize("name", ["function of indices", "function of scores"])
def test_functions_compile(name, target):
    # It starts JAX, which has to come after the driver that `target` loads.
    from flax_attn.device.calls import CALLS, in_dtype

    one = next(in_dtype(call, "bfloat16") for call in CALLS if call.name == name)
    both = forward_and_backward(one, "fused")
    program = compiled(target, both, (one.arrays, one.cotangent), one.cotangent.shape[0])
    assert launched(program) == prepares(target) + 3

import jax
import pytest

from flax_attn.backends.platform import PLATFORMS
from flax_attn.bench.calls import MODEL_CALLS, forward, forward_and_backward, table
from flax_attn.sharding.explain import explain

pytestmark = pytest.mark.usefixtures("no_shape_checks")


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("call", MODEL_CALLS, ids=lambda call: call.name)
def test_a_call_is_one_that_can_be_traced_and_differentiated(call):
    output = jax.eval_shape(forward(call), call.arrays)
    again, gradients = jax.eval_shape(forward_and_backward(call), call.arrays, call.cotangent)
    assert shapes(output) == shapes(again) == shapes(call.cotangent)
    assert shapes(gradients) == shapes({name: call.arrays[name] for name in call.learned})


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_table_has_a_row_for_every_call(platform):
    columns = [list(column.cells) for column in table(platform).columns]
    assert columns[0] == [call.name for call in MODEL_CALLS]
    for call, backend, memory, time, why in zip(MODEL_CALLS, *columns[3:], strict=True):
        found = explain(**call.arguments, platform=platform)
        assert backend == found.backend
        assert memory == f"{found.memory[backend] / 2**20:.1f} MiB"
        seconds = found.seconds.get(backend)
        assert time == ("" if seconds is None else f"{1000 * seconds:.3g} ms")
        assert str(why).splitlines() == [found.refusals[name] for name in found.passed_over]

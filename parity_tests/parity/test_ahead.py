"""Programs that are compiled before a check runs them, each of them once."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity.adapters import quick_jit
from flax_attn.parity.adapters.jax_arrays import zeros_like
from flax_attn.parity.ahead import RUNS, compile_ahead
from flax_attn.parity.compare import report_on
from flax_attn.parity.cpu import on_cpu


class Counted(nnx.Module):
    """A linear layer that counts the times that Python calls it."""

    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        calls.append(x.dtype)
        return self.linear(x)


calls = []


@pytest.fixture
def counted(paired):
    theirs = torch.nn.Sequential()
    theirs.add_module("linear", torch.nn.Linear(3, 2))
    pair = paired(Counted(), theirs, (4, 3))
    calls.clear()
    return pair


def test_what_is_begun_is_not_traced_again_by_the_checks(counted):
    with on_cpu():
        compile_ahead(counted, RUNS)
    begun = len(calls)
    assert begun >= len(RUNS)
    report = report_on(counted, "counted", list(RUNS), call_first=False)
    assert report.passed
    # Operation by operation, for jit = eager.
    assert len(calls) == begun + 1


def test_only_the_checks_that_run_are_begun(counted):
    with on_cpu():
        compile_ahead(counted, ["float32"])
    assert set(map(str, calls)) == {"float32"}


def test_training_runs_the_program_of_the_gradients(counted):
    report = report_on(counted, "counted", ["gradients", "training"], call_first=False)
    assert report.passed
    assert len(calls) == 1


def test_a_call_waits_for_its_own_program_alone():
    function = quick_jit.compiled(lambda x: x * 2)
    function.begin(np.ones(3, np.float32))
    function.begin(np.ones(4, np.float32))
    np.testing.assert_array_equal(function(np.ones(4, np.float32)), 2)
    (kept,) = function._begun.values()
    assert kept[0].in_avals[0].shape == (3,)


def test_what_fails_to_compile_ahead_is_raised_by_the_call():
    def unknown(x):
        # Its lowering is there, and no custom call of this name.
        return jax.ffi.ffi_call("nobody_has_this", jax.ShapeDtypeStruct((3,), np.float32))(x)

    function = quick_jit.compiled(unknown)
    function.begin(np.ones(3, np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="nobody_has_this"):
        function(np.ones(3, np.float32))


def test_quick_operations_end_with_the_setting_of_before():
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, False)
    try:
        with quick_jit.quick_operations():
            assert jax.config.values[name]
        assert not jax.config.values[name]
    finally:
        jax.config.update(name, before)


def test_zeros_may_move_where_the_array_may():
    array = jax.numpy.ones(3)
    assert not zeros_like(array).committed
    placed = jax.device_put(array, jax.devices()[0])
    assert zeros_like(placed).committed

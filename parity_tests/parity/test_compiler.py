"""What XLA computes wrongly is told from a fault of the port, and reduced."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from flax_attn.parity import compare, known_faults
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.report.document import document
from flax_attn.parity.trace import compiler, reproduction
from flax_attn.parity.trace.equations import flattened

# An operation that is wrong once it is compiled, on each version of JAX.
planted_p = Primitive("planted")
planted_p.def_impl(lambda x: x)
planted_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(planted_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
ad.deflinear2(planted_p, lambda cotangent, x: [cotangent])


@jax.custom_vjp
def wrong_backwards(x):
    return jnp.sin(x)


def _backward(x, cotangent):
    return (planted_p.bind(cotangent) * jnp.cos(x),)


wrong_backwards.defvjp(lambda x: (jnp.sin(x), x), _backward)


# The first known fault of XLA on a CPU.
def sums_of_squares(matrix, rows):
    return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(rows)


def theirs(matrix, rows):
    return ((rows @ matrix.T) ** 2).sum(1)


def planted(x):
    shifted = jnp.cos(x) + 1
    return jnp.exp(jnp.sin(planted_p.bind(shifted * x)))


def in_a_loop(x):
    def step(carry, row):
        return carry, planted_p.bind(row)

    return jax.lax.scan(step, 0.0, x)[1]


def report(flax, torch_function, *shapes, checks=("forward", "gradients", "jit = eager")):
    return compare(flax, torch_function, shapes, checks=checks)


def wrongly_compiled(found):
    """Return what a report says that XLA computes wrongly."""
    assert found.difference is not None
    assert found.difference.miscompiled is not None
    return found.difference.miscompiled


def searched(function, *arrays):
    """Search what differs between a compiled function and its operations."""
    arrays = [jnp.asarray(array) for array in arrays]
    program = flattened(jax.make_jaxpr(function)(*arrays), arrays)
    values = compiler.evaluated(program.equations, program.given)
    return compiler._Search(program, values, {})


@pytest.fixture
def in_float64():
    with on_cpu():
        yield


@pytest.fixture(scope="module")
def first_case():
    if known_faults.KNOWN_FAULTS[0] not in known_faults.found_here():
        pytest.skip(f"JAX {jax.__version__} sums squares of products rightly")
    return report(sums_of_squares, theirs, (4, 3), (20_000, 3))


def test_the_first_known_fault_is_no_fault_of_the_port(first_case):
    assert [check.name for check in first_case.failed] == ["jit = eager"]
    # A test of it fails, as what users run is wrong, and yet the port is not called different.
    assert first_case.state == "equal where tested"
    assert not first_case.passed
    (cause,) = first_case.causes
    assert cause.startswith("XLA miscompiles this at test_compiler.py:")
    assert "no fault of the port" in cause
    assert len("\n".join(first_case.where).splitlines()) < 60


def test_it_is_reduced_to_three_operations(first_case):
    found = wrongly_compiled(first_case)
    for name in ("dot_general", "integer_pow", "reduce_sum"):
        assert found.jaxpr.count(name) == 1
    assert "xla_cpu_experimental_ynn_fusion_type=" in found.helps
    assert "xla_backend_optimization_level=0" in found.useless


def test_its_script_needs_jax_alone_and_shows_it(first_case, tmp_path):
    found = wrongly_compiled(first_case)
    path = tmp_path / "shows.py"
    path.write_text(found.script)
    assert "flax_attn" not in found.script

    # Isolated, and with no flag of XLA from outside.
    command = [sys.executable, "-I", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    assert done.returncode == 1, done.stderr
    assert "the compiled function errs by" in done.stdout

    right = {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type="}
    mended = subprocess.run(command, capture_output=True, check=False, env=right)
    assert mended.returncode == 0


def test_only_the_operation_that_is_wrong_is_left():
    def right(x):
        shifted = torch.cos(x) + 1
        return torch.exp(torch.sin(shifted * x))

    found = report(planted, right, (5, 3))
    wrong = wrongly_compiled(found)
    assert "planted" in wrong.jaxpr
    for name in ("cos", "add", "mul", "sin", "exp"):
        assert name not in wrong.jaxpr
    # No option of XLA changes how it is lowered.
    assert wrong.helps == ()
    assert any("is not public in JAX" in line for line in found.where)
    # Twice the right value is wrong by all of it.
    written = document(found)["difference"]["miscompiled"]
    assert written["error"] == pytest.approx(1)


def test_a_backward_pass_that_is_compiled_wrongly_is_found():
    found = report(wrong_backwards, torch.sin, (5, 3), checks=["forward", "gradients"])
    assert [check.name for check in found.failed] == ["gradients"]
    assert "planted" in wrongly_compiled(found).jaxpr
    (untested, *_) = found.coverage.untested
    assert untested.startswith("gradients: XLA computes it wrongly once it is compiled")


def test_a_port_that_is_wrong_besides_is_different():
    def twice_as_steep(x):
        return wrong_backwards(2 * x) / 2

    found = report(twice_as_steep, torch.sin, (5, 3), checks=["forward", "gradients"])
    assert found.state == "different"


def test_what_is_wrong_inside_a_loop_is_said_but_not_reduced():
    found = report(in_a_loop, lambda x: 1 * x, (5, 3))
    assert wrongly_compiled(found).jaxpr == ""
    assert any("inside a loop" in line for line in found.where)


def test_a_fault_of_the_port_is_none_of_the_compiler():
    found = report(jnp.sin, torch.cos, (5, 3))
    assert found.difference is not None
    assert found.difference.miscompiled is None
    assert not any("XLA" in cause for cause in found.causes)


def test_the_first_of_two_wrong_operations_is_the_end(in_float64):
    search = searched(lambda x: planted_p.bind(jnp.sin(planted_p.bind(x))), np.ones((5, 3)))
    (output,) = search.program.outputs
    # The second may be right about a value that is wrong already.
    assert search.end(output) is search.program.equations[0]


def test_halving_that_misses_the_first_wrong_operation_goes_back_to_it(in_float64):
    search = searched(lambda x: planted_p.bind(x) + jnp.sin(x), np.ones((5, 3)))
    planted, sine, _ = search.program.equations
    assert not search.differs(search.program.equations, sine)
    assert search.end(search.program.outputs[0]) is planted


SCRIPTS = {
    "a loop": (lambda x: jax.lax.scan(lambda c, y: (c, y), 0.0, x)[1], "as a loop has its body"),
    "an operation of its own": (planted_p.bind, "is not public in JAX"),
    "a constant": (lambda x: x + np.arange(128.0), "random inputs do not show the difference"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_cannot_be_written_is_refused(in_float64, name):
    function, reason = SCRIPTS[name]
    search = searched(function, np.ones(128))
    equations = search.program.equations
    given = {variable: search.values[variable] for variable in compiler.inputs_of(equations)}
    with pytest.raises(reproduction.UnwritableError, match=reason):
        reproduction.script(equations, search.program.outputs[0], given, {}, lambda given: False)

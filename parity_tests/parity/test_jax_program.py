"""The JAX side as a program: its values are those of a run, its lines those of the user's code."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flax_attn.parity.trace import scopes
from flax_attn.parity.trace.jax_program import jax_program
from parity_tests.parity.lines import line_of, places

X = np.random.default_rng(0).normal(size=(3, 4))


def run(function, *arrays):
    """Return the program of a function of arrays with one output."""
    sources = {f"{i}": array for i, array in enumerate(arrays or (X,))}
    return jax_program(lambda given: {"output": function(*given.values())}, sources)


def looped(x):
    def turn(state):
        i, total = state
        return i + 1, total + jnp.sin(x) * i

    return jax.lax.while_loop(lambda state: state[0] < 3, turn, (0, x))[1]


def scanned(x):
    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry * 2

    return jax.lax.scan(step, x[0], x, reverse=True)[1]


def chosen(x):
    return jax.lax.cond(x.sum() > 1e9, jnp.sin, lambda y: jnp.cos(y), x)


def mapped(x):
    return jax.vmap(lambda row: row / jnp.linalg.norm(row))(x)


def saved(x):
    return jax.checkpoint(lambda y: jnp.exp(jnp.sin(y)))(x)


def differentiated(x):
    return jax.grad(lambda y: jax.nn.silu(y).sum())(x)


def mixed(x):
    parts = jnp.split(jnp.sort(x, -1), 2, -1)
    joined = jnp.concatenate([jnp.flip(part, 0) for part in parts], -1)
    padded = jnp.pad(jnp.cumsum(joined, 1), ((0, 1), (0, 0)))
    picked = jnp.take(padded, jnp.array([0, 2]), axis=0)
    return picked.at[0, 0].set(5.0) + jax.nn.one_hot(jnp.argmax(picked, -1), 4)


def convolved(x):
    image, kernel = x.reshape(1, 1, 3, 4), x[:2, :2].reshape(1, 1, 2, 2)
    return jax.lax.conv_general_dilated(image, kernel, (1, 2), "SAME", rhs_dilation=(2, 1))


def pooled(x):
    window = (2, 2)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1, 1), "VALID")


@pytest.mark.usefixtures("as_a_user_has_jax")
@pytest.mark.parametrize(
    "function",
    [
        looped,
        scanned,
        chosen,
        mapped,
        saved,
        differentiated,
        mixed,
        convolved,
        pooled,
        # Compiled by the user, and by JAX itself.
        jax.jit(mapped),
        jax.nn.gelu,
        jax.nn.softmax,
        jax.scipy.special.logsumexp,
    ],
)
def test_values_are_those_of_the_run(function):
    with jax.enable_x64(True):
        program = run(function)
        expected = np.asarray(function(X))
        (output,) = program.outputs.values()
        np.testing.assert_allclose(output.value, expected, rtol=1e-13, atol=1e-15)
        # A replaced operand must change what follows, and nothing else.
        for node in program.nodes:
            if node.compute is not None:
                given = [operand.value for operand in node.operands]
                again = node.compute(given)
                np.testing.assert_array_equal(again, node.value)


def test_an_element_of_one_axis_is_an_array():
    # NumPy takes a scalar from it.
    def numbered(x):
        first = x[0]
        return jax.lax.scan(lambda total, i: (total + first[i], None), first.sum(), jnp.arange(3))[
            0
        ]

    program = run(numbered)
    elements = [node.value for node in program.nodes if node.operation == "element"]
    assert len(elements) == 3
    for value in elements:
        assert isinstance(value, np.ndarray), type(value)


def test_what_depends_on_a_replaced_value_runs_again():
    program = run(lambda x: jnp.exp(jnp.sin(x)) + x)
    (sine,) = [node for node in program.nodes if node.operation == "sin"]
    changed = program.rerun({sine: np.zeros_like(X)}, {})
    np.testing.assert_allclose(changed[program.outputs["output"]], 1 + X)
    assert set(changed) == {sine, *program.downstream([sine])}


@pytest.mark.parametrize(
    ("function", "operation", "text"),
    [
        (looped, "sin", "jnp.sin(x) * i"),
        (scanned, "tanh", "jnp.tanh(carry"),
        (scanned, "element", "jax.lax.scan("),
        (chosen, "cos", "jax.lax.cond("),
        (mapped, "div", "jnp.linalg.norm("),
        (saved, "exp", "jax.checkpoint("),
    ],
)
def test_lines_are_those_of_the_users_code(function, operation, text):
    wanted = {line_of(function, text)}
    found = places(run(function), operation)
    assert {(place.file, place.line) for place in found} == {(__file__, *wanted)}


@jax.jit
def compiled(x):
    return jnp.sin(x)


def test_the_line_in_a_compiled_function_is_not_that_of_an_earlier_caller():
    # JAX keeps what it traced, with the lines of the caller that came first.
    earlier = compiled(jnp.asarray(X))
    program = run(lambda x: compiled(x) * 2)
    (place,) = places(program, "sin")
    assert place.line == line_of(compiled.__wrapped__, "jnp.sin")
    assert earlier.shape == X.shape


def test_what_a_library_compiles_stands_at_the_line_that_calls_it():
    # `jnp.var` is compiled, and was traced from here first.
    first = jnp.var(jnp.asarray(X), axis=-1)
    program = run(lambda x: jnp.var(x, axis=-1))
    sources = {node.place.source for node in program.nodes if node.operands}
    assert sources == {"program = run(lambda x: jnp.var(x, axis=-1))"}
    assert first.shape == (3,)


class Block(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(4, 4, rngs=nnx.Rngs(0), param_dtype=jnp.float64)

    def __call__(self, x):
        return jnp.sin(self.fc(x))


class Stack(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Block(), Block()])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# Linen names its parts where they are made, in the call.
class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.sin(linen.Dense(4, param_dtype=jnp.float64)(x))


def linen_stack():
    module = LinenStack()
    return module.bind(module.init(jax.random.key(0), X))


class EquinoxStack(equinox.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = jax.vmap(layer)(x)
        return jnp.sin(x)


def equinox_stack():
    return EquinoxStack([equinox.nn.Linear(4, 4, key=jax.random.key(0))])


@pytest.mark.parametrize(
    ("make", "dots", "sines"),
    [
        (Stack, ["blocks.0.fc", "blocks.1.fc"], ["blocks.0", "blocks.1"]),
        (linen_stack, ["Dense_0"], [""]),
        (equinox_stack, ["layers.0"], [""]),
    ],
)
def test_operations_have_the_path_of_their_module(make, dots, sines):
    module = make()

    def called(given):
        with scopes.named(module):
            return {"output": module(given["x"])}

    # The libraries add a bias to rows.
    with jax.numpy_rank_promotion("allow"):
        program = jax_program(called, {"x": X})
    products = places(program, "dot")
    assert [place.module for place in products] == dots
    waves = places(program, "sin")
    assert [place.module for place in waves] == sines
    assert {place.file for place in waves} == {__file__}

"""Formulas that are equal are one expression, however they are written; others are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flax_attn.parity.trace.builder import Builder
from flax_attn.parity.trace.jax_program import jax_program
from flax_attn.parity.trace.torch_program import torch_program

pytestmark = pytest.mark.usefixtures("as_a_user_has_jax")
X, Y, W = np.random.default_rng(0).normal(size=(3, 4, 4))


def of_jax(function):
    """Return the expression of a function of `x`, `y` and `w`, which are leaves 0, 1 and 2."""
    arrays = {"x": X, "y": Y, "w": W}
    with jax.enable_x64(True):
        return built(jax_program(lambda given: {"output": function(**given)}, arrays))


def of_torch(function):
    tensors = {name: torch.tensor(array) for name, array in {"x": X, "y": Y, "w": W}.items()}
    return built(torch_program(function, lambda f: {"output": f(**tensors)}, tensors))


def built(program):
    # An input has the same number on both sides, which need not read them in one order.
    order = {"x": 0, "y": 1, "w": 2}
    sources = [node for node in program.nodes if node.operation == "source"]
    leaves = {node: order[node.name] for node in sources}
    (output,) = program.outputs.values()
    return Builder(leaves, program.varying)(output)


EQUAL = {
    "division by a root": [lambda x, y, w: x / jnp.sqrt(y), lambda x, y, w: x * torch.rsqrt(y)],
    "order of terms": [lambda x, y, w: x + 2 * y - x * w, lambda x, y, w: y - w * x + x + y],
    "order of factors": [lambda x, y, w: 0.5 * x * y, lambda x, y, w: y * x / 2],
    "powers": [lambda x, y, w: x**3 / x, lambda x, y, w: x.square()],
    "terms that cancel": [lambda x, y, w: x + y - x, lambda x, y, w: y * 1],
    "mean": [lambda x, y, w: x.mean(-1), lambda x, y, w: x.sum(-1) / 4],
    "softmax": [lambda x, y, w: jax.nn.softmax(x * y), lambda x, y, w: (x * y).softmax(-1)],
    "softmax by hand": [
        lambda x, y, w: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True) * y,
        lambda x, y, w: x.softmax(-1) * y,
    ],
    "layer norm": [
        lambda x, y, w: (
            (x - x.mean(-1, keepdims=True))
            * jax.lax.rsqrt(((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + 1e-5)
        ),
        lambda x, y, w: F.layer_norm(x, (4,)),
    ],
    "linear layer": [lambda x, y, w: x @ w.T + y[0], lambda x, y, w: F.linear(x, w, y[0])],
    "exact GELU": [lambda x, y, w: jax.nn.gelu(x, approximate=False), lambda x, y, w: F.gelu(x)],
    "tanh GELU": [lambda x, y, w: jax.nn.gelu(x), lambda x, y, w: F.gelu(x, approximate="tanh")],
    "SiLU": [lambda x, y, w: jax.nn.silu(x), lambda x, y, w: F.silu(x)],
    "ReLU": [lambda x, y, w: jnp.maximum(x, 0), lambda x, y, w: F.relu(x)],
    "layout": [
        lambda x, y, w: jnp.tanh(x.T.reshape(2, 8)),
        lambda x, y, w: x.t().reshape(16).tanh()[None],
    ],
    "condition turned round": [
        lambda x, y, w: jnp.where(x > y, x, w),
        lambda x, y, w: torch.where(~(y < x), w, x),
    ],
    "halves": [
        lambda x, y, w: jnp.split(x, 2, -1)[1] + y[:, :2],
        lambda x, y, w: x[:, 2:] + y.chunk(2, -1)[0],
    ],
    "wider dtype": [lambda x, y, w: x.astype(jnp.float64) + y, lambda x, y, w: x + y],
}
# What differs by little is not one expression.
APART = {
    "transpose": [lambda x, y, w: x - x.T, lambda x, y, w: x - x],
    "factor": [lambda x, y, w: 0.5 * x, lambda x, y, w: 0.25 * x],
    "operands of a difference": [lambda x, y, w: x - y, lambda x, y, w: y - x],
    "exponent": [lambda x, y, w: x / y, lambda x, y, w: x / y**2],
    "epsilon": [lambda x, y, w: jnp.sqrt(y + 1e-5), lambda x, y, w: torch.sqrt(y + 1e-6)],
    "cast": [lambda x, y, w: x.astype(jnp.float32) * 1, lambda x, y, w: x * 1],
    "kind": [lambda x, y, w: jnp.sin(x), lambda x, y, w: torch.cos(x)],
    "cases": [lambda x, y, w: jnp.where(x > y, x, w), lambda x, y, w: torch.where(x > y, w, x)],
    "bound": [lambda x, y, w: jnp.sin(x[:2]), lambda x, y, w: torch.sin(x[1:3])],
    "leaf": [lambda x, y, w: jnp.sin(x), lambda x, y, w: torch.sin(y)],
    "other factor": [lambda x, y, w: x * y * w, lambda x, y, w: x * y],
}


@pytest.mark.parametrize("case", EQUAL)
def test_equal_formulas_are_one_expression(case):
    ours, theirs = EQUAL[case]
    flax, other = of_jax(ours), of_torch(theirs)
    assert flax == other, f"{flax}\n{other}"
    # Expressions are looked up in dictionaries.
    assert hash(flax) == hash(other)


@pytest.mark.parametrize("case", APART)
def test_other_formulas_are_other_expressions(case):
    ours, theirs = APART[case]
    assert of_jax(ours) != of_torch(theirs)


def test_a_constant_is_a_number_and_a_softmax_has_its_axis():
    assert of_jax(lambda x, y, w: jnp.full((2, 2), 3.0) * 2).number == 6
    softmax = of_torch(lambda x, y, w: x[:3].softmax(0))
    assert (softmax.operation, softmax.settings) == ("softmax", ((3,),))

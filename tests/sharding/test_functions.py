"""Masks and scores that are functions: on a mesh they get the global rows, heads and tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask, ScoreFunction, dot_product_attention
from flax_attn.parity import tolerance
from flax_attn.sharding import context_parallel

from ..backends.conformance import FAST

pytestmark = pytest.mark.usefixtures("x64")
jit = partial(jax.jit, compiler_options=FAST)
B, T, N, K, H = 4, 48, 8, 4, 6
DOCUMENTS = jnp.asarray(np.random.default_rng(0).integers(0, 2, (B, T)))
POSITIONS = jnp.asarray(np.arange(T) % 20)[None] + jnp.arange(B)[:, None]


def arrays(t=T):
    draw = np.random.default_rng(t).normal
    shapes = {
        "query": (B, t, N, H),
        "key": (B, T, K, H),
        "value": (B, T, K, H),
        "table": (B, N, 2 * T + 9),
    }
    return {name: jnp.asarray(draw(size=shape)) for name, shape in shapes.items()}


def sees(b, n, i, j):
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) | ((i + j + n) % 5 == 0)


def both(arrays, mask, positions=None):
    """Return the output and all gradients of a call that tells functions of every index."""

    def call(table, **qkv):
        score = ScoreFunction(
            lambda score, b, n, i, j: jnp.tanh(score) + table[b, n, j - i + T], positions, positions
        )
        return dot_product_attention(**qkv, mask=mask, score=score, soft_cap=3.0)

    output, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
    return {"output": output, **pull(jnp.sin(3 * output))[0]}


def assert_equal(found, expected):
    for name, ours in found.items():
        allowed = tolerance.FORWARD if name == "output" else tolerance.GRADIENT
        assert np.abs(ours - expected[name]).max() <= allowed * max(
            np.abs(expected[name]).max(), 1
        ), name


MASKS = {
    "function": Mask.where(sees) & Mask.causal(),
    "summary": Mask.where(sees).summarise(T, T, b=B, n=N, tile=4),
    "captured": Mask.where(lambda b, n, i, j: (i < j) | sees(b, n, i, j), jnp.array([0, 1, -2, 0])),
}
CASES = [  # mask, mesh of data, tensor and context, kind of its axes, strategy, balance
    ("function", (2, 4, 1), "auto", "auto", "auto"),
    ("summary", (2, 4, 1), "explicit", "auto", "auto"),
    ("function", (1, 2, 4), "auto", "ring", "zigzag"),
    ("summary", (2, 2, 2), "explicit", "ring", "none"),
    ("captured", (1, 1, 8), "auto", "all_gather", "none"),
    ("summary", (1, 2, 4), "auto", "all_gather", "zigzag"),
    ("captured", (2, 1, 4), "auto", "ulysses", "none"),
    ("function", (1, 1, 8), "auto", "ulysses+ring", "zigzag"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_functions_are_told_of_the_whole(case, mesh_like):
    mask, sizes, kind, strategy, balance = case
    call = partial(both, mask=MASKS[mask], positions=None if mask == "function" else POSITIONS)
    expected = jit(call)(arrays())
    mesh = mesh_like(kind, **dict(zip(("data", "tensor", "context"), sizes, strict=True)))
    with jax.set_mesh(mesh), context_parallel(strategy, balance):
        assert_equal(jit(call)(arrays()), expected)


def test_decoding_over_divided_keys(mesh_like):
    mask = Mask.where(sees, jnp.array([40, 3, 0, 47]))
    expected = jit(partial(both, mask=mask))(arrays(1))
    with jax.set_mesh(mesh_like(data=2, tensor=2, context=2)):
        assert_equal(jit(partial(both, mask=mask))(arrays(1)), expected)

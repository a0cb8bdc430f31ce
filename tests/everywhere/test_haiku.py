"""`haiku.MultiHeadAttention` computes the same here."""

from contextlib import suppress

import jax
import jax.numpy as jnp
import pytest

from flax_attn import everywhere
from tests.everywhere.originals import S, T, check_low, check_same, inputs, left_alone, some_mask

hk = pytest.importorskip("haiku", reason="Haiku is not installed")

HEADS = 3
WIDTHS = {"key_size": 4, "value_size": 6, "model_size": 5}


def forward(query, key, value, mask=None):
    drawn = hk.initializers.RandomNormal()
    return hk.MultiHeadAttention(HEADS, **WIDTHS, w_init=drawn, b_init=drawn)(
        query, key, value, mask
    )


def build(x):
    init, apply = hk.without_apply_rng(hk.transform(forward))
    return init(jax.random.key(0), *x), apply


MASKS = {
    "none": ((2,), None),
    "unbatched": ((), (1,)),
    "shared": ((2,), (1, 1)),
    "of rows and heads": ((2,), (2, HEADS)),
    "two batch axes": ((2, 4), (2, 1, 1)),
}


@pytest.mark.parametrize(("leading", "shape"), MASKS.values(), ids=MASKS)
def test_equal(x64, leading, shape):
    x = inputs(*leading)
    weights, apply = build(x)
    mask = None if shape is None else some_mask(*shape)
    check_same(lambda weights, *x: apply(weights, *x, mask), (weights, *x), "haiku")


def test_numbers_as_a_mask(x64):
    x = inputs(2)
    weights, apply = build(x)
    mask = some_mask(1, 1).astype(jnp.float64)
    check_same(lambda weights, *x: apply(weights, *x, mask), (weights, *x), "haiku")


def vmapped(apply, weights, *x):
    return jax.vmap(lambda *row: apply(weights, *row))(*x)


def jitted(apply, weights, *x):
    return jax.jit(apply)(weights, *x)


def scanned(apply, weights, *x):
    def step(carry, row):
        return carry + 1, apply(weights, *row) * carry

    return jax.lax.scan(step, jnp.ones((), jnp.float64), x)


def rematerialised(apply, weights, *x):
    return jax.checkpoint(apply)(weights, *x)


@pytest.mark.parametrize("run", [vmapped, jitted, scanned, rematerialised])
def test_transforms(x64, run):
    x = inputs(4)
    weights, apply = build(x)
    check_same(lambda weights, *x: run(apply, weights, *x), (weights, *x), "haiku")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_lower_dtypes(x64, dtype):
    x = inputs(2, dtype=dtype)
    weights, apply = build(x)
    check_low(apply, apply, (weights, *x), "haiku")


def test_the_same_weights_are_made(x64):
    x = inputs(2)
    weights, _ = build(x)
    with everywhere(targets=["haiku"], strict=True):
        found, _ = build(x)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), found, weights)
    assert all(jax.tree.leaves(same))


def test_left_alone(x64):
    query, key, value = inputs(2)
    weights, apply = build((query, key, value))
    # The original broadcasts keys and values over the batch.
    (reason,) = left_alone(lambda: apply(weights, query, key[:1], value[:1]), "haiku")
    assert reason == "query, key and value have different leading axes"


@pytest.mark.parametrize(
    ("message", "change", "mask"),
    [
        ("query, key and value have different leading axes", lambda q, k, v: (q, k[0], v), None),
        ("a mask (7, 9) does not fit the scores (2, 3, 7, 9)", lambda *x: x, (T, S)),
        ("it computes with int32", lambda q, k, v: (q, k, v.astype(jnp.int32)), None),
    ],
)
def test_what_does_not_fit_is_left_to_the_original(x64, message, change, mask):
    x = inputs(2)
    weights, apply = build(x)
    mask = None if mask is None else jnp.ones(mask, bool)
    with everywhere(targets=["haiku"]) as report, suppress(ValueError):
        apply(weights, *change(*x), mask)
    assert [entry.reason for entry in report.left_alone] == [message]

"""`equinox.nn.MultiheadAttention` computes the same here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import everywhere
from tests.everywhere.originals import S, T, check_low, check_same, inputs, left_alone, some_mask

eqx = pytest.importorskip("equinox", reason="Equinox is not installed")

HEADS, SIZES = 3, {"query_size": 10, "key_size": 11, "value_size": 13}
WIDTHS = {"qk_size": 8, "vo_size": 6, "output_size": 5}
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def build(dtype=jnp.float64, **arguments):
    layer = eqx.nn.MultiheadAttention(
        HEADS, **SIZES, **WIDTHS, **BIASES, dtype=dtype, **arguments, key=jax.random.key(0)
    )
    return eqx.partition(layer, eqx.is_inexact_array)


def rotated(query, key, value):
    return query[::-1], jnp.roll(key, 1, axis=-1), 2 * value


CALLS = {
    "plain": {},
    "mask": {"mask": some_mask()},
    "mask of heads": {"mask": some_mask(HEADS)},
    "process_heads": {"process_heads": rotated, "mask": some_mask()},
    "inference": {"inference": True, "key": None},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_equal(x64, options):
    rate = 0.5 if "inference" in options else 0.0
    weights, rest = build(dropout_p=rate)
    check_same(
        lambda weights, *x: eqx.combine(weights, rest)(*x, **options),
        (weights, *inputs()),
        "equinox",
    )


def vmapped(layer, *x):
    return jax.vmap(lambda *row: layer(*row, mask=some_mask()))(*x)


def jitted(layer, *x):
    return eqx.filter_jit(vmapped)(layer, *x)


def scanned(layer, *x):
    def step(carry, row):
        return carry + 1, layer(*row) * carry

    return jax.lax.scan(step, jnp.ones((), jnp.float64), x)


def rematerialised(layer, *x):
    return jax.vmap(eqx.filter_checkpoint(layer))(*x)


@pytest.mark.parametrize("run", [vmapped, jitted, scanned, rematerialised])
def test_transforms(x64, run):
    weights, rest = build()
    check_same(
        lambda weights, *x: run(eqx.combine(weights, rest), *x), (weights, *inputs(4)), "equinox"
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_lower_dtypes(x64, dtype):
    weights, rest = build(dtype)

    def run(weights, *x):
        return eqx.combine(weights, rest)(*x)

    check_low(run, run, (weights, *inputs(dtype=dtype)), "equinox")


def test_function(x64):
    rng = np.random.default_rng(3)
    heads = [jnp.asarray(rng.normal(size=shape)) for shape in ((T, 4), (S, 4), (S, 6))]
    attention = eqx.nn._attention.dot_product_attention
    check_same(lambda *x: attention(*x, some_mask()), heads, "equinox")


def test_dropout_has_its_distribution(x64):
    layer = eqx.nn.MultiheadAttention(2, 8, dropout_p=0.4, key=jax.random.key(0))
    x = inputs()[0][:, :8]
    keys = jax.random.split(jax.random.key(1), 4000)

    def mean(layer, x):
        return jax.vmap(lambda key: layer(x, x, x, key=key))(keys).mean(axis=0)

    with everywhere(targets=["equinox"], strict=True) as report:
        found = mean(layer, x)
        first, second = (layer(x, x, x, key=key) for key in keys[:2])
    assert "dropout" in next(iter(report.taken)).asked
    assert not jnp.allclose(first, second)
    # The mean over keys is the output without dropout, to a few standard errors.
    drawn = jax.vmap(lambda key: layer(x, x, x, key=key))(keys)
    error = drawn.std(axis=0) / len(keys) ** 0.5
    assert (jnp.abs(found - layer(x, x, x, inference=True)) < 5 * error).all()


class _Dropout(eqx.nn.Dropout):
    """A dropout of the user's own."""


def test_left_alone(x64):
    layer = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    x = inputs()[0][:, :8]
    with pytest.warns(UserWarning, match="deprecated"):
        (reason,) = left_alone(lambda: layer(x, x, x, deterministic=True), "equinox")
    assert reason == "deterministic= is deprecated; inference= says the same"
    other = eqx.tree_at(lambda layer: layer.dropout, layer, _Dropout(0.0))
    (reason,) = left_alone(lambda: other(x, x, x), "equinox")
    assert reason == f"its dropout is a {__name__}._Dropout"


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("a mask (3, 3) does not fit scores (3, 7, 9)", (), {"mask": jnp.ones((3, 3), bool)}),
        ("it has no key for its dropout", (), {"inference": False}),
    ],
)
def test_the_original_raises(x64, message, arguments, options):
    weights, rest = build(dropout_p=0.5)
    layer = eqx.combine(weights, rest)
    with everywhere(targets=["equinox"]) as report, pytest.raises((ValueError, RuntimeError)):
        layer(*inputs(), **{"inference": True} | options)
    assert [entry.reason for entry in report.left_alone] == [message]


def test_heads_of_other_shapes_raise(x64):
    layer = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    x = inputs()[0][:, :8]
    with (
        everywhere(targets=["equinox"]),
        pytest.raises(ValueError, match="process_heads must not change the shape of the heads"),
    ):
        layer(x, x, x, process_heads=lambda q, k, v: (q[..., :2], k[..., :2], v))

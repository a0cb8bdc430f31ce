"""The functions of one tile, against the formula over all keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import KeyedDropout
from flax_attn.backends import tile
from flax_attn.functional.dropout import keep_mask, key_data, threefry_2x32

HIDE = -jnp.inf
FLOAT = jnp.dtype(jnp.float32)
draw = np.random.default_rng(5).normal
KEY = jax.random.key(3)


def parts():
    masked = jnp.asarray(draw(size=(3, 8)), jnp.float32).at[1].set(HIDE).at[0, :4].set(HIDE)
    value = jnp.asarray(draw(size=(8, 5)), jnp.float32)
    return masked, value


def over_tiles(masked, value, *cuts):
    done = tile.over_nothing(len(masked), value.shape[1], FLOAT)
    for start, stop in zip((0, *cuts), (*cuts, value.shape[0]), strict=True):
        done = tile.softmax_step(done, masked[:, start:stop], value[start:stop], jnp.matmul)
    return done.divided()


@pytest.mark.parametrize("cuts", [(), (4,), (3, 6)])
def test_steps_over_tiles_are_the_softmax_over_all(cuts, close):
    masked, value = parts()
    found = over_tiles(masked, value, *cuts)
    weights = jnp.where(masked == HIDE, 0, jax.nn.softmax(masked.at[1].set(0), axis=-1))
    close(found.output, weights @ value)
    assert not found.output[1].any()
    assert not found.total[1].any()


def test_a_hidden_tile_changes_no_bit():
    masked, value = parts()
    before = tile.softmax_step(tile.over_nothing(3, 5, FLOAT), masked[:, 4:], value[4:], jnp.matmul)
    after = tile.softmax_step(before, jnp.full((3, 4), HIDE), value[:4], jnp.matmul)
    for name in ("output", "top", "total"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


def test_a_bias_of_minus_infinity_hides_under_a_cap_and_beside_nan():
    bias, more = jnp.array([[HIDE, 0.5]]), jnp.array([[jnp.nan, jnp.nan]])
    found = tile.scores(jnp.ones((2, 2)), bias, None, 2.0, more=more)
    assert (found.masked[:, 0] == HIDE).all()
    assert jnp.isnan(found.masked[:, 1]).all()
    assert jnp.isfinite(found.capped).all()


def test_gradients_are_those_of_the_formula(close):
    products, value = (jnp.asarray(draw(size=shape), jnp.float32) for shape in ((3, 8), (8, 5)))
    cotangent = jnp.asarray(draw(size=(3, 5)), jnp.float32)
    slope, soft_cap = jnp.float32(0.3), 1.5

    def function(x, slope):
        return x * slope + x**2

    def formula(products, slope):
        capped = soft_cap * jnp.tanh(products / soft_cap)
        return (jax.nn.softmax(function(capped, slope), axis=-1) @ value * cotangent).sum()

    def pull(capped, d_scores):
        _, pullback = jax.vjp(lambda x, slope: function(x, slope), capped, slope)
        d_capped, d_slope = pullback(d_scores)
        return d_capped, (d_slope,)

    found = tile.scores(products, None, None, soft_cap, lambda x: function(x, slope))
    weights = jax.nn.softmax(found.masked, axis=-1)
    d_weights = cotangent @ value.T
    delta = (weights * d_weights).sum(axis=-1, keepdims=True)
    ours = tile.score_gradients(weights, d_weights, delta, found.capped, soft_cap, pull)
    close((ours.scores, *ours.captured), jax.grad(formula, (0, 1))(products, slope))


def test_dropout_drops_what_the_whole_call_drops():
    rows, cols = jnp.arange(3, 6)[:, None], jnp.arange(7, 15)[None]
    b, n, rate = jnp.uint32(1), jnp.uint32(2), 0.4
    seed = key_data(KEY)
    head_key = threefry_2x32((seed[0], seed[1]), (b, n))
    words = (rows.astype(jnp.uint32), cols.astype(jnp.uint32))
    factors = tile.dropout_factors(head_key, *words, rate, FLOAT)
    at = jnp.full((1, 1), 1), jnp.full((1, 1), 2)
    keep = keep_mask(KeyedDropout(rate, KEY), *at, rows, cols)
    np.testing.assert_array_equal(factors, jnp.where(keep, jnp.float32(1 / 0.6), 0))

"""Numbers at their limits, and arguments of other kinds, in every backend that runs here."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_attn.backends.splash as splash
from flax_attn import KeyedDropout, Mask, dot_product_attention, explain
from flax_attn.backends.call import Unsupported
from flax_attn.backends.nonfinite import headroom
from flax_attn.backends.registry import load
from flax_attn.functional.kv_range import KVRange, as_int32, bounded, plus

from .conformance import FAST

B, T, N, H = 1, 128, 2, 16
BACKENDS = ("decode", "blocked", "native", "splash")
RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE, COTANGENT = RANDOM.normal(size=(4, B, T, N, H))
INT32 = np.iinfo(np.int32)
jit = partial(jax.jit, compiler_options=FAST)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(load("blocked"), "block", 64)
    monkeypatch.setattr(load("blocked"), "edge", 16)


def attend(backend, *arrays, **options):
    with splash.interpreted():
        return dot_product_attention(*arrays, backend=backend, **options)


def results(backend, arrays, cotangent, **options):
    @jit
    def both(arrays, cotangent):
        output, pull = jax.vjp(partial(attend, backend, **options), *arrays)
        return output, *pull(cotangent)

    names = ("output", "query", "key", "value")
    return dict(zip(names, both(arrays, cotangent), strict=True))


CALLS = {
    "all keys": (T, {}),
    "causal": (T, {"mask": Mask.causal()}),
    "sinks under a cap": (T, {"sinks": jnp.array([0.5, -1.0]), "soft_cap": 2.0}),
    "segments": (T, {"mask": Mask.segments(np.arange(T) // 50)}),
    "few queries": (3, {"mask": Mask.lengths(key=100), "sinks": jnp.array([0.5, -1.0])}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_mean_of_the_largest_values_is_finite(close, backend, name):
    t, options = CALLS[name]
    largest = float(jnp.finfo(jnp.float32).max)
    value = np.clip(VALUE, -0.98, 0.98) * largest
    arrays = [jnp.asarray(x, jnp.float32) for x in (QUERY[:, :t], KEY, value)]
    cotangent = jnp.asarray(
        COTANGENT[:, :t] * 1e-5, jnp.float32
    )  # so that it can be multiplied by values
    found = results(backend, arrays, cotangent, **options)
    assert all(np.isfinite(x).all() for x in found.values())
    close(found, results("reference", arrays, cotangent, **options))


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_a_mean_of_the_largest_values_after_dropout_is_finite(close, backend):
    value = np.full(VALUE.shape, 0.2 * float(jnp.finfo(jnp.float32).max))
    arrays = [jnp.asarray(x, jnp.float32) for x in (QUERY, KEY, value)]
    dropout = KeyedDropout(0.5, jax.random.key(0))
    found = attend(backend, *arrays, dropout=dropout)
    assert np.isfinite(found).all()
    close(found, attend("reference", *arrays, dropout=dropout))


@pytest.mark.parametrize("backend", ["reference", "decode", "blocked", "native"])
def test_the_largest_values_of_float16_are_summed_in_float32(backend):
    value = np.where(VALUE > 0, 65504.0, 60000.0)
    arrays = [jnp.asarray(x, jnp.float16) for x in (QUERY, KEY, value)]
    found = np.asarray(attend(backend, *arrays), np.float32)
    assert found.min() >= 60000
    assert found.max() <= 65504


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_score_that_overflows_makes_its_row_nan_and_below_hides_its_key(close, backend):
    query = jnp.ones((B, T, N, H)).at[:, 7].set(1e20)
    key = jnp.ones((B, T, N, H)).at[:, 5].set(1e20)
    value = jnp.asarray(VALUE, jnp.float32)
    found = np.isnan(attend(backend, query, key, value)).all(axis=(0, 2, 3))
    assert np.flatnonzero(found).tolist() == [7]
    below = attend(backend, query, key.at[:, 5].set(-1e20), value)
    hidden = attend("reference", query, key, value, mask=jnp.arange(T) != 5)
    close(below[:, 7], hidden[:, 7])
    capped = attend(backend, query, key, value, soft_cap=2.0)
    assert np.isfinite(capped).all()


@pytest.mark.parametrize("backend", ["reference", "decode", "blocked", "native", "splash"])
@pytest.mark.parametrize("sink", [3e38, -3e38])
def test_the_largest_sinks_take_all_or_nothing(close, backend, sink):
    arrays = [jnp.asarray(x, jnp.float32) for x in (QUERY, KEY, VALUE)]
    found = attend(backend, *arrays, sinks=jnp.full(N, sink))
    close(found, jnp.zeros_like(found) if sink > 0 else attend("reference", *arrays))


@pytest.mark.parametrize("backend", ["reference", "decode", "blocked", "native", "splash"])
def test_a_sink_that_is_not_finite_makes_the_rows_of_its_head_nan(backend):
    arrays = [jnp.asarray(x, jnp.float32) for x in (QUERY, KEY, VALUE)]
    for sink in (jnp.inf, jnp.nan):
        options = {"sinks": jnp.array([sink, 0.3]), "mask": Mask.lengths(query=20)}
        found = results(backend, arrays, jnp.ones((B, T, N, H)), **options)
        assert np.isnan(found["output"][:, :20, 0]).all()
        assert np.isnan(found["value"][:, :, 0]).all()
        assert all(np.isfinite(x[..., 1, :]).all() for x in found.values())
        assert not found["output"][:, 20:].any()


@pytest.mark.parametrize("backend", ["reference", "decode", "blocked", "native"])
@pytest.mark.parametrize("offset", [INT32.max, INT32.min])
def test_the_ends_of_the_integers_as_traced_offsets(close, backend, offset):
    arrays = [jnp.asarray(x, jnp.float32) for x in (QUERY, KEY, VALUE)]
    sees = offset > 0

    def under(make, offset):
        return jax.jit(lambda offset: attend(backend, *arrays, mask=make(offset)))(offset)

    for dtype in ("int32", "uint32") if sees else ("int32",):
        count = jnp.asarray(offset, dtype)
        everything = attend("reference", *arrays)
        expected = everything if sees else jnp.zeros_like(everything)
        close(under(Mask.causal, count), expected)
        close(under(lambda x: Mask.prefix(0, x), count), expected)
        close(under(lambda x: Mask.prefix(x, -T), count), expected)
        close(under(lambda x: Mask.lengths(query=x, key=x), count), expected)
        after = attend("reference", *arrays, mask=Mask.window(0, None)) if sees else expected
        close(under(lambda x: Mask.window(INT32.max, 3, x), count), after)
        close(under(lambda x: Mask.window(2**29, 2**29, x), count), jnp.zeros_like(everything))


def test_sums_of_counts_do_not_wrap_around():
    counts = [0, 1, -1, 2**29, -(2**29), 2**30, -(2**30), INT32.max, INT32.min, 7]
    for count in map(int, counts):
        for more in (*map(int, counts), 2**40, -(2**40), 2**32, -(2**31) - 2**29):
            assert bounded(jnp.int32(count), more) == bounded(count, more)
            expected = min(max(count + more, INT32.min), INT32.max)
            if INT32.min <= more <= INT32.max:
                assert plus(jnp.int32(count), jnp.int32(more)) == expected
    assert as_int32(jnp.uint32(2**32 - 1)) == INT32.max
    assert as_int32(np.array([2**63 - 1])) == INT32.max


def test_a_mask_is_moved_beyond_the_integers():
    moved = Mask.causal(jnp.int32(INT32.max)).shift(jnp.int32(5), 3, 4)
    assert moved.materialise(1, 1, 3, 4).all()
    moved = (Mask.lengths(query=INT32.max) & Mask.prefix(0, INT32.min)).shift(jnp.int32(-9), 3, 4)
    assert not moved.materialise(1, 1, 3, 4).any()


def test_key_ranges_at_the_ends_of_the_integers():
    for offset, expected in ((INT32.max, (0, 9, 0, 9)), (INT32.min, (0, 0, 0, 0))):
        found = Mask.causal(jnp.int32(offset)).kv_range(2, 5, 9)
        stops = [max(min(int(x), 9), 0) for x in found]
        assert KVRange(*stops) == KVRange(*expected)


def test_a_function_of_positions_gets_the_largest_position():
    last = INT32.max
    mask = Mask.where(lambda b, n, i, j: i == last - 2 + j, jnp.int32(last - 2))
    np.testing.assert_array_equal(mask.materialise(1, 1, 3, 3)[0, 0], np.eye(3, dtype=bool))
    beyond = Mask.where(lambda b, n, i, j: i == last, jnp.int32(last - 1))
    assert beyond.materialise(1, 1, 3, 1)[0, 0, :, 0].tolist() == [False, True, True]


def test_a_function_over_an_empty_batch():
    mask = Mask.where(lambda b, n, i, j: i >= j, jnp.zeros(0, jnp.int32))
    assert mask.materialise(0, 2, 3, 4).shape == (0, 2, 3, 4)


def test_ids_of_more_bits_than_there_are_without_64():
    large = np.array([2**32, 0, 0])
    with pytest.raises(
        ValueError,
        match=r"query segments must fit 32 bits while jax_enable_x64 is off; got ids from 0 to",
    ):
        Mask.segments(large)
    with pytest.raises(
        ValueError,
        match=r"key segments must fit 32 bits.*Number them.*np\.unique\(ids, return_inverse",
    ):
        Mask.segments(np.zeros(3, int), large)
    same = jax.jit(
        lambda x: (
            x[None, None] & Mask.segments(np.array([7, 7, 2], np.int64)).materialise(1, 1, 3, 3)
        )
    )
    assert same(jnp.ones((3, 3), bool))[0, 0].tolist() == [[True, True, False]] * 2 + [
        [False, False, True]
    ]
    with jax.enable_x64(True):
        wide = Mask.segments(large)
        assert wide.parts[0].query.dtype == jnp.int64
        assert wide.materialise(1, 1, 3, 3)[0, 0, 0].tolist() == [True, False, False]
        x = jnp.ones((1, 3, 2, 4), jnp.float32)
        with pytest.raises(
            Unsupported, match="native compares segment ids of up to 32 bits; got 64"
        ):
            dot_product_attention(x, x, x, mask=wide, backend="native")


def test_headroom_is_one_where_sums_are_finite():
    assert headroom(jnp.array([1.0, -3.0]), 10**6) == 1
    assert 3e38 * headroom(jnp.array([-3e38]), 1000) * 1000 <= float(jnp.finfo(jnp.float32).max)


X = jnp.ones((1, 3, 2, 4))
WRONG = {
    "query": ([1.0], r"query must be Array or ndarray; got list\. Pass jnp\.asarray\(query\)"),
    "key": (None, r"key must be Array or ndarray; got NoneType"),
    "bias": (Mask(), r"bias must be Array or ndarray; got Mask\. Pass a mask as mask="),
    "sinks": ("x", r"sinks must be Array or ndarray; got str"),
    "mask": ("causal", r"mask must be an array, a number or a list; got str"),
    "scale": (1j, r"scale is one real number for all scores.*got scale=1j"),
    "soft_cap": (
        jnp.float32(3),
        r"soft_cap must be positive, a number from .* known before tracing",
    ),
    "precision": (
        "nonsense",
        r"precision must be one that jax\.lax\.dot_general takes; got 'nonsense'\. Pass None",
    ),
    "dropout": (0.5, r"dropout must be .*KeyedDropout.*; got float"),
}


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("function", [dot_product_attention, explain])
def test_arguments_of_another_kind_are_refused_by_name(function, name):
    value, match = WRONG[name]
    with pytest.raises(ValueError, match=match):
        function(**{"query": X, "key": X, "value": X, name: value})


@pytest.mark.usefixtures("no_shape_checks")
def test_precisions_that_cannot_be_hashed():
    with pytest.raises(
        ValueError, match=r"precision must be one that .*; got \[1\.0, 2\.0, 3\.0\]"
    ):
        dot_product_attention(X, X, X, precision=[1.0, 2.0, 3.0])


@pytest.mark.usefixtures("no_shape_checks")
def test_a_traced_soft_cap_is_refused():
    with pytest.raises(
        ValueError, match=r"soft_cap must be positive.*known before tracing; got soft_cap=.*Tracer"
    ):
        jax.jit(lambda cap: dot_product_attention(X, X, X, soft_cap=cap))(2.0)


@pytest.mark.usefixtures("no_shape_checks")
def test_arrays_of_numpy_and_abstract_sinks_are_taken(close):
    arrays = [np.asarray(x, np.float32) for x in (QUERY, KEY, VALUE)]
    close(dot_product_attention(*arrays), dot_product_attention(*map(jnp.asarray, arrays)))
    sinks = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert explain(X, X, X, sinks=sinks).backend == explain(X, X, X, sinks=jnp.ones(2)).backend

"""The attention call against the formula in plain numpy, and both sides against each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_attn
import torch_ref
from flax_attn.parity import tolerance
from parity_tests.asserts import assert_near, assert_results_near

B, T, S, N, K, H, V = 2, 5, 7, 6, 3, 4, 8
# Every random call is compiled, and run once.
FAST = {"xla_backend_optimization_level": 0}
RATE, CAP, SCALE = 0.4, 1.5, 0.7
RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE = (
    RANDOM.normal(size=shape) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, V))
)
BIAS = RANDOM.normal(size=(B, N, T, S))
SINKS = RANDOM.normal(size=N)
VISIBLE = RANDOM.random((B, N, T, S)) < 0.6
# A row that may see nothing.
VISIBLE[1, :, 2] = False


def truth(query, key, value, bias=0.0, visible=True, sinks=None, keep=True, rate=0.0, **scores):
    """Return output and weights in the order of the contract."""
    key, value = (np.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = logits_of(query, key, bias, **scores)
    weights = softmax(logits, visible, sinks) * keep / (1 - rate)
    return {"output": np.einsum("bnts,bsnv->btnv", weights, value), "weights": weights}


def logits_of(query, key, bias, scale=None, soft_cap=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * np.einsum("btnh,bsnh->bnts", query, key) + bias
    return logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)


def softmax(logits, visible, sinks):
    """Return the weights, 0 in a row that sees nothing; a sink is one more logit of each row."""
    seen = np.where(visible, logits, -np.inf)
    sink = -np.inf if sinks is None else sinks[:, None, None]
    # A row that sees nothing has no maximum.
    largest = np.maximum(seen.max(axis=-1, keepdims=True), np.maximum(sink, -1e30))
    exps = np.exp(seen - largest)
    total = exps.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
    return np.divide(exps, total, out=np.zeros_like(exps), where=total > 0)


def attend(side, query=QUERY, key=KEY, value=VALUE, dropout=None, **options):
    """Return output and weights as numpy arrays; array options come as numpy."""
    made = {name: side.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if dropout is not None:
        made["dropout"] = side.KeyedDropout(dropout, side.key())
    arrays = [side.array(x) for x in (query, key, value)]
    return numbers(side, side.attend(*arrays, **made, return_weights=True))


def numbers(side, found):
    return {"output": side.numpy(found.output), "weights": side.numpy(found.weights)}


def kept(rate=RATE):
    """Return the elements that dropout keeps."""
    dropout = flax_attn.functional.dropout
    words = jnp.array([3, 14], jnp.uint32)
    return np.asarray(dropout.keep_grid(flax_attn.KeyedDropout(rate, words), (B, N, T, S)))


# Each option alone, some that meet, and all of them.
OPTIONS = {
    "plain": {},
    "scale": {"scale": SCALE},
    "bias": {"bias": BIAS},
    "soft cap": {"soft_cap": CAP, "scale": 3.0},
    "mask": {"mask": VISIBLE},
    "sinks": {"sinks": SINKS},
    "sinks and mask": {"sinks": SINKS, "mask": VISIBLE},
    "dropout": {"dropout": RATE},
    "bias then cap": {"bias": 4 * BIAS, "soft_cap": CAP},
    "all": {
        "scale": 3.0,
        "bias": BIAS,
        "soft_cap": CAP,
        "mask": VISIBLE,
        "sinks": SINKS,
        "dropout": RATE,
    },
}


# Names of options in the formula.
NAMES = {"mask": "visible", "dropout": "rate"}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_formula(side, options):
    said = {NAMES.get(name, name): value for name, value in options.items()}
    said["keep"] = kept() if "dropout" in options else True
    assert_near(attend(side, **options), truth(QUERY, KEY, VALUE, **said))


@pytest.mark.parametrize("shape", [(T, S), (N, 1, S), (B, 1, 1, S), (1, N, T, 1), (S,)])
def test_bias_and_mask_broadcast(side, shape):
    # Some rows of a small shape see nothing.
    bias, visible = RANDOM.normal(size=shape), RANDOM.random(shape) < 0.6
    assert_near(attend(side, bias=bias, mask=visible), truth(QUERY, KEY, VALUE, bias, visible))


@pytest.mark.parametrize(("n", "k"), [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_query_head_i_reads_key_value_head_i_over_g(side, n, k):
    value = np.broadcast_to(np.arange(k, dtype=float)[:, None], (B, S, k, V))
    output = attend(side, QUERY[:, :, :n], RANDOM.normal(size=(B, S, k, H)), value)["output"]
    expected = np.broadcast_to((np.arange(n) // (n // k))[:, None], (B, T, n, V))
    np.testing.assert_allclose(output, expected, rtol=tolerance.FORWARD, atol=tolerance.FORWARD)


def test_weights_sum_to_one_and_less_with_a_sink(side):
    np.testing.assert_allclose(attend(side)["weights"].sum(-1), 1, rtol=tolerance.FORWARD)
    assert (attend(side, sinks=SINKS)["weights"].sum(-1) < 0.99).all()
    # A sink that takes nothing.
    assert_near(attend(side, sinks=np.full(N, -np.inf)), attend(side))


def test_unbatched_is_a_row_of_the_batch(side):
    options = {"bias": BIAS[0], "sinks": SINKS, "mask": VISIBLE[0]}
    # Without the first axis everywhere.
    single = attend(side, QUERY[0], KEY[0], VALUE[0], **options)
    whole = attend(side, QUERY[:1], KEY[:1], VALUE[:1], **options)
    assert single["output"].shape == (T, N, V)
    assert single["weights"].shape == (N, T, S)
    assert_near(single, {name: array[0] for name, array in whole.items()})


def test_single_head_attention_is_one_head(side):
    one = [side.array(x[:, :, 0]) for x in (QUERY, KEY, VALUE)]
    mask = side.array(VISIBLE[:, 0])
    found = numbers(side, side.attend_one_head(*one, mask=mask, return_weights=True))
    many = attend(side, *(x[:, :, :1] for x in (QUERY, KEY, VALUE)), mask=VISIBLE[:, :1])
    assert_near(found, {"output": many["output"][:, :, 0], "weights": many["weights"][:, 0]})
    assert (side.numpy(side.single_head_attention(*one, mask=mask)) == found["output"]).all()


def options_in(side, dtype):
    """Return options of every kind, with arrays in a dtype."""
    dropout = side.KeyedDropout(RATE, side.key())
    return {"mask": side.array(VISIBLE), "sinks": side.array(SINKS, dtype), "dropout": dropout}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_asking_for_weights_does_not_change_the_output(side, dtype):
    arrays, options = [side.array(x, dtype) for x in (QUERY, KEY, VALUE)], options_in(side, dtype)
    alone = side.dot_product_attention(*arrays, **options)
    found = side.attend(*arrays, **options, return_weights=True)
    assert (side.numpy(alone) == side.numpy(found.output)).all()
    assert alone.dtype == found.output.dtype == found.weights.dtype == arrays[0].dtype
    assert side.attend(*arrays, **options).weights is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_dtypes_are_computed_in_float32(side, dtype):
    low = [side.array(x, dtype) for x in (QUERY, KEY, VALUE)]
    wide = [side.array(side.numpy(x).astype(np.float32)) for x in low]
    options = {"mask": side.array(VISIBLE), "soft_cap": CAP, "return_weights": True}
    ours, expected = (side.attend(*arrays, **options) for arrays in (low, wide))
    assert_rounded(side, ours.output, expected.output, dtype)
    assert_rounded(side, ours.weights, expected.weights, dtype)


def assert_rounded(side, found, wide, dtype):
    """Assert that numbers are those of a wider dtype, rounded once."""
    rounded = side.array(side.numpy(wide), dtype)
    assert found.dtype == rounded.dtype
    assert (side.numpy(found) == side.numpy(rounded)).all()


@pytest.fixture(params=[1e4, -1e4])
def size(request):
    return request.param


def huge(size):
    """Return query, key and value whose largest logits are alike: positive, or the last one."""
    query, key = np.full((1, 3, 1, 1), size), np.array([1.0, 1.0, 0.5, -1.0]).reshape(1, 4, 1, 1)
    return query, key, np.random.default_rng(1).normal(size=(1, 4, 1, 2))


def test_logits_of_ten_thousand(side, size):
    result = attend(side, *huge(size), scale=1.0)
    expected = [0.5, 0.5, 0, 0] if size > 0 else [0, 0, 0, 1.0]
    np.testing.assert_array_equal(result["weights"][0, 0], [expected] * 3)


def test_a_bias_of_ten_thousand_everywhere_changes_nothing(side, size):
    shifted = attend(side, bias=np.full((1, 1), size))
    np.testing.assert_allclose(shifted["weights"], attend(side)["weights"], rtol=1e-10)


def test_logits_of_ten_thousand_are_finite_in_float32(side, size):
    arrays = [side.array(x, "float32") for x in huge(size)]
    assert np.isfinite(side.numpy(side.dot_product_attention(*arrays, scale=1.0))).all()


def test_a_sink_of_ten_thousand_takes_all(side):
    result = attend(side, sinks=np.full(N, 1e4))
    assert (result["weights"] == 0).all()
    assert (result["output"] == 0).all()


# Masks of b rows, t queries and s keys, by the parts that they have.
MASKS = {
    "none": lambda side, b, t, s: None,
    "causal": lambda side, b, t, s: side.Mask.causal(s - t),
    "window": lambda side, b, t, s: side.Mask.window(1, 0, min(1, s)),
    "prefix": lambda side, b, t, s: side.Mask.prefix(2, 0),
    "lengths": lambda side, b, t, s: side.Mask.lengths(key=side.array(np.arange(b) * 2)),
    "segments": lambda side, b, t, s: side.Mask.segments(
        side.array(np.arange(t) // 2), side.array(np.arange(s) % 3)
    ),
    "dense": lambda side, b, t, s: side.array(np.random.default_rng(t).random((b, 1, t, s)) < 0.5),
    "several": lambda side, b, t, s: (
        side.Mask.causal(0) & side.Mask.lengths(query=max(t - 1, 1), key=max(s - 1, 1))
    ),
}


# Of b, t, s, k, g, h and v.
SIZES = st.tuples(*(st.integers(1, top) for top in (3, 5, 6, 3, 3, 4, 3)))
CALLS = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([None, 0.3, 2.0]),
        "soft_cap": st.sampled_from([None, 1.0, 5.0]),
        "rate": st.sampled_from([0.0, 0.3, 0.8]),
        "mask": st.sampled_from(sorted(MASKS)),
    }
)


@st.composite
def shapes_of_calls(draw):
    """Draw the shape of each array, some of them with a bias or with sinks."""
    b, t, s, k, g, h, v = draw(SIZES)
    required = {"query": (b, t, k * g, h), "key": (b, s, k, h), "value": (b, s, k, v)}
    # A bias broadcasts over any of its axes.
    bias = tuple(size if draw(st.booleans()) else 1 for size in (b, k * g, t, s))
    optional = {"bias": bias, "sinks": (k * g,)}
    return required | {name: optional[name] for name in optional if draw(st.booleans())}


def shapes_of_results(query, value, **others):
    (b, t, n, _), (_, s, _, v) = query, value
    return (b, t, n, v), (b, n, t, s)


def options_of(side, shapes, rate, mask, **options):
    """Return the options of a call of one side."""
    (b, t, *_), (_, s, *_) = shapes["query"], shapes["key"]
    dropout = side.KeyedDropout(rate, side.key()) if rate else None
    return {**options, "dropout": dropout, "mask": MASKS[mask](side, b, t, s)}


def total(side, cotangents, options, arrays):
    """Return the sum of output and weights under their cotangents, and both of them."""
    found = side.attend(**arrays, **options, return_weights=True)
    results = found.output, found.weights
    pairs = zip(results, cotangents, strict=True)
    return sum((result * cotangent).sum() for result, cotangent in pairs), results


def in_jax(function, arrays):
    return jax.jit(jax.grad(function, has_aux=True), compiler_options=FAST)(arrays)


def in_torch(function, arrays):
    leaves = {name: array.requires_grad_() for name, array in arrays.items()}
    value, results = function(leaves)
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True)), results


def run(side, arrays, cotangents, shapes, options):
    """Return outputs and the gradients of every array, as numpy arrays."""
    given = {name: side.array(x) for name, x in arrays.items()}
    cotangents = [side.array(x) for x in cotangents]
    function = partial(total, side, cotangents, options_of(side, shapes, **options))
    gradients, results = (in_jax if side.is_flax else in_torch)(function, given)
    outputs = {"output": side.numpy(results[0]), "weights": side.numpy(results[1])}
    return outputs, {name: side.numpy(gradient) for name, gradient in gradients.items()}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shapes_of_calls(), CALLS, st.integers(0, 2**16))
def test_both_sides_agree_over_random_calls(sides, shapes, options, seed):
    random = np.random.default_rng(seed)
    arrays = {name: random.normal(size=shape) for name, shape in shapes.items()}
    cotangents = [random.normal(size=shape) for shape in shapes_of_results(**shapes)]
    results = [run(side, arrays, cotangents, shapes, options) for side in sides]
    assert_results_near(*results)


def test_both_packages_are_under_test(sides):
    assert [side.dot_product_attention for side in sides] == [
        flax_attn.dot_product_attention,
        torch_ref.dot_product_attention,
    ]

"""The attention call against the formula in plain numpy, and both sides against each other.

The options are random.
"""

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

B, T, S, N, K, H, V = 2, 5, 7, 6, 3, 4, 8
FAST = {"xla_backend_optimization_level": 0}  # every random call is compiled, and run once
RATE, CAP, SCALE = 0.4, 1.5, 0.7
RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE = (
    RANDOM.normal(size=shape) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, V))
)
BIAS = RANDOM.normal(size=(B, N, T, S))
SINKS = RANDOM.normal(size=N)
VISIBLE = RANDOM.random((B, N, T, S)) < 0.6
VISIBLE[1, :, 2] = False  # a row that may see nothing


def truth(
    query,
    key,
    value,
    bias=0.0,
    visible=True,
    scale=None,
    soft_cap=None,
    sinks=None,
    keep=True,
    rate=0.0,
):
    """Return output and weights, one head and one row at a time, in the order of the contract."""
    (b, t, n, h), (_, s, k, v) = query.shape, value.shape
    bias, visible, keep = (np.broadcast_to(x, (b, n, t, s)) for x in (bias, visible, keep))
    output, weights = np.zeros((b, t, n, v)), np.zeros((b, n, t, s))
    for index in np.ndindex(b, n, t):
        row, head, i = index
        reads = head // (n // k)
        logits = (h**-0.5 if scale is None else scale) * (
            key[row, :, reads] @ query[row, i, head]
        ) + bias[index]
        logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
        seen = logits[visible[index]]
        exps = np.exp(seen - seen.max(initial=-1e30 if sinks is None else sinks[head]))
        total = exps.sum()
        if sinks is not None:
            total += np.exp(sinks[head] - max(seen.max(initial=-1e30), sinks[head]))
        weights[index][visible[index]] = exps / total if len(seen) else 0
        weights[index] = np.where(keep[index], weights[index] / (1 - rate), 0)
        output[row, i, head] = weights[index] @ value[row, :, reads]
    return {"output": output, "weights": weights}


def attend(side, query=QUERY, key=KEY, value=VALUE, **options):
    """Return output and weights as numpy arrays; array options come as numpy."""
    made = {
        n: side.array(o) if isinstance(o, np.ndarray) else o
        for n, o in options.items()
        if n != "dropout"
    }
    made |= (
        {"dropout": side.KeyedDropout(options["dropout"], side.key())}
        if "dropout" in options
        else {}
    )
    arrays = (side.array(x) for x in (query, key, value))
    found = side.attend(*arrays, **made, return_weights=True)
    return {"output": side.numpy(found.output), "weights": side.numpy(found.weights)}


def kept(rate=RATE):
    dropout = flax_attn.functional.dropout
    words = jnp.array([3, 14], jnp.uint32)
    return np.asarray(dropout.keep_grid(flax_attn.KeyedDropout(rate, words), (B, N, T, S)))


def assert_close(ours, expected):
    errors = tolerance.relative(ours, expected)
    assert max(errors.values()) <= tolerance.FORWARD, errors


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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_formula(side, options):
    said = dict(options)
    said |= {"keep": kept(), "rate": said.pop("dropout")} if "dropout" in said else {}
    said |= {"visible": said.pop("mask")} if "mask" in said else {}
    assert_close(attend(side, **options), truth(QUERY, KEY, VALUE, **said))


@pytest.mark.parametrize("shape", [(T, S), (N, 1, S), (B, 1, 1, S), (1, N, T, 1), (S,)])
def test_bias_and_mask_broadcast(side, shape):
    bias, visible = RANDOM.normal(size=shape), RANDOM.random(shape) < 0.6
    assert_close(attend(side, bias=bias, mask=visible), truth(QUERY, KEY, VALUE, bias, visible))


@pytest.mark.parametrize(("n", "k"), [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_query_head_i_reads_key_value_head_i_over_g(side, n, k):
    value = np.broadcast_to(np.arange(k, dtype=float)[:, None], (B, S, k, V))
    output = attend(side, QUERY[:, :, :n], RANDOM.normal(size=(B, S, k, H)), value)["output"]
    expected = np.broadcast_to((np.arange(n) // (n // k))[:, None], (B, T, n, V))
    np.testing.assert_allclose(output, expected, rtol=tolerance.FORWARD, atol=tolerance.FORWARD)


def test_weights_sum_to_one_and_less_with_a_sink(side):
    np.testing.assert_allclose(attend(side)["weights"].sum(-1), 1, rtol=tolerance.FORWARD)
    assert (attend(side, sinks=SINKS)["weights"].sum(-1) < 0.99).all()
    assert_close(attend(side, sinks=np.full(N, -np.inf)), attend(side))


def test_unbatched_is_a_row_of_the_batch(side):
    options = {"bias": BIAS[0], "sinks": SINKS, "mask": VISIBLE[0]}
    single = attend(side, QUERY[0], KEY[0], VALUE[0], **options)
    whole = attend(side, QUERY[:1], KEY[:1], VALUE[:1], **options)
    assert single["output"].shape == (T, N, V)
    assert single["weights"].shape == (N, T, S)
    assert_close(single, {name: array[0] for name, array in whole.items()})


def test_single_head_attention_is_one_head(side):
    one = [side.array(x[:, :, 0]) for x in (QUERY, KEY, VALUE)]
    found = side.attend_one_head(*one, mask=side.array(VISIBLE[:, 0]), return_weights=True)
    output, weights = side.numpy(found.output), side.numpy(found.weights)
    many = attend(side, *(x[:, :, :1] for x in (QUERY, KEY, VALUE)), mask=VISIBLE[:, :1])
    assert_close({"output": output[:, :, None], "weights": weights[:, None]}, many)
    again = side.single_head_attention(*one, mask=side.array(VISIBLE[:, 0]))
    assert (side.numpy(again) == output).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_asking_for_weights_does_not_change_the_output(side, dtype):
    arrays = [side.array(x, dtype) for x in (QUERY, KEY, VALUE)]
    options = {"mask": side.array(VISIBLE), "sinks": side.array(SINKS, dtype)}
    options["dropout"] = side.KeyedDropout(RATE, side.key())
    alone = side.dot_product_attention(*arrays, **options)
    found = side.attend(*arrays, **options, return_weights=True)
    assert (side.numpy(alone) == side.numpy(found.output)).all()
    assert alone.dtype == found.output.dtype == found.weights.dtype == arrays[0].dtype
    assert side.attend(*arrays, **options).weights is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_dtypes_are_computed_in_float32(side, dtype):
    low = [side.array(x, dtype) for x in (QUERY, KEY, VALUE)]
    wide = [side.array(side.numpy(x).astype(np.float32)) for x in low]
    options = {"mask": side.array(VISIBLE), "soft_cap": CAP}
    ours = side.attend(*low, **options, return_weights=True)
    expected = side.attend(*wide, **options, return_weights=True)
    for a, b in ((ours.output, expected.output), (ours.weights, expected.weights)):
        rounded = side.array(side.numpy(b), dtype)
        assert a.dtype == rounded.dtype
        assert (side.numpy(a) == side.numpy(rounded)).all()


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_logits_of_ten_thousand(side, size):
    query, key = np.full((1, 3, 1, 1), size), np.array([1.0, 1.0, 0.5, -1.0]).reshape(1, 4, 1, 1)
    value = RANDOM.normal(size=(1, 4, 1, 2))
    result = attend(side, query, key, value, scale=1.0)
    expected = [0.5, 0.5, 0, 0] if size > 0 else [0, 0, 0, 1.0]
    np.testing.assert_array_equal(result["weights"][0, 0], [expected] * 3)
    for shift in (size, -size):
        shifted = attend(side, bias=np.full((1, 1), shift))
        np.testing.assert_allclose(shifted["weights"], attend(side)["weights"], rtol=1e-10)
    float32 = side.dot_product_attention(
        *(side.array(x, "float32") for x in (query, key, value)), scale=1.0
    )
    assert np.isfinite(side.numpy(float32)).all()


def test_a_sink_of_ten_thousand_takes_all(side):
    result = attend(side, sinks=np.full(N, 1e4))
    assert (result["weights"] == 0).all()
    assert (result["output"] == 0).all()


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


@st.composite
def calls(draw):
    b, t, s, k, g, h, v = (draw(st.integers(1, top)) for top in (3, 5, 6, 3, 3, 4, 3))
    shapes = {"query": (b, t, k * g, h), "key": (b, s, k, h), "value": (b, s, k, v)}
    if draw(st.booleans()):
        shapes["bias"] = tuple(size if draw(st.booleans()) else 1 for size in (b, k * g, t, s))
    if draw(st.booleans()):
        shapes["sinks"] = (k * g,)
    options = {
        "scale": draw(st.sampled_from([None, 0.3, 2.0])),
        "soft_cap": draw(st.sampled_from([None, 1.0, 5.0])),
        "rate": draw(st.sampled_from([0.0, 0.3, 0.8])),
        "mask": draw(st.sampled_from(sorted(MASKS))),
    }
    return shapes, options, draw(st.integers(0, 2**16))


def run(side, arrays, cotangents, options, sizes):
    """Return outputs and the gradients of every array, as numpy arrays."""
    options = dict(options)
    rate, mask = options.pop("rate"), MASKS[options.pop("mask")](side, *sizes)
    dropout = side.KeyedDropout(rate, side.key()) if rate else None

    def weighted(arrays):
        found = side.attend(**arrays, mask=mask, dropout=dropout, **options, return_weights=True)
        results = found.output, found.weights
        total = sum((result * c).sum() for result, c in zip(results, cotangents, strict=True))
        return total, results

    if side.is_flax:
        gradients, results = jax.jit(jax.grad(weighted, has_aux=True), compiler_options=FAST)(
            arrays
        )
    else:
        arrays = {name: array.requires_grad_() for name, array in arrays.items()}
        total, results = weighted(arrays)
        gradients = dict(
            zip(arrays, torch.autograd.grad(total, list(arrays.values())), strict=True)
        )
    outputs = dict(zip(("output", "weights"), map(side.numpy, results), strict=True))
    return outputs, {name: side.numpy(gradient) for name, gradient in gradients.items()}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(calls())
def test_both_sides_agree_over_random_calls(sides, call):
    shapes, options, seed = call
    random = np.random.default_rng(seed)
    arrays = {name: random.normal(size=shape) for name, shape in shapes.items()}
    b, t, n, _ = shapes["query"]
    s, v = shapes["value"][1], shapes["value"][3]
    cotangents = [random.normal(size=shape) for shape in ((b, t, n, v), (b, n, t, s))]
    (ours, our_gradients), (theirs, their_gradients) = (
        run(
            side,
            {n: side.array(a) for n, a in arrays.items()},
            [side.array(c) for c in cotangents],
            options,
            (b, t, s),
        )
        for side in sides
    )
    assert_close(ours, theirs)
    errors = tolerance.gradient_errors(our_gradients, their_gradients)
    assert max(errors.values()) <= tolerance.GRADIENT, errors


def test_both_packages_are_under_test(sides):
    assert [side.dot_product_attention for side in sides] == [
        flax_attn.dot_product_attention,
        torch_ref.dot_product_attention,
    ]

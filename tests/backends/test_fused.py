"""The kernels of `fused` in Pallas's interpreter, in the form of a GPU and in that of a TPU.

A share of the cases runs always; `make test-fused` sets FLAX_ATTN_ALL_OF_FUSED and runs all.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask, dot_product_attention
from flax_attn.backends import fused
from flax_attn.backends.call import prepare
from flax_attn.backends.choose import refusal
from flax_attn.backends.fused import gpu, interpreted
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.parity import tolerance

from .conformance import CASES, FAST
from .test_conformance import LOWER, TOGETHER, Run, check, pairs, results

ALL = bool(os.environ.get("FLAX_ATTN_ALL_OF_FUSED"))


REFUSES = {
    "got an array that is indexed by both a query and a key in": lambda case: (
        case.name == "function by row and head at an offset a row"
    )
}
# Of one key the weight is 1 and the gradients of query and key are 0 in truth: what rounding leaves
# of them has nothing to be compared with.
OF_ONE_KEY = {
    "causal that shows one key to one query", "sliding window of one", "one query and one key",
    "one key",
}  # fmt: skip
EVERY = tuple(name for name in CASES if name not in OF_ONE_KEY)
RUNS = [
    Run("fused", "float32", "gpu", REFUSES, EVERY if ALL else TOGETHER[2::6]),
    Run("fused", "float32", "tpu", REFUSES, EVERY if ALL else TOGETHER[4::6]),
    Run("fused", "bfloat16", "gpu", REFUSES, LOWER if ALL else LOWER[3:4]),
    Run("fused", "bfloat16", "tpu", REFUSES, LOWER if ALL else LOWER[9:10]),
    Run("fused", "float16", "gpu", REFUSES, LOWER if ALL else LOWER[10:11]),
]


@pytest.fixture(autouse=True)
def in_the_interpreter():
    with interpreted(16, 16):
        yield


@pairs(RUNS)
def test_equals_the_reference(run, case, monkeypatch):
    monkeypatch.setattr("flax_attn.backends.call.platform_of", lambda _: run.platform)
    check(case, results(case, run.backend, run.dtype), run.dtype)


PLATFORMS = pytest.mark.parametrize("platform", ["gpu", "tpu"])
T, S, N = 20, 37, 4
TOKENS = 83
DOCUMENTS = np.arange(S) // 9
BIASED = jax.random.normal(jax.random.key(7), (T,))


@pytest.fixture
def on(monkeypatch):
    return lambda platform: monkeypatch.setattr(
        "flax_attn.backends.call.platform_of", lambda _: platform
    )


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def alibi(slopes, score, b, n, i, j):
    return score - jax.nn.softplus(slopes[n]) * abs(i - j).astype(score.dtype)


def by_query(shifts, score, b, n, i, j):
    return jnp.where(i % 3 == 0, score * shifts[b, n, i], score)


def by_key(shifts, score, b, n, i, j):
    return jnp.tanh(score + shifts[n, j]) * 2


FUNCTIONS = {
    "of a head": (alibi, draw(N, seed=3)),
    "of a query": (by_query, draw(2, N, T, seed=4)),
    "of a key": (by_key, draw(N, S, seed=5)),
}


@PLATFORMS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_scores_with_the_gradients_of_what_they_capture(platform, name, on):
    on(platform)
    function, captured = FUNCTIONS[name]
    arrays = draw(2, T, N, 8), draw(2, S, 2, 8, seed=1), draw(2, S, 2, 8, seed=2)
    documents = jnp.asarray(DOCUMENTS)
    mask = Mask.where(lambda b, n, i, j: (documents[i] == documents[j]) | (j < 5 * n + 1))
    cotangent = draw(2, T, N, 8, seed=6)

    def loss(arrays, captured, backend):
        options = {"score": partial(function, captured), "backend": backend}
        output = dot_product_attention(*arrays, mask=mask, **options)
        return (output * cotangent).sum()

    def gradients(backend):
        found = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2, compiler_options=FAST)
        inputs, of_captured = found(arrays, captured, backend)
        names = "query", "key", "value", "captured"
        return dict(zip(names, map(np.asarray, (*inputs, of_captured)), strict=True))

    errors = tolerance.reordered(gradients("fused"), gradients("blocked"))
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("size", [5, gpu.PARTS * gpu.AT_ONCE + 3])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found(size, value):
    x = jnp.ones(size, jnp.bfloat16)
    assert gpu.flags([x, x[:2]], interpret=True).all()
    assert not gpu.flags([x[:2], x.at[-1].set(value)], interpret=True).all()


@pytest.mark.usefixtures("no_shape_checks")
def test_more_numbers_than_32_bits_count_are_not_asked():
    few, many = (jax.ShapeDtypeStruct((size, 2**16), jnp.bfloat16) for size in (2**14, 2**15))
    flags = partial(gpu.flags, interpret=True)
    assert jax.eval_shape(flags, [few, few]).shape == (gpu.PARTS,)
    assert jax.eval_shape(flags, [few, many]) is None


def test_the_loops_for_finite_numbers_compute_the_same_bits(on):
    on("gpu")
    arrays = draw(2, T, N, 8), draw(2, S, 2, 8, seed=1), draw(2, S, 2, 8, seed=2)
    attend = partial(dot_product_attention, mask=Mask.causal(S - T), backend="fused")
    query, key, value = arrays
    other = attend(query, key.at[0, 3, 0, 0].set(jnp.nan), value)
    np.testing.assert_array_equal(other[1], attend(*arrays)[1])
    assert np.isnan(other[0]).any()


# What differs by head and not by query, for few queries of which a tile holds all heads of a group.
BY_HEAD = {
    "bias": {"bias": draw(1, N, 1, TOKENS, seed=8)},
    "dropout": {"dropout": KeyedDropout(0.3, jax.random.key(9))},
    "function": {"score": partial(alibi, draw(N, seed=3))},
}


@PLATFORMS
@pytest.mark.parametrize("name", BY_HEAD)
def test_few_queries_have_what_differs_by_head(platform, name, on):
    on(platform)
    arrays = draw(2, 3, N, 8), draw(2, TOKENS, 2, 8, seed=1), draw(2, TOKENS, 2, 8, seed=2)
    options = {"mask": Mask.causal(TOKENS - 3)} | BY_HEAD[name]
    found, expected = (
        {"output": np.asarray(dot_product_attention(*arrays, backend=backend, **options))}
        for backend in ("fused", "blocked")
    )
    errors = tolerance.reordered(found, expected)
    assert max(errors.values()) <= 1, errors


@PLATFORMS
@pytest.mark.parametrize("t", [T, 2])
def test_sinks_that_are_not_finite_need_no_copy_of_the_query(platform, t, on, equations):
    on(platform)
    arrays = draw(2, t, N, 8), draw(2, S, 2, 8, seed=1), draw(2, S, 2, 8, seed=2)
    sinks = jnp.array([0.3, jnp.inf, jnp.nan, -jnp.inf])
    cotangent = draw(2, t, N, 8, seed=3)

    def attend(query, key, value, sinks, backend="fused"):
        return dot_product_attention(query, key, value, sinks=sinks, backend=backend)

    def with_gradients(backend):
        output, pullback = jax.vjp(partial(attend, backend=backend), *arrays, sinks)
        names = "output", "query", "key", "value", "sinks"
        found = zip(names, (output, *pullback(cotangent)), strict=True)
        return {name: np.asarray(x) for name, x in found}

    errors = tolerance.reordered(with_gradients("fused"), with_gradients("blocked"))
    assert max(errors.values()) <= 1, errors
    program = jax.make_jaxpr(attend)(*arrays, sinks).jaxpr
    computed = [eqn for eqn in equations(program) if eqn.primitive.name == "add"]
    assert not [eqn for eqn in computed if eqn.outvars[0].aval.shape == arrays[0].shape]


REFUSALS = {
    "wider than 256": (
        {"h": 264},
        "takes head widths up to 256, whose tiles fit every chip; got h",
    ),
    "float16 on TPU": ({"dtype": "float16", "platform": "tpu"}, "no float16 on TPU"),
    "float64": ({"dtype": "float64"}, "fused takes float32, bfloat16, float16; got dtype float64"),
    "an algorithm": (
        {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32},
        "takes a precision that has a name; got the algorithm",
    ),
    "a table of both": (
        {"score": lambda score, b, n, i, j: score + BIASED[i - j]},
        "got an array that is indexed by both a query and a key in <lambda>",
    ),
    "no arithmetic": (
        {"score": lambda score, b, n, i, j: score + jax.lax.lgamma(score)},
        "got lgamma in <lambda>",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.usefixtures("no_shape_checks")
def test_refuses_by_name(name):
    options, reason = dict(REFUSALS[name][0]), REFUSALS[name][1]
    h, dtype = options.pop("h", 8), options.pop("dtype", "float32")
    platform = options.pop("platform", "gpu")
    with jax.enable_x64(dtype == "float64"):
        x = jax.ShapeDtypeStruct((1, 9, 2, h), dtype)
        found = jax.eval_shape(lambda x: prepare(x, x, x, platform=platform, **options), x)
    assert reason in (refusal(fused.BACKEND, found) or "")


# Ids of 64 bits, of which the documents differ in the upper half alone.
IDS = [np.arange(2 * size).reshape(2, size) // 9 * 2**32 for size in (T, S)]


@PLATFORMS
@pytest.mark.usefixtures("x64")
def test_computes_in_32_bits_with_x64(platform, on):
    on(platform)
    arrays = draw(2, T, N, 8), draw(2, S, 2, 8, seed=1), draw(2, S, 2, 8, seed=2)
    arrays = tuple(x.astype(jnp.float32) for x in arrays)
    bias = draw(1, N, 1, S, seed=3).astype(jnp.float64)
    cotangent = draw(2, T, N, 8, seed=6).astype(jnp.float32)
    mask = Mask.segments(*IDS) & Mask.where(lambda b, n, i, j: (i + j) % (n + 2) != 0)
    options = {
        "mask": mask,
        "dropout": KeyedDropout(0.3, jax.random.key(9)),
        "score": lambda score, b, n, i, j: score / (1 + abs(i - j)).astype(score.dtype),
    }

    def results(backend):
        def attend(arrays, bias):
            return dot_product_attention(*arrays, bias, backend=backend, **options)

        output, pullback = jax.vjp(attend, arrays, bias)
        inputs, of_bias = pullback(cotangent)
        assert of_bias.dtype == jnp.float64
        names = "output", "query", "key", "value", "bias"
        # The sums of all gradients are in float32.
        found = output, *inputs, of_bias.astype(jnp.float32)
        return dict(zip(names, map(np.asarray, found), strict=True))

    errors = tolerance.reordered(results("fused"), results("blocked"))
    assert max(errors.values()) <= 1, errors


def test_refuses_functions_of_64_bits():
    x = draw(1, 9, 2, 8).astype(jnp.float32)
    with jax.enable_x64(True):
        slopes = jnp.ones(2)

        def sloped(score, b, n, i, j):
            distance = (i - j).astype(slopes.dtype)
            return score - (slopes[n] * distance).astype(score.dtype)

        reason = refusal(fused.BACKEND, prepare(x, x, x, score=sloped, platform="gpu")) or ""
    assert reason.startswith(
        "fused computes functions of indices in 32 bits; got float64 in sloped."
    )


def test_refuses_a_gpu_and_a_jax_that_are_too_old(monkeypatch):
    x = draw(1, 9, 2, 8)
    call = prepare(x, x, x, platform="gpu")
    assert refusal(fused.BACKEND, call) is None
    monkeypatch.setattr(fused, "compute_capability", lambda: 7.5)
    assert "compute capability 8.0 or newer; got 7.5" in (refusal(fused.BACKEND, call) or "")
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert "needs a JAX that lowers Pallas to Triton" in (refusal(fused.BACKEND, call) or "")


@PLATFORMS
def test_the_bits_of_a_row_are_those_of_its_query_and_keys_alone(platform, on):
    on(platform)
    # Three parts of keys, the last cut off in its second tile.
    query, key, value = (draw(16, TOKENS, n, 8, seed=n) for n in (N, 2, 1))
    value = jnp.repeat(value, 2, axis=2)
    slopes = jnp.linspace(0.1, 1, N)
    sinks = draw(N, seed=3)

    def attend(rows, first, stop):
        # A cache holds later tokens, too, which nobody sees.
        mask = Mask.causal(first) & Mask.lengths(key=stop)
        positions = first + jnp.arange(stop - first)
        distance = abs(positions[:, None] - jnp.arange(TOKENS)[None]).astype(jnp.float32)
        bias = -slopes[:, None, None] * distance[None]
        arrays = query[:rows, first:stop], key[:rows], value[:rows], bias
        options = {"mask": mask, "sinks": sinks, "backend": "fused"}
        return jax.jit(partial(dot_product_attention, **options))(*arrays)

    whole = attend(16, 0, TOKENS)
    for rows in (1, 5):
        np.testing.assert_array_equal(attend(rows, 0, TOKENS), whole[:rows])
    for chunk in (1, 7, 19, 64):
        for first in ((TOKENS - 1) // chunk * chunk, TOKENS // chunk // 2 * chunk):
            stop = min(first + chunk, TOKENS)
            np.testing.assert_array_equal(attend(2, first, stop), whole[:2, first:stop])


@PLATFORMS
def test_softmaxes_over_parts_of_the_keys_fold_into_that_over_all(platform, on):
    on(platform)
    query, key, value = draw(2, T, N, 8), draw(2, S, 2, 8, seed=1), draw(2, S, 2, 8, seed=2)
    cotangent, cut = draw(2, T, N, 8, seed=3), 21

    def call(part):
        mask = Mask.causal(S - T - part.start)
        return prepare(query, key[:, part], value[:, part], mask=mask, platform=platform)

    parts, whole = [call(slice(0, cut)), call(slice(cut, S))], call(slice(0, S))
    backend = fused.BACKEND
    done = backend.forward(parts[0]).fold(backend.forward(parts[1]))
    found, expected = [], backend.forward(whole)
    for part in parts:
        found.append(backend.backward(part, done, cotangent))
    gradients = backend.backward(whole, expected, cotangent)
    ours = {
        "output": done.output,
        "query": found[0].query + found[1].query,
        "key": jnp.concatenate([found[0].key, found[1].key], axis=1),
        "value": jnp.concatenate([found[0].value, found[1].value], axis=1),
    }
    theirs = {"output": expected.output} | {x: getattr(gradients, x) for x in list(ours)[1:]}
    errors = tolerance.reordered(
        {name: np.asarray(x) for name, x in ours.items()},
        {name: np.asarray(x) for name, x in theirs.items()},
    )
    assert max(errors.values()) <= 1, errors


def test_the_output_of_a_part_of_the_keys_is_not_rounded():
    x = draw(1, T, N, 8).astype(jnp.bfloat16)
    call = prepare(x, x, x, platform="gpu")
    assert fused.BACKEND.forward(call).output.dtype == jnp.float32
    assert fused.BACKEND.attend(call).dtype == jnp.bfloat16


@PLATFORMS
@pytest.mark.parametrize("s", [S, TOKENS])
def test_scores_near_the_largest_number(platform, s, on):
    on(platform)
    size = 1.7e19  # whose square, times 1, is near the largest of float32
    query = jnp.sign(draw(1, T, N, 1)) * size
    key = jnp.sign(draw(1, s, 2, 1, seed=1)) * jnp.linspace(0.5, 1, s)[None, :, None, None] * size
    value = draw(1, s, 2, 1, seed=2)
    options = {"scale": 1.0, "mask": Mask.causal(s - T)}
    arrays = query, key, value
    found, expected = (
        dot_product_attention(*arrays, backend=name, **options) for name in ("fused", "reference")
    )
    assert float(jnp.abs(query[0, 0, 0, 0] * key).max()) > 2.8e38
    np.testing.assert_allclose(found, expected, rtol=1e-6)

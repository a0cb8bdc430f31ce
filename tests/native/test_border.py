"""Break every rule for calls of the C++ kernels once: XLA raises an error, without a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import native

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the library was not built: no C++ compiler"
)

ATTENTION = {
    "query": "float32 2 3 4 6",
    "key": "float32 2 5 2 6",
    "value": "float32 2 5 2 7",
    "sinks": "float32 2 4",
    "start": "int32 2 3",
    "stop": "int32 2 3",
    "query_segment": "int32 2 3",
    "key_segment": "int32 2 5",
}
DENSE = {"dense": "bool 1 4 1 5"}  # behind all others, where there is one
ROWS, OUTPUT = "float32 2 4 3", "float32 2 3 4 7"
SCORES = {"scale": np.float32(0.5), "soft_cap": np.float32(0), "heads_first": False}
CALLS = {  # arrays, results, options
    "attention_forward": (
        ATTENTION,
        {"output": OUTPUT, "top": ROWS, "total": ROWS},
        {**SCORES, "few": False, "differentiated": False},
    ),
    "attention_backward": (
        {**ATTENTION, "output": OUTPUT, "top": ROWS, "total": ROWS, "cotangent": OUTPUT},
        {
            "d_query": ATTENTION["query"],
            "d_key": ATTENTION["key"],
            "d_value": ATTENTION["value"],
            "delta": ROWS,
        },
        SCORES,
    ),
    "matrix_product": (
        {"x": "bfloat16 3 5", "matrix": "bfloat16 5 4"},
        {"result": "bfloat16 3 4"},
        {"transposed": False},
    ),
    "quantized_product": (
        {
            "x": "bfloat16 3 64",
            "matrix": "uint8 2 5 32",
            "scale": "uint8 2 5 2",
            "sizes": "int32 2",
        },
        {"result": "float32 3 5"},
        {"block_out": np.int64(1), "block_in": np.int64(32)},
    ),
    "grouped_product": (
        {"left": "float16 6 5", "right": "float16 3 5 4", "sizes": "int32 3"},
        {"result": "float16 6 4"},
        {"form": np.int64(0)},
    ),
    "write_tokens": (
        {"cached": "bfloat16 2 3 5 4", "new": "bfloat16 2 6 3 4", "slots": "int32 2 6"},
        {"result": "bfloat16 2 3 5 4"},
        {},
    ),
}
BOTH = {
    "query must be float32, bfloat16 or float16": {"query": "float8_e4m3fn 2 3 4 6"},
    "query must be (..., b, t, n, h)": {"query": "float32 3 4 6"},
    "key must have the dtype of query, and be (..., b, s, k, h), or": {"key": "float16 2 5 2 6"},
    "value must have the dtype of query, and be (..., b, s, k, v), or": {
        "value": "float32 2 6 2 7"
    },
    "t, s, n, k, h and v must be at least 1": {
        "key": "float32 2 0 2 6",
        "value": "float32 2 0 2 7",
    },
    "t and s must be at most 2**30": {
        "key": f"float16 0 {2**30 + 1} 2 6",
        "value": f"float16 0 {2**30 + 1} 2 7",
        "query": "float16 0 3 4 6",
    },
    "the heads k of key must divide the heads n of query": {
        "key": "float32 2 5 3 6",
        "value": "float32 2 5 3 7",
    },
    "sinks must be float32, and (..., b, n) or (..., b, 0)": {"sinks": "float32 2 3"},
    "start must be int32, and (..., b, t)": {"start": "int32 2 4"},
    "stop must be int32, and (..., b, t)": {"stop": "uint32 2 3"},
    "query_segment must be int32, and (..., b, t), or": {"query_segment": "int32 2 0"},
    "key_segment must be int32, and (..., b, s), or": {"key_segment": "int32 2 0"},
    "dense must be bool, and (..., b or 1, n or 1, t or 1, s)": {"dense": "bool 3 1 3 5"},
    "dense must be bool, and": {"dense": "bool 2 2 3 5"},
    "dense must be": {"dense": "uint8 2 4 3 5"},
    "soft_cap must be positive, or 0 for none": {"soft_cap": np.float32(-1)},
}
BREAKS = {
    "attention_forward": {
        **BOTH,
        "output must have the dtype of query, or be float32 unless few": {
            "output": "bfloat16 2 3 4 7"
        },
        "top must be float32, and (..., b, n, t)": {"top": "float32 2 3 4"},
        "total must be float32, and (..., b, n, t)": {"total": "float16 2 4 3"},
    },
    "attention_backward": {
        **BOTH,
        "output must have the dtype of query, or be float32": {"output": "bfloat16 2 3 4 7"},
        "cotangent must have the dtype of query, and be": {"cotangent": "float32 2 3 4 6"},
        "top, total and delta must be float32": {"delta": "float32 2 4 2"},
        "d_query must be as query": {"d_query": "float32 2 3 4 5"},
        "d_key must have the dtype of query, and be": {"d_key": "float32 2 2 5 6"},
        "d_value must have the dtype of query, and be": {"d_value": "bfloat16 2 5 2 7"},
    },
    "matrix_product": {
        "x must be float32, bfloat16 or float16, and (m, d_in)": {"x": "int8 3 5"},
        "matrix must have the dtype of x, and be (d_in, d_out), or (d_out, d_in) if": {
            "matrix": "bfloat16 6 4"
        },
        "result must have the dtype of x or be float32, and be (m, d_out)": {
            "result": "float16 3 4"
        },
    },
    "quantized_product": {
        "x must be float32, bfloat16 or float16, and (m, d_in)": {"x": "int8 3 64"},
        "block_out must be at least 1, and block_in a multiple of 32": {"block_in": np.int64(24)},
        "block_out must be at least 1": {"block_out": np.int64(0)},
        "matrix must be int8, float8_e4m3fn or uint8": {"matrix": "float32 2 5 64"},
        "matrix must be (d_out, d_in), or (groups, d_out, d_in)": {"matrix": "uint8 2 5 64"},
        "scale must be float32, or uint8 beside a matrix of uint8": {"scale": "float32 2 5 2"},
        "scale must be float32, or uint8 beside": {"scale": "uint8 2 5 3"},
        "sizes must be int32, and (groups,)": {"sizes": "int32 3"},
        "result must be float32, and (m, d_out)": {"result": "bfloat16 3 5"},
    },
    "grouped_product": {
        "form must be 0 (plain), 1 (transposed) or 2 (outer)": {"form": np.int64(3)},
        "left must be float32, bfloat16 or float16": {"left": "int32 6 5"},
        "left must be (m, d_in), or (m, d_out) in the transposed form": {"left": "float16 6 4"},
        "the matrices must have the dtype of left, and be (groups, d_in, d_out)": {
            "right": "float32 3 5 4"
        },
        "right, in the outer form, or the result must have the dtype of left": {
            "result": "float16 5 4"
        },
        "sizes must be int32, and (groups,)": {"sizes": "int32 4"},
    },
    "write_tokens": {
        "cached must be bfloat16 or float16, and (b, k, s, h)": {"cached": "float32 2 3 5 4"},
        "new must have the dtype of cached, and be (b, t, k, h)": {"new": "bfloat16 2 3 6 4"},
        "slots must be int32, and (b, t)": {"slots": "uint32 2 6"},
        "result must have the dtype and the shape of cached": {"result": "float16 2 3 5 4"},
    },
}
ALL = [(function, rule) for function, rules in BREAKS.items() for rule in rules]


def shape(text):
    dtype, *sizes = text.split()
    return jax.ShapeDtypeStruct(tuple(map(int, sizes)), dtype)


def call(function, changes=(), left_out=()):
    """Return the results of a call in which some arrays, results or options are others."""
    arrays, results, options = (
        {**part, **{n: x for n, x in dict(changes).items() if n in part}}
        for part in CALLS[function]
    )
    arrays |= {name: x for name, x in dict(changes).items() if name in DENSE}
    given = [
        jnp.zeros(x.shape, x.dtype)
        for name, x in ((n, shape(t)) for n, t in arrays.items())
        if name not in left_out
    ]
    made = jax.ffi.ffi_call(
        native.target(function), list(map(shape, results.values())), has_side_effect=True
    )
    return jax.block_until_ready(jax.jit(lambda *given: made(*given, **options))(*given))


@pytest.mark.parametrize("function", CALLS)
def test_a_right_call_runs(function):
    assert all(np.isfinite(x).all() for x in call(function))


@pytest.mark.parametrize("function", ["attention_forward", "attention_backward"])
def test_a_dense_mask_is_an_array_more(function):
    assert all(np.isfinite(x).all() for x in call(function, DENSE))


@pytest.mark.parametrize(("function", "rule"), ALL, ids=lambda text: text)
def test_a_broken_rule_is_an_error_with_the_rule_and_the_arrays(function, rule):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        call(function, BREAKS[function][rule])
    message = str(caught.value)
    assert message.startswith(f"INVALID_ARGUMENT: flax_attn.{function}: {rule}")
    first = next(iter(CALLS[function][0]))
    assert f"; got {first} " in message


@pytest.mark.parametrize("function", CALLS)
def test_an_array_too_few_is_an_error(function):
    # All but the last: of two, one may be optional.
    *most, _ = CALLS[function][0]
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"a call of this name has other arrays; got .* \(\d+ arguments, ",
    ):
        call(function, left_out=most)


def test_an_empty_batch_is_no_work():
    empty = {
        name: text.replace(" 2 ", " 0 ", 1)
        for part in CALLS["attention_backward"][:2]
        for name, text in part.items()
    }
    assert all(x.size == 0 for x in call("attention_backward", empty))
    assert all(x.size == 0 for x in call("attention_forward", empty))


def test_a_sum_over_nothing_is_zero():
    (result,) = call("matrix_product", {"x": "bfloat16 3 0", "matrix": "bfloat16 0 4"})
    np.testing.assert_array_equal(result, np.zeros((3, 4)))

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import KeyedDropout, Mask
from flax_attn.backends import xla
from flax_attn.backends.call import Call
from flax_attn.functional.reference import reference_attention
from flax_attn.parity import tolerance

B, N, K, T, S, H = 3, 4, 2, 5, 7, 8


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def build(mask=None, bias=None, platform="cpu", v=H, **options):
    query, key, value = draw(B, T, N, H), draw(B, S, K, H, seed=1), draw(B, S, K, v, seed=2)
    mask = (Mask() if mask is None else mask).resolve(B, N, T, S)
    options = {
        "scale": 0.3,
        "soft_cap": None,
        "sinks": None,
        "dropout": None,
        "precision": None,
    } | options
    return Call(query, key, value, bias, mask, platform=platform, **options)


def reference(call):
    options = {
        name: getattr(call, name) for name in ("scale", "soft_cap", "sinks", "dropout", "precision")
    }
    return reference_attention(call.query, call.key, call.value, call.bias, call.mask, **options)[0]


def both_ways(attend, call):
    """The output and the gradients of query, key, value and bias under a random cotangent."""
    names = [name for name in ("query", "key", "value", "bias") if getattr(call, name) is not None]

    @jax.jit
    def run(arrays, cotangent):
        output, pull = jax.vjp(lambda arrays: attend(Call(**{**vars(call), **arrays})), arrays)
        return {"output": output, **pull(cotangent)[0]}

    cotangent = draw(B, T, N, H, seed=4).astype(call.query.dtype)
    return run({name: getattr(call, name) for name in names}, cotangent)


def check(close, call):
    assert xla.BACKEND.refuse(call) is None
    close(both_ways(xla.BACKEND.attend, call), both_ways(reference, call))


def test_a_bias_of_minus_infinity_hides(close):
    bias = jnp.where(jnp.arange(S) % 3 == 0, -jnp.inf, draw(B, N, T, S, seed=3)).at[1].set(-jnp.inf)
    check(close, build(Mask.causal(2), bias))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_a_row_whose_bias_is_the_least_number_does_not_see_what_is_hidden(dtype, close):
    bias = jnp.full((1, 1, T, S), jnp.finfo(dtype).min, dtype).at[:, :, 0].set(1)
    check(close, build(Mask.causal(2), bias))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_lower_dtypes(dtype):
    def results(attend, dtype):
        arrays = {
            name: getattr(call, name).astype(low).astype(dtype)
            for name in ("query", "key", "value")
        }
        found = both_ways(attend, Call(**{**vars(call), **arrays}))
        return {name: np.asarray(value, np.float64) for name, value in found.items()}

    call, low = build(Mask.causal(2)), dtype
    ours, plain = results(xla.BACKEND.attend, dtype), results(reference, dtype)
    with jax.enable_x64(True):
        truth = results(reference, jnp.float64)
    eps = float(jnp.finfo(dtype).eps)
    forward = tolerance.lower_dtype(
        ours, [plain], {"output": truth.pop("output")}, tolerance.LOW_FORWARD, eps
    )
    errors = forward | tolerance.lower_dtype(ours, [plain], truth, tolerance.LOW_GRADIENT, eps)
    assert max(errors.values()) <= 1, errors
    assert (
        xla.BACKEND.attend(
            Call(
                **{
                    **vars(call),
                    **{n: getattr(call, n).astype(dtype) for n in ("query", "key", "value")},
                }
            )
        ).dtype
        == dtype
    )


def test_a_hidden_value_may_be_huge(close):
    call = build(Mask.causal(1))
    value = call.value.at[:, -1].set(1e30)
    check(close, Call(**{**vars(call), "value": value, "key": call.key.at[:, -1].set(1e30)}))


def test_memory_is_that_of_the_scores():
    call, long = build(), build()
    long = Call(**{**vars(call), "key": draw(B, 3 * S, K, H), "value": draw(B, 3 * S, K, H)})
    assert xla.BACKEND.memory(long) == 3 * xla.BACKEND.memory(call) == 3 * 12 * B * N * T * S


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"soft_cap": 5.0}, "xla has no soft cap; got soft_cap=5.0"),
        ({"sinks": jnp.zeros(N)}, r"xla has no attention sinks; got sinks of shape \(4,\)"),
        (
            {"dropout": KeyedDropout(0.25, jnp.zeros(2, jnp.uint32))},
            "cannot drop by key and index; got dropout at rate 0.25",
        ),
        (
            {"precision": jax.lax.Precision.HIGHEST},
            "takes no precision; got .*HIGHEST.*default_matmul_precision",
        ),
        ({"v": 9}, "one head width; got h=8, v=9"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(AssertionError, match=message):
        assert xla.BACKEND.refuse(build(**options)) is None


def test_refuses_nothing_to_compute():
    call = build()
    empty = Call(**{**vars(call), "query": call.query[:, :0]})
    assert (
        xla.BACKEND.refuse(empty)
        == "xla needs at least one batch row and one query token; got (b, n, t, s) = (3, 4, 0, 7)"
    )

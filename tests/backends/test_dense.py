"""Kernels that take the mask as one array, here that of `jax.nn` compiled by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask
from flax_attn.backends.call import Call
from flax_attn.backends.dense import attend_dense
from flax_attn.functional.reference import reference_attention
from flax_attn.parity import tolerance

B, N, K, T, S, H = 3, 4, 2, 5, 7, 8
# What jax.nn puts in the place of a hidden score.
FILL = -0.7 * float(jnp.finfo(jnp.float32).max)


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


def attend(call):
    def kernel(query, key, value, bias, visible):
        # In lower dtypes jax.nn rounds the weights, and has no gradient if promotion is strict.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        bias = None if bias is None else bias.astype(jnp.float32)
        options = {"scale": call.scale, "implementation": "xla"}
        output = jax.nn.dot_product_attention(query, key, value, bias, visible, **options)
        return output.astype(call.query.dtype)

    return attend_dense(call, kernel, FILL)


def reference(call):
    options = {
        name: getattr(call, name) for name in ("scale", "soft_cap", "sinks", "dropout", "precision")
    }
    return reference_attention(call.query, call.key, call.value, call.bias, call.mask, **options)[0]


def both_ways(function, call):
    """The output and the gradients of query, key, value and bias under a random cotangent."""
    names = [name for name in ("query", "key", "value", "bias") if getattr(call, name) is not None]

    @jax.jit
    def run(arrays, cotangent):
        output, pull = jax.vjp(lambda arrays: function(Call(**{**vars(call), **arrays})), arrays)
        return {"output": output, **pull(cotangent)[0]}

    cotangent = draw(B, T, N, H, seed=4).astype(call.query.dtype)
    return run({name: getattr(call, name) for name in names}, cotangent)


def check(close, call):
    close(both_ways(attend, call), both_ways(reference, call))


def test_a_bias_of_minus_infinity_hides(close):
    bias = jnp.where(jnp.arange(S) % 3 == 0, -jnp.inf, draw(B, N, T, S, seed=3)).at[1].set(-jnp.inf)
    check(close, build(Mask.causal(2), bias))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_a_row_whose_bias_is_the_least_number_does_not_see_what_is_hidden(dtype, close):
    bias = jnp.full((1, 1, T, S), jnp.finfo(dtype).min, dtype).at[:, :, 0].set(1)
    check(close, build(Mask.causal(2), bias))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_lower_dtypes(dtype):
    def results(function, dtype):
        arrays = {
            name: getattr(call, name).astype(low).astype(dtype)
            for name in ("query", "key", "value")
        }
        found = both_ways(function, Call(**{**vars(call), **arrays}))
        return {name: np.asarray(value, np.float64) for name, value in found.items()}

    call, low = build(Mask.causal(2)), dtype
    ours, plain = results(attend, dtype), results(reference, dtype)
    with jax.enable_x64(True):
        truth = results(reference, jnp.float64)
    eps = float(jnp.finfo(dtype).eps)
    forward = tolerance.lower_dtype(
        ours, [plain], {"output": truth.pop("output")}, tolerance.LOW_FORWARD, eps
    )
    errors = forward | tolerance.lower_dtype(ours, [plain], truth, tolerance.LOW_GRADIENT, eps)
    assert max(errors.values()) <= 1, errors
    assert (
        attend(
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

"""Kernels that take the mask as one array, here that of `jax.nn` compiled by XLA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask
from flax_attn.backends.dense import attend_dense
from flax_attn.backends.reference import BACKEND as REFERENCE
from flax_attn.parity import tolerance

from .calls import both_ways, draw, make_call

B, N, K, T, S, H = 3, 4, 2, 5, 7, 8
# What jax.nn puts in the place of a hidden score.
FILL = -0.7 * float(jnp.finfo(jnp.float32).max)


def build(mask=None, bias=None, platform="cpu", v=H, **options):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, v)
    return make_call(*shapes, mask=mask, bias=bias, platform=platform, **options)


def attend(call):
    def kernel(query, key, value, bias, visible):
        # In lower dtypes jax.nn rounds the weights, and has no gradient if promotion is strict.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        bias = None if bias is None else bias.astype(jnp.float32)
        options = {"scale": call.scale, "implementation": "xla"}
        output = jax.nn.dot_product_attention(query, key, value, bias, visible, **options)
        return output.astype(call.query.dtype)

    return attend_dense(call, kernel, FILL)


def check(close, call):
    close(both_ways(attend, call), both_ways(REFERENCE.attend, call))


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
        arrays = {name: getattr(call, name).astype(dtype) for name in ("query", "key", "value")}
        found = both_ways(function, replace(call, **arrays))
        return {name: np.asarray(value, np.float64) for name, value in found.items()}

    call = build(Mask.causal(2), dtype=dtype)
    ours, plain = results(attend, dtype), results(REFERENCE.attend, dtype)
    with jax.enable_x64(True):
        truth = results(REFERENCE.attend, jnp.float64)
    eps = float(jnp.finfo(dtype).eps)
    forward = tolerance.lower_dtype(
        ours, [plain], {"output": truth.pop("output")}, tolerance.LOW_FORWARD, eps
    )
    errors = forward | tolerance.lower_dtype(ours, [plain], truth, tolerance.LOW_GRADIENT, eps)
    assert max(errors.values()) <= 1, errors
    assert attend(call).dtype == dtype


def test_a_hidden_value_may_be_huge(close):
    call = build(Mask.causal(1))
    value = call.value.at[:, -1].set(1e30)
    check(close, replace(call, value=value, key=call.key.at[:, -1].set(1e30)))

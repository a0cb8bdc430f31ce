"""`jax.nn.dot_product_attention` compiled by XLA. The whole scores in memory, on every platform. Source: `jax.nn`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.backends.dense import attend_dense, refuse_options

_FILL = -0.7 * float(jnp.finfo(jnp.float32).max)  # what jax.nn puts in the place of a hidden score


def refuse(call: Call) -> str | None:
    """Return why jax.nn cannot honour the call, or None."""
    if call.query.dtype.name not in ("float32", "bfloat16", "float16"):
        return f"xla takes its softmax in float32 and needs float32, bfloat16 or float16; got {call.query.dtype.name}"
    if call.soft_cap is not None:
        return f'xla has no soft cap; got soft_cap={call.soft_cap}. Pass backend="auto"'
    return refuse_options("xla", call)


def attend(call: Call) -> Array:
    """Return the output, the whole mask given as one boolean array."""

    def kernel(query, key, value, bias, visible):
        # In lower dtypes jax.nn rounds the weights, has no float16 but on GPUs, and no gradient if promotion is strict.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        bias = None if bias is None else bias.astype(jnp.float32)
        output = jax.nn.dot_product_attention(query, key, value, bias, visible, scale=call.scale, implementation="xla")
        return output.astype(call.query.dtype)

    return attend_dense(call, kernel, _FILL)


def memory(call: Call) -> int:
    """Return `12 b n t s`: scores, exponentials and weights, each in float32."""
    b, n, t, s = call.shape
    return 12 * b * n * t * s

"""`jax.nn.dot_product_attention` compiled by XLA, with all scores in memory."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends.backend import Backend
from flax_attn.backends.call import Call
from flax_attn.backends.dense import attend_dense, refuse_options, refuse_widths

_FILL = -0.7 * float(jnp.finfo(jnp.float32).max)  # what jax.nn puts in the place of a hidden score


class Xla(Backend):
    """`jax.nn.dot_product_attention`."""

    name = "xla"
    dtypes = ("float32", "bfloat16", "float16")  # its softmax is in float32
    source = "`jax.nn`"
    limits = (
        "soft cap, functions of scores, sinks, dropout, a precision, values of another width than"
        " queries"
    )

    def refuse(self, call: Call) -> str | None:
        """Return why jax.nn cannot honour the call, or None."""
        if call.soft_cap is not None:
            return f'xla has no soft cap; got soft_cap={call.soft_cap}. Pass backend="auto"'
        return refuse_options("xla", call) or refuse_widths("xla", call)

    def attend(self, call: Call) -> Array:
        """Return the output, the whole mask given as one boolean array."""
        return attend_dense(call, partial(_kernel, call), _FILL)

    def memory(self, call: Call) -> int:
        """Return `12 b n t s`: scores, exponentials and weights, each in float32."""
        b, n, t, s = call.shape
        return 12 * b * n * t * s


def _kernel(
    call: Call, query: Array, key: Array, value: Array, bias: Array | None, visible: Array
) -> Array:
    # In lower dtypes jax.nn rounds the weights, has float16 on GPUs only, and no gradient if
    # promotion is strict.
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    bias = None if bias is None else bias.astype(jnp.float32)
    output = jax.nn.dot_product_attention(
        query, key, value, bias, visible, scale=call.scale, implementation="xla"
    )
    return output.astype(call.query.dtype)


BACKEND = Xla()

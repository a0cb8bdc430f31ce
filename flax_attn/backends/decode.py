"""The formula for a few queries over many keys, as in decoding: keys and values are read once.

Non-finite numbers are looked for in the scores and the output, which are small: where these are
finite, so is what they were computed from, or it is hidden. Otherwise the call is computed again by
the formula, which handles them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from attn_spec.checks import DTYPES
from flax_attn.backends.backend import Backend
from flax_attn.backends.call import ARRAY_SCALE, Call
from flax_attn.backends.containment import if_finite
from flax_attn.backends.nonfinite import all_finite
from flax_attn.backends.reference import with_weights
from flax_attn.backends.work import KernelWork, arrays_moved, drawn, is_float32, products
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.reference import capped_scores, hide, masked_softmax


class Decode(Backend):
    """A few queries over many keys."""

    name = "decode"
    dtypes = DTYPES
    honours = ("bias", "soft_cap", "sinks", "precision", "score", ARRAY_SCALE)
    few = 16
    typed = True
    every_mode = True
    nonfinite = "test of its results, then a branch to the formula"

    def preferred(self, call: Call) -> bool:
        _, _, t, s = call.shape
        return t <= self.few and t < s

    def attend(self, call: Call) -> Array:
        """Return `(b, t, n, v)`, differentiable in every mode and to every order."""
        return _compiled(call)

    def memory(self, call: Call) -> int:
        """Return the bytes of the scores and the weights."""
        b, n, t, s = call.shape
        return 2 * b * n * t * s * accumulation_dtype(call.query.dtype).itemsize

    def work(self, call: Call) -> KernelWork:
        """Return the work of keys and values that are read once, and scores beside them.

        Compiled for a v5e keys are read where they lie, for an H200 they are first copied with
        heads first; 36 and 30 launches.
        """
        _, _, t, s = call.shape
        keys = (call.key.size + call.value.size) * call.key.dtype.itemsize
        apart = self.memory(call) + (2 * keys if call.platform == "gpu" else 0)
        flops, numbers = products(call, t * s), drawn(call, t * s)
        moved = arrays_moved(call) + self.memory(call)
        return KernelWork(30, flops, moved, apart, is_float32(call), drawn=numbers)


@jax.custom_jvp
def _attend(call: Call) -> Array:
    # Heads first, as a cache stores them. In the other order XLA copies them for each product, and
    # for the branch.
    key = rearrange(call.key, "b s k h -> b k s h")
    value = rearrange(call.value, "b s k v -> b k s v")
    scores = _scores(call, key)
    output = _applied(call, _weights(call, scores), value)
    # A number that is not finite makes every score or output that it takes part in so too, also
    # those of hidden keys.
    finite = all_finite(scores, output)
    return if_finite(finite, output, partial(_by_formula, call, key, value))


def _by_formula(call: Call, key: Array, value: Array) -> Array:
    key = rearrange(key, "b k s h -> b s k h")
    value = rearrange(value, "b k s v -> b s k v")
    return with_weights(replace(call, key=key, value=value))[0]


@_attend.defjvp
def _differentiate(primals: tuple[Call], tangents: tuple[Any]) -> tuple[Array, Array]:
    return jax.jvp(lambda call: with_weights(call)[0], primals, tangents)


_compiled = jax.jit(_attend, inline=True)  # an eager call would compile the branch each time


# Batch and heads come first in both.
_HEADS = ((0, 1), (0, 1))


def _scores(call: Call, key: Float[Array, "b k s h"]) -> Float[Array, "b n t s"]:
    """Return the scaled products."""
    group = call.query.shape[2] // key.shape[1]  # not t, which may be 0: no queries
    # The queries of all heads that share keys are the columns of one matrix.
    query = rearrange(call.query, "b t (k g) h -> b k (g t) h", g=group)
    products = _dot(call, key, query, (((3,), (3,)), _HEADS))
    return rearrange(products, "b k s (g t) -> b (k g) t s", g=group) * call.scale


def _weights(call: Call, scores: Float[Array, "b n t s"]) -> Float[Array, "b n t s"]:
    visible, bias = hide(_visible(call), call.bias)
    final = capped_scores(scores, bias, call.soft_cap)
    if call.score is not None:
        final = call.score.apply(jnp.where(visible, final, 0))
    return masked_softmax(final, visible, call.sinks)


def _visible(call: Call) -> Bool[Array, "b n t s"]:
    _, _, t, s = call.shape
    visible = call.mask.block(jnp.arange(t), jnp.arange(s))
    return jnp.broadcast_to(visible, call.shape)


def _applied(call: Call, weights: Array, value: Float[Array, "b k s v"]) -> Array:
    group = call.query.shape[2] // value.shape[1]
    weights = rearrange(weights, "b (k g) t s -> b k (g t) s", g=group)
    output = _dot(call, weights, value.astype(weights.dtype), (((3,), (2,)), _HEADS))
    output = rearrange(output, "b k (g t) v -> b t (k g) v", g=group)
    return output.astype(call.query.dtype)


def _dot(call: Call, a: Array, b: Array, axes: Any) -> Array:
    sums = accumulation_dtype(call.query.dtype)
    return lax.dot_general(a, b, axes, call.precision, preferred_element_type=sums)


BACKEND = Decode()

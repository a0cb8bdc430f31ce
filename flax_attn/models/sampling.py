"""The next token from its logits: greedy, or drawn by temperature, top-k and top-p."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt32

from attn_spec.sampling import Sampling
from flax_attn.functional.dropout import threefry_2x32
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.sharding.axes import constrain


def keep_most_likely(logits: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    """Return `(logits - largest) / temperature`, and -inf where a token is not to be drawn.

    Ties of the last one stay.

    Example:
        >>> keep_most_likely(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), Sampling(1.0, top_p=0.6))
        Array([[ 0.        , -0.51082563,        -inf]], dtype=float32)
    """
    logits = logits.astype(accumulation_dtype(logits.dtype))
    largest = logits.max(axis=-1, keepdims=True)
    # Divided first, several could be infinite, and the most likely would be lost among them.
    logits = (logits - jnp.where(jnp.isfinite(largest), largest, 0)) / sampling.temperature
    if sampling.top_k or sampling.top_p:
        logits = constrain(logits, "batch", None)  # words are sorted on one device
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits = _from(logits, jax.lax.top_k(logits, sampling.top_k)[0][:, -1:])
    if sampling.top_p is not None:
        ordered = -jnp.sort(-logits, axis=-1)
        chances = jax.nn.softmax(ordered, axis=-1)
        inside = (
            jnp.cumsum(chances, axis=-1) - chances < sampling.top_p
        )  # the more likely ones have less together
        inside = (
            inside | (jnp.arange(inside.shape[-1]) == 0)[None]
        )  # a top_p below float32's numbers is 0
        logits = _from(logits, jnp.where(inside, ordered, jnp.inf).min(axis=-1, keepdims=True))
    return logits


def sample(
    logits: Float[Array, "b v"],
    sampling: Sampling,
    key: UInt32[Array, "2"],
    step: Integer[Array, ""] | int,
) -> Integer[Array, " b"]:
    """Return a token for every row, decided by (key, step, row) alone: the same in both frameworks.

    Drawn with Gumbel noise: `argmax(logits / temperature - log(-log(u)))`.

    Example:
        >>> sample(jnp.array([[0.0, 3.0, 1.0]]), Sampling(), jnp.zeros(2, jnp.uint32), 0)
        Array([1], dtype=int32)
    """
    if sampling.greedy:
        return logits.argmax(axis=-1).astype(jnp.int32)
    kept = keep_most_likely(logits, sampling)
    rows, words = (jnp.arange(size, dtype=jnp.uint32) for size in logits.shape)
    own = threefry_2x32((key[0], key[1]), (jnp.asarray(step, jnp.uint32), rows[:, None]))
    bits, _ = threefry_2x32(own, (words[None], jnp.uint32(0)))
    uniform = ((bits >> 8).astype(kept.dtype) + 0.5) / 2**24
    return (kept - jnp.log(-jnp.log(uniform))).argmax(axis=-1).astype(jnp.int32)


def _from(logits: Array, least: Array) -> Array:
    return jnp.where(logits >= least, logits, -jnp.inf)

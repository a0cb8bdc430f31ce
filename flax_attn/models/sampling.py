"""The next token from its logits: greedy, or drawn by temperature, top-k and top-p."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt32

from attn_spec.sampling import Sampling
from flax_attn.functional.dropout import threefry_2x32
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.explicit_sharding import split_as
from flax_attn.sharding.axes import constrain


def keep_most_likely(logits: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    """Return `(logits - largest) / temperature`, and -inf where a token is not to be drawn.

    Ties of the last one stay.

    Example:
        >>> keep_most_likely(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), Sampling(1.0, top_p=0.6))
        Array([[ 0.        , -0.51082563,        -inf]], dtype=float32)
    """
    logits = _scaled(logits, sampling.temperature)
    top_k, top_p = sampling.top_k, sampling.top_p
    if top_k or top_p:
        # Words are sorted on one device.
        logits = constrain(logits, "batch", None)
    if top_k is not None and top_k < logits.shape[-1]:
        largest, _ = jax.lax.top_k(logits, top_k)
        logits = _from(logits, largest[:, -1:])
    # Chances are those among the words that top-k leaves.
    if top_p is not None:
        least = _least_inside(logits, top_p)
        logits = _from(logits, least)
    return logits


def _scaled(logits: Array, temperature: float) -> Array:
    """Return `(logits - largest) / temperature`, in at least float32."""
    logits = logits.astype(accumulation_dtype(logits.dtype))
    # Only differences count, and those of the likely words stay exact.
    largest = logits.max(axis=-1, keepdims=True)
    # Infinity less itself is no number.
    finite = jnp.where(jnp.isfinite(largest), largest, 0)
    # Divided first, several could be infinite, and the most likely would be lost among them.
    return (logits - finite) / temperature


def _least_inside(logits: Array, top_p: float) -> Array:
    """Return the least logit of each row whose more likely ones have a chance below `top_p`."""
    ordered = -jnp.sort(-logits, axis=-1)
    chances = jax.nn.softmax(ordered, axis=-1)
    # The most likely first: what stands before a word has at least its chance.
    before = jnp.cumsum(chances, axis=-1) - chances
    inside = before < top_p
    # The first always, as a `top_p` below the numbers of float32 is 0.
    inside = inside.at[:, 0].set(True)
    kept = jnp.where(inside, ordered, jnp.inf)
    return kept.min(axis=-1, keepdims=True)


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
    # No number is drawn: the seed has no say.
    if sampling.greedy:
        return _most_likely(logits)
    kept = keep_most_likely(logits, sampling)
    bits = _bits(logits.shape, key, step) >> 8
    # Half a step from 0 and from 1, whose logarithms are no numbers.
    uniform = (bits.astype(kept.dtype) + 0.5) / 2**24
    gumbel = -jnp.log(-jnp.log(uniform))
    return _most_likely(kept + gumbel)


def _most_likely(scores: Float[Array, "b v"]) -> Integer[Array, " b"]:
    """Return the first of the largest scores, or the first that is NaN, as `argmax` does."""
    # XLA on a CPU reduces pairs of a number and a place one by one, in four times the time.
    top = scores.max(axis=-1, keepdims=True)
    largest = (scores == top) | jnp.isnan(scores)
    places = jax.lax.broadcasted_iota(
        jnp.int32, scores.shape, 1, out_sharding=split_as(scores, 0, 1)
    )
    return jnp.where(largest, places, scores.shape[-1]).min(axis=-1)


def _bits(shape: tuple[int, ...], key: Array, step: Array | int) -> Array:
    """Return random bits that depend on the key, the step, the row and the word alone."""
    b, v = shape
    rows = jnp.arange(b, dtype=jnp.uint32)[:, None]
    words = jnp.arange(v, dtype=jnp.uint32)[None]
    # Each row has a key of its own, so that a row does not depend on the others.
    row_keys = threefry_2x32((key[0], key[1]), (jnp.asarray(step, jnp.uint32), rows))
    bits, _ = threefry_2x32(row_keys, (words, jnp.uint32(0)))
    return jnp.asarray(bits)


def _from(logits: Array, least: Array) -> Array:
    # Words as likely as the least one are kept as well, on both sides.
    return jnp.where(logits >= least, logits, -jnp.inf)

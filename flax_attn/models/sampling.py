"""The next token from its logits: greedy, or drawn by temperature, top-k and top-p."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt32

from attn_spec.checks import check_number, check_positive
from flax_attn.functional.dropout import threefry_2x32
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.sharding.axes import constrain

_SMALLEST = 2.0**-126  # the smallest normal number of float32


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

        softmax(logits / temperature)

    It is taken over the top_k most likely tokens, and over the fewest of these that reach top_p.

    Args:
        temperature: divisor of the logits. 0 is greedy, the most likely token, and so is less than
            the smallest normal number of float32; 1 draws from the model's own distribution.
        top_k: number of most likely tokens that may be drawn; None is all.
        top_p: smallest total probability of the tokens that may be drawn, in (0, 1]; None is all.

    Raises:
        ValueError: if a number lies outside its range, or if `top_k` or `top_p` is given to greedy
            decoding.

    Example:
        >>> Sampling(0.8, top_k=50).top_k
        50

    References:
        Fan et al. 2018, top-k (arXiv:1805.04833); Holtzman et al. 2019, top-p (arXiv:1904.09751).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        check_number(temperature=self.temperature)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be at least 0, and finite; got {self.temperature}. For greedy"
                " pass 0"
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                "temperature=0 takes the most likely token, and top_k and top_p choose among"
                f" several; got top_k={self.top_k}, top_p={self.top_p}. Leave them out or pass a"
                " temperature, such as 1.0"
            )
        if self.top_k is not None:
            check_positive(top_k=self.top_k)
        if self.top_p is not None:
            check_number(top_p=self.top_p)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p is a probability in (0, 1]; got top_p={self.top_p}. For all tokens pass"
                " None"
            )

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy: no logits can be divided by so small a temperature."""
        return self.temperature < _SMALLEST


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

"""Absolute positions: rotary (RoPE) and sinusoids.

Both are functions of integer positions, computed in the call: there are no tables, and packed and
cached sequences pass their own positions. Learned positions are an embedding like any other:
`nnx.Embed`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax.typing import Dtype
from jaxtyping import Array, Float, Integer

from attn_spec.frequencies import (
    DynamicNTKScaling,
    check_base,
    check_pairs,
    plain_frequencies,
)
from attn_spec.frequencies import LinearScaling as LinearScaling
from attn_spec.frequencies import Llama3Scaling as Llama3Scaling
from attn_spec.frequencies import YaRNScaling as YaRNScaling
from attn_spec.longrope import LongRoPEScaling
from attn_spec.rope import RotaryPositions
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.shapes import ArrayLike


class RoPE(RotaryPositions, portable=True):
    """Rotary positions: pairs of features are rotated by angles that grow with the position.

        (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)
        angle = position * base ** (-2i / width)

    The product of a query and a key then depends on the difference of their positions alone. The
    arithmetic is in the dtype of the input, but at least in float32, in which positions up to 2**24
    are exact.

    Args:
        base: ratio of the frequencies, also called theta.
        width: number of features of a head that are rotated, its first ones; None is all.
        interleaved: whether pair `i` is features `(2i, 2i + 1)` as in the paper and GPT-J, or else
            `(i, i + width / 2)` as in GPT-NeoX, and in Hugging Face's Llama.
        scaling: change of the frequencies for inputs longer than in training; None is no change.

    Shapes:
        x `(b, t, n, h)` with positions `(t,)` or `(b, t)`; x `(t, n, h)` with positions `(t,)`. The
        shape of x stays, and positions that are not given are `0 ... t - 1`.

    Raises:
        ValueError: if `base` is not above 1, `width` is odd or wider than the head, `scaling` is
            not a `Scaling`, or positions are not integers or of another shape.

    Example:
        >>> rope, query, key = RoPE(), jnp.ones((1, 1, 8)), jnp.ones((1, 1, 8))
        >>> pairs = [(rope(query, [5 + i]), rope(key, [2 + i])) for i in (0, 1000)]
        >>> [round(float((query * key).sum()), 3) for query, key in pairs]
        [3.93, 3.93]

    References:
        Su et al. 2021 (arXiv:2104.09864).
    """

    def __call__(
        self, x: Float[Array, "*b t n h"], positions: ArrayLike | None = None
    ) -> Float[Array, "*b t n h"]:
        self.check_head_dim(x.shape[-1])
        positions = (
            jnp.arange(x.shape[-3]) if positions is None else as_positions(positions, x.shape[:-2])
        )
        if x.ndim == 3:
            return self(x[None], positions)[0]
        width = x.shape[-1] if self.width is None else self.width
        positions = positions if positions.ndim == 2 else positions[None]
        cos, sin = self._cos_sin(width, positions, x.dtype)
        pairs = "(i two)" if self.interleaved else "(two i)"
        both = rearrange(x[..., :width].astype(cos.dtype), f"b t n {pairs} -> two b t n i", two=2)
        # Unpacking an array outside of jit would gather it from all devices.
        first, second = both[0], both[1]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin])
        rotated = rearrange(rotated, f"two b t n i -> b t n {pairs}").astype(x.dtype)
        return jnp.concatenate([rotated, x[..., width:]], axis=-1)

    def _cos_sin(
        self, width: int, positions: Integer[Array, "#b t"], dtype: jnp.dtype
    ) -> list[Array]:
        dtype = accumulation_dtype(dtype)
        frequencies = (plain_frequencies if self.scaling is None else self.scaling.frequencies)(
            self.base, width
        )
        frequencies = jnp.asarray(frequencies, dtype)[None]
        if isinstance(self.scaling, DynamicNTKScaling):
            stretch = self.scaling.stretch(1 + positions.max(axis=1, keepdims=True).astype(dtype))
            frequencies = (
                frequencies * stretch ** jnp.asarray(self.scaling.exponents(width), dtype)[None]
            )
        if isinstance(self.scaling, LongRoPEScaling):
            long = jnp.asarray(self.scaling.long_frequencies(self.base, width), dtype)[None]
            is_long = positions.max(axis=1, keepdims=True) >= self.scaling.original_context_length
            frequencies = jnp.where(is_long, long, frequencies)
        angles = rearrange(positions, "b t -> b t 1 1").astype(dtype) * rearrange(
            frequencies, "b i -> b 1 1 i"
        )
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude()
        return [amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)]


def sinusoidal(
    positions: ArrayLike, width: int, *, base: float = 10000.0, dtype: Dtype | None = None
) -> Float[Array, "*b t d"]:
    """Return sinusoids to add to token embeddings.

        out[2i]     = sin(position * base ** (-2i / width))
        out[2i + 1] = cos(position * base ** (-2i / width))

    Args:
        positions: integers `(t,)` or `(b, t)`.
        width: width of the tokens, even.
        base: ratio of the frequencies.
        dtype: dtype of the result, computed in at least float32; None is the default for floats.

    Shapes:
        Returns `(t, width)` or `(b, t, width)`.

    Raises:
        ValueError: if positions are not integers, `width` is odd or `base` is not above 1.

    Example:
        >>> np.asarray(sinusoidal([0, 1], 4)).round(2)
        array([[0.  , 1.  , 0.  , 1.  ],
               [0.84, 0.54, 0.01, 1.  ]], dtype=float32)

    References:
        Vaswani et al. 2017 (arXiv:1706.03762).
    """
    check_pairs("width", width)
    check_base(base)
    dtype = jnp.result_type(float if dtype is None else dtype)
    wide = accumulation_dtype(dtype)
    frequencies = jnp.asarray(plain_frequencies(base, width), wide)
    angles = jnp.multiply.outer(as_positions(positions).astype(wide), frequencies)
    return rearrange(
        jnp.stack([jnp.sin(angles), jnp.cos(angles)]), "two ... i -> ... (i two)"
    ).astype(dtype)


def as_positions(
    positions: ArrayLike, tokens: tuple[int, ...] | None = None
) -> Integer[Array, "*b t"]:
    """Return positions as signed integers.

    `tokens` is the shape of the input's tokens, `(t,)` or `(b, t)`, if it is known.

    Raises:
        ValueError: if they are not integers, or if their shape is neither that of the tokens nor
            `(t,)`.

    Example:
        >>> as_positions([0, 1, 2, 0, 1], (4, 5))
        Array([0, 1, 2, 0, 1], dtype=int32)
    """
    positions = jnp.asarray(positions)
    rule = "positions must be integers of shape (t,) or (b, t)"
    got = f"got shape {positions.shape}, dtype {positions.dtype}"
    if not jnp.issubdtype(positions.dtype, np.integer) or positions.ndim not in (1, 2):
        raise ValueError(f"{rule}; {got}. Cast and reshape them before the call")
    if tokens is not None and positions.shape not in (tokens, tokens[-1:]):
        raise ValueError(
            f"{rule}, one for each of the tokens {tokens}; {got}. Without b they serve every row"
        )
    return positions.astype(int)


def segment_positions(segments: ArrayLike) -> Integer[Array, "*b t"]:
    """Return the position of each token in its packed document, a run of equal ids.

    Args:
        segments: ids of the documents, integers `(t,)` or `(b, t)`, as in `Mask.segments`.

    Raises:
        ValueError: if they are not integers, or of another rank.

    Example:
        >>> segment_positions([7, 7, 7, 2, 2, 9])
        Array([0, 1, 2, 0, 1, 0], dtype=int32)
    """
    ids = jnp.asarray(segments)
    if not jnp.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2):
        raise ValueError(
            "segments must be integers of shape (t,) or (b, t), one id a token; "
            f"got shape {ids.shape}, dtype {ids.dtype}. Cast and reshape them before the call"
        )
    begins = jnp.diff(ids, axis=-1, prepend=ids[..., :1] - 1) != 0
    positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    return positions - jax.lax.cummax(jnp.where(begins, positions, 0), axis=ids.ndim - 1)

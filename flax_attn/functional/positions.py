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
from jaxtyping import Array, Float

from attn_spec.checks import check_dtype
from attn_spec.frequencies import DynamicNTKScaling, plain_frequencies
from attn_spec.frequencies import LinearScaling as LinearScaling
from attn_spec.frequencies import Llama3Scaling as Llama3Scaling
from attn_spec.frequencies import YaRNScaling as YaRNScaling
from attn_spec.longrope import LongRoPEScaling
from attn_spec.position_checks import check_base, check_pairs, check_positions, check_segments
from attn_spec.rope import RotaryPositions
from flax_attn.functional.dtypes import accumulation_dtype, dtype_name, is_integer
from flax_attn.functional.shapes import ArrayLike, Heads, Index, Positions


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

    def __call__(self, x: Heads, positions: ArrayLike | None = None) -> Heads:
        check_dtype("x", x)
        # Tables are made for the width that the config names.
        self.check_head_dim(x.shape[-1])
        positions = _positions_of(x, positions)
        if x.ndim == 3:
            return self._rotated(x[None], positions[None])[0]
        return self._rotated(x, jnp.atleast_2d(positions))

    def _rotated(self, x: Array, positions: Array) -> Array:
        width = self._width(x.shape[-1])
        cos, sin = self._cos_sin(width, positions, x.dtype)
        rotated = self._rotated_pairs(x[..., :width].astype(cos.dtype), cos, sin)
        # The features behind the rotated ones carry no position.
        return jnp.concatenate([rotated.astype(x.dtype), x[..., width:]], axis=-1)

    def _rotated_pairs(self, x: Array, cos: Array, sin: Array) -> Array:
        pairs = "(i two)" if self.interleaved else "(two i)"
        both = rearrange(x, f"b t n {pairs} -> two b t n i", two=2)
        # Unpacking an array outside of jit would gather it from all devices.
        first, second = both[0], both[1]
        new_first = first * cos - second * sin
        new_second = second * cos + first * sin
        rotated = jnp.stack([new_first, new_second])
        return rearrange(rotated, f"two b t n i -> b t n {pairs}")

    def _width(self, head_dim: int) -> int:
        return head_dim if self.width is None else self.width

    def _cos_sin(self, width: int, positions: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
        dtype = accumulation_dtype(dtype)
        frequencies = self._frequencies(width, positions, dtype)
        positions = rearrange(positions, "b t -> b t 1 1").astype(dtype)
        angles = positions * rearrange(frequencies, "b i -> b 1 1 i")
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude()
        return amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)

    def _frequencies(self, width: int, positions: Array, dtype: jnp.dtype) -> Array:
        """Return the frequencies of each row: those of some scalings depend on its length."""
        # Known before tracing in float64, and rounded once.
        if self.scaling is None:
            return _as_row(plain_frequencies(self.base, width), dtype)
        frequencies = _as_row(self.scaling.frequencies(self.base, width), dtype)
        if isinstance(self.scaling, DynamicNTKScaling):
            return frequencies * _stretch(self.scaling, width, positions, dtype)
        if isinstance(self.scaling, LongRoPEScaling):
            return self._of_length(self.scaling, width, frequencies, positions)
        return frequencies

    def _of_length(
        self, scaling: LongRoPEScaling, width: int, short: Array, positions: Array
    ) -> Array:
        long = _as_row(scaling.long_frequencies(self.base, width), short.dtype)
        # A row is long as a whole: its queries and keys have the same frequencies.
        is_long = _last(positions) >= scaling.original_context_length
        return jnp.where(is_long, long, short)


def _stretch(scaling: DynamicNTKScaling, width: int, positions: Array, dtype: jnp.dtype) -> Array:
    stretch = scaling.stretch(1 + _last(positions).astype(dtype))
    return stretch ** _as_row(scaling.exponents(width), dtype)


def _positions_of(x: Heads, positions: ArrayLike | None) -> Index:
    """Return the positions of the tokens of x; None is their order."""
    if positions is None:
        positions = jnp.arange(x.shape[-3])
    # Checked and made integers: a mask of positions in floats would round them.
    return as_positions(positions, x.shape[:-2])


def _last(positions: Array) -> Array:
    return positions.max(axis=1, keepdims=True)


def _as_row(numbers: np.ndarray, dtype: jnp.dtype) -> Array:
    return jnp.asarray(numbers, dtype)[None]


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
    positions = as_positions(positions).astype(wide)
    frequencies = jnp.asarray(plain_frequencies(base, width), wide)
    angles = jnp.multiply.outer(positions, frequencies)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)])
    return rearrange(pairs, "two ... i -> ... (i two)").astype(dtype)


def as_positions(positions: ArrayLike, tokens: tuple[int, ...] | None = None) -> Positions:
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
    dtype = positions.dtype
    shape = positions.shape
    check_positions(shape, dtype_name(dtype), is_integer(dtype), tokens)
    # Differences of unsigned positions would wrap around.
    return positions.astype(int)


def segment_positions(segments: ArrayLike) -> Positions:
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
    check_segments(ids.shape, dtype_name(ids.dtype), is_integer(ids.dtype))
    # An id that differs from the first makes the first token begin a document.
    begins = jnp.diff(ids, axis=-1, prepend=ids[..., :1] - 1) != 0
    positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    # The latest start so far is that of the token's own document.
    starts = jnp.where(begins, positions, 0)
    return positions - jax.lax.cummax(starts, axis=ids.ndim - 1)

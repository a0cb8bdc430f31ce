"""Absolute positions: rotary (RoPE) and sinusoids.

Both are functions of integer positions, computed in the call: there are no tables, and packed and
cached sequences pass their own positions. Learned positions are an embedding like any other:
`nn.Embedding`.
"""

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from attn_spec.checks import check_dtype
from attn_spec.frequencies import DynamicNTKScaling, plain_frequencies
from attn_spec.frequencies import LinearScaling as LinearScaling
from attn_spec.frequencies import Llama3Scaling as Llama3Scaling
from attn_spec.frequencies import YaRNScaling as YaRNScaling
from attn_spec.longrope import LongRoPEScaling
from attn_spec.position_checks import check_base, check_pairs, check_positions, check_segments
from attn_spec.rope import RotaryPositions
from torch_ref.functional.dtypes import accumulation_dtype, dtype_name, is_integer
from torch_ref.functional.shapes import ArrayLike, Heads, Index, Positions


class RoPE(RotaryPositions, portable=True):
    """Rotary positions: pairs of features are rotated by angles that grow with the position.

        (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)
        angle = position * base ** (-2i / width)

    The product of a query and a key then depends on the difference of their positions alone. The
    arithmetic is in the dtype of the input, but at least in float32, in which positions up to 2**24
    are exact.

    Shapes:
        x `(b, t, n, h)` with positions `(t,)` or `(b, t)`; x `(t, n, h)` with positions `(t,)`. The
        shape of x stays, and positions that are not given are `0 ... t - 1`.

    Example:
        >>> rope, query, key = RoPE(), torch.ones((1, 1, 8)), torch.ones((1, 1, 8))
        >>> pairs = [(rope(query, [5 + i]), rope(key, [2 + i])) for i in (0, 1000)]
        >>> [round(float((query * key).sum()), 3) for query, key in pairs]
        [3.93, 3.93]
    """

    def __call__(self, x: Heads, positions: ArrayLike | None = None) -> Heads:
        check_dtype("x", x)
        # Tables are made for the width that the config names.
        self.check_head_dim(x.shape[-1])
        positions = _positions_of(x, positions)
        if x.ndim == 3:
            return self._rotated(x[None], positions[None])[0]
        return self._rotated(x, torch.atleast_2d(positions))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        width = self._width(x.shape[-1])
        cos, sin = self._cos_sin(width, positions.to(x.device), x.dtype)
        rotated = self._rotated_pairs(x[..., :width].to(cos.dtype), cos, sin)
        # The features behind the rotated ones carry no position.
        return torch.cat([rotated.to(x.dtype), x[..., width:]], dim=-1)

    def _rotated_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = "(i two)" if self.interleaved else "(two i)"
        first, second = rearrange(x, f"b t n {pairs} -> two b t n i", two=2)
        new_first = first * cos - second * sin
        new_second = second * cos + first * sin
        rotated = torch.stack([new_first, new_second])
        return rearrange(rotated, f"two b t n i -> b t n {pairs}")

    def _width(self, head_dim: int) -> int:
        return head_dim if self.width is None else self.width

    def _cos_sin(self, width: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(dtype)
        frequencies = self._frequencies(width, positions, dtype)
        positions = rearrange(positions, "b t -> b t 1 1").to(dtype)
        angles = positions * rearrange(frequencies, "b i -> b 1 1 i")
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude()
        return amplitude * torch.cos(angles), amplitude * torch.sin(angles)

    def _frequencies(self, width: int, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the frequencies of each row: those of some scalings depend on its length."""
        # Known before tracing in float64, and rounded once.
        if self.scaling is None:
            return _as_row(plain_frequencies(self.base, width), dtype, positions.device)
        frequencies = _as_row(self.scaling.frequencies(self.base, width), dtype, positions.device)
        if isinstance(self.scaling, DynamicNTKScaling):
            return frequencies * _stretch(self.scaling, width, positions, dtype)
        if isinstance(self.scaling, LongRoPEScaling):
            return self._of_length(self.scaling, width, frequencies, positions)
        return frequencies

    def _of_length(
        self, scaling: LongRoPEScaling, width: int, short: Tensor, positions: Tensor
    ) -> Tensor:
        long = _as_row(scaling.long_frequencies(self.base, width), short.dtype, short.device)
        # A row is long as a whole: its queries and keys have the same frequencies.
        is_long = _last(positions) >= scaling.original_context_length
        return torch.where(is_long, long, short)


def _stretch(
    scaling: DynamicNTKScaling, width: int, positions: Tensor, dtype: torch.dtype
) -> Tensor:
    stretch = scaling.stretch(1 + _last(positions).to(dtype))
    return stretch ** _as_row(scaling.exponents(width), dtype, positions.device)


def _positions_of(x: Heads, positions: ArrayLike | None) -> Index:
    """Return the positions of the tokens of x; None is their order."""
    if positions is None:
        positions = torch.arange(x.shape[-3])
    # Checked and made integers: a mask of positions in floats would round them.
    return as_positions(positions, tuple(x.shape[:-2]))


def _last(positions: Tensor) -> Tensor:
    return positions.amax(dim=1, keepdim=True)


def _as_row(numbers: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(numbers, dtype=dtype, device=device)[None]


def sinusoidal(
    positions: ArrayLike, width: int, *, base: float = 10000.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "*b t d"]:
    """Return sinusoids to add to token embeddings.

        out[2i]     = sin(position * base ** (-2i / width))
        out[2i + 1] = cos(position * base ** (-2i / width))

    Shapes:
        Returns `(t, width)` or `(b, t, width)`.

    Example:
        >>> sinusoidal([0, 1], 4).numpy().round(2)
        array([[0.  , 1.  , 0.  , 1.  ],
               [0.84, 0.54, 0.01, 1.  ]], dtype=float32)
    """
    check_pairs("width", width)
    check_base(base)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    wide = accumulation_dtype(dtype)
    positions = as_positions(positions).to(wide)
    frequencies = _as_row(plain_frequencies(base, width), wide, positions.device)
    angles = positions[..., None] * frequencies
    pairs = torch.stack([torch.sin(angles), torch.cos(angles)])
    return rearrange(pairs, "two ... i -> ... (i two)").to(dtype)


def as_positions(positions: ArrayLike, tokens: tuple[int, ...] | None = None) -> Positions:
    """Return positions as signed integers.

    `tokens` is the shape of the input's tokens, `(t,)` or `(b, t)`, if it is known.

    Example:
        >>> as_positions([0, 1, 2, 0, 1], (4, 5))
        tensor([0, 1, 2, 0, 1])
    """
    positions = torch.as_tensor(positions)
    dtype = positions.dtype
    shape = tuple(positions.shape)
    check_positions(shape, dtype_name(dtype), is_integer(dtype), tokens)
    # Differences of unsigned positions would wrap around.
    return positions.long()


def segment_positions(segments: ArrayLike) -> Positions:
    """Return the position of each token in its packed document, a run of equal ids.

    Example:
        >>> segment_positions([7, 7, 7, 2, 2, 9])
        tensor([0, 1, 2, 0, 1, 0])
    """
    ids = torch.as_tensor(segments)
    check_segments(tuple(ids.shape), dtype_name(ids.dtype), is_integer(ids.dtype))
    # An id that differs from the first makes the first token begin a document.
    begins = torch.diff(ids, dim=-1, prepend=ids[..., :1] - 1) != 0
    positions = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    # The latest start so far is that of the token's own document.
    starts = torch.where(begins, positions, 0)
    return positions - starts.cummax(dim=-1).values

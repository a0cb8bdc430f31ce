"""Absolute positions: rotary (RoPE) and sinusoids.

Both are functions of integer positions, computed in the call: there are no tables, and packed and
cached sequences pass their own positions. Learned positions are an embedding like any other:
`nn.Embedding`.
"""

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor

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
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.shapes import ArrayLike


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
        >>> rope, query, key = RoPE(), torch.ones((1, 1, 8)), torch.ones((1, 1, 8))
        >>> pairs = [(rope(query, [5 + i]), rope(key, [2 + i])) for i in (0, 1000)]
        >>> [round(float((query * key).sum()), 3) for query, key in pairs]
        [3.93, 3.93]

    References:
        Su et al. 2021 (arXiv:2104.09864).
    """

    def __call__(
        self, x: Float[Tensor, "*b t n h"], positions: ArrayLike | None = None
    ) -> Float[Tensor, "*b t n h"]:
        self.check_head_dim(x.shape[-1])
        positions = (
            torch.arange(x.shape[-3])
            if positions is None
            else as_positions(positions, tuple(x.shape[:-2]))
        )
        if x.ndim == 3:
            return self(x[None], positions)[0]
        width = x.shape[-1] if self.width is None else self.width
        positions = (positions if positions.ndim == 2 else positions[None]).to(x.device)
        cos, sin = self._cos_sin(width, positions, x.dtype)
        pairs = "(i two)" if self.interleaved else "(two i)"
        first, second = rearrange(
            x[..., :width].to(cos.dtype), f"b t n {pairs} -> two b t n i", two=2
        )
        rotated = torch.stack([first * cos - second * sin, second * cos + first * sin])
        rotated = rearrange(rotated, f"two b t n i -> b t n {pairs}").to(x.dtype)
        return torch.cat([rotated, x[..., width:]], dim=-1)

    def _cos_sin(
        self, width: int, positions: Integer[Tensor, "#b t"], dtype: torch.dtype
    ) -> list[Tensor]:
        dtype = accumulation_dtype(dtype)
        frequencies = (plain_frequencies if self.scaling is None else self.scaling.frequencies)(
            self.base, width
        )
        frequencies = torch.as_tensor(frequencies, dtype=dtype, device=positions.device)[None]
        if isinstance(self.scaling, DynamicNTKScaling):
            stretch = self.scaling.stretch(1 + positions.amax(dim=1, keepdim=True).to(dtype))
            exponents = torch.as_tensor(
                self.scaling.exponents(width), dtype=dtype, device=positions.device
            )
            frequencies = frequencies * stretch ** exponents[None]
        if isinstance(self.scaling, LongRoPEScaling):
            long = self.scaling.long_frequencies(self.base, width)
            is_long = positions.amax(dim=1, keepdim=True) >= self.scaling.original_context_length
            frequencies = torch.where(
                is_long, torch.as_tensor(long, dtype=dtype, device=positions.device), frequencies
            )
        angles = rearrange(positions, "b t -> b t 1 1").to(dtype) * rearrange(
            frequencies, "b i -> b 1 1 i"
        )
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude()
        return [amplitude * torch.cos(angles), amplitude * torch.sin(angles)]


def sinusoidal(
    positions: ArrayLike, width: int, *, base: float = 10000.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "*b t d"]:
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
        >>> sinusoidal([0, 1], 4).numpy().round(2)
        array([[0.  , 1.  , 0.  , 1.  ],
               [0.84, 0.54, 0.01, 1.  ]], dtype=float32)

    References:
        Vaswani et al. 2017 (arXiv:1706.03762).
    """
    check_pairs("width", width)
    check_base(base)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    wide = accumulation_dtype(dtype)
    positions = as_positions(positions)
    frequencies = torch.as_tensor(
        plain_frequencies(base, width), dtype=wide, device=positions.device
    )
    angles = positions[..., None].to(wide) * frequencies
    return rearrange(
        torch.stack([torch.sin(angles), torch.cos(angles)]), "two ... i -> ... (i two)"
    ).to(dtype)


def as_positions(
    positions: ArrayLike, tokens: tuple[int, ...] | None = None
) -> Integer[Tensor, "*b t"]:
    """Return positions as signed integers.

    `tokens` is the shape of the input's tokens, `(t,)` or `(b, t)`, if it is known.

    Raises:
        ValueError: if they are not integers, or if their shape is neither that of the tokens nor
            `(t,)`.

    Example:
        >>> as_positions([0, 1, 2, 0, 1], (4, 5))
        tensor([0, 1, 2, 0, 1])
    """
    positions = torch.as_tensor(positions)
    rule = "positions must be integers of shape (t,) or (b, t)"
    shape, dtype = tuple(positions.shape), positions.dtype
    got = f"got shape {shape}, dtype {str(dtype).removeprefix('torch.')}"
    if dtype.is_floating_point or dtype == torch.bool or len(shape) not in (1, 2):
        raise ValueError(f"{rule}; {got}. Cast and reshape them before the call")
    if tokens is not None and shape not in (tokens, tokens[-1:]):
        raise ValueError(
            f"{rule}, one for each of the tokens {tokens}; {got}. Without b they serve every row"
        )
    return positions.long()


def segment_positions(segments: ArrayLike) -> Integer[Tensor, "*b t"]:
    """Return the position of each token in its packed document, a run of equal ids.

    Args:
        segments: ids of the documents, integers `(t,)` or `(b, t)`, as in `Mask.segments`.

    Raises:
        ValueError: if they are not integers, or of another rank.

    Example:
        >>> segment_positions([7, 7, 7, 2, 2, 9])
        tensor([0, 1, 2, 0, 1, 0])
    """
    ids = torch.as_tensor(segments)
    shape, dtype = tuple(ids.shape), ids.dtype
    if dtype.is_floating_point or dtype == torch.bool or len(shape) not in (1, 2):
        raise ValueError(
            f"segments must be integers of shape (t,) or (b, t), one id a token; got shape {shape},"
            f" dtype {str(dtype).removeprefix('torch.')}. Cast and reshape them before the call"
        )
    begins = torch.diff(ids, dim=-1, prepend=ids[..., :1] - 1) != 0
    positions = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    return positions - torch.where(begins, positions, 0).cummax(dim=-1).values

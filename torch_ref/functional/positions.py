"""Positions in attention: rotary (RoPE), linear biases (ALiBi), relative buckets (T5) and sinusoids.

All are functions of integer positions, computed in the call: no tables are held, and packed and cached sequences give
their positions as they are. Learned positions are an embedding like any other: `nn.Embedding`.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor

from torch_ref.functional.checks import check_positive, check_type
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.frequencies import DynamicNTKScaling, Scaling, check_base, check_pairs, plain_frequencies
from torch_ref.functional.shapes import ArrayLike


@dataclass(frozen=True)
class RoPE:
    """Rotary positions: pairs of features turn by angles that grow with the position.

        (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)    with the angle position * base ** (-2i / width)

    The product of a query and a key then depends on the difference of their positions alone. The arithmetic is in the
    dtype of the input, but at least in float32, in which positions up to 2**24 are exact.

    Args:
        base: ratio of the frequencies, also called theta.
        width: how many features of a head turn, its first ones; None is all.
        interleaved: pair `i` is features `(2i, 2i + 1)` as in the paper and GPT-J, or else `(i, i + width / 2)` as in
            GPT-NeoX, and in Hugging Face's Llama.
        scaling: how the frequencies change for inputs longer than those of the training; None is not at all.

    Shapes:
        x `(b, t, n, h)` with positions `(t,)` or `(b, t)`; x `(t, n, h)` with positions `(t,)`. The shape of x stays,
        and positions that are not given are `0 ... t - 1`.

    Raises:
        ValueError: if `base` is not above 1, `width` is odd or wider than the head, `scaling` is not a `Scaling`, or
            positions are not integers or of another shape.

    Example:
        >>> rope, query, key = RoPE(), torch.ones((1, 1, 8)), torch.ones((1, 1, 8))
        >>> scores = [(rope(query, [5 + shift]) * rope(key, [2 + shift])).sum() for shift in (0, 1000)]
        >>> [round(float(score), 3) for score in scores]
        [3.93, 3.93]

    References:
        Su et al. 2021 (arXiv:2104.09864).
    """

    base: float = 10000.0
    width: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self):
        check_base(self.base)
        if self.width is not None:
            check_pairs("width", self.width)
        check_type("scaling", self.scaling, Scaling | None, "scaling=LinearScaling(8.0), or another one, or None")

    def check_head_dim(self, head_dim: int) -> None:
        """Raise unless heads of this width can turn."""
        if self.width is None:
            check_pairs("head_dim", head_dim)
        elif self.width > head_dim:
            raise ValueError(
                f"width is how many features of a head turn, at most all; got width={self.width}, "
                f"head_dim={head_dim}. For all pass width=None"
            )

    def __call__(self, x: Float[Tensor, "*b t n h"], positions: ArrayLike | None = None) -> Float[Tensor, "*b t n h"]:
        self.check_head_dim(x.shape[-1])
        positions = torch.arange(x.shape[-3]) if positions is None else as_positions(positions, tuple(x.shape[:-2]))
        if x.ndim == 3:
            return self(x[None], positions)[0]
        width = x.shape[-1] if self.width is None else self.width
        positions = (positions if positions.ndim == 2 else positions[None]).to(x.device)
        cos, sin = self._cos_sin(width, positions, x.dtype)
        pairs = "(i two)" if self.interleaved else "(two i)"
        first, second = rearrange(x[..., :width].to(cos.dtype), f"b t n {pairs} -> two b t n i", two=2)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin])
        turned = rearrange(turned, f"two b t n i -> b t n {pairs}").to(x.dtype)
        return torch.cat([turned, x[..., width:]], dim=-1)

    def _cos_sin(self, width: int, positions: Integer[Tensor, "#b t"], dtype: torch.dtype) -> list[Tensor]:
        dtype = accumulation_dtype(dtype)
        frequencies = (plain_frequencies if self.scaling is None else self.scaling.frequencies)(self.base, width)
        frequencies = torch.as_tensor(frequencies, dtype=dtype, device=positions.device)[None]
        if isinstance(self.scaling, DynamicNTKScaling):
            stretch = self.scaling.stretch(1 + positions.amax(dim=1, keepdim=True).to(dtype))
            exponents = torch.as_tensor(self.scaling.exponents(width), dtype=dtype, device=positions.device)
            frequencies = frequencies * stretch ** exponents[None]
        angles = rearrange(positions, "b t -> b t 1 1").to(dtype) * rearrange(frequencies, "b i -> b 1 1 i")
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude()
        return [amplitude * torch.cos(angles), amplitude * torch.sin(angles)]


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of every head: `2 ** (-8 i / num_heads)` for `i = 1 ... num_heads`, in float64.

    Where `num_heads` is not a power of two, the slopes of the power below come first, and then every other slope of
    the power above.

    Raises:
        ValueError: if `num_heads` is not positive.

    Example:
        >>> alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    References:
        Press et al. 2021 (arXiv:2108.12409).
    """
    check_positive(num_heads=num_heads)
    power = 2 ** (num_heads.bit_length() - 1)
    below, above = (2.0 ** (-8 * np.arange(1, count + 1) / count) for count in (power, 2 * power))
    return np.concatenate([below, above[::2][: num_heads - power]])


def alibi(
    num_heads: int, query_positions: ArrayLike, key_positions: ArrayLike, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "*b n t s"]:
    """Attention with linear biases: the farther a key, the lower its score.

        bias = -slope * |query position - key position|

    Under a causal mask it is that of the paper; in both directions it falls equally to either side.

    Args:
        num_heads: number of query heads n.
        query_positions: integers `(t,)` or `(b, t)`.
        key_positions: integers `(s,)` or `(b, s)`.
        dtype: of the bias; None is the default one for floats.

    Shapes:
        Returns `(n, t, s)` or `(b, n, t, s)`, to be passed as `bias=`.

    Raises:
        ValueError: if positions are not integers, their ranks or batches differ, or `num_heads` is not positive.

    Example:
        >>> alibi(8, [2], [0, 1, 2])[0]
        tensor([[-1.0000, -0.5000,  0.0000]])

    References:
        Press et al. 2021 (arXiv:2108.12409).
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    nearness = (-_offsets(query_positions, key_positions).abs()).to(dtype)
    slopes = torch.as_tensor(alibi_slopes(num_heads), dtype=dtype, device=nearness.device)
    return rearrange(nearness[..., None] * slopes, "... t s n -> ... n t s")


def t5_bias(
    table: Float[Tensor, "buckets n"],
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
) -> Float[Tensor, "*b n t s"]:
    """Relative position bias: a learned number for each head and bucket of `key position - query position`.

        bias[n, t, s] = table[t5_buckets(...)[t, s], n]

    T5 adds it to scores that are not scaled: `scale=1.0`.

    Args:
        table: `(num_buckets, n)`, learned; the first layer's of T5 serves all layers.
        query_positions: integers `(t,)` or `(b, t)`.
        key_positions: integers `(s,)` or `(b, s)`.
        bidirectional: whether keys after the query have buckets of their own, as in an encoder.
        max_distance: from here on all distances share the last bucket.

    Shapes:
        Returns `(n, t, s)` or `(b, n, t, s)`, to be passed as `bias=`.

    Raises:
        ValueError: where `t5_buckets` does.

    Example:
        >>> t5_bias(torch.arange(8.0)[:, None], [2], [0, 1, 2, 3])[0]
        tensor([[2., 1., 0., 5.]])

    References:
        Raffel et al. 2019 (arXiv:1910.10683).
    """
    options = {"bidirectional": bidirectional, "num_buckets": table.shape[0], "max_distance": max_distance}
    return rearrange(table[t5_buckets(query_positions, key_positions, **options)], "... t s n -> ... n t s")


def t5_buckets(
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Integer[Tensor, "*b t s"]:
    """Return the bucket of `key position - query position`: one a distance at first, then ever wider ones.

    Of the `m` buckets of a direction, half of `num_buckets` or all, distances `d` below `e = m // 2` have one each; the
    others are `e + floor((m - e) * log(d / e) / log(max_distance / e))`, at most `m - 1`. Without `bidirectional` keys
    after the query stand at distance 0. Computed with integers alone, so the same on every device.

    Raises:
        ValueError: if positions are not integers or their ranks or batches differ, if there are less than 4 buckets,
            or 2 for one direction, or if `max_distance` leaves no room for wide buckets.

    Example:
        >>> t5_buckets([40], [0, 20, 30, 39, 40, 41, 50, 99])
        tensor([[12, 10,  8,  1,  0, 17, 24, 29]])

    References:
        Raffel et al. 2019 (arXiv:1910.10683).
    """
    offsets = _offsets(query_positions, key_positions)
    one_way = num_buckets // 2 if bidirectional else num_buckets
    starts = torch.tensor(_bucket_starts(one_way, max_distance), device=offsets.device)
    distances = offsets.abs() if bidirectional else (-offsets).clamp(min=0)
    buckets = torch.searchsorted(starts, distances, right=True)
    return torch.where(offsets > 0, buckets + one_way, buckets) if bidirectional else buckets


def _bucket_starts(buckets: int, max_distance: int) -> list[int]:
    # The smallest distance of every bucket but the first. log(d / e) * wide >= log(max_distance / e) * j in integers.
    exact = buckets // 2
    wide = buckets - exact
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            "T5 needs at least 2 buckets a direction, and a max_distance beyond the half of them that hold one "
            f"distance each; got {buckets} buckets a direction, max_distance={max_distance}. Usual are 32 and 128"
        )
    powers = (max_distance**j * exact ** (wide - j) for j in range(wide))
    return [*range(1, exact), *(bisect_left(range(max_distance), power, key=lambda d: d**wide) for power in powers)]


def sinusoidal(
    positions: ArrayLike, width: int, *, base: float = 10000.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "*b t d"]:
    """Sinusoids to be added to token embeddings.

        out[2i] = sin(position * base ** (-2i / width)),  out[2i + 1] = cos(position * base ** (-2i / width))

    Args:
        positions: integers `(t,)` or `(b, t)`.
        width: of the tokens, even.
        base: ratio of the frequencies.
        dtype: of the result, computed in at least float32; None is the default one for floats.

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
    dtype = torch.get_default_dtype() if dtype is None else dtype
    wide = accumulation_dtype(dtype)
    positions = as_positions(positions)
    frequencies = torch.as_tensor(plain_frequencies(base, width), dtype=wide, device=positions.device)
    angles = positions[..., None].to(wide) * frequencies
    return rearrange(torch.stack([torch.sin(angles), torch.cos(angles)]), "two ... i -> ... (i two)").to(dtype)


def as_positions(positions: ArrayLike, tokens: tuple[int, ...] | None = None) -> Integer[Tensor, "*b t"]:
    """Return positions as signed integers, for an input whose tokens have shape `(t,)` or `(b, t)` if it is known.

    Raises:
        ValueError: if they are not integers, or if their shape is neither that of the tokens nor `(t,)`.

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
        raise ValueError(f"{rule}, one for each of the tokens {tokens}; {got}. Without b they serve every row")
    return positions.long()


def segment_positions(segments: ArrayLike) -> Integer[Tensor, "*b t"]:
    """Return the place of each token within its run of equal ids: the positions of packed documents.

    Args:
        segments: integers `(t,)` or `(b, t)`, as in `Mask.segments`.

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
            "segments must be integers of shape (t,) or (b, t), one id a token; "
            f"got shape {shape}, dtype {str(dtype).removeprefix('torch.')}. Cast and reshape them before the call"
        )
    begins = torch.diff(ids, dim=-1, prepend=ids[..., :1] - 1) != 0
    places = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    return places - torch.where(begins, places, 0).cummax(dim=-1).values


def _offsets(query_positions: ArrayLike, key_positions: ArrayLike) -> Integer[Tensor, "*b t s"]:
    query, key = as_positions(query_positions), as_positions(key_positions)
    if query.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            "query and key positions must both have the same b, or both none; "
            f"got shapes {tuple(query.shape)} and {tuple(key.shape)}. Repeat the positions that all rows share"
        )
    return rearrange(key, "... s -> ... 1 s") - rearrange(query, "... t -> ... t 1")

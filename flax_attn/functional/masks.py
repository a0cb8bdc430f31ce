"""Masks as data: which query may see which key, kept as structure and not as a matrix.

A `Mask` is a conjunction of parts, so any block of a mask can be made without the whole. `True`
means attend, everywhere. Query `i` has position `offset + i`, key `j` has position `j`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

from attn_spec.checks import check_positive
from attn_spec.function_checks import SEES, check_sees
from attn_spec.mask_checks import check_counts, check_window, refuse_operator, refuse_truth
from attn_spec.mask_text import check_printable, expression, picture
from flax_attn.functional.abstract import ArrayOrShape as ArrayLike
from flax_attn.functional.abstract import or_abstract
from flax_attn.functional.block_summary import summarise
from flax_attn.functional.kv_range import KVRange, Limit, Tiles
from flax_attn.functional.mask_arguments import as_booleans, as_ids, as_integers
from flax_attn.functional.mask_function import Where
from flax_attn.functional.mask_part import Count, IntervalPart, MaskPart
from flax_attn.functional.mask_parts import Causal, Dense, Lengths, Prefix, Segments, Window
from flax_attn.functional.shapes import Index, Visible
from flax_attn.functional.traced import trace


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A conjunction of parts: `mask & other` lets through what both let through.

    The structure is kept. An empty `Mask()` hides nothing. Arrays inside a mask may be traced;
    Python integers stay static, so that a kernel can skip blocks.

    Example:
        >>> mask = Mask.causal() & Mask.lengths(key=jnp.array([3, 2]))
        >>> mask.materialise(2, 1, 3, 3)[1, 0].astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 0]], dtype=int32)
    """

    parts: tuple[MaskPart, ...] = ()

    @staticmethod
    @or_abstract
    def causal(offset: Count | ArrayLike | None = None) -> Mask:
        """Query `i` sees key `j` when `j <= offset + i`.

        The offset is 0 where t == s and must be given elsewhere.
        """
        return Mask((Causal(offset=as_integers("offset", offset)),))

    @staticmethod
    @or_abstract
    def window(
        left: int | None, right: int | None, offset: Count | ArrayLike | None = None
    ) -> Mask:
        """Query at position `p` sees the keys from `p - left` to `p + right`, both included."""
        check_window(left=left, right=right)
        # Integers of NumPy become those of Python.
        left = None if left is None else int(left)
        right = None if right is None else int(right)
        return Mask((Window(left, right, offset=as_integers("offset", offset)),))

    @staticmethod
    def sliding_window(width: int, offset: Count | ArrayLike | None = None) -> Mask:
        """Causal, and `width` keys in all, the query's own included: `window(width - 1, 0)`."""
        check_positive(width=width)
        return Mask.window(width - 1, 0, offset)

    @staticmethod
    @or_abstract
    def where(function: Callable, offset: Count | ArrayLike | None = None) -> Mask:
        """Key `j` is seen from position `p = offset + i` when `function(b, n, p, j)`.

        The function is written for scalars: `b` is the row of the batch, `n` the query head. It is
        traced once on indices: it indexes arrays and computes with `&`, `|` and `~`, without `if`.
        The offset is 0 if not given, and follows a `KVCache`.

        Raises:
            ValueError: if it is no such function, or returns no booleans; in a call, if it reads an
                array at an index that goes beyond its end.

        Example:
            >>> strided = Mask.where(lambda b, n, i, j: (i - j) % 2 == 0) & Mask.causal()
            >>> print(strided.as_text(3))
              0 1 2
            0 ■ · ·
            1 · ■ ·
            2 ■ · ■

        References:
            Dong et al. 2024, FlexAttention (arXiv:2412.05496).
        """
        traced, result = trace("mask", function, SEES)
        check_sees(result.dtype.name, result.shape, ())
        return Mask((Where(traced, offset=as_integers("offset", offset)),))

    @staticmethod
    @or_abstract
    def lengths(
        *, query: Count | ArrayLike | None = None, key: Count | ArrayLike | None = None
    ) -> Mask:
        """Hide padding: in row `b` the first `query[b]` queries and `key[b]` keys are real.

        With `key` only, queries of padding still attend, and their output is not 0. In
        self-attention of a layer pass `lengths=` to the layer, which hides both.
        """
        counts = as_integers("query lengths", query), as_integers("key lengths", key)
        check_counts(query_lengths=query, key_lengths=key)
        return Mask((Lengths(*counts),))

    @staticmethod
    @or_abstract
    def segments(query: ArrayLike, key: ArrayLike | None = None) -> Mask:
        """Packed documents: a query sees the keys that have its id.

        The ids are `(b, t)` for queries and `(b, s)` for keys, which have those of the queries if
        `key` is None.
        """
        return Mask((Segments(*as_ids(query, key)),))

    @staticmethod
    @or_abstract
    def prefix(length: Count | ArrayLike, offset: Count | ArrayLike | None = None) -> Mask:
        """Prefix-LM: causal, and the first `length` keys are open to every query."""
        count = as_integers("prefix length", length)
        check_counts(prefix_length=length)
        return Mask((Prefix(count, offset=as_integers("offset", offset)),))

    @staticmethod
    @or_abstract
    def dense(array: ArrayLike) -> Mask:
        """Any boolean array that broadcasts to `(b, n, t, s)`, True = attend.

        One of numbers is taken where its values are known and are 0 and 1, with at least one 1.
        """
        return Mask((Dense(as_booleans(array)),))

    # NumPy leaves `array & mask` to the mask.
    __array_priority__ = 1

    def __and__(self, other: Mask | ArrayLike) -> Mask:
        return Mask(self.parts + as_mask(other).parts)

    __rand__ = __and__

    def __or__(self, other: object) -> None:
        refuse_operator("|")

    __ror__ = __or__

    def __invert__(self) -> None:
        refuse_operator("~")

    def __bool__(self) -> bool:
        refuse_truth()

    def resolve(self, b: int, n: int, t: int, s: int) -> Mask:
        """Return the mask for a call of this size: default offsets filled in, shapes checked."""
        return Mask(tuple(part.resolve(b, n, t, s) for part in self.parts))

    def sized(self, b: int | None, n: int | None) -> Mask:
        """Return the mask for `b` rows and `n` heads; None leaves a number open.

        Functions inside the mask may read both. A call does this for its own mask.
        """
        return Mask(tuple(part.sized(b, n) for part in self.parts))

    def block(self, rows: Integer[Array, " t"], cols: Integer[Array, " s"]) -> Visible:
        """Return the mask at the query indices `rows` and key indices `cols`.

        Axes that do not matter have size 1.
        """
        rows = rows.astype(jnp.int32)[None, None, :, None]
        cols = cols.astype(jnp.int32)[None, None, None, :]
        # Axes of 1 until a part needs more: a causal mask has no row of the batch.
        allowed = jnp.ones((1, 1, 1, 1), bool)
        for part in self.parts:
            allowed = allowed & part.allow(rows, cols)
        return allowed

    def materialise(self, b: int, n: int, t: int, s: int) -> Bool[Array, "b n t s"]:
        """Return the whole mask as one boolean array."""
        block = self.resolve(b, n, t, s).block(jnp.arange(t), jnp.arange(s))
        return jnp.broadcast_to(block, (b, n, t, s))

    def as_text(self, t: int, s: int | None = None, *, b: int = 1, n: int = 1) -> str:
        """Return the mask in marks, queries down and keys across: `■` is seen, `·` is hidden.

        Where s is not given it is t. Rows of a batch and heads that differ get a picture each.

        Raises:
            ValueError: if the mask does not fit the sizes, or is too large to print.

        Example:
            >>> print(Mask.sliding_window(2).as_text(4))
              0 1 2 3
            0 ■ · · ·
            1 ■ ■ · ·
            2 · ■ ■ ·
            3 · · ■ ■
        """
        s = t if s is None else s
        check_printable(t, s)
        block = self.resolve(b, n, t, s).block(jnp.arange(t), jnp.arange(s))
        return picture(jnp.broadcast_to(block, (*block.shape[:2], t, s)).tolist())

    def __repr__(self) -> str:
        return expression(self.parts)

    def kv_range(self, first: Limit, last: Limit, s: int) -> KVRange:
        """Return which of `s` keys the queries `first` to `last`, both included, may see.

        This is the range over all rows of the batch and all heads: Python integers where the
        queries and the mask are integers, so that a kernel can skip blocks before tracing, and
        arrays where the mask holds arrays or the queries are traced. A part that cannot tell shows
        every key.

        Example:
            >>> Mask.sliding_window(5).kv_range(8, 11, s=16)
            KVRange(start=4, stop=12, inner_start=7, inner_stop=9)
        """
        ranges = (part.kv_range(first, last, s) for part in self.parts)
        return reduce(KVRange.__and__, ranges, KVRange(0, s, 0, s))

    @property
    def summarised(self) -> bool:
        """Whether there is a summary of the tiles of a part; see `summarise`."""
        return any(part.summarised for part in self.parts)

    def summarise(self, t: int, s: int, *, b: int = 1, n: int = 1, tile: int = 128) -> Mask:
        """Return the mask with a summary of its tiles: which are empty, and which are whole.

        A tile is `tile` queries by `tile` keys. Kernels skip empty tiles and need no mask in whole
        ones. Summarise masks that do not know what they hide: functions, dense arrays, segments in
        any order. Do it once, outside the step, and combine the result with other masks:
        `Mask.where(fn).summarise(t, s) & Mask.causal()`. `b` and `n` are needed where the mask
        differs between them.

        Raises:
            ValueError: if the mask does not fit these sizes; in a call, if it has others.

        Example:
            >>> near = Mask.where(lambda b, n, i, j: abs(i // 4 - j // 4) < 2)
            >>> near.summarise(16, 16, tile=4).parts[0].summary.some[0, 0].sum(axis=1)
            Array([2, 3, 3, 2], dtype=int32)
        """
        return Mask((summarise(self, b, n, t, s, tile),))

    def tiles(self, first: Limit, last: Limit, starts: Index, stops: Index, s: int) -> Tiles:
        """Return what the queries `first` to `last` see of each run of keys.

        Run i is the keys from `starts[i]` to before `stops[i]`.
        """
        tiles = (part.tiles(first, last, starts, stops, s) for part in self.parts)
        return reduce(Tiles.__and__, tiles, Tiles(starts < s, stops <= s))

    def split_band(self) -> tuple[tuple[int | None, int | None], Mask]:
        """Return `(low, high)` for the parts that are `low <= key - query <= high`, and the rest.

        Causal masks and windows whose offset is an integer make this band, which is the same for
        every query; None is unbounded. The rest is a mask of the other parts.

        Example:
            >>> (Mask.sliding_window(5) & Mask.lengths(key=3)).split_band()
            ((-4, 0), Mask.lengths(key=3))
        """
        lows = []
        highs = []
        rest = []
        for part in self.parts:
            band = part.band()
            if band is None:
                rest.append(part)
                continue
            low, high = band
            if low is not None:
                lows.append(low)
            if high is not None:
                highs.append(high)
        # What all parts let through lies within the narrowest of their bands.
        band = max(lows, default=None), min(highs, default=None)
        return band, Mask(tuple(rest))

    def split_intervals(self, t: int, s: int) -> tuple[tuple[Array, Array], Mask]:
        """Return `(start, stop)`, the interval of keys that each query may see, and the rest.

        Query i may see the keys from `start[:, i]` to before `stop[:, i]`, with a row for each row
        of the batch or one for all. The rest is a mask of the other parts, such as segments.

        Example:
            >>> (start, stop), rest = Mask.sliding_window(2).split_intervals(3, 3)
            >>> start[0].tolist(), stop[0].tolist(), rest
            ([0, 0, 1], [1, 2, 3], Mask())
        """
        rows = jnp.arange(t, dtype=jnp.int32).reshape(1, 1, t, 1)
        start = jnp.zeros_like(rows)
        stop = jnp.full_like(rows, s)
        rest = []
        for part in self.parts:
            if not isinstance(part, IntervalPart):
                rest.append(part)
                continue
            first, last = part.interval(rows)
            start = jnp.maximum(start, first)
            stop = jnp.minimum(stop, last + 1)
        # No interval depends on the head.
        return (start[:, 0, :, 0], stop[:, 0, :, 0]), Mask(tuple(rest))

    def row(self, b: int | Index, n: int | Index | None = None) -> Mask:
        """Return the mask of batch row `b` and head `n`, as one of a single row and head.

        With `n=None` it is the mask of all heads.
        `b` and `n` may be traced. Integers inside the mask stay static.

        Example:
            >>> mask = Mask.causal() & Mask.lengths(key=jnp.array([3, 2]))
            >>> mask.row(1, 0).materialise(1, 1, 3, 3)[0, 0].astype(int)
            Array([[1, 0, 0],
                   [1, 1, 0],
                   [1, 1, 0]], dtype=int32)
        """
        return Mask(tuple(part.row(b, n) for part in self.parts))

    def at(self, rows: Integer[Array, "#b t"], cols: Integer[Array, "#b s"]) -> Visible:
        """Return the mask at query and key indices that may differ between rows of the batch.

        Example:
            >>> rows, cols = jnp.array([[4], [5]]), jnp.array([[3, 4, 5], [3, 4, 5]])
            >>> Mask.causal().at(rows, cols).astype(int)[:, 0, 0]
            Array([[1, 1, 0],
                   [1, 1, 1]], dtype=int32)
        """

        def one(b, rows, cols):
            block = self.row(b).block(rows, cols)[0]
            return jnp.broadcast_to(block, (len(block), len(rows), len(cols)))

        return jax.vmap(one)(jnp.arange(len(rows)), rows, cols)

    def shift(self, start: Count, t: int, s: int) -> Mask:
        """Return the mask of the `t` queries from index `start` on and the first `s` keys.

        It is the mask of a call of its own: as with `at` for consecutive indices, but the structure
        is kept.

        Example:
            >>> Mask.sliding_window(5).shift(7, t=1, s=16)
            Mask.window(4, 0, offset=7)
        """
        return Mask(tuple(part.shift(start, t, s) for part in self.parts))

    def check_whole(self, s: int) -> None:
        """Raise unless the arrays inside are those of a sequence of `s` tokens."""
        for part in self.parts:
            part.check_whole(s)


def as_mask(mask: Mask | ArrayLike | None, heads: bool = True) -> Mask:
    """Return a `Mask` for whatever may be passed as one; None hides nothing.

    Without `heads` an array of rank 3 is `(b, t, s)`, and the head axis is put in.
    """
    if mask is None:
        return Mask()
    mask = mask if isinstance(mask, Mask) else Mask.dense(mask)
    return mask if heads else Mask(tuple(_with_head_axis(part) for part in mask.parts))


def _with_head_axis(part: MaskPart) -> MaskPart:
    if isinstance(part, Dense) and part.array.ndim == 3:
        return Dense(part.array[:, None])
    return part

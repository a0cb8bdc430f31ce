"""Masks as data: which query may see which key, kept as structure and not as a matrix.

A `Mask` is a conjunction of parts. Each part decides from index arrays alone, so any block of a mask can be
made without the whole. `True` means attend, everywhere. Query `i` stands at position `offset + i`,
key `j` at position `j`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer

from flax_attn.functional.checks import check_broadcast, check_positive
from flax_attn.functional.shapes import ArrayLike, Index

Count = int | Integer[Array, ""] | Integer[Array, " b"]


class _Part:
    """One condition on (query, key). Python integers stay static under `jax.jit`, arrays are traced."""

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(cls, _flatten, lambda static, children: _unflatten(cls, static, children))

    def resolve(self, b: int, n: int, t: int, s: int) -> _Part:
        """Return the part made definite for a call of this size, or raise `ValueError`."""
        return self

    def allow(self, rows: Index, cols: Index) -> Array:
        """Return the block of the mask at query indices `(1, 1, t, 1)` and key indices `(1, 1, 1, s)`."""
        raise NotImplementedError


def _flatten(part):
    values = vars(part)
    traced = [name for name, value in values.items() if not isinstance(value, int | None)]
    static = tuple((name, value) for name, value in values.items() if name not in traced)
    return [values[name] for name in traced], (tuple(traced), static)


def _unflatten(cls, static, children):
    part = object.__new__(cls)  # children may be tracers or placeholders: nothing is checked again
    for name, value in (*static[1], *zip(static[0], children, strict=True)):
        object.__setattr__(part, name, value)
    return part


@dataclass(frozen=True)
class _Positioned(_Part):
    """A part in which query `i` stands at `offset + i`."""

    offset: Count | None = field(default=None, kw_only=True)

    def resolve(self, b, n, t, s):
        if self.offset is None and t != s:
            raise ValueError(
                f"a causal, window or prefix mask needs an offset when t != s: query i stands at offset + i; got "
                f"t={t}, s={s}. Choose offset=0 (top-left, as torch's is_causal) or offset={s - t} (bottom-right, "
                "as FlashAttention): build a module with causal=False and pass mask=Mask.causal(offset=...)"
            )
        if isinstance(self.offset, int) and not -t <= self.offset <= s:
            raise ValueError(
                f"a mask offset must lie between -t and s, or every query sees nothing or everything; "
                f"got offset={self.offset}, t={t}, s={s}"
            )
        _check_rows("offset", self.offset, b)
        return self if self.offset is not None else dataclasses.replace(self, offset=0)

    def position(self, rows):
        return rows + _per_row(0 if self.offset is None else self.offset)


@dataclass(frozen=True)
class Causal(_Positioned):
    """Key `j` is seen from position `p` when `j <= p`."""

    def allow(self, rows, cols):
        return cols <= self.position(rows)


@dataclass(frozen=True)
class Window(_Positioned):
    """Key `j` is seen from position `p` when `p - left <= j <= p + right`; None is unbounded."""

    left: int | None
    right: int | None

    def allow(self, rows, cols):
        distance = cols - self.position(rows)
        inside = jnp.ones_like(distance, bool)
        if self.left is not None:
            inside &= distance >= -self.left
        if self.right is not None:
            inside &= distance <= self.right
        return inside


@dataclass(frozen=True)
class Prefix(_Positioned):
    """Key `j` is seen from position `p` when `j <= p` or `j < length`."""

    length: Count

    def resolve(self, b, n, t, s):
        _check_rows("length", self.length, b)
        return super().resolve(b, n, t, s)

    def allow(self, rows, cols):
        return (cols <= self.position(rows)) | (cols < _per_row(self.length))


@dataclass(frozen=True)
class Lengths(_Part):
    """Query `i` sees key `j` when `i < query` and `j < key`; None is unbounded."""

    query: Count | None = None
    key: Count | None = None

    def resolve(self, b, n, t, s):
        _check_rows("query lengths", self.query, b)
        _check_rows("key lengths", self.key, b)
        return self

    def allow(self, rows, cols):
        inside = jnp.ones((1, 1, 1, 1), bool)
        if self.query is not None:
            inside = inside & (rows < _per_row(self.query))
        if self.key is not None:
            inside = inside & (cols < _per_row(self.key))
        return inside


@dataclass(frozen=True)
class Segments(_Part):
    """Query `i` sees key `j` when their segment ids are equal."""

    query: Integer[Array, "*b t"]
    key: Integer[Array, "*b s"]

    def resolve(self, b, n, t, s):
        for name, ids, size in (("query", self.query, t), ("key", self.key, s)):
            shape = ids.shape
            if shape not in ((size,), (1, size), (b, size)):
                raise ValueError(
                    f"{name} segments must have one id a token, shape ({b}, {size}) or ({size},); got {shape}. "
                    "When t != s pass both: Mask.segments(query, key)"
                )
        return self

    def allow(self, rows, cols):
        query = jnp.atleast_2d(self.query)[:, rows.reshape(-1)]
        key = jnp.atleast_2d(self.key)[:, cols.reshape(-1)]
        return query[:, None, :, None] == key[:, None, None, :]


@dataclass(frozen=True)
class Dense(_Part):
    """Any boolean array that broadcasts to `(b, n, t, s)`."""

    array: Bool[Array, ...]

    def resolve(self, b, n, t, s):
        check_broadcast("mask", self.array.shape, (b, n, t, s))
        return self

    def allow(self, rows, cols):
        array = self.array.reshape((1,) * (4 - self.array.ndim) + self.array.shape)
        array = array if array.shape[2] == 1 else array[:, :, rows.reshape(-1)]
        return array if array.shape[3] == 1 else array[:, :, :, cols.reshape(-1)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A conjunction of parts: `mask & other` lets through what both let through, and keeps the structure.

    An empty `Mask()` hides nothing. Arrays inside a mask may be traced; Python integers stay static, so
    that a kernel can skip blocks.

    Example:
        >>> mask = Mask.causal() & Mask.lengths(key=jnp.array([3, 2]))
        >>> mask.materialise(2, 1, 3, 3)[1, 0].astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 0]], dtype=int32)
    """

    parts: tuple[_Part, ...] = ()

    @staticmethod
    def causal(offset: Count | None = None) -> Mask:
        """Query `i` sees key `j` when `j <= offset + i`. The offset is 0 where t == s and must be given elsewhere."""
        return Mask((Causal(offset=_integers("offset", offset)),))

    @staticmethod
    def window(left: int | None, right: int | None, offset: Count | None = None) -> Mask:
        """Query at position `p` sees the keys from `p - left` to `p + right`, both included."""
        for name, size in (("left", left), ("right", right)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, Integral) or size < 0):
                raise ValueError(
                    f"a window's {name} is a number of keys, at least 0, known before tracing; got {name}={size}. "
                    "For an unbounded side pass None"
                )
        return Mask((Window(left, right, offset=_integers("offset", offset)),))

    @staticmethod
    def sliding_window(width: int, offset: Count | None = None) -> Mask:
        """Causal, and `width` keys in all, the query's own included: `window(width - 1, 0)`."""
        check_positive(width=width)
        return Mask.window(width - 1, 0, offset)

    @staticmethod
    def lengths(*, query: Count | ArrayLike | None = None, key: Count | ArrayLike | None = None) -> Mask:
        """Hide padding at the end: of row `b` only the first `query[b]` queries and `key[b]` keys are real."""
        return Mask((Lengths(_integers("query lengths", query), _integers("key lengths", key)),))

    @staticmethod
    def segments(query: ArrayLike, key: ArrayLike | None = None) -> Mask:
        """Packed documents: `(b, t)` ids of the queries and `(b, s)` ids of the keys (the same if not given)."""
        query = jnp.asarray(_integers("query segments", query))
        return Mask((Segments(query, query if key is None else jnp.asarray(_integers("key segments", key))),))

    @staticmethod
    def prefix(length: Count | ArrayLike, offset: Count | None = None) -> Mask:
        """Prefix-LM: causal, and the first `length` keys are open to every query."""
        return Mask((Prefix(_integers("prefix length", length), offset=_integers("offset", offset)),))

    @staticmethod
    def dense(array: ArrayLike) -> Mask:
        """Any boolean array that broadcasts to `(b, n, t, s)`."""
        return Mask((Dense(_boolean(array)),))

    __array_priority__ = 1  # array & mask comes here too

    def __and__(self, other: Mask | ArrayLike) -> Mask:
        return Mask(self.parts + as_mask(other).parts)

    __rand__ = __and__

    def resolve(self, b: int, n: int, t: int, s: int) -> Mask:
        """Return the mask made definite for a call of this size: default offsets filled in, shapes checked."""
        return Mask(tuple(part.resolve(b, n, t, s) for part in self.parts))

    def block(self, rows: Integer[Array, " t"], cols: Integer[Array, " s"]) -> Bool[Array, "#b #n #t #s"]:
        """Return the mask at the query indices `rows` and key indices `cols`, axes that do not matter being 1."""
        rows = rows.astype(jnp.int32)[None, None, :, None]
        cols = cols.astype(jnp.int32)[None, None, None, :]
        allowed = jnp.ones((1, 1, 1, 1), bool)
        for part in self.parts:
            allowed = allowed & part.allow(rows, cols)
        return allowed

    def materialise(self, b: int, n: int, t: int, s: int) -> Bool[Array, "b n t s"]:
        """Return the whole mask as one boolean array."""
        block = self.resolve(b, n, t, s).block(jnp.arange(t), jnp.arange(s))
        return jnp.broadcast_to(block, (b, n, t, s))


def as_mask(mask: Mask | ArrayLike | None, heads: bool = True) -> Mask:
    """Return a `Mask` for whatever may be passed as one; None hides nothing.

    Without `heads` an array of rank 3 is `(b, t, s)`, and the head axis is put in.
    """
    mask = mask if isinstance(mask, Mask) else Mask() if mask is None else Mask.dense(mask)
    return mask if heads else Mask(tuple(_with_head_axis(part) for part in mask.parts))


def _with_head_axis(part: _Part) -> _Part:
    return Dense(part.array[:, None]) if isinstance(part, Dense) and part.array.ndim == 3 else part


def create_causal_mask(t: int, s: int | None = None, offset: int | None = None) -> Bool[Array, "t s"]:
    """Return the causal mask as an array, `True` = attend: `mask[i, j] = (j <= offset + i)`.

    Raises:
        ValueError: if t != s and no offset is given.

    Example:
        >>> create_causal_mask(3).astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]], dtype=int32)
    """
    return Mask.causal(offset).materialise(1, 1, t, t if s is None else s)[0, 0]


def _boolean(array: Any) -> Array:
    array = jnp.asarray(array)
    if array.dtype != bool:
        raise ValueError(
            f"mask must be boolean, True = attend; got dtype {array.dtype}. "
            "To add numbers to the scores pass them as bias; for 0/1 integers write mask.astype(bool)"
        )
    return array


def _integers(name: str, values: Any) -> Any:
    if values is None or (isinstance(values, Integral) and not isinstance(values, bool)):
        return values if values is None else int(values)
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} must be integers; got dtype {values.dtype}. Cast them before the call")
    return values


def _check_rows(name: str, values: Count | None, b: int) -> None:
    if values is not None and np.shape(values) not in ((), (1,), (b,)):
        raise ValueError(f"{name} must be one integer or one a row, shape ({b},); got shape {np.shape(values)}")


def _per_row(values: Count) -> Array:
    return jnp.asarray(values, jnp.int32).reshape(-1, 1, 1, 1)

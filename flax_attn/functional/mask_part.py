"""What a condition of a mask has to answer, and the answers that follow from others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer

from flax_attn.functional.kv_range import KVRange, Limit, Tiles
from flax_attn.functional.shapes import Index

Count = int | Integer[Array, ""] | Integer[Array, " b"]


class Part:
    """One condition on (query, key).

    Python integers stay static under `jax.jit`, arrays are traced.
    A new kind of part has to define `allow`, and is then correct in every backend. `kv_range` and
    `band` let kernels skip what is hidden; `row` and `shift` keep the structure of a part whose
    `allow` depends on the batch row or shape.

    Attributes:
        axes: axes of the arrays inside, by the name of the field: `"batch"`, `"heads"`, or None for
            one that is not divided among devices; aligned at the last. None is a part whose arrays
            are not known.
    """

    axes: ClassVar[dict[str, tuple[str | None, ...]] | None] = None

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, partial(_unflatten, cls), _flatten
        )

    def resolve(self, b: int, n: int, t: int, s: int) -> Part:
        """Return the part for a call of this size, with its defaults filled in, or raise."""
        return self

    def sized(self, b: int | None, n: int | None) -> Part:
        """Return the part for `b` rows of the batch and `n` heads; None leaves a number open."""
        return self

    def allow(self, rows: Index, cols: Index) -> Array:
        """Return the mask at query indices `(1, 1, t, 1)` and key indices `(1, 1, 1, s)`."""
        raise NotImplementedError

    def kv_range(self, first: Limit, last: Limit, s: int) -> KVRange:
        """Return which of `s` keys the queries `first` to `last` may see.

        By default any key may be seen, and no key is known to be seen by all queries.
        """
        return KVRange(0, s, 0, 0)

    @property
    def summarised(self) -> bool:
        """Whether `tiles` knows more than `kv_range`."""
        return False

    def tiles(self, first: Limit, last: Limit, starts: Index, stops: Index, s: int) -> Tiles:
        """Return what the queries `first` to `last` see of each run of keys.

        Run i is the keys from `starts[i]` to before `stops[i]`.
        """
        found = self.kv_range(first, last, s)
        seen = (starts < found.stop) & (stops > found.start)
        return Tiles(seen, (starts >= found.inner_start) & (stops <= found.inner_stop))

    def band(self) -> tuple[int | None, int | None] | None:
        """Return `(low, high)` if the part is `low <= key - query <= high`, else None.

        The bounds are integers known before tracing.
        """
        return None

    @property
    def has_interval(self) -> bool:
        """Whether what a query sees is an interval of keys, which `interval` returns."""
        return type(self).interval is not Part.interval

    def interval(self, rows: Index) -> tuple[Array | int, Array | int]:
        """Return `(start, stop)`: queries at `rows` see the keys from `start` to before `stop`.

        Both broadcast to `(b, 1, t, 1)`, and may lie outside the keys. Only for a part that
        `has_interval`.
        """
        raise NotImplementedError

    def row(self, b: int | Index, n: int | Index | None) -> Part:
        """Return the part for one batch row and head, or for all heads."""
        return _RowOf(self, b, n)

    def shift(self, start: Count, t: int, s: int) -> Part:
        """Return the part for the `t` queries from index `start` on, and the first `s` keys."""
        return _Shifted(self, start)

    def check_whole(self, s: int) -> None:
        """Raise unless arrays inside are those of a sequence of `s` tokens."""


def _flatten(part):
    values = vars(part)
    traced = [name for name, value in values.items() if not isinstance(value, int | None)]
    static = tuple((name, value) for name, value in values.items() if name not in traced)
    return [values[name] for name in traced], (tuple(traced), static)


def _flatten_with_keys(part):
    children, static = _flatten(part)
    names, _ = static
    keys = map(jax.tree_util.GetAttrKey, names)
    return list(zip(keys, children, strict=True)), static


def _unflatten(cls, static, children):
    part = object.__new__(cls)  # children may be tracers or placeholders: nothing is checked again
    for name, value in (*static[1], *zip(static[0], children, strict=True)):
        object.__setattr__(part, name, value)
    return part


@dataclass(frozen=True)
class _RowOf(Part):
    """Any part at one batch row and one head; None is all heads."""

    part: Part
    b: int | Index
    n: int | Index | None

    def allow(self, rows, cols):
        block = pick(of_rank_4(self.part.allow(rows, cols)), self.b, 0)
        return block if self.n is None else pick(block, self.n, 1)


@dataclass(frozen=True)
class _Shifted(Part):
    """Any part, its queries counted from index `start`, one integer or one a row."""

    part: Part
    start: Count

    def allow(self, rows, cols):
        def one(b, start):
            return pick(of_rank_4(self.part.allow(rows + start, cols)), b, 0)[0]

        if isinstance(self.start, int):
            return self.part.allow(rows + self.start, cols)
        starts = jnp.atleast_1d(self.start).astype(jnp.int32)
        if len(starts) == 1:
            return self.part.allow(rows + starts[0], cols)
        return jax.vmap(one)(jnp.arange(len(starts), dtype=jnp.int32), starts)


def of_rank_4(array: Array) -> Array:
    """Return the array with axes of one before its own, so that it has four."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def pick(array: Array, index: int | Index, axis: int) -> Array:
    """Return the array at one index of an axis, which stays; an axis of one serves every index."""
    # A slice is moved to where it fits.
    return jax.lax.dynamic_slice_in_dim(array, index, 1, axis)

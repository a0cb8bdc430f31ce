"""A mask that is a function of indices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from attn_spec.attention_checks import check_position
from attn_spec.function_checks import SEES, check_known, check_same_size
from flax_attn.functional.kv_range import as_int32
from flax_attn.functional.mask_parts import Positioned
from flax_attn.functional.shapes import Index


@dataclass(frozen=True)
class Where(Positioned):
    """Query `i` of head `n` in row `b` sees key `j` from position `p` when `function(b, n, p, j)`.

    Args:
        function: traced function, with the arrays that it captures.
        b: indices of the rows of the batch, `(b,)`; None until it is known how many there are.
        n: indices of the heads, `(n,)`; None until it is known how many there are.
    """

    function: Any
    b: Any = field(default=None, repr=False)
    n: Any = field(default=None, repr=False)
    axes = {"offset": ("batch",), "b": ("batch",), "n": ("heads",)}

    def check_static(self, t, s):
        if isinstance(self.offset, int):
            check_position(self.offset)

    def resolve(self, b, n, t, s):
        known = self._without_unread()
        # A function that reads b was placed in one batch, and cannot serve another.
        check_same_size("b", _size(known.b), b)
        check_same_size("n", _size(known.n), n)
        self._check_tables(b, n, t, s)
        part = replace(known.sized(b, n), offset=self.first_position)
        return super(Where, part).resolve(b, n, t, s)

    def _check_tables(self, b: int, n: int, t: int, s: int) -> None:
        counts = {"b": b, "n": n, "j": s}
        # An array of offsets is not read, so that no call waits for the device.
        if isinstance(self.first_position, int):
            counts["i"] = self.first_position + t
        self.function.check_tables("mask", SEES, counts)

    def _without_unread(self) -> Where:
        """Return the part without indices that the function does not read: these may be any."""
        reads_b, reads_n, _, _ = self.function.program.reads
        b = self.b if reads_b else None
        n = self.n if reads_n else None
        return replace(self, b=b, n=n)

    def sized(self, b, n):
        return replace(self, b=_counted(self.b, b), n=_counted(self.n, n))

    def allow(self, rows, cols):
        # An index that the function does not read gets one value, so that its axis has size 1.
        i, j = self._tokens(rows, cols)
        b, n = self._rows_and_heads()
        b = b if len(i) == 1 else jnp.broadcast_to(b, len(i))
        return self.function.over((), b, n, i, j)

    def _tokens(self, rows: Index, cols: Index) -> tuple[Array, Array]:
        """Return the positions of queries, `(#b, #t)`, and the indices of keys, `(1, #s)`."""
        _, _, reads_i, reads_j = self.function.program.reads
        i = self.positions(rows)[:, 0, :, 0]
        j = cols.reshape(1, -1)
        i = i if reads_i else i[:1, :1]
        j = j if reads_j else j[:1, :1]
        return i, j

    def _rows_and_heads(self) -> tuple[Array, Array]:
        reads_b, reads_n, _, _ = self.function.program.reads
        one = jnp.zeros(1, jnp.int32)
        b = self.b if reads_b else one
        n = self.n if reads_n else one
        check_known(_size(b), _size(n))
        return b, n

    def positions(self, rows):
        """Return the positions `(#b, 1, t, 1)` of queries at indices `(1, 1, t, 1)`."""
        offset = as_int32(self.first_position).reshape(-1, 1, 1, 1)
        # The sum ends at the largest int32, and does not wrap around.
        return rows + jnp.minimum(offset, jnp.iinfo(jnp.int32).max - jnp.maximum(rows, 0))

    def row(self, b, n):
        # An index that is not known yet is the one asked for: `indices[at]` is `at`.
        part = replace(self, b=_one(b) if self.b is None else self.b)
        if n is not None and self.n is None:
            part = replace(part, n=_one(n))
        return super(Where, part).row(b, n)


def _size(indices: Any) -> int | None:
    return None if indices is None else len(indices)


def _one(index: Any) -> Array:
    return jnp.asarray(index, jnp.int32).reshape(1)


def _counted(indices: Any, size: int | None) -> Any:
    if indices is not None or size is None:
        return indices
    return jnp.arange(size, dtype=jnp.int32)

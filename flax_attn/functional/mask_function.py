"""A mask that is a function of indices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from attn_spec.attention_checks import check_position
from attn_spec.function_checks import check_known, check_same_size
from flax_attn.functional.kv_range import as_int32
from flax_attn.functional.mask_parts import Positioned


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
        # Without an offset it is a function of indices.
        placed = replace(self, offset=0) if self.offset is None else self
        return super(Where, placed).resolve(b, n, t, s)._for_call(b, n)

    def _for_call(self, b, n):
        reads_b, reads_n, _, _ = self.function.program.reads
        # Indices that the function does not read may be any.
        known = {"b": self.b if reads_b else None, "n": self.n if reads_n else None}
        for (name, index), size in zip(known.items(), (b, n), strict=True):
            check_same_size(name, None if index is None else len(index), size)
        return replace(self, **known).sized(b, n)

    def sized(self, b, n):
        given = {"b": (self.b, b), "n": (self.n, n)}
        unknown = {
            name: size
            for name, (index, size) in given.items()
            if index is None and size is not None
        }
        return replace(
            self, **{name: jnp.arange(size, dtype=jnp.int32) for name, size in unknown.items()}
        )

    def allow(self, rows, cols):
        i, j = self._positions(rows)[:, 0, :, 0], cols.reshape(1, -1)
        reads = self.function.program.reads
        i, j = (
            index if read else index[:1, :1] for index, read in zip((i, j), reads[2:], strict=True)
        )
        b, n = (
            x if read else jnp.zeros(1, jnp.int32)
            for x, read in zip((self.b, self.n), reads[:2], strict=True)
        )
        check_known(*(None if index is None else len(index) for index in (b, n)))
        b = b if len(i) == 1 else jnp.broadcast_to(b, len(i))
        return self.function.over((), b, n, i, j)

    def _positions(self, rows):
        offset = as_int32(0 if self.offset is None else self.offset).reshape(-1, 1, 1, 1)
        # The sum ends at the largest int32, and does not wrap around.
        return rows + jnp.minimum(offset, jnp.iinfo(jnp.int32).max - jnp.maximum(rows, 0))

    def row(self, b, n):
        one = {"b": _pick(self.b, b), "n": self.n if n is None else _pick(self.n, n)}
        return replace(super().row(b, n), **one)


def _pick(indices: Any, at: Any) -> Any:
    return (
        jnp.asarray(at, jnp.int32).reshape(1)
        if indices is None
        else lax.dynamic_slice_in_dim(indices, at, 1)
    )

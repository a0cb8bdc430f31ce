"""A mask that is a function of indices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_spec.attention_checks import check_position
from attn_spec.function_checks import check_known, check_same_size, check_sees
from torch_ref.functional.called import broadcast_size, called
from torch_ref.functional.mask_parts import Positioned


@dataclass(frozen=True)
class Where(Positioned):
    """Query `i` of head `n` in row `b` sees key `j` from position `p` when `function(b, n, p, j)`.

    Args:
        function: function that is called on tensors of indices that broadcast to `(b, n, t, s)`.
        b: indices of the rows of the batch, `(b,)`; None until it is known how many there are.
        n: indices of the heads, `(n,)`; None until it is known how many there are.
    """

    function: Any
    b: Any = field(default=None, repr=False)
    n: Any = field(default=None, repr=False)

    def check_static(self, t, s):
        if isinstance(self.offset, int):
            check_position(self.offset)

    def resolve(self, b, n, t, s):
        for name, index, size in (("b", self.b, b), ("n", self.n, n)):
            check_same_size(name, None if index is None else len(index), size)
        # Without an offset it is a function of indices.
        placed = replace(self, offset=0) if self.offset is None else self
        return super(Where, placed).resolve(b, n, t, s).sized(b, n)

    def sized(self, b, n):
        given = {"b": (self.b, b), "n": (self.n, n)}
        unknown = {
            name: size
            for name, (index, size) in given.items()
            if index is None and size is not None
        }
        return replace(self, **{name: torch.arange(size) for name, size in unknown.items()})

    def allow(self, rows, cols):
        check_known(*(None if index is None else len(index) for index in (self.b, self.n)))
        b, n = (
            self.b.to(rows.device)[:, None, None, None],
            self.n.to(rows.device)[None, :, None, None],
        )
        indices = b, n, self._positions(rows), cols
        result, size = called("mask", self.function, *indices), broadcast_size(*indices)
        check_sees(str(result.dtype).removeprefix("torch."), tuple(result.shape), size)
        return result.expand(size)

    def _positions(self, rows):
        offset = torch.as_tensor(0 if self.offset is None else self.offset, device=rows.device)
        return rows + offset.clamp(-(2**31), 2**31 - 1).reshape(-1, 1, 1, 1)

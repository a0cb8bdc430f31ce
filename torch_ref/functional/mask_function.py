"""A mask that is a function of indices."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_spec.attention_checks import check_position
from attn_spec.function_checks import check_known, check_same_size, check_sees
from torch_ref.functional.called import broadcast_size, called
from torch_ref.functional.dtypes import dtype_name
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
        check_same_size("b", _size(self.b), b)
        check_same_size("n", _size(self.n), n)
        part = replace(self.sized(b, n), offset=self.first_position)
        return super(Where, part).resolve(b, n, t, s)

    def sized(self, b, n):
        return replace(self, b=_counted(self.b, b), n=_counted(self.n, n))

    def allow(self, rows, cols):
        indices = (*self._rows_and_heads(rows.device), self.positions(rows), cols)
        size = broadcast_size(*indices)
        # Its own errors are passed on with the rule in front.
        result = called("mask", self.function, *indices)
        check_sees(dtype_name(result.dtype), tuple(result.shape), size)
        return result.expand(size)

    def _rows_and_heads(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # Axes of the batch and of heads are known only once the mask met a call.
        check_known(_size(self.b), _size(self.n))
        b = self.b.to(device)[:, None, None, None]
        n = self.n.to(device)[None, :, None, None]
        return b, n

    def positions(self, rows):
        """Return the positions `(#b, 1, t, 1)` of queries at indices `(1, 1, t, 1)`."""
        offset = torch.as_tensor(self.first_position, device=rows.device)
        return rows + offset.clamp(-(2**31), 2**31 - 1).reshape(-1, 1, 1, 1)


def _size(indices: Any) -> int | None:
    return None if indices is None else len(indices)


def _counted(indices: Any, size: int | None) -> Any:
    if indices is not None or size is None:
        return indices
    return torch.arange(size)

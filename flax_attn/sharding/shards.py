"""What one device has of an attention call."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from flax_attn.backends.call import Call
from flax_attn.functional.mask_part import PlacedPart
from flax_attn.functional.masks import Mask
from flax_attn.functional.token_runs import PlacedDropout, Places


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard:
    """One device's rows of the batch, heads, queries and keys.

    Args:
        call: call with the arrays of this device, except that the mask is that of the whole
            sequences and the bias that of its queries and all keys.
        b: places of its rows of the batch.
        n: places of its heads.
        rows: places of its queries; None where it has all, in order.
        cols: places of its keys; None where it has all, in order.
        s: number of keys of the whole sequence.
    """

    call: Call
    b: Places
    n: Places
    rows: Places | None
    cols: Places | None
    s: int = field(metadata={"static": True})

    def as_call(self) -> Call:
        """Return the shard as a call of its own."""
        call = self.call
        _, _, t, s = call.shape
        rows = self.rows or whole(t)
        cols = self.cols or whole(s)
        changes: dict[str, Any] = {}
        # A mask that is asked by its own indices keeps its structure for the kernels.
        if self.rows is not None or self.cols is not None:
            changes["mask"] = _placed(call.mask, rows, cols, self.s)
        # A device has the bias of its queries, and of all keys.
        if call.bias is not None and self.cols is not None:
            changes["bias"] = cols.take(call.bias, 3)
        dropout = call.dropout
        if dropout is not None:
            places = self.b, self.n, rows, cols
            changes["dropout"] = PlacedDropout(dropout.rate, dropout.key, places)
        if call.score is not None:
            changes["score"] = call.score.placed(rows, cols)
        return replace(call, **changes)


def _placed(mask: Mask, rows: Places, cols: Places, s: int) -> Mask:
    parts = [PlacedPart(part, rows=rows, cols=cols, s=s) for part in mask.parts]
    return Mask(tuple(parts))


def whole(size: int) -> Places:
    """Return the places of all tokens of a sequence."""
    return Places(jnp.zeros(1, jnp.int32), size)

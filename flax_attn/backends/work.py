"""What a call costs a backend on a chip: a model of its time, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flax_attn.backends.call import Call
from flax_attn.backends.chips import Chip

# Of the rate of a chip, what attention reaches where the mask is structure, and where it is an
# array: measured on an H100 with cuDNN (github.com/jax-ml/jax/issues/35114).
FUSED, DENSE = 0.406, 0.158


@dataclass(frozen=True)
class KernelWork:
    """What one forward call asks of a chip.

    Args:
        launches: number of kernels, one after the other.
        flops: operations in matrix products.
        moved: bytes to and from memory.
        in_float32: whether the products are of float32, whatever the dtype of the call.
        share: share of the chip's rate that the products reach.
    """

    launches: int
    flops: int
    moved: int
    in_float32: bool = False
    share: float = FUSED

    def seconds(self, chip: Chip) -> float:
        """Return the predicted time: launches, and products or memory, whichever takes longer.

        Raises:
            ValueError: if nothing is published about the chip.

        Example:
            >>> from flax_attn.backends.chips import CHIPS
            >>> work = KernelWork(launches=2, flops=10**12, moved=10**9)
            >>> f"{work.seconds(CHIPS['h100']):.4f} s"
            '0.0025 s'
        """
        rate = chip.flops_float32 if self.in_float32 else chip.flops
        if rate is None or chip.bandwidth is None:
            raise ValueError(
                f"predicted times need the published rates of a chip; got one of kind {chip.kind!r}"
                " without. Ask about a GPU or a TPU"
            )
        computed = self.flops / (rate * self.share)
        return self.launches * chip.launch + max(computed, self.moved / chip.bandwidth)


def is_float32(call: Call) -> bool:
    """Return whether the products of a call are of float32 or wider."""
    return call.query.dtype.itemsize >= 4


def arrays_moved(call: Call) -> int:
    """Return the bytes of the inputs, read once, and of the output."""
    b, n, t, _ = call.shape
    read = call.query.size + call.key.size + call.value.size
    bias = 0 if call.bias is None else call.bias.size * call.bias.dtype.itemsize
    return (read + b * n * t * call.value.shape[3]) * call.query.dtype.itemsize + bias


def products(call: Call, pairs: int) -> int:
    """Return the operations of both products for so many pairs of query and key of a head."""
    b, n, _, _ = call.shape
    return 2 * b * n * pairs * (call.query.shape[3] + call.value.shape[3])


def pairs_in_band(call: Call) -> int:
    """Return how many pairs of query and key of a head a causal mask and a window let through."""
    _, _, t, s = call.shape
    (low, high), _ = call.mask.split_band()
    rows = np.arange(t)
    first = 0 if low is None else np.clip(rows + low, 0, s)
    stop = s if high is None else np.clip(rows + high + 1, 0, s)
    return int(np.broadcast_to(np.maximum(stop - first, 0), (t,)).sum())


def fused(call: Call, memory: int, launches: int = 2) -> KernelWork:
    """Return the work of a kernel that skips what the band hides and holds no scores."""
    flops = products(call, pairs_in_band(call))
    return KernelWork(launches, flops, arrays_moved(call) + memory, is_float32(call))

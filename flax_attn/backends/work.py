"""What a call costs a backend on a chip: a model of its time, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flax_attn.backends.call import Call
from flax_attn.backends.chips import Chip

# What separate kernels reach of a chip. GEMMs reach 80 to 90 % of the rate of an H100 (Shah et al.
# 2024, FlashAttention-3, arXiv:2407.08608, section 1). Standard attention there (figure 5, 8192
# tokens) does 73 TFLOP/s at width 64 and 139 at width 128, and moves its scores four times: 68 and
# 65 % of the bandwidth.
PRODUCTS = 0.8
BANDWIDTH = 2 / 3


@dataclass(frozen=True)
class KernelWork:
    """What one forward call asks of a chip.

    Args:
        launches: number of kernels, one after the other.
        flops: operations in matrix products.
        moved: bytes to and from memory of the kernels that multiply, meanwhile.
        apart: bytes to and from memory of all other kernels.
        in_float32: whether the products are of float32, whatever the dtype of the call.
        share: share of the chip's rate that the products reach.
        drawn: numbers that dropout draws, which hide behind nothing else.
    """

    launches: int
    flops: int
    moved: int
    apart: int = 0
    in_float32: bool = False
    share: float = PRODUCTS
    drawn: int = 0

    def seconds(self, chip: Chip) -> float:
        """Return the predicted time: launches, products or what they move, all else.

        Raises:
            ValueError: if nothing is published about the chip.

        Example:
            >>> from flax_attn.backends.chips import CHIPS
            >>> work = KernelWork(launches=2, flops=10**12, moved=10**9, apart=10**9)
            >>> f"{work.seconds(CHIPS['h100']):.4f} s"
            '0.0017 s'
        """
        rate, bandwidth, draws = self._rates(chip)
        computed = self.flops / (rate * self.share)
        multiplied = max(computed, self.moved / bandwidth)
        apart = self.apart / bandwidth + self.drawn / draws
        return self.launches * chip.launch + multiplied + apart

    def over(self, computed: int, rows: int) -> KernelWork:
        """Return the work where so many queries are computed in the place of `rows`."""
        flops = self.flops * computed // rows
        numbers = self.drawn * computed // rows
        return replace(self, flops=flops, drawn=numbers)

    def _rates(self, chip: Chip) -> tuple[float, float, float]:
        # Operations, bytes and random numbers a second.
        rate = chip.flops_float32 if self.in_float32 else chip.flops
        bandwidth = _published(chip, chip.bandwidth) * BANDWIDTH
        return _published(chip, rate), bandwidth, _published(chip, chip.draws)


def _published(chip: Chip, figure: float | None) -> float:
    if figure is None:
        raise ValueError(
            f"predicted times need the published rates of a chip; got one of kind {chip.kind!r}"
            " without. Ask about a GPU or a TPU"
        )
    return figure


def is_float32(call: Call) -> bool:
    """Return whether the products of a call are of float32 or wider."""
    return call.query.dtype.itemsize >= 4


def arrays_read(call: Call) -> int:
    """Return the bytes of query, key and value."""
    return (call.query.size + call.key.size + call.value.size) * call.query.dtype.itemsize


def arrays_moved(call: Call) -> int:
    """Return the bytes of the inputs, read once, and of the output."""
    b, n, t, _ = call.shape
    output = b * n * t * call.value.shape[3] * call.query.dtype.itemsize
    bias = 0 if call.bias is None else call.bias.size * call.bias.dtype.itemsize
    return arrays_read(call) + output + bias


def products(call: Call, pairs: int) -> int:
    """Return the operations of both products for so many pairs of query and key of a head."""
    b, n, _, _ = call.shape
    return 2 * b * n * pairs * (call.query.shape[3] + call.value.shape[3])


def drawn(call: Call, pairs: int) -> int:
    """Return how many numbers dropout draws for so many pairs of query and key of a head."""
    b, n, _, _ = call.shape
    return 0 if call.dropout is None else b * n * pairs


def pairs_in_band(call: Call) -> int:
    """Return how many pairs of query and key of a head a causal mask and a window let through."""
    _, _, t, s = call.shape
    (low, high), _ = call.mask.split_band()
    rows = np.arange(t)
    first = 0 if low is None else np.clip(rows + low, 0, s)
    stop = s if high is None else np.clip(rows + high + 1, 0, s)
    return int(np.broadcast_to(np.maximum(stop - first, 0), (t,)).sum())


def fused(call: Call, share: float, launches: int, apart: int = 0) -> KernelWork:
    """Return the work of a kernel that skips what the band hides and holds no scores.

    `apart` are the bytes of what prepares its arrays.
    """
    pairs = pairs_in_band(call)
    return KernelWork(
        launches,
        products(call, pairs),
        arrays_moved(call),
        apart,
        is_float32(call),
        share,
        drawn(call, pairs),
    )

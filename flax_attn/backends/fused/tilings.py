"""The sizes of tiles, by platform, width of a head and dtype.

They do not depend on the numbers of tokens, heads or rows: the order of the sums of a row is that
of its keys alone.
"""

from __future__ import annotations

from flax_attn.backends.call import Call
from flax_attn.backends.fused.kernel import Tiling


def tilings(call: Call) -> tuple[Tiling, Tiling]:
    """Return the sizes of tiles forward and backward."""
    if call.platform == "tpu":
        return Tiling(256, 512), Tiling(256, 256)
    wide = max(call.query.shape[3], call.value.shape[3])
    double = call.query.dtype.itemsize == 4
    if wide > 128:
        forward, backward = Tiling(64, 32, warps=8), Tiling(32, 32, warps=8, stages=1)
    else:
        forward, backward = Tiling(64, 64, warps=4), Tiling(64, 64, warps=8, stages=1)
    if double:
        forward, backward = Tiling(32, 32, warps=4), Tiling(32, 32, warps=4, stages=1)
    return forward, backward

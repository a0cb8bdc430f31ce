"""The table of tiles: their sizes by platform, width of a head and dtype.

They do not depend on the numbers of tokens, heads or rows: the order of the sums of a row is that
of its keys alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from flax_attn.backends.call import Call
from flax_attn.backends.fused.kernel import Tiling
from flax_attn.backends.platform import compute_capability


class TileRow(NamedTuple):
    """A row of the table, for calls that are no wider than it says.

    Args:
        platform: `"gpu"` or `"tpu"`.
        itemsize: bytes of a number of the call, at most.
        width: width of a query or value, whichever is wider, at most.
        forward: sizes of the tiles forward.
        backward: sizes of the tiles of the gradients of queries, and of arrays along the scores.
        keys: sizes of the tiles of the gradients of keys and values.
        capability: compute capability of a GPU, at least.
    """

    platform: str
    itemsize: int
    width: int
    forward: Tiling
    backward: Tiling
    keys: Tiling
    capability: float = 0.0


# The first row that a call fits is taken. The rows from compute capability 9 on were the fastest of
# four to seven on an H100; no other row was measured. `flax-attn device-check` writes rows for the
# device at hand. On GPUs these compile with few spills or none; from Hopper on tensor cores take 64
# queries at least.
TABLE = (
    TileRow("tpu", 4, 256, Tiling(256, 512), Tiling(256, 256), Tiling(256, 256)),
    TileRow(
        platform="gpu",
        itemsize=2,
        width=64,
        forward=Tiling(64, 64, stages=3),
        backward=Tiling(64, 64),
        keys=Tiling(64, 64),
        capability=9.0,
    ),
    TileRow(
        platform="gpu",
        itemsize=2,
        width=128,
        forward=Tiling(64, 64, stages=3),
        backward=Tiling(64, 64),
        keys=Tiling(32, 128, warps=8),
        capability=9.0,
    ),
    TileRow(
        platform="gpu",
        itemsize=2,
        width=256,
        forward=Tiling(64, 32),
        backward=Tiling(32, 32),
        keys=Tiling(64, 32, warps=8, stages=1),
        capability=9.0,
    ),
    TileRow(
        platform="gpu",
        itemsize=2,
        width=64,
        forward=Tiling(64, 64),
        backward=Tiling(64, 64, warps=8, stages=1),
        keys=Tiling(64, 64, warps=8, stages=1),
    ),
    TileRow(
        platform="gpu",
        itemsize=2,
        width=128,
        forward=Tiling(128, 32, warps=8),
        backward=Tiling(32, 64, warps=8, stages=1),
        keys=Tiling(32, 64, warps=8, stages=1),
    ),
    TileRow(
        platform="gpu",
        itemsize=2,
        width=256,
        forward=Tiling(16, 32, stages=1),
        backward=Tiling(32, 32, stages=1),
        keys=Tiling(32, 32, stages=1),
    ),
    TileRow(
        platform="gpu",
        itemsize=4,
        width=256,
        forward=Tiling(32, 32),
        backward=Tiling(32, 32, stages=1),
        keys=Tiling(32, 32, stages=1),
    ),
)

_TRIED: ContextVar[TileRow | None] = ContextVar("tried", default=None)


@contextmanager
def tried(row: TileRow) -> Iterator[None]:
    """Take one row in place of the table.

    Example:
        >>> row = TileRow("tpu", 4, 256, *[Tiling(128, 128)] * 3)
        >>> with tried(row):
        ...     pass
    """
    token = _TRIED.set(row)
    try:
        yield
    finally:
        _TRIED.reset(token)


def row_of(call: Call) -> TileRow:
    """Return the row of the table for a call."""
    itemsize = call.query.dtype.itemsize
    width = max(call.query.shape[3], call.value.shape[3])
    capability = compute_capability() if call.platform == "gpu" else 0.0
    own = [row for row in TABLE if row.platform == call.platform and row.capability <= capability]
    fitting = (row for row in own if itemsize <= row.itemsize and width <= row.width)
    # Of a call that is refused the time is predicted, too.
    return next(fitting, own[-1])


def tilings(call: Call) -> tuple[Tiling, Tiling, Tiling]:
    """Return the sizes of tiles forward, of the gradients of queries, and of those of keys."""
    row = _TRIED.get() or row_of(call)
    return row.forward, row.backward, row.keys

"""A kernel as data: what it reads and writes tile by tile, and what it computes between.

A program of the kernel computes one tile of its outputs. It begins with a carry, takes a step at
each tile of its loops, and finishes. `gpu` and `tpu` run the same kernel, each with the grid, the
blocks and the loops that such a chip wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

Coordinates = Mapping[str, Any]
Read = Callable[[str], Array]  # an input by name, as a tile of rank 2


@dataclass(frozen=True)
class Tiling:
    """The numbers of queries `t` and of keys `s` in a tile, and how a GPU computes it.

    Args:
        t: queries of a tile.
        s: keys of a tile.
        warps: groups of 32 threads that compute a tile on a GPU.
        stages: tiles that a GPU has in flight.
        part: keys of a part, whose sums are added up by themselves: a multiple of `s`. Few queries
            are divided over the parts.
    """

    t: int
    s: int
    warps: int = 4
    stages: int = 2
    part: int = 1024


class Operand(NamedTuple):
    """An array of rank 4 that a kernel reads or writes.

    Args:
        array: array, or its shape and dtype.
        axes: coordinate of each axis: `b`, `n`, `k`, `t` or `s`; `np` for parts of the keys of
            each head; `h` for one that is taken whole, and `1` for one of size 1.
        broadcast: whether a token axis of size 1 serves every token.
    """

    array: Any
    axes: tuple[str, str, str, str]
    broadcast: bool = False

    def block(self, tiling: Tiling) -> list[int | None]:
        """Return the size of a tile along each axis; None for an axis that it does not have."""
        pairs = zip(self.axes, self.array.shape, strict=True)
        return [self._length(axis, size, tiling) for axis, size in pairs]

    def _length(self, axis: str, size: int, tiling: Tiling) -> int | None:
        if axis in ("h", "1"):
            return size
        if axis in ("t", "s"):
            return 1 if self._serves_all(size) else getattr(tiling, axis)
        return None

    def place(self, coordinates: Coordinates) -> list[Any]:
        """Return the number of the tile along each axis."""
        places = []
        for axis, size in zip(self.axes, self.array.shape, strict=True):
            alone = axis in ("h", "1") or self._serves_all(size) or size == 1
            places.append(jnp.int32(0) if alone else coordinates[axis])
        return places

    def _serves_all(self, size: int) -> bool:
        return self.broadcast and size == 1


def along(array: Any) -> Operand:
    """Return an array that broadcasts to `(b, n, t, s)` as an operand."""
    return Operand(array, ("b", "n", "t", "s"), broadcast=True)


def rows(array: Any) -> Operand:
    """Return an array `(b, n, t, 1)` as an operand: a number for each query."""
    return Operand(array, ("b", "n", "t", "1"))


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Args:
        name: name, for profiles.
        tiling: sizes of its tiles.
        inputs: what it reads.
        outputs: what it writes.
        grid: coordinates of a program, and how many there are of each.
        loops: coordinates that a program loops over, the last innermost.
        bounds: first and stop of the innermost loop, `(b, programs, 2)`; `outer` is the coordinate
            of the second axis. None is the whole loop.
        outer: coordinate by which the bounds differ.
        group: query heads that share a key/value head.
        begin: function to the carry before the first step.
        fixed: function from the inputs to what all steps of a program share.
        step: function from the inputs, the coordinates, what is shared and the carry to the carry.
        finish: function from the inputs, the coordinates, what is shared and the carry to the
            outputs.
        parts: number of parts of the keys. A program adds up the carry of each, unless the part is
            one of its coordinates.
        merge: function from the carries of the keys so far, and of the next part, to that of both.
        flags: 1 for each part of the numbers that is finite, else 0; None where that is not asked.
        of_finite: the same kernel for numbers that are finite, where there are flags.
    """

    name: str
    tiling: Tiling
    inputs: dict[str, Operand]
    outputs: dict[str, Operand]
    grid: dict[str, int]
    loops: dict[str, int]
    bounds: Array | None
    outer: str
    group: int
    begin: Callable[[], Any]
    fixed: Callable[[Read, Coordinates], Any]
    step: Callable[[Read, Coordinates, Any, Any], Any]
    finish: Callable[[Read, Coordinates, Any, Any], dict[str, Array]]
    parts: int = 1
    merge: Callable[[Any, Any], Any] | None = None
    flags: Array | None = None
    of_finite: Kernel | None = None

    def coordinates(self, found: Coordinates) -> dict[str, Any]:
        """Return all coordinates, given those of the grid and the loops."""
        known = dict(found)
        if "n" in known:
            known["k"] = known["n"] // self.group
        elif "g" in known:
            # Head n is number g of its group.
            known["n"] = known["k"] * self.group + known["g"]
        if "p" in known:
            known["np"] = known["n"] * self.parts + known["p"]
        return known

    @property
    def merges(self) -> bool:
        """Whether a program adds up the carries of several parts."""
        return self.parts > 1 and self.merge is not None and "p" not in self.grid

    @property
    def tiles_of_part(self) -> int:
        """How many tiles of keys a part has."""
        return self.tiling.part // self.tiling.s

    @property
    def programs(self) -> int:
        """How many programs there are."""
        return prod(self.grid.values())

    @property
    def out_shape(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the outputs."""
        return [operand.array for operand in self.outputs.values()]

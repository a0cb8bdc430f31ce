"""How pieces of the keys travel around a ring of devices, and which of them each device needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from flax_attn.functional.masks import Mask
from flax_attn.functional.token_runs import Places

T = TypeVar("T")


@dataclass(frozen=True)
class Route:
    """The way of the pieces, known before tracing.

    Args:
        axes: mesh axes of the devices.
        size: number of places for pieces in the ring.
        within: number of devices that share a place, each with its own heads.
        runs: number of runs of neighbouring tokens in a piece: 2 in zigzag order, else 1.
        keys: number of tokens of a piece.
        needed: whether the device at place `i` attends to anything in the piece of place `j`.
    """

    axes: tuple[str, ...]
    size: int
    within: int
    runs: int
    keys: int
    needed: tuple[tuple[bool, ...], ...]

    @property
    def hops(self) -> tuple[int, int]:
        """How far a piece must travel, up and down the ring, to meet every device that needs it."""
        steps = set()
        for i, needed in enumerate(self.needed):
            steps.update((i - j) % self.size for j in range(self.size) if needed[j])
        # So many steps up the ring, or fewer and the rest down: the least in all, and then down.
        ways = []
        for down in range(self.size):
            up = max((step for step in steps if step < self.size - down), default=0)
            ways.append((up, down))
        return min(ways, key=lambda way: (sum(way), way[1]))

    @property
    def place(self) -> Array:
        """The place of this device in the ring; in `jax.shard_map`."""
        return lax.axis_index(self.axes) // self.within

    def keys_of(self, place: Any) -> Places:
        """Return where the keys of the piece of a place stand."""
        return Places(
            jnp.stack(starts(place, self.size, self.runs, self.keys)), self.keys // self.runs
        )

    def send(self, pieces: T, hops: int, last: int | None = None) -> T:
        """Return pieces after so many hops up the ring, or down if negative.

        With `last`, how many hops a piece makes in all, those that no device beyond needs are not
        sent.
        """
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, self._pairs(hops, last)), pieces)

    def _pairs(self, hops: int, last: int | None) -> list[tuple[int, int]]:
        pairs = []
        for i in range(self.size):
            to = (i + hops) % self.size
            if last is None or self._wanted(to, hops, last):
                first, first_to = i * self.within, to * self.within
                pairs += [(first + member, first_to + member) for member in range(self.within)]
        return pairs

    def _wanted(self, place: int, direction: int, last: int) -> bool:
        # Whether a piece that reaches this place after some hops is needed here or further on.
        for hop in range(1, last + 1):
            home = (place - direction * hop) % self.size
            further = range(last - hop + 1)
            if any(self.needed[(place + direction * more) % self.size][home] for more in further):
                return True
        return False

    def travel(
        self, direction: int, pieces: Any, step: Callable, sums: Any, carry: Any, own: bool
    ) -> tuple[Any, Any]:
        """Return `sums` and `carry` after `step` for each piece that passes by.

            sums, carry = step(j, pieces, sums, carry)

        `sums` travel with their piece, and are home again in the end. The next piece is sent before
        the present one is used, so that both go on at once.

        Args:
            direction: 1 for up the ring, -1 for down.
            pieces: pieces of this place.
            step: function called for each piece, with the place `j` that it comes from.
            sums: values to add up for each piece.
            carry: values to add up on this device.
            own: whether the device's own pieces are the first.
        """
        last, first = self.hops[0 if direction == 1 else 1], 0 if own else 1
        if not own:
            pieces = self.send(pieces, direction, last)

        def hop(i, state):
            pieces, sums, carry = state
            coming = self.send(pieces, direction, last)
            sums, carry = step((self.place - direction * i) % self.size, pieces, sums, carry)
            return coming, self.send(sums, direction), carry

        if first < last:
            pieces, sums, carry = lax.fori_loop(first, last, hop, (pieces, sums, carry))
        sums, carry = step((self.place - direction * last) % self.size, pieces, sums, carry)
        return (self.send(sums, -direction * last) if last else sums), carry

    def where_needed(self, j: Any, compute: Callable[[], T], otherwise: T) -> T:
        """Return `compute()` if this device needs the piece of place `j`, else `otherwise`."""
        if all(map(all, self.needed)):
            return compute()
        needed = jnp.asarray(np.array(self.needed))[self.place, j]
        return lax.cond(needed, compute, lambda: otherwise)


def make_route(
    axes: tuple[str, ...], size: int, within: int, ordered: bool, mask: Mask, t: int, s: int
) -> Route:
    """Return the route of pieces of `s` keys past devices of `t` queries.

    It follows what the mask is known to hide before tracing.
    """
    runs = 2 if ordered else 1
    known = Mask(tuple(part for part in mask.parts if not jax.tree.leaves(part)))

    def sees(row: int, col: int) -> bool:
        found = known.kv_range(row, row + t // runs - 1, size * s)
        return bool(found.start < col + s // runs and found.stop > col)

    def needs(i: int, j: int) -> bool:
        pieces = product(starts(i, size, runs, t), starts(j, size, runs, s))
        return any(sees(row, col) for row, col in pieces)

    needed = tuple(tuple(needs(i, j) for j in range(size)) for i in range(size))
    return Route(axes, size, within, runs, s, needed)


def stay(axes: tuple[str, ...], size: int, keys: int) -> Route:
    """Return the route of pieces that no other device needs."""
    needed = tuple(tuple(i == j for j in range(size)) for i in range(size))
    return Route(axes, size, 1, 1, keys, needed)


def starts(place: Any, size: int, runs: int, tokens: int) -> tuple[Any, ...]:
    """Return where the runs of tokens of a place begin."""
    if runs == 1:
        return (place * tokens,)
    return place * (tokens // 2), (2 * size - 1 - place) * (tokens // 2)

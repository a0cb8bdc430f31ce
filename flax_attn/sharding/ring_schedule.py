"""How pieces of the keys travel around a ring of devices, and which of them each device needs."""

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
        steps = self._steps()
        ways = []
        for down in range(self.size):
            up = max(step for step in steps if step < self.size - down)
            ways.append((up, down))
        # The least in all, and of equal ones that with more steps up.
        return min(ways, key=sum)

    def _steps(self) -> set[int]:
        """Return how many steps up the ring lie between a piece and those that need it."""
        users, homes = np.nonzero(np.array(self.needed))
        found = (users - homes) % self.size
        return {0, *found.tolist()}

    @property
    def place(self) -> Array:
        """The place of this device in the ring; in `jax.shard_map`."""
        return lax.axis_index(self.axes) // self.within

    def keys_of(self, place: Any) -> Places:
        """Return where the keys of the piece of a place stand."""
        begin = starts(place, self.size, self.runs, self.keys)
        return Places(jnp.stack(begin), self.keys // self.runs)

    def send(self, pieces: T, hops: int, last: int | None = None) -> T:
        """Return pieces after so many hops up the ring, or down if negative.

        With `last`, how many hops a piece makes in all, those that no device beyond needs are not
        sent.
        """
        pairs = self._pairs(hops, last)
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), pieces)

    def _pairs(self, hops: int, last: int | None) -> list[tuple[int, int]]:
        pairs = []
        for place in range(self.size):
            to = (place + hops) % self.size
            if last is None or self._wanted(to, hops, last):
                pairs += zip(self._members(place), self._members(to), strict=True)
        return pairs

    def _members(self, place: int) -> range:
        # Each member of a place has its own heads, and sends to its like.
        first = place * self.within
        return range(first, first + self.within)

    def _wanted(self, place: int, direction: int, last: int) -> bool:
        """Whether a piece that reaches this place after some hops is needed here or further on."""
        # One program sends all hops of the loop, so that a pair must do for each of them.
        for hop in range(1, last + 1):
            home = (place - direction * hop) % self.size
            users = [(place + direction * more) % self.size for more in range(last - hop + 1)]
            if any(self.needed[user][home] for user in users):
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
        up, down = self.hops
        last = up if direction == 1 else down
        first = 0
        if not own:
            first = 1
            pieces = self.send(pieces, direction, last)

        def home(i):
            return (self.place - direction * i) % self.size

        def hop(i, state):
            pieces, sums, carry = state
            # Sent before `step` reads it: XLA overlaps what does not depend on each other.
            coming = self.send(pieces, direction, last)
            sums, carry = step(home(i), pieces, sums, carry)
            return coming, self.send(sums, direction), carry

        if first < last:
            state = pieces, sums, carry
            pieces, sums, carry = lax.fori_loop(first, last, hop, state)
        # Outside of the loop, as the last piece is sent no further.
        sums, carry = step(home(last), pieces, sums, carry)
        if last:
            sums = self.send(sums, -direction * last)
        return sums, carry

    def where_needed(self, j: Any, compute: Callable[[], T], otherwise: T) -> T:
        """Return `compute()` if this device needs the piece of place `j`, else `otherwise`."""
        table = np.array(self.needed)
        if table.all():
            return compute()
        needed = jnp.asarray(table)[self.place, j]
        return lax.cond(needed, compute, lambda: otherwise)


def make_route(
    axes: tuple[str, ...], size: int, within: int, ordered: bool, mask: Mask, t: int, s: int
) -> Route:
    """Return the route of pieces of `s` keys past devices of `t` queries.

    It follows what the mask is known to hide before tracing.
    """
    runs = 2 if ordered else 1
    # A part that holds arrays may hide anything: of it nothing is known before it is run.
    parts = [part for part in mask.parts if not jax.tree.leaves(part)]
    known = Mask(tuple(parts))
    needed = np.zeros((size, size), bool)
    for i, j in np.ndindex(size, size):
        pairs = product(_runs(i, size, runs, t), _runs(j, size, runs, s))
        needed[i, j] = any(_sees(known, *pair, size * s) for pair in pairs)
    return Route(axes, size, within, runs, s, _frozen(needed))


def _runs(place: int, size: int, runs: int, tokens: int) -> list[range]:
    length = tokens // runs
    return [range(start, start + length) for start in starts(place, size, runs, tokens)]


def _sees(mask: Mask, queries: range, keys: range, s: int) -> bool:
    """Return whether some of these queries may attend to some of these of `s` keys."""
    seen = mask.kv_range(queries.start, queries.stop - 1, s)
    return bool(seen.start < keys.stop and seen.stop > keys.start)


def stay(axes: tuple[str, ...], size: int, keys: int) -> Route:
    """Return the route of pieces that no other device needs."""
    return Route(axes, size, 1, 1, keys, _frozen(np.eye(size, dtype=bool)))


def _frozen(table: np.ndarray) -> tuple[tuple[bool, ...], ...]:
    # Routes are static arguments of compiled functions, which hash them.
    return tuple(tuple(row) for row in table.tolist())


def starts(place: Any, size: int, runs: int, tokens: int) -> tuple[Any, ...]:
    """Return where the runs of tokens of a place begin."""
    if runs == 1:
        return (place * tokens,)
    piece = tokens // 2
    return place * piece, (2 * size - 1 - place) * piece

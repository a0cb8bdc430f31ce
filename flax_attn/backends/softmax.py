"""Softmaxes over a part of the keys, and how those over several parts become one.

Inside a kernel they are `Sums`, which are cheap to add up; what a kernel returns is a `Softmax`,
whose output is divided by its sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Rows of one head over some keys, not yet divided by their sum.

    `output = sum e value` and `total = sum e`, with `e = exp(score - top)`.
    """

    output: Float[Array, "t v"]
    top: Float[Array, "t 1"]
    total: Float[Array, "t 1"]

    def __and__(self, other: Sums) -> Sums:
        """Return the sums over the keys of both."""
        top = jnp.maximum(self.top, other.top)
        mine, theirs = jnp.exp(self.top - top), jnp.exp(other.top - top)
        output = self.output * mine + other.output * theirs
        return Sums(output, top, self.total * mine + other.total * theirs)

    def divided(self) -> Softmax:
        """Return the softmax, whose rows without keys are zeros."""
        output = self.output / jnp.where(self.total == 0, 1, self.total)
        return Softmax(output, self.top, self.total)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Softmax:
    """Attention over some keys, with the maximum and the sum of its softmax.

    `output = sum e value / total` and `total = sum e`, with `e = exp(score - top)`.

    Shapes:
        Of one head: output `(t, v)`, top and total `(t, 1)`. Of a call: `(b, t, n, v)` and
        `(b, n, t, 1)`.
    """

    output: Array
    top: Array
    total: Array

    @staticmethod
    def over_nothing(query: Array, width: int, dtype: jnp.dtype) -> Softmax:
        """Return the softmax of a call over no keys, with values of a width."""
        b, t, n, _ = query.shape
        top = jnp.full((b, n, t, 1), float(jnp.finfo(dtype).min), dtype)
        return Softmax(jnp.zeros((b, t, n, width), dtype), top, jnp.zeros((b, n, t, 1), dtype))

    def fold(self, other: Softmax) -> Softmax:
        """Return the softmax of a call over the keys of both: the outputs weighed by their sums."""
        top = jnp.maximum(self.top, other.top)
        own, others = (part.total * jnp.exp(part.top - top) for part in (self, other))
        total = own + others
        mine, theirs = _weight(own, total), _weight(others, total)
        return Softmax(self.output * mine + other.output * theirs, top, total)

    def fold_over(self, axes: tuple[str, ...]) -> Softmax:
        """Return the softmax over the keys of all devices along mesh axes; in `jax.shard_map`."""
        if not axes:
            return self
        # Any number will do, and a maximum has no derivative here.
        top = lax.pmax(lax.stop_gradient(self.top), axes)
        own = self.total * jnp.exp(self.top - top)
        total = lax.psum(own, axes)
        return Softmax(lax.psum(self.output * _weight(own, total), axes), top, total)

    def with_sinks(self, sinks: Float[Array, " n"] | None) -> Softmax:
        """Return the softmax with one more key a head: its score is the sink, its value zero."""
        if sinks is None:
            return self
        score = jnp.broadcast_to(_of_rows(sinks, self.top.dtype), self.top.shape)
        return self.fold(Softmax(jnp.zeros_like(self.output), score, jnp.ones_like(self.total)))

    def sinks_gradient(self, sinks: Float[Array, " n"] | None, cotangent: Array) -> Array | None:
        """Return the gradient of the sinks, `-sum w (o do)`, w being a sink's weight in its row."""
        if sinks is None:
            return None
        # A row that sees neither a key nor its sink has a sum of 0.
        total = jnp.where(self.total == 0, 1, self.total)
        weight = jnp.exp(_of_rows(sinks, self.top.dtype) - self.top) / total
        return -(weight * self._delta(cotangent)).sum(axis=(0, 2, 3)).astype(sinks.dtype)

    def _delta(self, cotangent: Array) -> Float[Array, "b n t 1"]:
        output, cotangent = (x.astype(self.top.dtype) for x in (self.output, cotangent))
        delta = (output * cotangent).sum(axis=-1)
        return rearrange(delta, "b t n -> b n t 1")


def reciprocal(total: Array) -> Array:
    """Return one over the sum of each row, and 0 for rows without keys."""
    empty = total == 0
    return jnp.where(empty, 0, 1 / jnp.where(empty, 1, total))


def _of_rows(sinks: Float[Array, " n"], dtype: jnp.dtype) -> Float[Array, "1 n 1 1"]:
    return sinks.astype(dtype)[None, :, None, None]


def _weight(own: Array, total: Array) -> Float[Array, "b t n 1"]:
    # By how much an output counts whose sum is a part of the total.
    share = own / jnp.where(total == 0, 1, total)
    return rearrange(share, "b n t 1 -> b t n 1")

"""The scores of one tile in a kernel, and their gradients, from what it read of the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_attn.backends import tile
from flax_attn.backends.call import Call
from flax_attn.backends.fused.functions import Halves
from flax_attn.backends.fused.kernel import Coordinates, Read, Tiling
from flax_attn.backends.fused.operands import apart, hides_before, score_halves, words
from flax_attn.functional.mask_function import Where
from flax_attn.functional.mask_part import MaskPart
from flax_attn.functional.mask_parts import Segments

SUMS = jnp.dtype(jnp.float32)  # every dtype that a kernel takes is summed in it


class Tokens(NamedTuple):
    """Queries, keys or values of a tile, without what is not finite.

    Args:
        numbers: numbers, with zeros for tokens that are not finite. Beyond the last token of the
            call any finite numbers may stand: no row sees them.
        finite: which tokens are finite, `(tokens, 1)`; None where all are known to be.
    """

    numbers: Array
    finite: Array | None

    def where(self, condition: Array) -> Tokens:
        """Return the tokens with those that do not meet a condition as not finite."""
        if self.finite is None:
            return self
        return Tokens(_select(condition, self.numbers), self.finite & condition)

    def only_finite(self, x: Array) -> Array:
        """Return numbers of the tokens, with zeros for tokens that are not finite."""
        return x if self.finite is None else jnp.where(self.finite, x, 0)


def exp(x: Array) -> Array:
    """Return e to the power of numbers, by the power of 2 that a chip has.

    The relative error grows with the number: it is 1e-6 for a weight of e^-16.
    """
    return jnp.exp2(x * math.log2(math.e))


def is_sink(sinks: Array) -> Array:
    """Return which sinks are numbers or -inf, which is no sink; rows of all others are NaN."""
    return sinks < jnp.inf


def _nan_unless(finite: Array) -> Array:
    return jnp.where(finite, 0, jnp.nan).astype(SUMS)


def without_beyond(x: Array, first: Any, count: int) -> Array:
    """Return a tile with zeros for tokens beyond the last, where anything may stand."""
    index = first + lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return _select(index < count, x)


def _select(condition: Array, x: Array) -> Array:
    return jnp.where(condition, x, jnp.zeros_like(x))


@dataclass(frozen=True)
class Scores:
    """What all tiles of a call share.

    Args:
        call: call, whose arrays the kernel reads through operands.
        tiling: sizes of the tiles.
        count: number of queries of a head.
        finite: whether queries, keys, values and sinks are known to be finite. What is read of
            them then goes to the products as it is, which a chip does ahead.
        turned: whether a tile is `(s, t)`, with a row for each key. Sums over queries are products
            with such a tile as it is: to transpose it would take time on a chip, and some compilers
            transpose each operation that led to it instead.
    """

    call: Call
    tiling: Tiling
    count: int
    finite: bool = False
    turned: bool = False

    def tokens(self, x: Array) -> Tokens:
        """Return the tokens of a tile."""
        if self.finite:
            return Tokens(x, None)
        # 0 * x is 0 or NaN.
        finite = (x.astype(SUMS) * 0).sum(axis=1, keepdims=True) == 0
        return Tokens(_select(finite, x), finite)

    def oriented(self, x: Array) -> Array:
        """Return what is `(t, s)`, `(t, 1)` or `(1, s)` as a tile has it."""
        return x.T if self.turned and x.size > 1 else x

    def reader(self, read: Read) -> Read:
        """Return the function that reads what lies along the scores as a tile has it."""
        return lambda name: self.oriented(read(name))

    def dot(self, a: Array, b: Array) -> Array:
        """Return `a @ b`, of which b has the dtype that products read."""
        return self._product(a.astype(b.dtype), b, ((1,), (0,)))

    def dot_transposed(self, a: Array, b: Array) -> Array:
        """Return `a @ b^T`."""
        return self._product(a, b, ((1,), (1,)))

    def _product(self, a: Array, b: Array, axes: tuple) -> Array:
        options: Any = {"precision": self.call.precision, "preferred_element_type": SUMS}
        return lax.dot_general(a, b, (axes, ((), ())), **options)

    def products(self, queries: Array, keys: Array) -> Array:
        """Return the products of what there is for each query and for each key."""
        if self.turned:
            return self.dot_transposed(keys, queries)
        return self.dot_transposed(queries, keys)

    def scaled(self, read: Read, products: Array) -> Array:
        """Return products or gradients times the scale."""
        if isinstance(self.call.scale, Real):
            return products * float(self.call.scale)
        return products * read("scale")

    def tile(
        self,
        read: Read,
        at: Coordinates,
        products: Array,
        query: Tokens,
        key: Tokens,
        value: Tokens,
    ) -> tile.TileScores:
        """Return the scores of a tile."""
        bias = read("bias").astype(SUMS) if self.call.bias is not None else None
        return tile.scores(
            self.scaled(read, products),
            bias,
            self.visible(read, at),
            self.call.soft_cap,
            function=self.function(read),
            more=self._nan(query, key, value),
        )

    def _nan(self, query: Tokens, key: Tokens, value: Tokens) -> Array | None:
        # NaN between queries and keys of which one is not finite, else 0.
        if query.finite is None or key.finite is None or value.finite is None:
            return None
        of_queries, of_keys = _nan_unless(query.finite), _nan_unless(key.finite & value.finite)
        return self.oriented(of_queries) + self.oriented(of_keys.T)

    def function(self, read: Read) -> Callable[..., Array] | None:
        """Return the function of scores in a tile: of them, and of what it captured, read here."""
        halves = score_halves(self.call)
        if halves is None:
            return None
        names = [f"score {at}" for at in range(len(halves.between))]
        # Read before it is differentiated.
        return partial(_changed, halves, {name: read(name) for name in names})

    def visible(self, read: Read, at: Coordinates) -> Array:
        """Return what the mask shows in a tile, and not beyond the last query and key."""
        seen = self._inside(read, at)
        for number, part in enumerate(apart(self.call.mask)):
            seen = seen & _shown(part, number, read)
        shape = self.tiling.t, self.tiling.s
        return jnp.broadcast_to(seen, shape[::-1] if self.turned else shape)

    def _inside(self, read: Read, at: Coordinates) -> Array:
        of_queries, of_keys = (1, 0) if self.turned else (0, 1)
        key = _indices(at["s"], self.tiling.s, of_keys)
        query = _indices(at["t"], self.tiling.t, of_queries)
        # Also where all are inside: the same arithmetic gives the same bits.
        seen = key < jnp.where(query < self.count, read("stop"), 0)
        return seen & (key >= read("start")) if hides_before(self.call.mask) else seen

    def factors(self, read: Read) -> Array | None:
        """Return the factors of dropout of a tile, or None."""
        dropout = self.call.dropout
        if dropout is None:
            return None
        head_key = read("head key 0"), read("head key 1")
        counters = read("query counter"), read("key counter")
        return tile.dropout_factors(head_key, *counters, dropout.rate, SUMS)


def _changed(
    halves: Halves,
    tiles: Mapping[str, Array],
    scores: Array,
    other: Mapping[str, Array] = MappingProxyType({}),
) -> Array:
    # What a function makes of scores, with other tiles than it read in the place of some.
    read = {**tiles, **other}
    return halves.apply([scores], list(read.values()))


def _indices(number: Any, size: int, axis: int) -> Array:
    # Those of a tile in the call, as a column or a row.
    shape = (size, 1) if axis == 0 else (1, size)
    return number * size + lax.broadcasted_iota(jnp.int32, shape, axis)


def _shown(part: MaskPart, number: int, read: Read) -> Array:
    if isinstance(part, Segments):
        return _same_segment(part, number, read)
    if isinstance(part, Where):
        halves = Halves(part.function, 0)
        return halves.apply([], _numbered(read, f"function {{}} of {number}", halves))
    return read(f"dense {number}") != 0


def _same_segment(part: Segments, number: int, read: Read) -> Array:
    names = [f"word {at} of {number}" for at in range(words(part))]
    same = [read(f"query {name}") == read(f"key {name}") for name in names]
    return reduce(jnp.bitwise_and, same)


def _numbered(read: Read, name: str, halves: Halves) -> list[Array]:
    return [read(name.format(at)) for at in range(len(halves.between))]


class Weights(NamedTuple):
    """What backward needs of a tile, as `Scores.turned` says.

    Args:
        dropped: weights as they met the values.
        d_scores: gradient of the scaled products.
        products: products before they were scaled.
        captured: gradient of what the function of scores captured, or None.
    """

    dropped: Array
    d_scores: Array
    products: Array
    captured: Array | None


class Rows(NamedTuple):
    """What backward reads of some queries.

    Args:
        query: queries.
        cotangent: gradient of the output.
        top: maximum of the softmax, `(t, 1)`.
        share: 1 over the sum of the softmax, `(t, 1)`.
        delta: sum of the output times its gradient, `(t, 1)`.
    """

    query: Tokens
    cotangent: Array
    top: Array
    share: Array
    delta: Array


def weights(
    scores: Scores,
    read: Read,
    at: Coordinates,
    rows: Rows,
    key: Tokens,
    value: Tokens,
    captured: tuple[str, Array] | None = None,
) -> Weights:
    """Return the weights of a tile, computed again, and the gradient of its scores.

    `captured` is the name and the tile of what the function of scores captured, whose gradient is
    asked for.
    """
    read = scores.reader(read)
    top, share, delta = map(scores.oriented, (rows.top, rows.share, rows.delta))
    products = scores.products(rows.query.numbers, key.numbers)
    masked, capped = scores.tile(read, at, products, rows.query, key, value)
    own = _from_sums(masked, top, share)
    d_weights = scores.products(rows.cotangent, value.numbers)
    factors = scores.factors(read)
    function = scores.function(read)
    gradients = tile.score_gradients(
        own,
        tile.times(d_weights, factors),
        delta,
        capped,
        scores.call.soft_cap,
        pull=None if function is None else partial(_pull, function, captured),
    )
    return Weights(
        dropped=tile.times(own, factors),
        d_scores=gradients.scores,
        products=products,
        captured=gradients.captured[0] if gradients.captured else None,
    )


def _from_sums(masked: Array, top: Array, share: Array) -> Array:
    exps = exp(masked - top) * share
    # Zero where hidden, also in a row that is NaN.
    return jnp.where(masked == -jnp.inf, 0, exps)


def _pull(
    function: Callable[..., Array],
    captured: tuple[str, Array] | None,
    capped: Array,
    cotangent: Array,
) -> tuple[Array, tuple[Array, ...]]:
    if captured is None:
        _, pullback = jax.vjp(function, capped)
        return pullback(cotangent)[0], ()
    name, own = captured
    _, pullback = jax.vjp(lambda x, own: function(x, {name: own}), capped, own)
    d_capped, d_own = pullback(cotangent)
    return d_capped, (d_own,)

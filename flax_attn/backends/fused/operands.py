"""What a kernel reads of a call, as arrays that broadcast to `(b, n, t, s)`, beside its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.backends.fused.functions import Halves, in_memory
from flax_attn.backends.fused.kernel import Operand, along
from flax_attn.functional.block_summary import Summarised
from flax_attn.functional.dropout import KeyedDropout, key_data, threefry_2x32
from flax_attn.functional.mask_function import Where
from flax_attn.functional.mask_part import IntervalPart, MaskPart, of_rank_4
from flax_attn.functional.mask_parts import Dense, Segments
from flax_attn.functional.masks import Mask

KNOWN = (IntervalPart, Segments, Dense, Where)  # the parts of a mask that a kernel computes


def flat(mask: Mask) -> Mask:
    """Return a mask without summaries, which only say what to leave out."""
    parts: list[MaskPart] = []
    for part in mask.parts:
        own = flat(part.mask).parts if isinstance(part, Summarised) else (part,)
        parts.extend(own)
    return Mask(tuple(parts))


def apart(mask: Mask) -> list[MaskPart]:
    """Return the parts of a mask that are no intervals of keys."""
    return [part for part in flat(mask).parts if not isinstance(part, IntervalPart)]


def score_halves(call: Call) -> Halves | None:
    """Return the function of scores of a call in two halves, or None."""
    return None if call.score is None else Halves(call.score.function, 1)


def score_arrays(call: Call) -> list[Array]:
    """Return what the first half of the function of scores hands to the second."""
    if call.score is None:
        return []
    score = call.score
    return Halves(score.function, 1).arrays(score.b, score.n, score.rows, score.cols)


def operands(call: Call) -> dict[str, Operand]:
    """Return what beside query, key and value decides the scores of a call."""
    found = dict(_mask(call))
    if call.bias is not None:
        found["bias"] = call.bias
    if call.sinks is not None:
        found["sinks"] = call.sinks[None, :, None, None]
    if not isinstance(call.scale, Real):
        found["scale"] = jnp.reshape(call.scale, (1, 1, 1, 1))
    if call.dropout is not None:
        found |= _dropout(call.dropout, call.shape)
    found |= {f"score {at}": in_memory(x) for at, x in enumerate(score_arrays(call))}
    return {name: along(array) for name, array in found.items()}


def packed(x: Array, k: int, group: int) -> Array:
    """Return an array `(#b, #n, #t, #s)` with the heads of a group as queries, `(#b, k, g t, #s)`.

    One that is the same for all heads and queries stays.
    """
    b, n, t, s = x.shape
    if n == t == 1:
        return x
    x = jnp.broadcast_to(x, (b, k * group, t, s))
    return rearrange(x, "b (k g) t s -> b k (g t) s", k=k)


def _mask(call: Call) -> Iterator[tuple[str, Array]]:
    # All intervals together are one, from a first key to before a last, for each query.
    _, _, t, s = call.shape
    (start, stop), _ = flat(call.mask).split_intervals(t, s)
    yield "start", start[:, None, :, None]
    yield "stop", stop[:, None, :, None]
    for index, part in enumerate(apart(call.mask)):
        for name, array in _arrays(part, t, s):
            yield f"{name} {index}", array


def _arrays(part: MaskPart, t: int, s: int) -> Iterator[tuple[str, Array]]:
    if isinstance(part, Segments):
        yield "query segments", jnp.atleast_2d(part.query)[:, None, :, None]
        yield "key segments", jnp.atleast_2d(part.key)[:, None, None, :]
    elif isinstance(part, Dense):
        # Booleans are no dtype that a TPU keeps in memory.
        yield "dense", of_rank_4(part.array).astype(jnp.int8)

    elif isinstance(part, Where):
        rows = part.positions(jnp.arange(t, dtype=jnp.int32)[None, None, :, None])[:, 0, :, 0]
        cols = jnp.arange(s, dtype=jnp.int32)[None]
        one = jnp.zeros(1, jnp.int32)
        b, n = (one if index is None else index for index in (part.b, part.n))
        b = b if len(rows) == 1 else jnp.broadcast_to(b, len(rows))
        for at, array in enumerate(Halves(part.function, 0).arrays(b, n, rows, cols)):
            yield f"function {at} of", in_memory(array)


def _dropout(dropout: KeyedDropout, shape: tuple[int, int, int, int]) -> dict[str, Array]:
    # The key of a row of the batch and a head, and the counters of queries and keys in the whole.
    _, _, t, s = shape
    places = dropout.indices(*(jnp.arange(size, dtype=jnp.int32) for size in shape))
    rows, heads, queries, keys = (place.astype(jnp.uint32) for place in places)
    seed = key_data(dropout.key)
    first, second = threefry_2x32((seed[0], seed[1]), (rows[:, None], heads[None]))
    return {
        "head key 0": jnp.asarray(first)[:, :, None, None],
        "head key 1": jnp.asarray(second)[:, :, None, None],
        "query counter": queries.reshape(-1, 1, t, 1),
        "key counter": keys.reshape(-1, 1, 1, s),
    }

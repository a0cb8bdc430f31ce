"""What a kernel reads of a call, as arrays that broadcast to `(b, n, t, s)`, beside its tokens."""

from collections.abc import Iterable
from numbers import Real

import jax.numpy as jnp
from einops import rearrange
from jax import lax
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


def hides_before(mask: Mask) -> bool:
    """Return whether an interval of a mask may hide keys before its first."""
    intervals = (part for part in flat(mask).parts if isinstance(part, IntervalPart))
    return not all(part.from_first for part in intervals)


def score_halves(call: Call) -> Halves | None:
    """Return the function of scores of a call in two halves, or None."""
    return None if call.score is None else Halves(call.score.function, 1)


def score_arrays(call: Call) -> list[Array]:
    """Return what the first half of the function of scores hands to the second."""
    score, halves = call.score, score_halves(call)
    if score is None or halves is None:
        return []
    return halves.arrays(score.b, score.n, score.rows, score.cols)


def operands(call: Call) -> dict[str, Operand]:
    """Return what beside query, key and value decides the scores of a call."""
    arrays = _mask(call) | _options(call)
    if call.dropout is not None:
        arrays |= _dropout(call.dropout, call.shape)
    arrays |= _numbered("score {}", score_arrays(call))
    return {name: along(_narrow(array)) for name, array in arrays.items()}


def _narrow(x: Array) -> Array:
    # Kernels sum in float32.
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def _options(call: Call) -> dict[str, Array]:
    sinks = None if call.sinks is None else call.sinks[None, :, None, None]
    # A scale that is a number is known to the kernel.
    scale = None if isinstance(call.scale, Real) else jnp.reshape(call.scale, (1, 1, 1, 1))
    found = {"bias": call.bias, "sinks": sinks, "scale": scale}
    return {name: x for name, x in found.items() if x is not None}


def packed(x: Array, k: int, group: int, t: int) -> Array:
    """Return an array `(#b, #n, #t, #s)` with the heads of a group as queries, `(#b, k, g t, #s)`.

    One that is the same for all heads and queries stays.
    """
    if x.shape[1:3] == (1, 1):
        return x
    x = jnp.broadcast_to(x, (len(x), k * group, t, x.shape[3]))
    return rearrange(x, "b (k g) t s -> b k (g t) s", k=k)


def _mask(call: Call) -> dict[str, Array]:
    # All intervals together are one, from a first key to before a last, for each query.
    _, _, t, s = call.shape
    intervals, _ = flat(call.mask).split_intervals(t, s)
    start, stop = (limit[:, None, :, None] for limit in intervals)
    found = {"stop": stop}
    if hides_before(call.mask):
        found["start"] = start
    for index, part in enumerate(apart(call.mask)):
        own = _arrays(part, t, s)
        named = {f"{name} {index}": array for name, array in own.items()}
        found |= named
    return found


def _arrays(part: MaskPart, t: int, s: int) -> dict[str, Array]:
    if isinstance(part, Segments):
        return _segments(part)
    if isinstance(part, Dense):
        # Booleans are no dtype that a TPU keeps in memory.
        return {"dense": of_rank_4(part.array).astype(jnp.int8)}
    assert isinstance(part, Where), "refused"
    return _numbered("function {} of", _function_arrays(part, t, s))


def words(part: Segments) -> int:
    """Return of how many integers of 32 bits an id consists."""
    return 2 if 8 in (part.query.dtype.itemsize, part.key.dtype.itemsize) else 1


def _segments(part: Segments) -> dict[str, Array]:
    count = words(part)
    query, key = _words(part.query, count), _words(part.key, count)
    found = {f"query word {at} of": word[:, None, :, None] for at, word in enumerate(query)}
    return found | {f"key word {at} of": word[:, None, None, :] for at, word in enumerate(key)}


def _words(ids: Array, count: int) -> list[Array]:
    ids = jnp.atleast_2d(ids)
    if count == 1:
        return [ids]
    both = lax.bitcast_convert_type(ids.astype(jnp.int64), jnp.int32)
    return [both[..., 0], both[..., 1]]


def _numbered(name: str, arrays: Iterable[Array]) -> dict[str, Array]:
    return {name.format(at): in_memory(array) for at, array in enumerate(arrays)}


def _function_arrays(part: Where, t: int, s: int) -> list[Array]:
    rows = _positions(part, t)
    cols = jnp.arange(s, dtype=jnp.int32)[None]
    # A mask that is the same for all rows or heads is asked for the first.
    n = jnp.zeros(1, jnp.int32) if part.n is None else part.n
    b = jnp.zeros(1, jnp.int32) if part.b is None else part.b
    b = b if len(rows) == 1 else jnp.broadcast_to(b, len(rows))
    return Halves(part.function, 0).arrays(b, n, rows, cols)


def _positions(part: Where, t: int) -> Array:
    indices = jnp.arange(t, dtype=jnp.int32)
    return part.positions(indices[None, None, :, None])[:, 0, :, 0]


def _dropout(dropout: KeyedDropout, shape: tuple[int, int, int, int]) -> dict[str, Array]:
    # The key of a row of the batch and a head, and the counters of queries and keys in the whole.
    places = dropout.indices(*(jnp.arange(size, dtype=jnp.int32) for size in shape))
    rows, heads, queries, keys = (place.astype(jnp.uint32) for place in places)
    return _head_keys(dropout, rows, heads) | {
        "query counter": queries.reshape(-1, 1, shape[2], 1),
        "key counter": keys.reshape(-1, 1, 1, shape[3]),
    }


def _head_keys(dropout: KeyedDropout, rows: Array, heads: Array) -> dict[str, Array]:
    seed = key_data(dropout.key)
    words = threefry_2x32((seed[0], seed[1]), (rows[:, None], heads[None]))
    pairs = enumerate(map(jnp.asarray, words))
    return {f"head key {at}": word[:, :, None, None] for at, word in pairs}

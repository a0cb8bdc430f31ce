"""Attention in tiles, in plain JAX on any device: memory linear in t, hidden tiles skipped, its own backward pass.

Forward, a block of queries over the chunks of keys that it sees, with a running maximum m, sum l and output o:

    m' = max(m, max x);  e = exp(x - m');  l' = l exp(m - m') + sum e;  o' = o exp(m - m') + e @ value

Backward, from the output and the log-sum-exp, kept as its two parts m and l so that a large m cannot drown l:

    w = exp(x - m) / l;  dx = w * (do @ value^T - delta);  delta = sum(do * o)

References:
    Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory" (arXiv:2112.05682);
    Dao 2023, FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.backends.passes import Gradients, Partial, backward, forward
from flax_attn.backends.quarantine import finite, poison_factor
from flax_attn.backends.slices import add, put, take
from flax_attn.backends.tiles import Head, Static
from flax_attn.backends.tiling import Tiling, cut
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.masks import Mask

_BLOCK = 1024  # queries, and keys, taken at once: on CPU the products of smaller tiles run on one core only
_STRIP = 128  # queries that share an edge of the band: with fewer less is computed in vain, with more at a better rate


def refuse(call: Call) -> str | None:
    """Return why the call cannot run in tiles: it always can."""
    return None


def attend(call: Call) -> Array:
    """Return `(b, t, n, v)`; differentiable in reverse mode once, and in forward mode over that."""
    if 0 in call.shape:
        return jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)
    sums = accumulation_dtype(call.query.dtype)
    # Lower dtypes are slow on CPU, and float16 does not hold what the backward pass divides by the sum of a long row.
    low = call.platform != "cpu" and call.query.dtype == jnp.bfloat16
    operand = call.query.dtype if low else sums
    tiling, rest = _cut(call)
    loop = _Loop(Static(tiling, call.soft_cap, call.precision, operand, sums), width=_width(call))
    scale, poison = jnp.asarray(call.scale, sums), poison_factor(call, sums)
    options = _Options(call.bias, call.sinks, scale, rest, call.dropout, poison)
    query, key, value = (jnp.asarray(x, operand) for x in (call.query, call.key, call.value))
    return jnp.asarray(_attend(loop, query, key, value, options), call.query.dtype)


def memory(call: Call) -> int:
    """Return the bytes of three tiles of scores, of one head padded, and of the maxima and sums."""
    b, n, t, s = call.shape
    tiling, _ = _cut(call)
    tile = tiling.block * max(0 if tiling.narrow else tiling.chunk, *(strip.cols for strip in tiling.strips), 0)
    head = (t + tiling.block + s + tiling.before + tiling.after) * (call.query.shape[3] + call.value.shape[3])
    return accumulation_dtype(call.query.dtype).itemsize * (_width(call) * (3 * tile + head) + 2 * b * n * t)


def _cut(call: Call) -> tuple[Tiling, Mask]:
    band, rest = call.mask.split_band()
    block = _BLOCK if call.platform == "cpu" else max(_BLOCK // 4, 1)  # of all heads at once
    return cut(*call.shape[2:], *band, block, min(_STRIP, block)), rest


def _width(call: Call) -> int:
    return 1 if call.platform == "cpu" else call.shape[1]


class _Options(NamedTuple):  # and their gradients: None for the last three
    bias: Array | None
    sinks: Array | None
    scale: Array
    mask: Any
    dropout: KeyedDropout | None
    poison: Array | None


class _Loop(NamedTuple):
    # `width` heads at once: one on CPU, where a batched product is slow; all of a batch row where many cores wait.
    static: Static
    width: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(loop: _Loop, query: Array, key: Array, value: Array, options: _Options) -> Array:
    return _forward(loop, query, key, value, options)[0]


def _forward(loop, query, key, value, options):
    (b, t, n, _), v = query.shape, value.shape[-1]
    arrays = query, key, value, _padded_bias(loop.static.tiling, options.bias)

    def one(b, n):
        found, factor = forward(loop.static, _head(loop.static, arrays, options, b, n)), _rows_of(options.poison, b, n)
        return found._replace(output=found.output * factor, total=found.total * factor)  # which backward divides by

    def place(sums, b, n, found):
        output, tops, totals = sums
        return (
            put(output, _tokens_first(found.output), (b, 0, n, 0)),
            put(tops, found.top[None], (b, n, 0, 0)),
            put(totals, found.total[None], (b, n, 0, 0)),
        )

    parts = jnp.zeros((b, n, t, 1), loop.static.sums)
    output, tops, totals = _over_heads(
        loop, b, n, one, place, (jnp.zeros((b, t, n, v), loop.static.sums), parts, parts)
    )
    return output, (query, key, value, options, output, tops, totals)


def _backward(loop, saved, cotangent):
    query, key, value, options, output, tops, totals = saved
    static, (b, _, n, _) = loop.static, query.shape
    arrays, group = (query, key, value, _padded_bias(static.tiling, options.bias)), n // key.shape[2]

    def one(b, n):
        kept = Partial(_pick(output, b, n), _rows_of(tops, b, n), _rows_of(totals, b, n))
        found = backward(static, _head(static, arrays, options, b, n), kept, _pick(cotangent, b, n))
        query, key, value = (_pick(x, b, i) for x, i in zip(arrays[:3], (n, n // group, n // group), strict=True))
        d_scale = (found.query * finite(query).astype(static.sums)).sum()
        d_query, d_key, d_value = finite(query, found.query), finite(key, found.key), finite(value, found.value)
        return Gradients(d_query, d_key, d_value, found.bias, found.sink), d_scale

    def place(sums, b, n, found):
        (d_query, d_key, d_value, d_bias, d_sinks), d_scale = found
        return (
            put(sums[0], _tokens_first(d_query * options.scale), (b, 0, n, 0)),
            _put_group(sums[1], d_key, b, n, group),
            _put_group(sums[2], d_value, b, n, group),
            None if d_bias is None else _add_bias(sums[3], d_bias, b, n),
            None if d_sinks is None else add(sums[4], d_sinks, (n,)),
            sums[5] + d_scale.sum(),
        )

    sums = [None if x is None else jnp.zeros(x.shape, static.sums) for x in (*arrays, options.sinks, options.scale)]
    *found, d_bias, d_sinks, d_scale = _over_heads(loop, b, n, one, place, tuple(sums))
    d_query, d_key, d_value = (d.astype(x.dtype) for d, x in zip(found, (query, key, value), strict=True))
    d_bias = None if d_bias is None else _real_bias(static.tiling, d_bias, options.bias)
    d_sinks = None if d_sinks is None else d_sinks.astype(options.sinks.dtype)
    return d_query, d_key, d_value, _Options(d_bias, d_sinks, d_scale, None, None, None)


_attend.defvjp(_forward, _backward)


def _over_heads(loop, b, n, one, place, sums):
    def step(i, sums):
        i = jnp.asarray(i, jnp.int32)
        row, first = i * loop.width // n, i * loop.width % n
        if loop.width == 1:
            return place(sums, row, first, jax.tree.map(lambda x: x[None], one(row, first)))
        heads = first + jnp.arange(loop.width, dtype=jnp.int32)
        return place(sums, row, first, jax.vmap(one, (None, 0))(row, heads))

    return lax.fori_loop(0, b * n // loop.width, step, sums)


def _head(static: Static, arrays: tuple, options: _Options, b: Array, n: Array) -> Head:
    query, key, value, bias = arrays
    tiling, group = static.tiling, query.shape[2] // key.shape[2]
    query = finite(_pick(query, b, n)).astype(static.sums) * options.scale
    key, value = (finite(_pick(x, b, n // group)).astype(static.operand) for x in (key, value))
    ends = ((tiling.before, tiling.after), (0, 0))
    return Head(
        query=jnp.pad(query.astype(static.operand), ((0, tiling.blocks * tiling.block - tiling.t), (0, 0))),
        key=jnp.pad(key, ends),
        value=jnp.pad(value, ends),
        bias=bias,
        sink=None if options.sinks is None else take(options.sinks, (n,), (1,)),
        mask=options.mask.row(b, n),
        dropout=options.dropout,
        b=b,
        n=n,
    )


def _pick(x: Array, b: Array, n: Array) -> Array:
    return take(x, (b, 0, n, 0), (1, x.shape[1], 1, x.shape[3])).reshape(x.shape[1], x.shape[3])


def _rows_of(x: Array, b: Array, n: Array) -> Array:
    return take(x, (b, n, 0, 0), (1, 1, *x.shape[2:]))[0, 0]


def _tokens_first(x: Array) -> Array:
    return x.swapaxes(0, 1)[None]


def _put_group(array: Array, part: Array, b: Array, n: Array, group: int) -> Array:
    if group == 1:
        return put(array, _tokens_first(part), (b, 0, n, 0))
    # Query heads of one group share a key/value head.
    shared = part.reshape(-1, min(group, part.shape[0]), *part.shape[1:]).sum(axis=1)
    return add(array, _tokens_first(shared), (b, 0, n // group, 0))


def _add_bias(array: Array, part: Array, b: Array, n: Array) -> Array:
    part = part.sum(axis=0, keepdims=True) if array.shape[1] == 1 else part
    row, head = (0 if size == 1 else i for size, i in zip(array.shape, (b, n), strict=False))
    return add(array, part[None], (row, head, 0, 0))


def _padded_bias(tiling: Tiling, bias: Array | None) -> Array | None:
    if bias is None:
        return None
    ends = (0, tiling.blocks * tiling.block - tiling.t), (tiling.before, tiling.after)
    ends = (end if size > 1 else (0, 0) for end, size in zip(ends, bias.shape[2:], strict=True))
    return jnp.pad(bias, ((0, 0), (0, 0), *ends))


def _real_bias(tiling: Tiling, padded: Array, bias: Array) -> Array:
    at = (0, 0, 0, tiling.before if bias.shape[3] > 1 else 0)
    return take(padded, at, bias.shape).astype(bias.dtype)

"""The calls of the kernels in C++, and their derivatives of every order.

The first derivative in reverse mode has a kernel of its own. All others are those of the formula:
forward mode, and what is differentiated twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import ad, batching
from jaxtyping import Array

from flax_attn.functional.masks import Mask
from flax_attn.functional.reference import capped_scores, reference_attention
from flax_attn.native import target
from flax_attn.native.primitive import batch_by_broadcasting, primitive

_LOG2_E = np.float32(np.log2(np.e))


class Options(NamedTuple):
    """What is known before tracing.

    Args:
        scale: factor on the scores.
        soft_cap: soft cap on the scores; 0 is none.
        heads_first: whether keys and values are `(b, k, s, h)`.
        few: whether the queries are so few that keys and values are best read where they are.
        differentiated: whether a gradient is taken: its scores are summed in the order of
            `backward`, and not in that of few queries, or of products in bfloat16.
    """

    scale: float
    soft_cap: float
    heads_first: bool
    few: bool
    differentiated: bool = False


class Operands(NamedTuple):
    """The arrays of a call, all with a batch axis, so that `jax.vmap` can put its own before it.

    Args:
        query: query `(b, t, n, h)`.
        key: key `(b, s, k, h)`, or heads first.
        value: value `(b, s, k, v)`, or heads first.
        sinks: sinks `(b, n)`, or `(b, 0)` for none.
        start: first key that each query may see, `(b, t)`.
        stop: key after the last one that each query may see, `(b, t)`.
        query_segment: segment of each query, `(b, t)`, or `(b, 0)` for none.
        key_segment: segment of each key, `(b, s)`, or `(b, 0)` for none.
    """

    query: Array
    key: Array
    value: Array
    sinks: Array
    start: Array
    stop: Array
    query_segment: Array
    key_segment: Array

    @property
    def floats(self) -> tuple[Array, Array, Array, Array]:
        """What a call is differentiated by."""
        return self[:4]


class Results(NamedTuple):
    """The output `(b, t, n, v)`, and the largest base-2 score and softmax sum of each row.

    The last two are `(b, n, t)`.
    """

    output: Array
    top: Array
    total: Array


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward(options: Options, operands: Operands) -> Results:
    """Return what the kernel finds."""
    return Results(*_forward.bind(*operands, options=options))


@forward.defjvp
def _differentiate(options, primals, tangents):
    (operands,), (changes,) = primals, tangents
    results = forward(options._replace(few=False, differentiated=True), operands)
    change = _tangent.bind(*operands, *results, *changes[:4], options=options)
    # Top and total are read by derivatives alone, which do not depend on them but by rounding.
    return results, Results(change, jnp.zeros_like(results.top), jnp.zeros_like(results.total))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def backward(
    options: Options, operands: Operands, results: Results, cotangent: Array
) -> tuple[Array, ...]:
    """Return the gradients by query, key, value and sinks."""
    d_query, d_key, d_value, delta = _backward.bind(*operands, *results, cotangent, options=options)
    d_key, d_value = (_swapped(options, x) for x in (d_key, d_value))
    return d_query, d_key, d_value, _sinks_gradient(operands.sinks, results, delta)


@backward.defjvp
def _differentiate_again(options, primals, tangents):
    (operands, _, cotangent), (changes, _, change) = primals, tangents

    def by_formula(floats, cotangent):
        return jax.vjp(partial(_formula, options, operands), floats)[1](cotangent)[0]

    gradients, again = jax.jvp(by_formula, (operands.floats, cotangent), (changes[:4], change))
    del (
        gradients
    )  # the kernel's are returned, so that they are the same bits under every transformation
    return backward(options, *primals), again


def _sinks_gradient(sinks: Array, results: Results, delta: Array) -> Array:
    if sinks.shape[1] == 0:
        return jnp.zeros_like(sinks)
    total = jnp.where(results.total == 0, 1, results.total)
    weight = jnp.exp2(sinks[:, :, None] * _LOG2_E - results.top) / total
    return -(weight * delta).sum(axis=2)


def _call_forward(*operands: Array, options: Options) -> Sequence[Array]:
    call = Operands(*operands)
    (*batch, t, n, _), v = call.query.shape, call.value.shape[-1]
    rows = jax.ShapeDtypeStruct((*batch, n, t), jnp.float32)
    results = jax.ShapeDtypeStruct((*batch, t, n, v), call.query.dtype), rows, rows
    how = {"few": options.few, "differentiated": options.differentiated}
    return _call("attention_forward", results, options, *operands, **how)


def _call_backward(*arrays: Array, options: Options) -> Sequence[Array]:
    call, top = Operands(*arrays[:8]), arrays[9]
    key, value = (jax.eval_shape(partial(_swapped, options), x) for x in (call.key, call.value))
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (call.query, key, value, top)]
    return _call("attention_backward", results, options, *arrays)


def _call(name: str, results: Any, options: Options, *arrays: Array, **attributes: bool) -> Any:
    scale, soft_cap = np.float32(options.scale), np.float32(options.soft_cap)
    call = jax.ffi.ffi_call(target(name), results)
    # What lies before the last axes may be split over devices; XLA reads the number of such axes
    # from here.
    with set_xla_metadata(num_batch_dims="1"):
        return call(
            *arrays, scale=scale, soft_cap=soft_cap, heads_first=options.heads_first, **attributes
        )


def _swapped(options: Options, x: Array) -> Array:
    """Return keys or values with tokens and heads in the other order, where heads come first."""
    return jnp.swapaxes(x, -3, -2) if options.heads_first else x


def _by_rows(plain: Callable, *arrays: Array, options: Options) -> Any:
    """Return what `plain` finds for arrays whose batch axes are made one."""
    batch = arrays[0].shape[:-3]
    axis, rows = len(batch), math.prod(batch)  # -1 has no answer for an array without elements
    folded = [x.reshape(rows, *x.shape[axis:]) for x in arrays]
    return [x.reshape(*batch, *x.shape[1:]) for x in plain(*folded, options=options)]


def _plain_forward(*operands: Array, options: Options) -> Results:
    call = Operands(*operands)
    scores = jax.vmap(partial(_scores, options))(call)
    top = scores.max(axis=-1)
    if call.sinks.shape[1]:
        sinks = call.sinks[:, :, None] * _LOG2_E
        top = jnp.maximum(top, sinks)
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.exp2(scores - top[..., None]).sum(axis=-1)
    total += jnp.exp2(sinks - top) if call.sinks.shape[1] else 0
    return Results(_formula(options, call, call.floats), top, total)


def _plain_backward(*arrays: Array, options: Options) -> Sequence[Array]:
    call, output, cotangent = Operands(*arrays[:8]), arrays[8], arrays[11]
    pull = jax.vjp(partial(_formula, options, call), call.floats)[1]
    d_query, d_key, d_value, _ = pull(cotangent)[0]
    products = output.astype(jnp.float32) * cotangent.astype(jnp.float32)
    delta = rearrange(products.sum(axis=-1), "b t n -> b n t")
    return d_query, _swapped(options, d_key), _swapped(options, d_value), delta


def _scores(options: Options, row: Operands) -> Array:
    """Return the scores of one row of the batch, to base 2, `(n, t, s)`; -inf is hidden."""
    query, key = (x.astype(jnp.float32) for x in (row.query, _swapped(options, row.key)))
    query = rearrange(query, "t (k g) h -> t k g h", k=key.shape[1])
    scores = (
        jnp.einsum("t k g h, s k h -> k g t s", query, key, precision="highest") * options.scale
    )
    scores = capped_scores(
        rearrange(scores, "k g t s -> 1 (k g) t s"), None, options.soft_cap or None
    )[0]
    return jnp.where(_visible(row, key.shape[0]), scores * _LOG2_E, -jnp.inf)


def _visible(row: Operands, s: int) -> Array:
    cols = jnp.arange(s)[None]
    visible = (cols >= row.start[:, None]) & (cols < row.stop[:, None])
    if row.query_segment.size:
        visible &= row.query_segment[:, None] == row.key_segment[None]
    return visible


def _formula(options: Options, operands: Operands, floats: tuple[Array, ...]) -> Array:
    """Return the output as the formula gives it; each row of the batch has its own sinks."""

    def one(row: Operands) -> Array:
        query, key, value, sinks = row.floats
        key, value = (_swapped(options, x) for x in (key, value))
        return reference_attention(
            query[None],
            key[None],
            value[None],
            None,
            Mask.dense(_visible(row, key.shape[0])),
            scale=options.scale,
            soft_cap=options.soft_cap or None,
            sinks=sinks if sinks.size else None,
            dropout=None,
            precision="highest",
        )[0][0]

    return jax.vmap(one)(operands._replace(**dict(zip(Operands._fields[:4], floats, strict=True))))


def _tangent_formula(*args: Array, options: Options) -> Array:
    operands, changes = Operands(*args[:8]), args[11:]
    return jax.jvp(partial(_formula, options, operands), (operands.floats,), (changes,))[1]


def _transpose(cotangent, *args, options):
    operands, results, changes = (
        Operands(*args[:8]),
        Results(*args[8:11]),
        args[11:],
    )  # changes: the linear inputs
    cotangent = ad.instantiate_zeros(cotangent)
    gradients = backward(options, operands, results, cotangent)
    wanted = [
        g if ad.is_undefined_primal(x) else None for g, x in zip(gradients, changes, strict=True)
    ]
    return [None] * 11 + wanted


def _batch(args, dims, *, options):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    folded = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    folded = [x.reshape(size * x.shape[1], *x.shape[2:]) for x in folded]
    output = _tangent.bind(*folded, options=options)
    return output.reshape(size, -1, *output.shape[1:]), 0


def _jvp(primals, tangents, *, options):
    moves = [i for i in (0, 1, 2, 3, 11, 12, 13, 14) if type(tangents[i]) is not ad.Zero]

    def moved(*floats):
        args = list(primals)
        for i, x in zip(moves, floats, strict=True):
            args[i] = x
        return _tangent_formula(*args, options=options)

    output = _tangent.bind(*primals, options=options)
    if not moves:
        return output, jnp.zeros_like(output)
    return output, jax.jvp(moved, [primals[i] for i in moves], [tangents[i] for i in moves])[1]


_forward, _backward = (
    primitive(
        f"native_attention_{name}",
        call,
        partial(_by_rows, plain),
        ("options",),
        shapes=call,
        multiple_results=True,
    )
    for name, call, plain in (
        ("forward", _call_forward, _plain_forward),
        ("backward", _call_backward, _plain_backward),
    )
)
batch_by_broadcasting(_forward)
batch_by_broadcasting(_backward)

# The change of the output for changes of what it is computed from, which is linear in these: a
# primitive, because only a primitive has a transpose, the kernel for backward, and is
# differentiated and mapped over like any other.
_tangent = primitive(
    "native_attention_tangent",
    _tangent_formula,
    _tangent_formula,
    ("options",),
    shapes=lambda *args, options: args[8],
)
ad.primitive_transposes[_tangent] = _transpose
ad.primitive_jvps[_tangent] = _jvp
batching.primitive_batchers[_tangent] = _batch

"""The calls of the kernels in C++, and their derivatives of every order.

The first derivative in reverse mode has a kernel of its own. All others are those of the formula: forward mode, and
what is differentiated twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from flax_attn.functional.masks import Mask
from flax_attn.functional.reference import reference_attention
from flax_attn.native import target


class Options(NamedTuple):
    """What is known before tracing.

    Args:
        scale: of the scores.
        soft_cap: of the scores; 0 is none.
        heads_first: whether keys and values are `(b, k, s, h)`.
        few: whether the queries are so few that keys and values are best read where they are.
        differentiated: whether a gradient is taken: its scores are summed in the order of `backward`, and not in that
            of few queries, or of products in bfloat16.
    """

    scale: float
    soft_cap: float
    heads_first: bool
    few: bool
    differentiated: bool = False


class Operands(NamedTuple):
    """The arrays of a call, all with a batch axis, so that `jax.vmap` can put its own before it.

    Args:
        query: `(b, t, n, h)`.
        key: `(b, s, k, h)`, or heads first.
        value: `(b, s, k, v)`, or heads first.
        sinks: `(b, n)`, or `(b, 0)` for none.
        start: `(b, t)`, the first key that a query may see.
        stop: `(b, t)`, the key after the last one.
        query_segment: `(b, t)`, or `(b, 0)` for none.
        key_segment: `(b, s)`, or `(b, 0)` for none.
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
    """The output `(b, t, n, v)`, and for each row, `(b, n, t)`, the largest score to base 2 and the softmax's sum."""

    output: Array
    top: Array
    total: Array


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward(options: Options, operands: Operands) -> Results:
    """Return what the kernel finds."""
    (b, t, n, _), v = operands.query.shape, operands.value.shape[-1]
    rows = jax.ShapeDtypeStruct((b, n, t), jnp.float32)
    results = jax.ShapeDtypeStruct((b, t, n, v), operands.query.dtype), rows, rows
    how = {"few": options.few, "differentiated": options.differentiated}
    return Results(*_call("attention_forward", results, options, *operands, **how))


@forward.defjvp
def _differentiate(options, primals, tangents):
    (operands,), (changes,) = primals, tangents
    results = forward(options._replace(few=False, differentiated=True), operands)
    change = _tangent.bind(*operands, *results, *changes[:4], options=options)
    # Top and total are read by derivatives alone, which do not depend on them but by rounding.
    return results, Results(change, jnp.zeros_like(results.top), jnp.zeros_like(results.total))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def backward(options: Options, operands: Operands, results: Results, cotangent: Array) -> tuple[Array, ...]:
    """Return the gradients by query, key, value and sinks."""
    query, key, value, sinks = operands.floats
    tokens_first = [_tokens_first(options, x) for x in (key, value)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, *tokens_first, results.top)]
    d_query, d_key, d_value, delta = _call("attention_backward", shapes, options, *operands, *results, cotangent)
    d_key, d_value = (rearrange(x, "b s k h -> b k s h") if options.heads_first else x for x in (d_key, d_value))
    return d_query, d_key, d_value, _sinks_gradient(sinks, results, delta)


@backward.defjvp
def _differentiate_again(options, primals, tangents):
    (operands, _, cotangent), (changes, _, change) = primals, tangents

    def by_formula(floats, cotangent):
        return jax.vjp(partial(_formula, options, operands), floats)[1](cotangent)[0]

    gradients, again = jax.jvp(by_formula, (operands.floats, cotangent), (changes[:4], change))
    del gradients  # the kernel's are returned, so that they are the same bits under every transformation
    return backward(options, *primals), again


def _sinks_gradient(sinks: Array, results: Results, delta: Array) -> Array:
    if sinks.shape[1] == 0:
        return jnp.zeros_like(sinks)
    total = jnp.where(results.total == 0, 1, results.total)
    weight = jnp.exp2(sinks[:, :, None] * np.float32(np.log2(np.e)) - results.top) / total
    return -(weight * delta).sum(axis=2)


def _call(name: str, results: Any, options: Options, *arrays: Array, **attributes: bool) -> Any:
    scale, soft_cap = np.float32(options.scale), np.float32(options.soft_cap)
    call = jax.ffi.ffi_call(target(name), results, vmap_method="broadcast_all")
    # What lies before the last axes may be split over devices; XLA reads the number of such axes from here.
    with set_xla_metadata(num_batch_dims="1"):
        return call(*arrays, scale=scale, soft_cap=soft_cap, heads_first=options.heads_first, **attributes)


def _tokens_first(options: Options, x: Array) -> Any:
    return jax.eval_shape(lambda x: rearrange(x, "b k s h -> b s k h") if options.heads_first else x, x)


def _formula(options: Options, operands: Operands, floats: tuple[Array, ...]) -> Array:
    """Return the output as the formula gives it; each row of the batch has its own sinks."""

    def one(row: Operands) -> Array:
        query, key, value, sinks = row.floats
        key, value = (rearrange(x, "k s h -> s k h") if options.heads_first else x for x in (key, value))
        cols = jnp.arange(key.shape[0])[None]
        visible = (cols >= row.start[:, None]) & (cols < row.stop[:, None])
        if row.query_segment.size:
            visible &= row.query_segment[:, None] == row.key_segment[None]
        return reference_attention(
            query[None],
            key[None],
            value[None],
            None,
            Mask.dense(visible),
            scale=options.scale,
            soft_cap=options.soft_cap or None,
            sinks=sinks if sinks.size else None,
            dropout=None,
            precision="highest",
        )[0][0]

    return jax.vmap(one)(operands._replace(**dict(zip(Operands._fields[:4], floats, strict=True))))


# The change of the output for changes of what it is computed from, which is linear in these: a primitive, because only
# a primitive has a transpose, the kernel for backward, and is differentiated and mapped over like any other.
_tangent = Primitive("native_attention_tangent")


def _tangent_formula(*args: Array, options: Options) -> Array:
    operands, changes = Operands(*args[:8]), args[11:]
    return jax.jvp(partial(_formula, options, operands), (operands.floats,), (changes,))[1]


def _transpose(cotangent, *args, options):
    operands, results, changes = Operands(*args[:8]), Results(*args[8:11]), args[11:]  # changes: the linear inputs
    cotangent = ad.instantiate_zeros(cotangent)
    gradients = backward(options, operands, results, cotangent)
    wanted = [g if ad.is_undefined_primal(x) else None for g, x in zip(gradients, changes, strict=True)]
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


_tangent.def_impl(jax.jit(_tangent_formula, static_argnames="options"))
_tangent.def_abstract_eval(lambda *args, options: args[8])
mlir.register_lowering(_tangent, mlir.lower_fun(_tangent_formula, multiple_results=False))
ad.primitive_transposes[_tangent] = _transpose
ad.primitive_jvps[_tangent] = _jvp
batching.primitive_batchers[_tangent] = _batch

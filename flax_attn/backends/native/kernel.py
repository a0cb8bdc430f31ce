"""The calls of the kernels in C++, forward and backward.

The primitives take the arrays of a whole `Call`. Under `jax.vmap` each of these has further axes
before its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jaxtyping import Array

from flax_attn.backends.call import Call, Floats
from flax_attn.backends.platform import may_be_partitioned
from flax_attn.backends.reference import with_weights
from flax_attn.functional.mask_part import of_rank_4
from flax_attn.functional.mask_parts import Dense, Segments
from flax_attn.functional.masks import Mask
from flax_attn.functional.reference import capped_scores
from flax_attn.native import target
from flax_attn.native.primitive import batch_by_broadcasting, primitive

FEW = 16  # queries, for which keys and values are best read where they are
_LOG2_E = np.float32(np.log2(np.e))


class Results(NamedTuple):
    """The output `(b, t, n, v)`, and the largest base-2 score and softmax sum of each row.

    The last two are `(b, n, t)`. The output is float32 where a gradient is taken: that of the
    scores of a row, which add up to 0, would not with the products of rounded outputs.
    """

    output: Array
    top: Array
    total: Array


@jax.custom_vjp
def attend(call: Call) -> Array:
    """Return what the kernel finds for a call."""
    return forward(False, call).output


def _forward_kept(call: Call) -> tuple[Array, tuple[Call, Results]]:
    results = forward(True, call)
    return results.output.astype(call.query.dtype), (call, results)


def _pull_back(kept: tuple[Call, Results], cotangent: Array) -> tuple[Call]:
    call, results = kept
    gradients = backward(call, results, cotangent)
    return (call.cotangent(gradients),)


attend.defvjp(_forward_kept, _pull_back)


def forward(differentiated: bool, call: Call) -> Results:
    """Return what the kernel finds, and the sums of its softmax.

    Where a gradient is taken, scores are summed in the order of `backward`, and not in that of few
    queries, or of products in bfloat16.
    """
    return Results(*_bind(_forward, call, differentiated=differentiated))


def backward(call: Call, results: Results, cotangent: Array) -> Floats:
    """Return the gradients."""
    d_query, d_key, d_value, delta = _bind(_backward, call, results, cotangent)
    d_sinks = _each(call, _sinks_gradient, call, results, delta)
    return Floats(d_query, d_key, d_value, sinks=d_sinks)


def _output_dtype(call: Call, differentiated: bool) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if differentiated else call.query.dtype


def _floats(call: Call) -> Floats:
    # A scale is known before tracing, and has no gradient.
    return call.floats._replace(scale=None)


def _bind(made: Primitive, *trees: Any, **options: Any) -> Any:
    """Return what a primitive finds for trees of arrays, whose structure it gets as an option."""
    leaves, structure = jax.tree.flatten(trees)
    return made.bind(*leaves, structure=structure, **options)


def _each(call: Call, function: Callable, *trees: Any) -> Any:
    """Return what `function` finds for the axes that `jax.vmap` put before those of a call."""
    for _ in range(call.query.ndim - 4):
        function = jax.vmap(function)
    return function(*trees)


def _call_forward(*leaves: Array, structure: Any, differentiated: bool) -> Sequence[Array]:
    (call,) = structure.unflatten(leaves)
    *batch, t, n, _ = call.query.shape
    output = *batch, t, n, call.value.shape[-1]
    rows = jax.ShapeDtypeStruct((*batch, n, t), jnp.float32)
    dtype = _output_dtype(call, differentiated)
    return _call(
        "attention_forward",
        (jax.ShapeDtypeStruct(output, dtype), rows, rows),
        call,
        few=not differentiated and t <= FEW,
        differentiated=differentiated,
    )


def _call_backward(*leaves: Array, structure: Any) -> Sequence[Array]:
    call, results, cotangent = structure.unflatten(leaves)
    found = call.query, call.key, call.value, results.top
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]
    return _call("attention_backward", shapes, call, *results, cotangent)


def _call(name: str, shapes: Any, call: Call, *others: Array, **how: bool) -> Any:
    numbers = {"scale": np.float32(call.scale), "soft_cap": np.float32(call.soft_cap or 0)}
    function = jax.ffi.ffi_call(target(name), shapes)
    operands, dense = _each(call, _operands, call)
    # What lies before the last axes may be split over devices; XLA reads the number of such axes
    # from here.
    with set_xla_metadata(num_batch_dims="1"):
        heads_first = _heads_first(call)
        return function(*operands, *others, *dense, **numbers, heads_first=heads_first, **how)


def _heads_first(call: Call) -> bool:
    # A cache stores heads first; in the other order XLA would copy it. Where t = s keys were just
    # computed.
    return call.query.shape[-3] < call.key.shape[-3]


def _operands(call: Call) -> tuple[list[Array], list[Array]]:
    """Return the arrays of a call in the order of the kernels, each with the batch as an axis.

    They are query, key, value, sinks, the first key that each query may see and the one after the
    last, and the segments of queries and keys; none are of size 0. A dense mask, if there is one,
    comes after all others, and by itself here.
    """
    intervals, rest = call.mask.split_intervals(*call.shape[2:])
    key, value = call.key, call.value
    if _heads_first(call):
        key, value = (rearrange(x, "b s k h -> b k s h") for x in (key, value))
    integers = _integers(call, (*intervals, *_segments(rest)))
    return [call.query, key, value, _sinks(call), *integers], _dense(call, rest)


def _integers(call: Call, arrays: Sequence[Array]) -> list[Array]:
    b = call.shape[0]
    whole = [jnp.broadcast_to(x, (b, x.shape[-1])) for x in arrays]
    return [x.astype(jnp.int32) for x in whole]


def _dense(call: Call, mask: Mask) -> list[Array]:
    b, _, _, s = call.shape
    arrays = [of_rank_4(part.array) for part in mask.parts if isinstance(part, Dense)]
    return [_whole_rows(reduce(jnp.logical_and, arrays), b, s)] if arrays else []


def _segments(mask: Mask) -> tuple[Array, Array]:
    for part in mask.parts:
        if isinstance(part, Segments):
            return part.query, part.key
    nothing = jnp.zeros((1, 0), jnp.int32)
    return nothing, nothing


def _sinks(call: Call) -> Array:
    sinks = jnp.zeros(0, jnp.float32) if call.sinks is None else _bounded(call.sinks)
    return jnp.broadcast_to(sinks, (call.shape[0], *sinks.shape))


def _whole_rows(array: Array, b: int, s: int) -> Array:
    """Return a dense mask with all keys, and the rows of the batch that XLA may divide."""
    rows = b if may_be_partitioned() else array.shape[0]
    return jnp.broadcast_to(array, (rows, *array.shape[1:3], s))


def _bounded(sinks: Array) -> Array:
    # To base 2 the largest would be infinite.
    return jnp.minimum(sinks.astype(jnp.float32), 2e38)


def _sinks_gradient(call: Call, results: Results, delta: Array) -> Array | None:
    if call.sinks is None:
        return None
    total = jnp.where(results.total == 0, 1, results.total)
    weight = jnp.exp2(_bounded(call.sinks)[None, :, None] * _LOG2_E - results.top) / total
    return -(weight * delta).sum(axis=(0, 2)).astype(call.sinks.dtype)


def _plain_forward(*leaves: Array, structure: Any, differentiated: bool) -> Sequence[Array]:
    (call,) = structure.unflatten(leaves)
    output = _formula(call, _floats(call)).astype(_output_dtype(call, differentiated))
    return [output, *_each(call, _softmax_sums, call)]


def _softmax_sums(call: Call) -> tuple[Array, Array]:
    """Return the largest score of each row, to base 2, and the sum of its softmax."""
    scores, sinks = _scores(call), _sink_scores(call)
    top = jnp.maximum(scores.max(axis=-1), sinks)
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.exp2(scores - top[..., None]).sum(axis=-1)
    return top, total + jnp.exp2(sinks - top)


def _scores(call: Call) -> Array:
    # To base 2, -inf where hidden.
    _, _, t, s = call.shape
    scores = capped_scores(_products(call) * call.scale, None, call.soft_cap) * _LOG2_E
    visible = call.mask.block(jnp.arange(t), jnp.arange(s))
    return jnp.where(visible, scores, -jnp.inf)


def _products(call: Call) -> Array:
    query, key = call.query.astype(jnp.float32), call.key.astype(jnp.float32)
    query = rearrange(query, "b t (k g) h -> b t k g h", k=key.shape[2])
    products = jnp.einsum("b t k g h, b s k h -> b k g t s", query, key, precision="highest")
    return rearrange(products, "b k g t s -> b (k g) t s")


def _sink_scores(call: Call) -> Array:
    none = jnp.full(call.shape[1], -jnp.inf, jnp.float32)
    sinks = none if call.sinks is None else _bounded(call.sinks)
    return sinks[None, :, None] * _LOG2_E


def _plain_backward(*leaves: Array, structure: Any) -> Sequence[Array]:
    call, results, cotangent = structure.unflatten(leaves)
    _, pull = jax.vjp(partial(_formula, call), _floats(call))
    (found,) = pull(cotangent)
    products = results.output * cotangent.astype(jnp.float32)
    delta = rearrange(products.sum(axis=-1), "... t n -> ... n t")
    return found.query, found.key, found.value, delta


def _formula(call: Call, floats: Floats) -> Array:
    """Return the output as the formula gives it."""

    def output(call: Call, floats: Floats) -> Array:
        arrays = {name: getattr(floats, name) for name in ("query", "key", "value", "sinks")}
        return with_weights(replace(call, **arrays, precision="highest"))[0]

    return _each(call, output, call, floats)


_forward = primitive(
    "native_attention_forward",
    _call_forward,
    _plain_forward,
    ("structure", "differentiated"),
    shapes=_call_forward,
    multiple_results=True,
)
_backward = primitive(
    "native_attention_backward",
    _call_backward,
    _plain_backward,
    ("structure",),
    shapes=_call_backward,
    multiple_results=True,
)

for _made in (_forward, _backward):
    batch_by_broadcasting(_made)

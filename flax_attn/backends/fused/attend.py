"""A call in fused kernels, with its own backward pass."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int32

from flax_attn.backends.call import Call, Floats
from flax_attn.backends.fused.gradients import (
    BackwardPass,
    added_kernel,
    key_kernel,
    query_kernel,
)
from flax_attn.backends.fused.kernel import Kernel, Tiling
from flax_attn.backends.fused.operands import score_arrays
from flax_attn.backends.fused.passes import Pass, forward_kernel, merge_kernel, part_kernel
from flax_attn.backends.fused.scores import is_sink
from flax_attn.backends.softmax import Softmax
from flax_attn.functional.traced_score import TracedScore

P = TypeVar("P", bound=Pass)


class Plan(NamedTuple):
    """How a call is computed.

    Args:
        form: `"gpu"` or `"tpu"`.
        forward: sizes of the tiles forward.
        backward: sizes of the tiles of the gradients of queries, and of arrays along the scores.
        keys: sizes of the tiles of the gradients of keys and values.
        interpret: whether Pallas's interpreter computes it.
    """

    form: str
    forward: Tiling
    backward: Tiling
    keys: Tiling
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, call: Call) -> Array:
    return forward(plan, call, call.query.dtype).output


def _forward(plan: Plan, call: Call) -> tuple[Array, tuple[Call, Softmax]]:
    saved = forward(plan, call, call.query.dtype)
    return saved.output, (call, saved)


def _backward(plan: Plan, residuals: tuple[Call, Softmax], cotangent: Array) -> tuple[Call]:
    call, saved = residuals
    return (call.cotangent(backward(plan, call, saved, cotangent)),)


_attend.defvjp(_forward, _backward)

# An eager call would trace its kernels each time.
attend = jax.jit(_attend, static_argnums=0, inline=True)


def forward(plan: Plan, call: Call, dtype: jnp.dtype) -> Softmax:
    """Return the output `(b, t, n, v)` in a dtype, and the softmax's maxima and sums."""
    one = Pass(call, plan.forward, _form(plan), _flags(plan, call))
    if one.few and one.parts > 1:
        return _forward_in_parts(plan, one, dtype)
    found = _run(plan, one, partial(forward_kernel, dtype=dtype))
    return Softmax(one.form.arrange(found["output"]), found["top"], found["total"])


def _forward_in_parts(plan: Plan, one: Pass, dtype: jnp.dtype) -> Softmax:
    parts = _run(plan, one, part_kernel)
    found = _launch(plan, merge_kernel(one, parts, dtype))
    output = one.form.arrange(found["output"])
    output = rearrange(output, "b (g t) k v -> b t (k g) v", g=one.group)
    return Softmax(output, _unpacked(found["top"], one.group), _unpacked(found["total"], one.group))


def _unpacked(x: Float[Array, "b k gt 1"], group: int) -> Float[Array, "b n t 1"]:
    return rearrange(x, "b k (g t) 1 -> b (k g) t 1", g=group)


def backward(plan: Plan, call: Call, saved: Softmax, cotangent: Array) -> Floats:
    """Return the gradients of a call."""
    form = _form(plan)
    delta = _delta(saved.output, cotangent)
    more = {"saved": saved, "delta": delta, "cotangent": cotangent}
    one = BackwardPass(call, plan.backward, form, _flags(plan, call), **more)
    of_queries = _run(plan, one, query_kernel)
    of_keys = _run(plan, replace(one, tiling=plan.keys), key_kernel)
    return Floats(
        query=form.arrange(of_queries["query"]),
        key=form.arrange(of_keys["key"]),
        value=form.arrange(of_keys["value"]),
        bias=None if call.bias is None else _added(plan, one, "bias", call.bias),
        sinks=_sinks_gradient(call.sinks, saved, cotangent),
        scale=of_queries["scale"].sum() if "scale" in of_queries else None,
        captured=_captured(plan, one),
    )


def _sinks_gradient(sinks: Array | None, saved: Softmax, cotangent: Array) -> Array | None:
    if sinks is None:
        return None
    good = is_sink(sinks)
    gradient = saved.sinks_gradient(jnp.where(good, sinks, 0), cotangent)
    return jnp.where(good, jnp.asarray(gradient), 0)


def _delta(output: Array, cotangent: Array) -> Float[Array, "b n t 1"]:
    products = output.astype(jnp.float32) * cotangent.astype(jnp.float32)
    return rearrange(products.sum(axis=-1, keepdims=True), "b t n 1 -> b n t 1")


def _added(plan: Plan, one: BackwardPass, name: str, like: Array) -> Array:
    # The gradient of an array that was broadcast along the scores.
    (found,) = _run(plan, one, partial(added_kernel, name=name)).values()
    axes = [axis for axis, size in enumerate(like.shape) if size == 1 and found.shape[axis] > 1]
    return found.sum(axis=tuple(axes), keepdims=True)


def _captured(plan: Plan, one: BackwardPass) -> tuple[Array, ...]:
    # The gradients of captured arrays, from those of the numbers that follow from them.
    score = one.call.score
    if score is None or not score.floats:
        return ()
    arrays, pullback = jax.vjp(partial(_learned, one.call, score), score.floats)
    found = {name: _added(plan, one, name, x).astype(x.dtype) for name, x in arrays.items()}
    return pullback(found)[0]


def _learned(call: Call, score: TracedScore, floats: tuple[Array, ...]) -> dict[str, Array]:
    # The numbers that have gradients, by their names as operands.
    arrays = score_arrays(replace(call, score=score.with_floats(floats)))
    named = {f"score {at}": x for at, x in enumerate(arrays)}
    return {name: x for name, x in named.items() if jnp.issubdtype(x.dtype, jnp.inexact)}


def _form(plan: Plan) -> ModuleType:
    # Pallas takes a second to import, and each form is for one kind of chip.
    return import_module(f"flax_attn.backends.fused.{plan.form}")


def _run(plan: Plan, one: P, make: Callable[[P], Kernel]) -> dict[str, Array]:
    kernel = make(one)
    if one.flags is not None:
        of_finite = make(replace(one, finite=True))
        kernel = replace(kernel, flags=one.flags, of_finite=of_finite)
    return _launch(plan, kernel)


def _flags(plan: Plan, call: Call) -> Int32[Array, " parts"] | None:
    # Which parts of what has to be finite are.
    arrays = [call.query, call.key, call.value]
    if call.sinks is not None:
        arrays.append(jnp.where(is_sink(call.sinks), 0, jnp.nan))
    with jax.enable_x64(False):
        return _form(plan).flags(arrays, plan.interpret)


def _launch(plan: Plan, kernel: Kernel) -> dict[str, Array]:
    # Numbers without a type have 32 bits in a kernel: a TPU has no others.
    with jax.enable_x64(False):
        return _form(plan).run(kernel, plan.interpret)

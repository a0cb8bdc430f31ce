"""A call in fused kernels, with its own backward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array

from flax_attn.backends.call import Call, Floats
from flax_attn.backends.fused.kernel import Kernel, Tiling
from flax_attn.backends.fused.operands import score_arrays
from flax_attn.backends.fused.passes import added_kernel, forward_kernel, key_kernel, query_kernel
from flax_attn.backends.softmax import Softmax


class Plan(NamedTuple):
    """How a call is computed.

    Args:
        form: `"gpu"` or `"tpu"`.
        forward: sizes of the tiles forward.
        backward: sizes of the tiles backward.
        interpret: whether Pallas's interpreter computes it.
    """

    form: str
    forward: Tiling
    backward: Tiling
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, call: Call) -> Array:
    return forward(plan, call).output


def _forward(plan: Plan, call: Call) -> tuple[Array, tuple[Call, Softmax]]:
    saved = forward(plan, call)
    return saved.output, (call, saved)


def _backward(plan: Plan, residuals: tuple[Call, Softmax], cotangent: Array) -> tuple[Call]:
    call, saved = residuals
    return (call.cotangent(backward(plan, call, saved, cotangent)),)


_attend.defvjp(_forward, _backward)

# An eager call would trace its kernels each time.
attend = jax.jit(_attend, static_argnums=0, inline=True)


def forward(plan: Plan, call: Call) -> Softmax:
    """Return the output `(b, t, n, v)`, and the softmax's maxima and sums `(b, n, t, 1)`."""
    form = _form(plan)
    found = _run(plan, forward_kernel(call, plan.forward, form))
    return Softmax(form.arrange(found["output"]), found["top"], found["total"])


def backward(plan: Plan, call: Call, saved: Softmax, cotangent: Array) -> Floats:
    """Return the gradients of a call."""
    form = _form(plan)
    products = saved.output.astype(jnp.float32) * cotangent.astype(jnp.float32)
    delta = rearrange(products.sum(axis=-1, keepdims=True), "b t n 1 -> b n t 1")
    given = saved, delta, cotangent, plan.backward, form
    of_queries = _run(plan, query_kernel(call, *given))
    of_keys = _run(plan, key_kernel(call, *given))
    d_bias = None if call.bias is None else _added(plan, call, "bias", given, call.bias)
    scale = of_queries["scale"].sum() if "scale" in of_queries else None
    return Floats(
        query=form.arrange(of_queries["query"]),
        key=form.arrange(of_keys["key"]),
        value=form.arrange(of_keys["value"]),
        bias=d_bias,
        sinks=saved.sinks_gradient(call.sinks, cotangent),
        scale=scale,
        captured=_captured(plan, call, given),
    )


def _added(plan: Plan, call: Call, name: str, given: tuple, like: Array) -> Array:
    # The gradient of an array that was broadcast along the scores.
    (found,) = _run(plan, added_kernel(call, *given, name=name)).values()
    axes = [axis for axis, size in enumerate(like.shape) if size == 1 and found.shape[axis] > 1]
    return found.sum(axis=tuple(axes), keepdims=True)


def _captured(plan: Plan, call: Call, given: tuple) -> tuple[Array, ...]:
    # The gradients of captured arrays, from those of the numbers that follow from them.
    if call.score is None or not call.score.floats:
        return ()
    score = call.score

    def learned(floats: tuple[Array, ...]) -> dict[str, Array]:
        arrays = score_arrays(replace(call, score=score.with_floats(floats)))
        named = {f"score {at}": x for at, x in enumerate(arrays)}
        return {name: x for name, x in named.items() if jnp.issubdtype(x.dtype, jnp.inexact)}

    arrays, pullback = jax.vjp(learned, score.floats)
    found = {name: _added(plan, call, name, given, x).astype(x.dtype) for name, x in arrays.items()}
    (gradients,) = pullback(found)
    return gradients


def _form(plan: Plan) -> ModuleType:
    # Pallas takes a second to import, and each form is for one kind of chip.
    return import_module(f"flax_attn.backends.fused.{plan.form}")


def _run(plan: Plan, kernel: Kernel) -> dict[str, Array]:
    return _form(plan).run(kernel, plan.interpret)

"""The kernels: forward, the gradient of the queries, and those of keys and values."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends import tile
from flax_attn.backends.call import Call
from flax_attn.backends.fused import bounds
from flax_attn.backends.fused.kernel import Coordinates, Kernel, Operand, Read, Tiling, along, rows
from flax_attn.backends.fused.operands import operands
from flax_attn.backends.fused.scores import SUMS, Rows, Scores, Tokens, weights, without_beyond
from flax_attn.backends.softmax import Softmax, Sums


def forward_kernel(call: Call, tiling: Tiling, form: ModuleType) -> Kernel:
    """Return the kernel that computes the output, and the maxima and sums of its softmax."""
    b, n, t, s = call.shape
    scores = Scores(call, tiling)
    wide = form.width_of(call.value.shape[3])

    def begin() -> Sums:
        return tile.over_nothing(tiling.t, wide, SUMS)

    def fixed(read: Read, at: Coordinates) -> tuple[Tokens, Array | None]:
        sink = read("sinks").astype(SUMS) if call.sinks is not None else None
        return scores.queries(read("query"), at), sink

    def step(read: Read, at: Coordinates, fixed: Any, done: Sums) -> Sums:
        query, _ = fixed
        key, value = scores.keys(read("key"), at), scores.keys(read("value"), at)
        nan = jnp.where(key.finite & value.finite, 0, jnp.nan).astype(SUMS)
        products = scores.products(query, key)
        masked = scores.tile(read, at, products, (query.nan, nan)).masked
        return tile.softmax_step(done, masked, value.numbers, scores.dot, scores.factors(read))

    def finish(at: Coordinates, fixed: Any, done: Sums) -> dict[str, Array]:
        _, sink = fixed
        if sink is not None:
            # A key that every row sees, with a value of zero.
            one = jnp.ones((tiling.t, 1), SUMS)
            done = done & Sums(jnp.zeros_like(done.output), sink * one, one)
        found = done.divided()
        return {"output": found.output, "top": found.top, "total": found.total}

    column = rows(jax.ShapeDtypeStruct((b, n, t, 1), SUMS))
    output = jax.ShapeDtypeStruct((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)
    return Kernel(
        name="attention_forward",
        tiling=tiling,
        inputs=_inputs(call, form),
        outputs={"output": _result(form, output, form.QUERY_AXES), "top": column, "total": column},
        grid={"b": b, "n": n, "t": bounds.tiles(t, tiling.t)},
        loops={"s": bounds.tiles(s, tiling.s)},
        bounds=bounds.of_queries(call, tiling),
        outer="t",
        group=_group(call),
        begin=begin,
        fixed=fixed,
        step=step,
        finish=finish,
    )


def query_kernel(
    call: Call, saved: Softmax, delta: Array, cotangent: Array, tiling: Tiling, form: ModuleType
) -> Kernel:
    """Return the kernel that computes the gradient of the queries, and of the scale by rows."""
    b, n, t, s = call.shape
    scores = Scores(call, tiling)
    wide = form.width_of(call.query.shape[3])

    def begin() -> tuple[Array, Array]:
        return jnp.zeros((tiling.t, wide), SUMS), jnp.zeros((tiling.t, 1), SUMS)

    def fixed(read: Read, at: Coordinates) -> tuple[Rows, Any]:
        scale = call.scale if "scale" not in inputs else read("scale")
        return _rows(scores, read, at), scale

    def step(read: Read, at: Coordinates, fixed: Any, sums: Any) -> Any:
        own, _ = fixed
        key, value = scores.keys(read("key"), at), scores.keys(read("value"), at)
        found = weights(scores, read, at, own, key, value)
        d_query, d_scale = sums
        d_query = d_query + scores.dot(found.d_scores, key.numbers)
        if "scale" in inputs:
            d_scale = d_scale + (found.d_scores * found.products).sum(axis=1, keepdims=True)
        return d_query, d_scale

    def finish(at: Coordinates, fixed: Any, sums: Any) -> dict[str, Array]:
        (own, scale), (d_query, d_scale) = fixed, sums
        found = {"query": jnp.where(own.query.finite, d_query * scale, 0)}
        return found | ({"scale": d_scale} if "scale" in inputs else {})

    inputs = _backward_inputs(call, saved, delta, cotangent, form)
    outputs = {"query": _result(form, call.query, form.QUERY_AXES)}
    if "scale" in inputs:
        outputs["scale"] = rows(jax.ShapeDtypeStruct((b, n, t, 1), SUMS))
    return Kernel(
        name="attention_backward_query",
        tiling=tiling,
        inputs=inputs,
        outputs=outputs,
        grid={"b": b, "n": n, "t": bounds.tiles(t, tiling.t)},
        loops={"s": bounds.tiles(s, tiling.s)},
        bounds=bounds.of_queries(call, tiling),
        outer="t",
        group=_group(call),
        begin=begin,
        fixed=fixed,
        step=step,
        finish=finish,
    )


def key_kernel(
    call: Call, saved: Softmax, delta: Array, cotangent: Array, tiling: Tiling, form: ModuleType
) -> Kernel:
    """Return the kernel that computes the gradients of keys and values."""
    b, _, t, s = call.shape
    scores = Scores(call, tiling)
    wide = form.width_of(call.key.shape[3]), form.width_of(call.value.shape[3])

    def begin() -> tuple[Array, ...]:
        return tuple(jnp.zeros((tiling.s, width), SUMS) for width in wide)

    def fixed(read: Read, at: Coordinates) -> tuple[Tokens, Tokens]:
        return scores.keys(read("key"), at), scores.keys(read("value"), at)

    def step(read: Read, at: Coordinates, fixed: Any, sums: Any) -> Any:
        own = _rows(scores, read, at)
        found = weights(scores, read, at, own, *fixed)
        d_key, d_value = sums
        d_scores = scores.scaled(read, found.d_scores)
        d_key = d_key + scores.dot(d_scores.T, own.query.numbers)
        return d_key, d_value + scores.dot(found.dropped.T, own.cotangent)

    def finish(at: Coordinates, fixed: Any, sums: Any) -> dict[str, Array]:
        names = "key", "value"
        pairs = zip(names, fixed, sums, strict=True)
        return {name: jnp.where(x.finite, gradient, 0) for name, x, gradient in pairs}

    return Kernel(
        name="attention_backward_key",
        tiling=tiling,
        inputs=_backward_inputs(call, saved, delta, cotangent, form),
        outputs={
            "key": _result(form, call.key, form.KEY_AXES),
            "value": _result(form, call.value, form.KEY_AXES),
        },
        grid={"b": b, "k": call.key.shape[2], "s": bounds.tiles(s, tiling.s)},
        loops={"g": _group(call), "t": bounds.tiles(t, tiling.t)},
        bounds=bounds.of_keys(call, tiling),
        outer="s",
        group=_group(call),
        begin=begin,
        fixed=fixed,
        step=step,
        finish=finish,
    )


def added_kernel(
    call: Call,
    saved: Softmax,
    delta: Array,
    cotangent: Array,
    tiling: Tiling,
    form: ModuleType,
    name: str,
) -> Kernel:
    """Return the kernel that computes the gradient of an array along the scores, by name.

    It is the bias, or what a function of scores captured. The gradient has the axes of the array
    that are not 1; where queries or keys are summed over, there is one for each row and head.
    """
    b, n, t, s = call.shape
    scores = Scores(call, tiling)
    inputs = _backward_inputs(call, saved, delta, cotangent, form)
    shape = inputs[name].array.shape
    over = [axis for axis, size in zip("ts", shape[2:], strict=True) if size == 1]
    by_keys = over == ["t"] and shape[3] > 1
    counts = {"b": b, "n": n, "t": bounds.tiles(t, tiling.t), "s": bounds.tiles(s, tiling.s)}
    block = tiling.t, tiling.s
    if not over:
        grid = {axis: min(counts[axis], size) for axis, size in zip("bn", shape[:2], strict=True)}
        grid |= {"t": counts["t"], "s": counts["s"]}
        loops = {
            axis: counts[axis] for axis, size in zip("bn", shape[:2], strict=True) if size == 1
        }
        output = along(jax.ShapeDtypeStruct(shape, SUMS))
    elif by_keys:
        grid, loops, block = {"b": b, "n": n, "s": counts["s"]}, {"t": counts["t"]}, (1, tiling.s)
        output = Operand(jax.ShapeDtypeStruct((b, n, 1, s), SUMS), ("b", "n", "1", "s"))
    else:
        grid, loops, block = {"b": b, "n": n, "t": counts["t"]}, {"s": counts["s"]}, (tiling.t, 1)
        output = rows(jax.ShapeDtypeStruct((b, n, t, 1), SUMS))
    limits = bounds.of_keys if by_keys else bounds.of_queries

    def begin() -> Array:
        return jnp.zeros(block, SUMS)

    def step(read: Read, at: Coordinates, fixed: Any, sums: Array) -> Array:
        own = _rows(scores, read, at)
        key, value = scores.keys(read("key"), at), scores.keys(read("value"), at)
        if name != "bias":
            captured = name, jnp.broadcast_to(read(name), block)
            found = weights(scores, read, at, own, key, value, captured)
            return sums + jnp.asarray(found.captured)
        d_scores = weights(scores, read, at, own, key, value).d_scores
        axes = tuple(axis for axis, size in enumerate(block) if size == 1)
        return sums + (d_scores.sum(axis=axes, keepdims=True) if axes else d_scores)

    return Kernel(
        name="attention_backward_added",
        tiling=tiling,
        inputs=inputs,
        outputs={name: output},
        grid=grid,
        loops=loops or {"once": 1},
        bounds=limits(call, tiling) if over else None,
        outer="s" if by_keys else "t",
        group=_group(call),
        begin=begin,
        fixed=lambda read, at: None,
        step=step,
        finish=lambda at, fixed, sums: {name: sums},
    )


def _group(call: Call) -> int:
    return call.query.shape[2] // call.key.shape[2]


def _inputs(call: Call, form: ModuleType) -> dict[str, Operand]:
    return {
        "query": Operand(form.arrange(call.query), form.QUERY_AXES),
        "key": Operand(form.arrange(call.key), form.KEY_AXES),
        "value": Operand(form.arrange(call.value), form.KEY_AXES),
        **operands(call),
    }


def _backward_inputs(
    call: Call, saved: Softmax, delta: Array, cotangent: Array, form: ModuleType
) -> dict[str, Operand]:
    found = _inputs(call, form)
    found.pop("sinks", None)  # they are in the sum
    return found | {
        "cotangent": Operand(form.arrange(cotangent), form.QUERY_AXES),
        "top": rows(saved.top),
        "total": rows(saved.total),
        "delta": rows(delta),
    }


def _result(form: ModuleType, like: Any, axes: tuple) -> Operand:
    shape = jax.eval_shape(form.arrange, jax.ShapeDtypeStruct(like.shape, like.dtype))
    return Operand(shape, axes)


def _rows(scores: Scores, read: Read, at: Coordinates) -> Rows:
    first = at["t"] * scores.tiling.t
    cotangent = without_beyond(read("cotangent"), first, scores.call.shape[2])
    columns = (read(name) for name in ("top", "total", "delta"))
    return Rows(scores.queries(read("query"), at), cotangent, *columns)

"""The kernels backward: of queries, of keys and values, and of arrays along the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends.fused import bounds
from flax_attn.backends.fused.kernel import Coordinates, Kernel, Operand, Read, along, rows
from flax_attn.backends.fused.passes import Pass
from flax_attn.backends.fused.scores import SUMS, Rows, Tokens, tokens, weights, without_beyond
from flax_attn.backends.softmax import Softmax


@dataclass(frozen=True)
class BackwardPass(Pass):
    """What the kernels of the gradients share.

    Args:
        saved: softmax that forward found.
        delta: sum of the output times its gradient, `(b, n, t, 1)`.
        cotangent: gradient of the output.
    """

    saved: Softmax
    delta: Array
    cotangent: Array

    @property
    def inputs(self) -> dict[str, Operand]:
        """What a kernel reads of the call, and of its softmax."""
        found = super().inputs
        found.pop("sinks", None)  # they are in the sum
        return found | {
            "cotangent": Operand(self.form.arrange(self.cotangent), self.form.QUERY_AXES),
            "top": rows(self.saved.top),
            "total": rows(self.saved.total),
            "delta": rows(self.delta),
        }

    def rows(self, read: Read, at: Coordinates) -> Rows:
        """Return what a tile reads of its queries."""
        first = at["t"] * self.tiling.t
        cotangent = without_beyond(read("cotangent"), first, self.call.shape[2])
        columns = (read(name) for name in ("top", "total", "delta"))
        return Rows(tokens(read("query")), cotangent, *columns)


def query_kernel(one: BackwardPass) -> Kernel:
    """Return the kernel that computes the gradient of the queries, and of the scale by rows."""
    call, tiling, scores, inputs = one.call, one.tiling, one.scores, one.inputs
    b, n, t, s = call.shape
    wide = one.form.width_of(call.query.shape[3])

    def begin() -> tuple[Array, Array]:
        return jnp.zeros((tiling.t, wide), SUMS), jnp.zeros((tiling.t, 1), SUMS)

    def step(read: Read, at: Coordinates, own: Rows, sums: Any) -> Any:
        key, value = tokens(read("key")), tokens(read("value"))
        found = weights(scores, read, at, own, key, value)
        d_query, d_scale = sums
        d_query = d_query + scores.dot(found.d_scores, key.numbers)
        if "scale" in inputs:
            d_scale = d_scale + (found.d_scores * found.products).sum(axis=1, keepdims=True)
        return d_query, d_scale

    def finish(read: Read, at: Coordinates, own: Rows, sums: Any) -> dict[str, Array]:
        d_query, d_scale = sums
        found = {"query": jnp.where(own.query.finite, scores.scaled(read, d_query), 0)}
        return found | ({"scale": d_scale} if "scale" in inputs else {})

    outputs = {"query": one.result(call.query, one.form.QUERY_AXES)}
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
        group=one.group,
        begin=begin,
        fixed=one.rows,
        step=step,
        finish=finish,
    )


def key_kernel(one: BackwardPass) -> Kernel:
    """Return the kernel that computes the gradients of keys and values."""
    call, tiling, scores = one.call, one.tiling, one.scores
    b, _, t, s = call.shape
    wide = one.form.width_of(call.key.shape[3]), one.form.width_of(call.value.shape[3])

    def begin() -> tuple[Array, ...]:
        return tuple(jnp.zeros((tiling.s, width), SUMS) for width in wide)

    def fixed(read: Read, at: Coordinates) -> tuple[Tokens, Tokens]:
        return tokens(read("key")), tokens(read("value"))

    def step(read: Read, at: Coordinates, fixed: Any, sums: Any) -> Any:
        own = one.rows(read, at)
        found = weights(scores, read, at, own, *fixed)
        d_key, d_value = sums
        d_scores = scores.scaled(read, found.d_scores)
        d_key = d_key + scores.dot(d_scores.T, own.query.numbers)
        return d_key, d_value + scores.dot(found.dropped.T, own.cotangent)

    def finish(read: Read, at: Coordinates, fixed: Any, sums: Any) -> dict[str, Array]:
        names = "key", "value"
        pairs = zip(names, fixed, sums, strict=True)
        return {name: jnp.where(x.finite, gradient, 0) for name, x, gradient in pairs}

    return Kernel(
        name="attention_backward_key",
        tiling=tiling,
        inputs=one.inputs,
        outputs={
            "key": one.result(call.key, one.form.KEY_AXES),
            "value": one.result(call.value, one.form.KEY_AXES),
        },
        grid={"b": b, "k": call.key.shape[2], "s": bounds.tiles(s, tiling.s)},
        loops={"g": one.group, "t": bounds.tiles(t, tiling.t)},
        bounds=bounds.of_keys(call, tiling),
        outer="s",
        group=one.group,
        begin=begin,
        fixed=fixed,
        step=step,
        finish=finish,
    )


def added_kernel(one: BackwardPass, name: str) -> Kernel:
    """Return the kernel that computes the gradient of an array along the scores, by name.

    It is the bias, or what a function of scores captured. The gradient has the axes of the array
    that are not 1; where queries or keys are summed over, there is one for each row and head.
    """
    call, tiling, scores, inputs = one.call, one.tiling, one.scores, one.inputs
    b, n, t, s = call.shape
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
        own = one.rows(read, at)
        key, value = tokens(read("key")), tokens(read("value"))
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
        group=one.group,
        begin=begin,
        fixed=lambda read, at: None,
        step=step,
        finish=lambda read, at, fixed, sums: {name: sums},
    )

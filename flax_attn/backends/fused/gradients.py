"""The kernels backward: of queries, of keys and values, and of arrays along the scores."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends.fused import bounds
from flax_attn.backends.fused.kernel import Coordinates, Kernel, Operand, Read, along, rows
from flax_attn.backends.fused.passes import Pass
from flax_attn.backends.fused.scores import SUMS, Rows, Tokens, weights, without_beyond
from flax_attn.backends.softmax import Softmax


@dataclass(frozen=True)
class BackwardPass(Pass):
    """What the kernels of the gradients share.

    Args:
        saved: softmax that forward found.
        delta: sum of the output times its gradient, `(b, n, t, 1)`.
        cotangent: gradient of the output.
    """

    saved: Softmax = field(kw_only=True)
    delta: Array = field(kw_only=True)
    cotangent: Array = field(kw_only=True)

    @property
    def inputs(self) -> dict[str, Operand]:
        """What a kernel reads of the call, and of its softmax."""
        return super().inputs | {
            "cotangent": Operand(self.form.arrange(self.cotangent), self.form.QUERY_AXES),
            "top": rows(self.saved.top),
            # Divided once for a row, and not for each score.
            "share": rows(1 / jnp.where(self.saved.total == 0, 1, self.saved.total)),
            "delta": rows(self.delta),
        }

    @property
    def has_scale(self) -> bool:
        """Whether the scale is an array, which has a gradient."""
        return not isinstance(self.call.scale, Real)

    @property
    def counts(self) -> dict[str, int]:
        """How many tiles there are along each axis of the scores."""
        b, n, t, s = self.call.shape
        rows, cols = bounds.tiles(t, self.tiling.t), bounds.tiles(s, self.tiling.s)
        return {"b": b, "n": n, "t": rows, "s": cols}

    def grid(self, axes: str) -> dict[str, int]:
        """Return how many tiles there are along some axes."""
        return {axis: self.counts[axis] for axis in axes}

    def rows(self, read: Read, at: Coordinates) -> Rows:
        """Return what a tile reads of its queries."""
        first = at["t"] * self.tiling.t
        cotangent = read("cotangent")
        if self.form.READS_BEYOND:
            cotangent = without_beyond(cotangent, first, self.call.shape[2])
        columns = (read(name) for name in ("top", "share", "delta"))
        return Rows(self.query(read), cotangent, *columns)

    def keys(self, read: Read, at: Coordinates) -> tuple[Tokens, Tokens]:
        """Return the keys and values of a tile."""
        return self.scores.tokens(read("key")), self.scores.tokens(read("value"))


def query_kernel(one: BackwardPass) -> Kernel:
    """Return the kernel that computes the gradient of the queries, and of the scale by rows."""
    outputs = {"query": one.result(one.call.query, one.form.QUERY_AXES)}
    if one.has_scale:
        shape = *one.call.shape[:3], 1
        outputs["scale"] = rows(jax.ShapeDtypeStruct(shape, SUMS))
    return Kernel(
        name="attention_backward_query",
        tiling=one.tiling,
        inputs=one.inputs,
        outputs=outputs,
        grid=one.grid("bnt"),
        loops=one.grid("s"),
        bounds=bounds.of_queries(one.call, one.tiling),
        outer="t",
        group=one.group,
        begin=partial(_begin_query, one),
        fixed=one.rows,
        step=partial(_step_query, one),
        finish=partial(_finish_query, one),
    )


def _begin_query(one: BackwardPass) -> tuple[Array, Array]:
    rows = one.tiling.t
    wide = one.form.width_of(one.call.query.shape[3])
    return jnp.zeros((rows, wide), SUMS), jnp.zeros((rows, 1), SUMS)


def _step_query(one: BackwardPass, read: Read, at: Coordinates, own: Rows, sums: Any) -> Any:
    key, value = one.keys(read, at)
    found = weights(one.scores, read, at, own, key, value)
    d_query, d_scale = sums
    if one.has_scale:
        d_scale = d_scale + (found.d_scores * found.products).sum(axis=1, keepdims=True)
    return d_query + one.scores.dot(found.d_scores, key.numbers), d_scale


def _finish_query(
    one: BackwardPass, read: Read, at: Coordinates, own: Rows, sums: Any
) -> dict[str, Array]:
    d_query, d_scale = sums
    d_query = one.scores.scaled(read, d_query)
    found = {"query": own.query.only_finite(d_query)}
    return found | {"scale": d_scale} if one.has_scale else found


def key_kernel(one: BackwardPass) -> Kernel:
    """Return the kernel that computes the gradients of keys and values."""
    call, counts = one.call, one.counts
    return Kernel(
        name="attention_backward_key",
        tiling=one.tiling,
        inputs=one.inputs,
        outputs={
            "key": one.result(call.key, one.form.KEY_AXES),
            "value": one.result(call.value, one.form.KEY_AXES),
        },
        grid={"b": counts["b"], "k": call.key.shape[2], "s": counts["s"]},
        loops={"g": one.group, "t": counts["t"]},
        bounds=bounds.of_keys(call, one.tiling),
        outer="s",
        group=one.group,
        begin=partial(_begin_keys, one),
        fixed=one.keys,
        step=partial(_step_keys, one),
        finish=partial(_finish_keys, one),
    )


def _begin_keys(one: BackwardPass) -> tuple[Array, Array]:
    d_key, d_value = (
        jnp.zeros((one.tiling.s, one.form.width_of(x.shape[3])), SUMS)
        for x in (one.call.key, one.call.value)
    )
    return d_key, d_value


def _step_keys(one: BackwardPass, read: Read, at: Coordinates, keys: Any, sums: Any) -> Any:
    own = one.rows(read, at)
    scores = replace(one.scores, turned=True)
    found = weights(scores, read, at, own, *keys)
    d_key, d_value = sums
    d_key = d_key + scores.dot(found.d_scores, own.query.numbers)
    return d_key, d_value + scores.dot(found.dropped, own.cotangent)


def _finish_keys(
    one: BackwardPass, read: Read, at: Coordinates, keys: Any, sums: Any
) -> dict[str, Array]:
    key, value = keys
    d_key, d_value = sums
    d_key = one.scores.scaled(read, d_key)
    return {"key": key.only_finite(d_key), "value": value.only_finite(d_value)}


def added_kernel(one: BackwardPass, name: str) -> Kernel:
    """Return the kernel that computes the gradient of an array along the scores, by name.

    It is the bias, or what a function of scores captured. The gradient has the axes of the array
    that are not 1; where queries or keys are summed over, there is one for each row and head.
    """
    inputs = one.inputs
    added = _added_form(one, inputs[name].array.shape)
    return Kernel(
        name="attention_backward_added",
        tiling=one.tiling,
        inputs=inputs,
        outputs={name: added.output},
        grid=added.grid,
        loops=added.loops or {"once": 1},
        bounds=None if added.limits is None else added.limits(one.call, one.tiling),
        outer="s" if "t" in added.loops else "t",
        group=one.group,
        begin=partial(jnp.zeros, added.block, SUMS),
        fixed=_nothing,
        step=partial(_step_added, one, name, added.block),
        finish=lambda read, at, fixed, sums: {name: sums},
    )


def _nothing(read: Read, at: Coordinates) -> None:
    return None


class _AddedForm(NamedTuple):
    # Which programs there are, what each loops over and adds up, and where that lies.
    grid: dict[str, int]
    loops: dict[str, int]
    block: tuple[int, int]
    output: Operand
    limits: Callable[..., Array] | None


def _added_form(one: BackwardPass, shape: tuple[int, ...]) -> _AddedForm:
    *_, t, s = shape
    if t > 1 and s > 1:
        return _along_both(one, shape)
    return _along_keys(one) if s > 1 else _along_queries(one)


def _along_both(one: BackwardPass, shape: tuple[int, ...]) -> _AddedForm:
    # Rows and heads that share the array are looped over.
    shared = [axis for axis, size in zip("bn", shape, strict=False) if size == 1]
    return _AddedForm(
        grid=one.counts | dict.fromkeys(shared, 1),
        loops=one.grid("".join(shared)),
        block=(one.tiling.t, one.tiling.s),
        output=along(jax.ShapeDtypeStruct(shape, SUMS)),
        limits=None,
    )


def _along_keys(one: BackwardPass) -> _AddedForm:
    b, n, _, s = one.call.shape
    sums = jax.ShapeDtypeStruct((b, n, 1, s), SUMS)
    return _AddedForm(
        grid=one.grid("bns"),
        loops=one.grid("t"),
        block=(1, one.tiling.s),
        output=Operand(sums, ("b", "n", "1", "s")),
        limits=bounds.of_keys,
    )


def _along_queries(one: BackwardPass) -> _AddedForm:
    b, n, t, _ = one.call.shape
    return _AddedForm(
        grid=one.grid("bnt"),
        loops=one.grid("s"),
        block=(one.tiling.t, 1),
        output=rows(jax.ShapeDtypeStruct((b, n, t, 1), SUMS)),
        limits=bounds.of_queries,
    )


def _step_added(
    one: BackwardPass,
    name: str,
    block: tuple[int, int],
    read: Read,
    at: Coordinates,
    fixed: None,
    sums: Array,
) -> Array:
    keys = one.keys(read, at)
    tile = one.scores, read, at, one.rows(read, at), *keys
    if name == "bias":
        return sums + _summed_to(block, weights(*tile).d_scores)
    captured = name, jnp.broadcast_to(read(name), block)
    found = weights(*tile, captured)
    return sums + jnp.asarray(found.captured)


def _summed_to(block: tuple[int, int], d_scores: Array) -> Array:
    axes = tuple(axis for axis, size in enumerate(block) if size == 1)
    return d_scores.sum(axis=axes, keepdims=True) if axes else d_scores

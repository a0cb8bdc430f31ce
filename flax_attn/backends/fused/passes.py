"""The kernels forward: of many queries, and of few with the keys in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array

from flax_attn.backends import tile
from flax_attn.backends.call import Call
from flax_attn.backends.fused import bounds
from flax_attn.backends.fused.kernel import Coordinates, Kernel, Operand, Read, Tiling, along, rows
from flax_attn.backends.fused.operands import operands, packed
from flax_attn.backends.fused.scores import SUMS, Scores, Tokens, is_sink, tokens
from flax_attn.backends.softmax import Sums

# Sums of a part of the keys: an array of a part for each head.
_OF_PARTS = ("b", "np", "t", "h")
_COLUMNS_OF_PARTS = ("b", "np", "t", "1")


@dataclass(frozen=True)
class Pass:
    """What the kernels of a call share.

    Args:
        call: call.
        tiling: sizes of the tiles.
        form: module that runs the kernels on a kind of chip.
    """

    call: Call
    tiling: Tiling
    form: ModuleType

    @property
    def group(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.call.query.shape[2] // self.call.key.shape[2]

    @property
    def few(self) -> bool:
        """Whether one tile holds the queries of all heads that share their keys."""
        _, _, t, s = self.call.shape
        return t < s and t * self.group <= self.tiling.t

    @property
    def parts(self) -> int:
        """Number of parts of the keys, whose sums are added up one after the other."""
        return bounds.tiles(self.call.shape[3], self.tiling.part)

    @property
    def scores(self) -> Scores:
        """What all tiles compute."""
        return Scores(self.call, self.tiling, self.call.shape[2])

    @property
    def inputs(self) -> dict[str, Operand]:
        """What a kernel reads of the call."""
        call, form = self.call, self.form
        tokens = {
            "query": Operand(form.arrange(call.query), form.QUERY_AXES),
            "key": Operand(form.arrange(call.key), form.KEY_AXES),
            "value": Operand(form.arrange(call.value), form.KEY_AXES),
        }
        return tokens | operands(call)

    def query(self, read: Read) -> Tokens:
        """Return the queries of a tile; none is finite where the sink of its head is not."""
        found = tokens(read("query"))
        return found if self.call.sinks is None else found.where(is_sink(read("sinks")))

    def result(self, like: Any, axes: tuple) -> Operand:
        """Return an output of the shape and dtype of an array of tokens."""
        like = jax.ShapeDtypeStruct(like.shape, like.dtype)
        return Operand(jax.eval_shape(self.form.arrange, like), axes)


def forward_kernel(one: Pass, dtype: jnp.dtype) -> Kernel:
    """Return the kernel that computes the output in a dtype, and the softmax's maxima and sums.

    A program adds up the sums of each part of the keys.
    """
    call, tiling = one.call, one.tiling
    b, n, t, s = call.shape
    column = rows(jax.ShapeDtypeStruct((b, n, t, 1), SUMS))
    output = jax.ShapeDtypeStruct((*call.query.shape[:3], call.value.shape[3]), dtype)
    results = {"output": one.result(output, one.form.QUERY_AXES), "top": column, "total": column}
    return Kernel(
        name="attention_forward",
        tiling=tiling,
        inputs=one.inputs,
        outputs=results,
        grid={"b": b, "n": n, "t": bounds.tiles(t, tiling.t)},
        loops={"s": bounds.tiles(s, tiling.s)},
        bounds=bounds.of_queries(call, tiling),
        outer="t",
        group=one.group,
        parts=one.parts,
        finish=_finished(call),
        **_sums(one, one.scores),
    )


def part_kernel(one: Pass) -> Kernel:
    """Return the kernel that computes the sums of few queries over each part of the keys.

    The heads of a group are queries of one tile, so that their keys are read once.
    """
    call, tiling = one.call, one.tiling
    b, _, t, s = call.shape
    k, queries = call.key.shape[2], t * one.group
    inputs = one.inputs
    query = rearrange(call.query, "b t (k g) h -> b (g t) k h", k=k)
    for name, operand in inputs.items():
        if name not in ("query", "key", "value"):
            inputs[name] = along(packed(operand.array, k, one.group, t))
    inputs["query"] = Operand(one.form.arrange(query), one.form.QUERY_AXES)
    wide = one.form.width_of(call.value.shape[3])
    sums = jax.ShapeDtypeStruct((b, k * one.parts, queries, wide), SUMS)
    column = Operand(jax.ShapeDtypeStruct((*sums.shape[:3], 1), SUMS), _COLUMNS_OF_PARTS)

    def finish(read: Read, at: Coordinates, fixed: Any, done: Sums) -> dict[str, Array]:
        return {"output": done.output, "top": done.top, "total": done.total}

    return Kernel(
        name="attention_part",
        tiling=tiling,
        inputs=inputs,
        outputs={"output": Operand(sums, _OF_PARTS), "top": column, "total": column},
        grid={"b": b, "n": k, "t": 1, "p": one.parts},
        loops={"s": bounds.tiles(s, tiling.s)},
        bounds=bounds.of_queries(call, replace(tiling, t=max(t, 1))),
        outer="t",
        group=1,
        parts=one.parts,
        finish=finish,
        **_sums(one, replace(one.scores, count=queries)),
    )


def merge_kernel(one: Pass, found: dict[str, Array], dtype: jnp.dtype) -> Kernel:
    """Return the kernel that adds up the sums of the parts, in the order of the keys."""
    call, k = one.call, one.call.key.shape[2]
    b, _, t, _ = call.shape
    v, queries = call.value.shape[3], t * one.group
    inputs = {
        "part output": Operand(found["output"], _OF_PARTS),
        "part top": Operand(found["top"], _COLUMNS_OF_PARTS),
        "part total": Operand(found["total"], _COLUMNS_OF_PARTS),
    }
    if call.sinks is not None:
        inputs["sinks"] = along(packed(call.sinks[None, :, None, None], k, one.group, t))
    output = jax.ShapeDtypeStruct((b, queries, k, v), dtype)
    column = rows(jax.ShapeDtypeStruct((b, k, queries, 1), SUMS))
    wide = one.form.width_of(v)

    def step(read: Read, at: Coordinates, fixed: Any, done: Sums) -> Sums:
        return done & Sums(read("part output"), read("part top"), read("part total"))

    return Kernel(
        name="attention_merge",
        tiling=one.tiling,
        inputs=inputs,
        outputs={
            "output": one.result(output, one.form.QUERY_AXES),
            "top": column,
            "total": column,
        },
        grid={"b": b, "n": k, "t": 1},
        loops={"p": one.parts},
        bounds=None,
        outer="t",
        group=1,
        parts=one.parts,
        begin=lambda: tile.over_nothing(one.tiling.t, wide, SUMS),
        fixed=lambda read, at: None,
        step=step,
        finish=_finished(call),
    )


def _sums(one: Pass, scores: Scores) -> dict[str, Any]:
    # The functions of a kernel that takes queries over keys.
    wide = one.form.width_of(one.call.value.shape[3])

    def step(read: Read, at: Coordinates, query: Tokens, done: Sums) -> Sums:
        key, value = tokens(read("key")), tokens(read("value"))
        nan = jnp.where(key.finite & value.finite, 0, jnp.nan).astype(SUMS)
        products = scores.products(query, key)
        masked = scores.tile(read, at, products, (query.nan, nan)).masked
        return tile.softmax_step(done, masked, value.numbers, scores.dot, scores.factors(read))

    return {
        "begin": lambda: tile.over_nothing(one.tiling.t, wide, SUMS),
        "fixed": lambda read, at: one.query(read),
        "step": step,
        "merge": Sums.__and__,
    }


def _finished(call: Call) -> Callable[..., dict[str, Array]]:
    # The function to the output from the sums over all keys.
    def finish(read: Read, at: Coordinates, fixed: Any, done: Sums) -> dict[str, Array]:
        if call.sinks is not None:
            # A key that every row sees, with a value of zero.
            one = jnp.ones_like(done.total)
            sinks = read("sinks")
            sink = jnp.where(is_sink(sinks), sinks, 0).astype(SUMS) * one
            done = done & Sums(jnp.zeros_like(done.output), sink, one)
        found = done.divided()
        return {"output": found.output, "top": found.top, "total": found.total}

    return finish

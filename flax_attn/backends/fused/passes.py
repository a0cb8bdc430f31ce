"""The kernels forward: of many queries, and of few with the keys in parts."""

from dataclasses import dataclass, replace
from functools import partial
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
from flax_attn.backends.fused.scores import SUMS, Scores, Tokens, exp, is_sink
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
        flags: 1 for each part of queries, keys, values and sinks that is finite, else 0; None where
            a kernel tests each tile.
        finite: whether all of them are known to be finite.
    """

    call: Call
    tiling: Tiling
    form: ModuleType
    flags: Array | None = None
    finite: bool = False

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
        return Scores(self.call, self.tiling, self.call.shape[2], self.finite)

    @property
    def inputs(self) -> dict[str, Operand]:
        """What a kernel reads of the call."""
        axes = {"query": self.form.QUERY_AXES, "key": self.form.KEY_AXES}
        axes |= {"value": self.form.KEY_AXES}
        arranged = {name: self.form.arrange(getattr(self.call, name)) for name in axes}
        found = {name: Operand(x, axes[name]) for name, x in arranged.items()}
        return found | operands(self.call)

    def query(self, read: Read) -> Tokens:
        """Return the queries of a tile; none is finite where the sink of its head is not."""
        found = self.scores.tokens(read("query"))
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
    output = jax.ShapeDtypeStruct((b, t, n, call.value.shape[3]), dtype)
    return Kernel(
        name="attention_forward",
        tiling=tiling,
        inputs=one.inputs,
        outputs={
            "output": one.result(output, one.form.QUERY_AXES),
            "top": column,
            "total": column,
        },
        grid={"b": b, "n": n, "t": bounds.tiles(t, tiling.t)},
        loops={"s": bounds.tiles(s, tiling.s)},
        bounds=bounds.of_queries(call, tiling),
        outer="t",
        group=one.group,
        parts=one.parts,
        finish=partial(_finish, call),
        **_sums(one, one.scores),
    )


def part_kernel(one: Pass) -> Kernel:
    """Return the kernel that computes the sums of few queries over each part of the keys.

    The heads of a group are queries of one tile, so that their keys are read once.
    """
    call, tiling = one.call, one.tiling
    b, _, t, s = call.shape
    k, queries = call.key.shape[2], t * one.group
    wide = one.form.width_of(call.value.shape[3])
    sums = jax.ShapeDtypeStruct((b, k * one.parts, queries, wide), SUMS)
    column = Operand(jax.ShapeDtypeStruct((*sums.shape[:3], 1), SUMS), _COLUMNS_OF_PARTS)
    return Kernel(
        name="attention_part",
        tiling=tiling,
        inputs=_packed_inputs(one),
        outputs={"output": Operand(sums, _OF_PARTS), "top": column, "total": column},
        grid={"b": b, "n": k, "t": 1, "p": one.parts},
        loops={"s": bounds.tiles(s, tiling.s)},
        bounds=bounds.of_queries(call, replace(tiling, t=max(t, 1))),
        outer="t",
        group=1,
        parts=one.parts,
        finish=lambda read, at, fixed, done: vars(done),
        **_sums(one, replace(one.scores, count=queries)),
    )


def _packed_inputs(one: Pass) -> dict[str, Operand]:
    # What the kernel reads, with the heads of a group as queries.
    _, _, t, _ = one.call.shape
    pack = partial(packed, k=one.call.key.shape[2], group=one.group, t=t)
    inputs = {name: along(pack(x.array)) for name, x in operands(one.call).items()}
    query = rearrange(one.call.query, "b t (k g) h -> b (g t) k h", g=one.group)
    own = {"query": Operand(one.form.arrange(query), one.form.QUERY_AXES)}
    return one.inputs | inputs | own


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
        sinks = call.sinks[None, :, None, None]
        inputs["sinks"] = along(packed(sinks, k, one.group, t))
    output = jax.ShapeDtypeStruct((b, queries, k, v), dtype)
    column = rows(jax.ShapeDtypeStruct((b, k, queries, 1), SUMS))
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
        begin=partial(_begin, one),
        fixed=lambda read, at: None,
        step=_add_part,
        finish=partial(_finish, call),
    )


def _add_part(read: Read, at: Coordinates, fixed: Any, done: Sums) -> Sums:
    return done & Sums(read("part output"), read("part top"), read("part total"))


def _sums(one: Pass, scores: Scores) -> dict[str, Any]:
    # The functions of a kernel that takes queries over keys.
    return {
        "begin": partial(_begin, one),
        "fixed": lambda read, at: one.query(read),
        "step": partial(_step, scores),
        "merge": Sums.__and__,
    }


def _begin(one: Pass) -> Sums:
    wide = one.form.width_of(one.call.value.shape[3])
    return tile.over_nothing(one.tiling.t, wide, SUMS)


def _step(scores: Scores, read: Read, at: Coordinates, query: Tokens, done: Sums) -> Sums:
    key, value = scores.tokens(read("key")), scores.tokens(read("value"))
    products = scores.products(query.numbers, key.numbers)
    masked = scores.tile(read, at, products, query, key, value).masked
    factors = scores.factors(read)
    return tile.softmax_step(done, masked, value.numbers, scores.dot, factors, exp)


def _finish(call: Call, read: Read, at: Coordinates, fixed: Any, done: Sums) -> dict[str, Array]:
    if call.sinks is not None:
        done = done & _of_sink(read("sinks"), done)
    return vars(done.divided())


def _of_sink(sinks: Array, like: Sums) -> Sums:
    # A key that every row sees, with a value of zero.
    one = jnp.ones_like(like.total)
    sink = jnp.where(is_sink(sinks), sinks, 0).astype(SUMS) * one
    return Sums(jnp.zeros_like(like.output), sink, one)

"""The form of a kernel for GPUs: a program loops over its tiles, and reads them where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Int32

from flax_attn.backends.fused.kernel import Coordinates, Kernel, Operand, Read, Tiling

# The axes of an array `(b, t, n, h)`, which is read as it is.
QUERY_AXES = ("b", "t", "n", "h")
KEY_AXES = ("b", "s", "k", "h")
# Whether anything may stand in a tile beyond the last token: here zeros are read.
READS_BEYOND = False
LEAST = 16  # the smallest side of a product on tensor cores
# The programs that ask whether numbers are finite, and how many numbers each asks at once.
PARTS, AT_ONCE = 256, 4096


def arrange(x: Array) -> Array:
    """Return an array `(b, t, n, h)` as this form reads it, and back."""
    return x


def run(kernel: Kernel, interpret: bool) -> dict[str, Array]:
    """Return the outputs of a kernel."""
    arrays = _arrays(kernel)
    # Blocks are whole arrays, of which a program takes tiles.
    whole = pl.BlockSpec(memory_space=pl.ANY)
    found = pl.pallas_call(
        partial(_program, kernel),
        grid=tuple(kernel.grid.values()),
        in_specs=[whole] * len(arrays),
        out_specs=[whole] * len(kernel.outputs),
        out_shape=kernel.out_shape,
        compiler_params=triton.CompilerParams(
            num_warps=kernel.tiling.warps,
            num_stages=kernel.tiling.stages,
        ),
        interpret=interpret,
        name=kernel.name,
    )(*arrays)
    return dict(zip(kernel.outputs, found, strict=True))


def flags(arrays: Sequence[Array], interpret: bool) -> Int32[Array, " parts"] | None:
    """Return 1 for each part of some arrays in which all numbers are finite, else 0.

    It is one pass over memory, which costs less than to test each tile. None for arrays of more
    numbers than 32 bits count.
    """
    largest = max(x.size for x in arrays)
    at_a_time = PARTS * AT_ONCE
    if largest >= 2**31 - at_a_time:
        return None
    whole = pl.BlockSpec(memory_space=pl.ANY)
    ask = pl.pallas_call(
        _ask_if_finite,
        grid=(PARTS,),
        in_specs=[whole] * len(arrays),
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((PARTS,), jnp.int32),
        interpret=interpret,
        name="attention_finite",
    )
    flat = [x.reshape(-1) for x in arrays]
    return ask(*flat)


def _ask_if_finite(*refs: Any) -> None:
    *arrays, result = refs
    part = pl.program_id(0)
    sums = jnp.zeros(AT_ONCE, jnp.float32)
    for ref in arrays:
        sums = _sums_of_zeros(ref, part, sums)
    all_finite = sums.sum() == 0
    triton.store(result.at[part], all_finite.astype(jnp.int32))


def _sums_of_zeros(ref: Any, part: Any, sums: Array) -> Array:
    # 0 * x is 0 or NaN.
    turns = pl.cdiv(ref.shape[0], PARTS * AT_ONCE)
    step = partial(_add_zeros, ref, part)
    return lax.fori_loop(0, turns, step, sums)


def _add_zeros(ref: Any, part: Any, turn: Any, sums: Array) -> Array:
    start = (turn * PARTS + part) * AT_ONCE
    index = lax.broadcasted_iota(jnp.int32, (AT_ONCE,), 0)
    inside = start + index < ref.shape[0]
    place = pl.ds(start, AT_ONCE)
    x = triton.load(ref.at[place], mask=inside, other=0)
    return sums + x.astype(jnp.float32) * 0


def _arrays(kernel: Kernel) -> list[Array]:
    arrays = [operand.array for operand in kernel.inputs.values()]
    more = kernel.bounds, kernel.flags
    return [*arrays, *(x for x in more if x is not None)]


def _program(kernel: Kernel, *refs: Any) -> None:
    at = {name: pl.program_id(axis) for axis, name in enumerate(kernel.grid)}
    known = kernel.coordinates(at)
    tiles = _tiles(kernel, refs, at, known)
    results = refs[-len(kernel.outputs) :]
    for (name, operand), ref in zip(kernel.outputs.items(), results, strict=True):
        _store(ref, operand, known, kernel.tiling, tiles[name])


def _tiles(kernel: Kernel, refs: tuple, at: Coordinates, known: Coordinates) -> dict[str, Array]:
    program = _Program.of(kernel, refs)
    if kernel.of_finite is None:
        return program.outputs(at, known)
    fast = _Program.of(kernel.of_finite, refs)
    # The last input.
    flags = refs[-len(kernel.outputs) - 1]
    all_finite = triton.load(flags).min() > 0
    return lax.cond(
        all_finite,
        lambda: fast.outputs(at, known),
        lambda: program.outputs(at, known),
    )


class _Program(NamedTuple):
    # One program: a kernel, what it reads, and the bounds of its innermost loop.
    kernel: Kernel
    inputs: Mapping[str, Any]
    bounds: Any

    @staticmethod
    def of(kernel: Kernel, refs: tuple) -> _Program:
        """Return a kernel with what it reads."""
        inputs = dict(zip(kernel.inputs, refs, strict=False))
        bounds = None if kernel.bounds is None else refs[len(inputs)]
        return _Program(kernel, inputs, bounds)

    def reader(self, known: Coordinates) -> Read:
        """Return the function that reads an input by name."""

        def read(name: str) -> Array:
            operand = self.kernel.inputs[name]
            return _load(self.inputs[name], operand, known, self.kernel.tiling)

        return read

    def outputs(self, at: Coordinates, known: Coordinates) -> dict[str, Array]:
        """Return the tiles of the outputs."""
        read = self.reader(known)
        fixed = self.kernel.fixed(read, known)
        return self.kernel.finish(read, known, fixed, self.over_all(fixed, at))

    def over_all(self, fixed: Any, at: Coordinates) -> Any:
        """Return the carry after all tiles."""
        kernel = self.kernel
        if not kernel.merges:
            return self.over(fixed, kernel.loops, at, kernel.begin())
        first, stop = self.limits(at, kernel.loops["s"])
        first, stop = first // kernel.tiles_of_part, pl.cdiv(stop, kernel.tiles_of_part)
        return lax.fori_loop(first, stop, partial(self.part, fixed, at), kernel.begin())

    def part(self, fixed: Any, at: Coordinates, p: Any, done: Any) -> Any:
        """Return the carry after one part of the keys more."""
        kernel = self.kernel
        assert kernel.merge is not None
        own = self.over(fixed, kernel.loops, {**at, "p": p}, kernel.begin())
        return kernel.merge(done, own)

    def over(self, fixed: Any, loops: Mapping[str, int], at: Coordinates, carry: Any) -> Any:
        """Return the carry after the tiles of some loops."""
        if not loops:
            return self.step(fixed, at, carry)
        (name, size), *rest = loops.items()
        limits = (jnp.int32(0), jnp.int32(size)) if rest else self.limits(at, size)
        turn = partial(self.turn, fixed, name, dict(rest), at)
        return lax.fori_loop(*limits, turn, carry)

    def turn(
        self, fixed: Any, name: str, rest: Mapping[str, int], at: Coordinates, i: Any, carry: Any
    ) -> Any:
        """Return the carry after a turn of one loop."""
        return self.over(fixed, rest, {**at, name: i}, carry)

    def step(self, fixed: Any, at: Coordinates, carry: Any) -> Any:
        """Return the carry after one tile."""
        known = self.kernel.coordinates(at)
        return self.kernel.step(self.reader(known), known, fixed, carry)

    def limits(self, at: Coordinates, size: int) -> tuple[Array, Array]:
        """Return the first tile of the innermost loop and the one after the last.

        Of a part, where one is known.
        """
        kernel = self.kernel
        first, stop = _ends(kernel, self.bounds, at, size)
        if "p" not in at or "p" in kernel.loops:
            return first, stop
        start = at["p"] * kernel.tiles_of_part
        return jnp.maximum(first, start), jnp.minimum(stop, start + kernel.tiles_of_part)


def _ends(kernel: Kernel, bounds: Any, at: Coordinates, size: int) -> tuple[Array, Array]:
    if bounds is None:
        return jnp.int32(0), jnp.int32(size)
    own = at["b"], at[kernel.outer]
    return bounds[(*own, 0)], bounds[(*own, 1)]


def width_of(size: int) -> int:
    """Return how wide a tile is of tokens of a width: a power of two."""
    return max(pl.next_power_of_2(size), LEAST)


def _block(operand: Operand, tiling: Tiling) -> list[int | None]:
    sizes = operand.block(tiling)
    axes = zip(operand.axes, sizes, strict=True)
    return [width_of(size) if axis == "h" and size else size for axis, size in axes]


class _Window(NamedTuple):
    # Where a tile lies in its array, and which of it lies inside.
    index: tuple
    inside: Array | None


def _window(operand: Operand, at: Coordinates, tiling: Tiling) -> _Window:
    places = zip(operand.place(at), _block(operand, tiling), operand.array.shape, strict=True)
    spans = [_Span.of(*each) for each in places]
    taken = [span for span in spans if span.size is not None]
    return _Window(tuple(span.index for span in spans), _inside(taken))


class _Span(NamedTuple):
    # Where a tile lies along an axis; the axis goes where there is no size.
    start: Any
    size: Any
    limit: int

    @staticmethod
    def of(place: Any, size: int | None, limit: int) -> _Span:
        return _Span(place if size is None else place * size, size, limit)

    @property
    def index(self) -> Any:
        return self.start if self.size is None else pl.ds(self.start, self.size)


def _inside(spans: list[_Span]) -> Array | None:
    ragged = [axis for axis, span in enumerate(spans) if span.limit % span.size]
    if not ragged:
        return None
    conditions = [_is_inside(spans[axis], axis) for axis in ragged]
    shape = tuple(span.size for span in spans)
    return jnp.broadcast_to(reduce(jnp.bitwise_and, conditions), shape)


def _is_inside(span: _Span, axis: int) -> Array:
    shape = (span.size, 1) if axis == 0 else (1, span.size)
    index = lax.broadcasted_iota(jnp.int32, shape, axis)
    return span.start + index < span.limit


def _load(ref: Any, operand: Operand, at: Coordinates, tiling: Tiling) -> Array:
    index, inside = _window(operand, at, tiling)
    return triton.load(ref.at[index], mask=inside, other=None if inside is None else 0)


def _store(ref: Any, operand: Operand, at: Coordinates, tiling: Tiling, tile: Array) -> None:
    index, inside = _window(operand, at, tiling)
    triton.store(ref.at[index], tile.astype(operand.array.dtype), mask=inside)

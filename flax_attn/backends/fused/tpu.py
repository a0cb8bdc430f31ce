"""The form of a kernel for TPUs: the grid walks over the loops, and blocks are fetched ahead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_attn.backends.fused.kernel import Kernel, Operand

# The axes of an array `(b, n, t, h)`: a block has its last two axes.
QUERY_AXES = ("b", "n", "t", "h")
KEY_AXES = ("b", "k", "s", "h")
# Whether anything may stand in a tile beyond the last token.
READS_BEYOND = True


def arrange(x: Array) -> Array:
    """Return an array `(b, t, n, h)` as this form reads it, and back."""
    return x.swapaxes(1, 2)


def flags(arrays: Sequence[Array], interpret: bool) -> None:
    """Return None: this form tests each tile."""


def width_of(size: int) -> int:
    """Return how wide a tile is of tokens of a width."""
    return size


def run(kernel: Kernel, interpret: bool) -> dict[str, Array]:
    """Return the outputs of a kernel."""
    outputs = kernel.outputs
    prefetched = [] if kernel.bounds is None else [kernel.bounds]
    inputs = [_lying(operand.array) for operand in kernel.inputs.values()]
    found = pl.pallas_call(
        partial(_program, kernel),
        grid_spec=_grid(kernel, len(prefetched)),
        out_shape=[_lying_shape(operand.array) for operand in outputs.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=_semantics(kernel)),
        interpret=interpret,
        name=kernel.name,
    )(*prefetched, *inputs)
    pairs = zip(outputs.items(), found, strict=True)
    return {name: _standing(x, operand.array) for (name, operand), x in pairs}


def _grid(kernel: Kernel, prefetched: int) -> pltpu.PrefetchScalarGridSpec:
    carry = jax.eval_shape(lambda: jax.tree.leaves(_begin(kernel)))
    spec = partial(_spec, kernel)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=prefetched,
        grid=(*kernel.grid.values(), *kernel.loops.values()),
        in_specs=list(map(spec, kernel.inputs.values())),
        out_specs=list(map(spec, kernel.outputs.values())),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in carry],
    )


def _semantics(kernel: Kernel) -> tuple:
    # Programs are independent, the steps of one follow each other.
    return (pltpu.PARALLEL,) * len(kernel.grid) + (pltpu.ARBITRARY,) * len(kernel.loops)


def _is_column(array: Any) -> bool:
    # One number a row would take 128 lanes each: it lies in memory as a row.
    return array.shape[3] == 1 and array.shape[2] > 1


def _lying(array: Array) -> Array:
    return array.swapaxes(2, 3) if _is_column(array) else array


def _standing(x: Array, like: Any) -> Array:
    return x.swapaxes(2, 3) if _is_column(like) else x


def _lying_shape(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    b, n, t, width = array.shape
    shape = (b, n, width, t) if _is_column(array) else array.shape
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _spec(kernel: Kernel, operand: Operand) -> pl.BlockSpec:
    column = _is_column(operand.array)
    block = _swapped(operand.block(kernel.tiling), column)

    def index(*indices: Any) -> tuple:
        at, _ = _coordinates(kernel, *_split(kernel, indices))
        return tuple(_swapped(operand.place(at), column))

    return pl.BlockSpec(tuple(block), index)


def _swapped(axes: list[Any], column: bool) -> list[Any]:
    b, n, rows, cols = axes
    return [b, n, cols, rows] if column else axes


def _split(kernel: Kernel, indices: tuple) -> tuple[tuple, Any]:
    if kernel.bounds is None:
        return indices, None
    return indices[:-1], indices[-1]


def _coordinates(kernel: Kernel, ids: tuple, bounds: Any) -> tuple[dict, Any]:
    # Where a step is, and whether it lies within the bounds of the innermost loop.
    at = dict(zip((*kernel.grid, *kernel.loops), ids, strict=True))
    inside = True if bounds is None else _move_inside(kernel, at, bounds)
    return kernel.coordinates(at), inside


def _move_inside(kernel: Kernel, at: dict[str, Any], bounds: Any) -> Any:
    # A step beyond the bounds is at the last tile, which is there already.
    name = list(kernel.loops)[-1]
    first, stop = _limits(kernel, at, bounds)
    index = first + at[name]
    at[name] = jnp.maximum(jnp.minimum(index, stop - 1), 0)
    return index < stop


def _limits(kernel: Kernel, at: dict[str, Any], bounds: Any) -> tuple[Any, Any]:
    own = at["b"], at[kernel.outer]
    first, stop = bounds[(*own, 0)], bounds[(*own, 1)]
    if "p" not in kernel.grid:
        return first, stop
    start = at["p"] * kernel.tiles_of_part
    return jnp.maximum(first, start), jnp.minimum(stop, start + kernel.tiles_of_part)


def _begin(kernel: Kernel) -> tuple[Any, ...]:
    # What is added up; where there are several parts, before it those that are done.
    begin = kernel.begin()
    return (begin, begin) if kernel.merges else (begin,)


def _program(kernel: Kernel, *refs: Any) -> None:
    program = _Program.of(kernel, refs)
    count = len(kernel.grid) + len(kernel.loops)
    ids = tuple(pl.program_id(axis) for axis in range(count))
    steps = ids[len(kernel.grid) :]
    at, active = _coordinates(kernel, ids, program.bounds)

    @pl.when(_all(step == 0 for step in steps))
    def _():
        program.write(_begin(kernel))

    if kernel.merges:

        @pl.when(active & (at["s"] % kernel.tiles_of_part == 0))
        def _():
            program.write((_merged(kernel, program.carry()), kernel.begin()))

    @pl.when(active)
    def _():
        program.step(at)

    sizes = kernel.loops.values()

    @pl.when(_all(step == size - 1 for step, size in zip(steps, sizes, strict=True)))
    def _():
        program.finish(at)


class _Program(NamedTuple):
    # One program: a kernel, and the memory that it reads, writes, and adds up in.
    kernel: Kernel
    bounds: Any
    inputs: dict[str, Any]
    results: dict[str, Any]
    scratch: tuple
    structure: Any  # of what is added up

    @staticmethod
    def of(kernel: Kernel, refs: tuple) -> _Program:
        """Return a kernel with its memory."""
        bounds, refs = (None, refs) if kernel.bounds is None else (refs[0], refs[1:])
        inputs = dict(zip(kernel.inputs, refs, strict=False))
        results = dict(zip(kernel.outputs, refs[len(inputs) :], strict=False))
        scratch = refs[len(inputs) + len(results) :]
        structure = jax.tree.structure(_begin(kernel))
        return _Program(kernel, bounds, inputs, results, scratch, structure)

    def read(self, name: str) -> Array:
        """Return the tile of an input."""
        tile = self.inputs[name][...]
        return _stand(tile) if _is_column(self.kernel.inputs[name].array) else tile

    def write(self, carry: Any) -> None:
        """Keep what is added up."""
        for ref, x in zip(self.scratch, jax.tree.leaves(carry), strict=True):
            ref[...] = x

    def carry(self) -> Any:
        """Return what is added up."""
        return jax.tree.unflatten(self.structure, [ref[...] for ref in self.scratch])

    def step(self, at: dict[str, Any]) -> None:
        """Add what a tile has."""
        *done, own = self.carry()
        fixed = self.kernel.fixed(self.read, at)
        self.write((*done, self.kernel.step(self.read, at, fixed, own)))

    def finish(self, at: dict[str, Any]) -> None:
        """Write the outputs."""
        own = _merged(self.kernel, self.carry())
        fixed = self.kernel.fixed(self.read, at)
        for name, tile in self.kernel.finish(self.read, at, fixed, own).items():
            like = self.kernel.outputs[name].array
            tile = _lie(tile) if _is_column(like) else tile
            self.results[name][...] = tile.astype(like.dtype)


def _merged(kernel: Kernel, carry: tuple[Any, ...]) -> Any:
    *done, own = carry
    return kernel.merge(done[0], own) if done and kernel.merge is not None else own


def _all(conditions: Any) -> Any:
    found = True
    for condition in conditions:
        found = condition & found
    return found


def _stand(row: Array) -> Array:
    # `(1, t)` as `(t, 1)`, which Mosaic does for whole registers.
    return row.T


def _lie(column: Array) -> Array:
    return column.T

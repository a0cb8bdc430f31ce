"""The form of a kernel for TPUs: the grid walks over the loops, and blocks are fetched ahead."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_attn.backends.fused.kernel import Kernel, Operand

# The axes of an array `(b, n, t, h)`: a block has its last two axes.
QUERY_AXES = ("b", "n", "t", "h")
KEY_AXES = ("b", "k", "s", "h")


def arrange(x: Array) -> Array:
    """Return an array `(b, t, n, h)` as this form reads it, and back."""
    return x.swapaxes(1, 2)


def width_of(size: int) -> int:
    """Return how wide a tile is of tokens of a width."""
    return size


def run(kernel: Kernel, interpret: bool) -> dict[str, Array]:
    """Return the outputs of a kernel."""
    spec = partial(_spec, kernel)
    parallel = (pltpu.PARALLEL,) * len(kernel.grid) + (pltpu.ARBITRARY,) * len(kernel.loops)
    carry = jax.eval_shape(lambda: jax.tree.leaves(_begin(kernel)))
    prefetched = [] if kernel.bounds is None else [kernel.bounds]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=(*kernel.grid.values(), *kernel.loops.values()),
        in_specs=[spec(operand) for operand in kernel.inputs.values()],
        out_specs=[spec(operand) for operand in kernel.outputs.values()],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in carry],
    )
    shapes = [jax.ShapeDtypeStruct(_lying(x.array).shape, x.array.dtype) for x in _outputs(kernel)]
    found = pl.pallas_call(
        partial(_program, kernel),
        grid_spec=grid,
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=parallel),
        interpret=interpret,
        name=kernel.name,
    )(*prefetched, *(_lying(operand.array) for operand in kernel.inputs.values()))
    results = {}
    for (name, operand), x in zip(kernel.outputs.items(), found, strict=True):
        results[name] = x.swapaxes(2, 3) if _is_column(operand.array) else x
    return results


def _outputs(kernel: Kernel) -> list[Operand]:
    return list(kernel.outputs.values())


def _is_column(array: Any) -> bool:
    # One number a row would take 128 lanes each: it lies in memory as a row.
    return array.shape[3] == 1 and array.shape[2] > 1


def _lying(array: Any) -> Any:
    if not _is_column(array):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        b, n, t, _ = array.shape
        return jax.ShapeDtypeStruct((b, n, 1, t), array.dtype)
    return array.swapaxes(2, 3)


def _spec(kernel: Kernel, operand: Operand) -> pl.BlockSpec:
    block = operand.block(kernel.tiling)
    column = _is_column(operand.array)
    if column:
        block = [*block[:2], block[3], block[2]]

    def index(*indices: Any) -> tuple:
        ids, bounds = _split(kernel, indices)
        at, _ = _coordinates(kernel, ids, bounds)
        place = operand.place(at)
        return tuple([*place[:2], place[3], place[2]] if column else place)

    return pl.BlockSpec(tuple(block), index)


def _split(kernel: Kernel, indices: tuple) -> tuple[tuple, Any]:
    if kernel.bounds is None:
        return indices, None
    return indices[:-1], indices[-1]


def _coordinates(kernel: Kernel, ids: tuple, bounds: Any) -> tuple[dict, Any]:
    # Where a step is, and whether it lies within the bounds of the innermost loop. A step beyond
    # them is at the last tile, which is there already.
    at = dict(zip((*kernel.grid, *kernel.loops), ids, strict=True))
    if bounds is None:
        return kernel.coordinates(at), True
    name = list(kernel.loops)[-1]
    own = at["b"], at[kernel.outer]
    first, stop = bounds[(*own, 0)], bounds[(*own, 1)]
    if "p" in kernel.grid:
        start = at["p"] * kernel.tiles_of_part
        first = jnp.maximum(first, start)
        stop = jnp.minimum(stop, start + kernel.tiles_of_part)
    index = first + at[name]
    at[name] = jnp.maximum(jnp.minimum(index, stop - 1), 0)
    return kernel.coordinates(at), index < stop


def _begin(kernel: Kernel) -> tuple[Any, ...]:
    # What is added up; where there are several parts, before it those that are done.
    begin = kernel.begin()
    return (begin, begin) if kernel.merges else (begin,)


def _program(kernel: Kernel, *refs: Any) -> None:
    bounds, refs = (None, refs) if kernel.bounds is None else (refs[0], refs[1:])
    inputs = dict(zip(kernel.inputs, refs, strict=False))
    refs = refs[len(inputs) :]
    results = dict(zip(kernel.outputs, refs, strict=False))
    scratch = refs[len(results) :]
    count = len(kernel.grid) + len(kernel.loops)
    ids = tuple(pl.program_id(axis) for axis in range(count))
    steps = ids[len(kernel.grid) :]
    at, active = _coordinates(kernel, ids, bounds)
    structure = jax.tree.structure(_begin(kernel))

    def read(name: str) -> Array:
        tile = inputs[name][...]
        return _stand(tile) if _is_column(kernel.inputs[name].array) else tile

    def write(carry: Any) -> None:
        for ref, x in zip(scratch, jax.tree.leaves(carry), strict=True):
            ref[...] = x

    def carry() -> Any:
        return jax.tree.unflatten(structure, [ref[...] for ref in scratch])

    @pl.when(_all(step == 0 for step in steps))
    def _():
        write(_begin(kernel))

    if kernel.merges:

        @pl.when(active & (at["s"] % kernel.tiles_of_part == 0))
        def _():
            write((_merged(kernel, carry()), kernel.begin()))

    @pl.when(active)
    def _():
        *done, own = carry()
        write((*done, kernel.step(read, at, kernel.fixed(read, at), own)))

    @pl.when(
        _all(step == size - 1 for step, size in zip(steps, kernel.loops.values(), strict=True))
    )
    def _():
        own = _merged(kernel, carry())
        tiles = kernel.finish(read, at, kernel.fixed(read, at), own)
        for name, tile in tiles.items():
            operand = kernel.outputs[name].array
            tile = _lie(tile) if _is_column(operand) else tile
            results[name][...] = tile.astype(operand.dtype)


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

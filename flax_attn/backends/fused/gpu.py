"""The form of a kernel for GPUs: a program loops over its tiles, and reads them where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from flax_attn.backends.fused.kernel import Coordinates, Kernel, Operand, Tiling

# The axes of an array `(b, t, n, h)`, which is read as it is.
QUERY_AXES = ("b", "t", "n", "h")
KEY_AXES = ("b", "s", "k", "h")
LEAST = 16  # the smallest side of a product on tensor cores


def arrange(x: Array) -> Array:
    """Return an array `(b, t, n, h)` as this form reads it, and back."""
    return x


def run(kernel: Kernel, interpret: bool) -> dict[str, Array]:
    """Return the outputs of a kernel."""
    arrays = [operand.array for operand in kernel.inputs.values()]
    if kernel.bounds is not None:
        arrays.append(kernel.bounds)
    # Blocks are whole arrays, of which a program takes tiles.
    options = triton.CompilerParams(num_warps=kernel.tiling.warps, num_stages=kernel.tiling.stages)
    found = pl.pallas_call(
        partial(_program, kernel),
        grid=tuple(kernel.grid.values()),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(kernel.outputs),
        out_shape=kernel.out_shape,
        compiler_params=options,
        interpret=interpret,
        name=kernel.name,
    )(*arrays)
    return dict(zip(kernel.outputs, found, strict=True))


def _program(kernel: Kernel, *refs: Any) -> None:
    inputs = dict(zip(kernel.inputs, refs, strict=False))
    results = dict(zip(kernel.outputs, refs[-len(kernel.outputs) :], strict=True))
    at = {name: pl.program_id(axis) for axis, name in enumerate(kernel.grid)}
    bounds = None if kernel.bounds is None else refs[len(inputs)]

    def read(name: str, coordinates: Coordinates) -> Array:
        return _load(inputs[name], kernel.inputs[name], coordinates, kernel.tiling)

    known = kernel.coordinates(at)
    fixed = kernel.fixed(lambda name: read(name, known), known)

    def over(loops: Mapping[str, int], at: Coordinates, carry: Any) -> Any:
        if not loops:
            known = kernel.coordinates(at)
            return kernel.step(lambda name: read(name, known), known, fixed, carry)
        (name, size), *rest = loops.items()
        if rest:
            first, stop = jnp.int32(0), jnp.int32(size)
        else:
            first, stop = _limits(kernel, bounds, at, size)
        return lax.fori_loop(
            first, stop, lambda i, carry: over(dict(rest), {**at, name: i}, carry), carry
        )

    def part(p: Any, done: Any) -> Any:
        assert kernel.merge is not None
        return kernel.merge(done, over(kernel.loops, {**at, "p": p}, kernel.begin()))

    if kernel.merges:
        first, stop = _limits(kernel, bounds, at, kernel.loops["s"])
        first, stop = first // kernel.tiles_of_part, pl.cdiv(stop, kernel.tiles_of_part)
        carry = lax.fori_loop(first, stop, part, kernel.begin())
    else:
        carry = over(kernel.loops, at, kernel.begin())
    for name, tile in kernel.finish(lambda name: read(name, known), known, fixed, carry).items():
        _store(results[name], kernel.outputs[name], known, kernel.tiling, tile)


def _limits(kernel: Kernel, bounds: Any, at: Coordinates, size: int) -> tuple[Array, Array]:
    # The first tile of the innermost loop and the one after the last, of a part where one is known.
    first, stop = jnp.int32(0), jnp.int32(size)
    if bounds is not None:
        own = at["b"], at[kernel.outer]
        first, stop = bounds[(*own, 0)], bounds[(*own, 1)]
    if "p" not in at or "p" in kernel.loops:
        return first, stop
    start = at["p"] * kernel.tiles_of_part
    return jnp.maximum(first, start), jnp.minimum(stop, start + kernel.tiles_of_part)


def width_of(size: int) -> int:
    """Return how wide a tile is of tokens of a width: a power of two."""
    return max(pl.next_power_of_2(size), LEAST)


def _block(operand: Operand, tiling: Tiling) -> list[int | None]:
    sizes = operand.block(tiling)
    axes = zip(operand.axes, sizes, strict=True)
    return [width_of(size) if axis == "h" and size else size for axis, size in axes]


def _window(operand: Operand, at: Coordinates, tiling: Tiling) -> tuple[tuple, Array | None]:
    # Where a tile lies in its array, and which of it lies inside.
    places = zip(operand.place(at), _block(operand, tiling), strict=True)
    index, starts, sizes, limits = [], [], [], []
    for axis, (place, size) in enumerate(places):
        if size is None:
            index.append(place)
            continue
        start = place * size
        index.append(pl.ds(start, size))
        starts.append(start)
        sizes.append(size)
        limits.append(operand.array.shape[axis])
    inside = None
    for axis, (start, size, limit) in enumerate(zip(starts, sizes, limits, strict=True)):
        if limit % size == 0:
            continue
        shape = (size, 1) if axis == 0 else (1, size)
        found = start + lax.broadcasted_iota(jnp.int32, shape, axis) < limit
        inside = found if inside is None else inside & found
    return tuple(index), None if inside is None else jnp.broadcast_to(inside, tuple(sizes))


def _load(ref: Any, operand: Operand, at: Coordinates, tiling: Tiling) -> Array:
    index, inside = _window(operand, at, tiling)
    return triton.load(ref.at[index], mask=inside, other=None if inside is None else 0)


def _store(ref: Any, operand: Operand, at: Coordinates, tiling: Tiling, tile: Array) -> None:
    index, inside = _window(operand, at, tiling)
    triton.store(ref.at[index], tile.astype(operand.array.dtype), mask=inside)

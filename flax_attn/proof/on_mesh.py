"""Rows of the table on a mesh: over which of its axes each is split, and which cannot be."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.check import Check
from flax_attn.parity.pair import Pair
from flax_attn.parity.report.report import Report, environment
from flax_attn.proof.prove import prove
from flax_attn.proof.variant import Variant
from flax_attn.sharding.axes import axes_in
from flax_attn.sharding.partition import IndivisibleError


def prove_on_mesh(variant: Variant, pair: Pair, seed: int = 0, **options: Any) -> Report:
    """Return the report of a variant on the mesh in use, with a note of the axes that split it.

    A row that the mesh cannot split is not compared: its report has one check, `"mesh"`, which says
    why it did not run.

    Args:
        variant: row of the table.
        pair: pair of the variant.
        seed: seed of the weights and inputs.
        options: options of `prove`.
    """
    try:
        axes = axes_of(pair)
    except IndivisibleError as error:
        return _refused(variant, seed, str(error))
    if not axes:
        reason = "nothing of it is split over this mesh, so that every device computes all of it"
        return _refused(variant, seed, reason)
    report = prove(variant, seed, pair=pair, **options)
    report.notes.append(f"split over {', '.join(axes)}")
    return report


def axes_of(pair: Pair) -> list[str]:
    """Return the axes of the mesh in use that anything in the JAX module of a pair is split over.

    Raises:
        IndivisibleError: if attention cannot be divided over the mesh.
    """
    assert isinstance(pair.flax, JaxAdapter), "the table has modules of JAX"
    flax = pair.flax
    module = flax.built()
    inputs = flax.arrays(pair.inputs)
    program = jax.make_jaxpr(lambda inputs: flax.call(module, inputs, {}))(inputs)
    arrays = inputs, nnx.state(module, nnx.Param)
    return _axes_in_use(program.jaxpr, jax.tree.leaves(arrays))


def _spec(array: jax.Array) -> PartitionSpec:
    return getattr(array.sharding, "spec", PartitionSpec())


def _axes_in_use(program: Any, arrays: Sequence[jax.Array]) -> list[str]:
    mesh = jax.sharding.get_mesh()
    found = set()
    # What no constraint of the program splits may lie split as it is.
    specs = [*_specs(program), *map(_spec, arrays)]
    for entry in chain.from_iterable(specs):
        found.update(axes_in(entry))
    return [axis for axis in mesh.axis_names if axis in found and mesh.shape[axis] > 1]


def _specs(program: Any) -> Iterator[PartitionSpec]:
    """Yield how arrays are split inside a program: by constraints, and in `jax.shard_map`."""
    for equation in program.eqns:
        parameters = equation.params
        if "sharding" in parameters:
            yield getattr(parameters["sharding"], "spec", PartitionSpec())
        yield from parameters.get("in_specs", ())
        # Programs within it, such as the body of a loop.
        values = jax.tree.leaves(list(parameters.values()), is_leaf=_is_program)
        for inner in filter(_is_program, values):
            yield from _specs(getattr(inner, "jaxpr", inner))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns")


def _refused(variant: Variant, seed: int, reason: str) -> Report:
    check = Check("mesh", np.nan, 0.0, skipped=reason)
    return Report(variant.name, [check], seed=seed, environment=environment())

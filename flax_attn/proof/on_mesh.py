"""Rows of the table on a mesh: over which of its axes each is split, and which cannot be."""

from __future__ import annotations

from collections.abc import Iterator
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
        return _refused(
            variant,
            seed,
            "nothing of it is split over this mesh, so that every device computes all of it",
        )
    report = prove(variant, seed, pair=pair, **options)
    report.notes.append(f"split over {', '.join(axes)}")
    return report


def axes_of(pair: Pair) -> list[str]:
    """Return the axes of the mesh in use that anything in the JAX module of a pair is split over.

    Raises:
        IndivisibleError: if attention cannot be divided over the mesh.
    """
    flax, mesh = pair.flax, jax.sharding.get_mesh()
    assert isinstance(flax, JaxAdapter), "the table has modules of JAX"
    module, inputs = flax.built(), flax.arrays(pair.inputs)
    program = jax.make_jaxpr(lambda inputs: flax.call(module, inputs, {}))(inputs)
    arrays = jax.tree.leaves((inputs, nnx.state(module, nnx.Param)))
    specs = [*_specs(program.jaxpr), *(getattr(array.sharding, "spec", ()) for array in arrays)]
    found = {axis for spec in specs for entry in spec for axis in axes_in(entry)}
    return [axis for axis in mesh.axis_names if axis in found and mesh.shape[axis] > 1]


def _specs(program: Any) -> Iterator[PartitionSpec]:
    """Yield how arrays are split inside a program: by constraints, and in `jax.shard_map`."""
    for equation in program.eqns:
        if "sharding" in equation.params:
            yield getattr(equation.params["sharding"], "spec", PartitionSpec())
        yield from equation.params.get("in_specs", ())
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from _specs(getattr(value, "jaxpr", value))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns")


def _refused(variant: Variant, seed: int, reason: str) -> Report:
    return Report(
        variant.name,
        [Check("mesh", np.nan, 0.0, skipped=reason)],
        seed=seed,
        environment=environment(),
    )

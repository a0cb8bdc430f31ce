"""The names of the axes of a parameter: those it has, as Flax's rules read them, or a default."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_attn.sharding.axes import AxisName, axes_in, mesh_axes, spec, table

S = TypeVar("S")
# The metadata that says how many elements along each axis stay on one device.
UNIT = "sharding_unit"
# The line of the table for parameters whose axes have no names.
_DEFAULT = "embed"


def axis_names(variable: nnx.Variable, mesh: Any) -> tuple[AxisName, ...] | None:
    """Return what each axis of a variable is split over; None where nothing is.

    The names are Flax's metadata, `nnx.with_partitioning` or `nnx.Param(..., out_sharding=...)`,
    renamed by the variable's own `sharding_rules` and by `nnx.logical_axis_rules` in use. Of a
    parameter that names no axis the largest one that divides is split as `"embed"` of the table.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.sharding.AbstractMesh((4,), ("fsdp",), (AxisType.Auto,))
        >>> axis_names(nnx.Param(jnp.ones((3, 8))), mesh)
        (None, 'embed')
    """
    named = given_names(variable)
    if named is None:
        return _default(variable, mesh)
    if len(named) < variable.ndim and isinstance(variable, nnx.Param):
        # As in a `PartitionSpec`, the last axes may be left out.
        named = (*named, *[None] * (variable.ndim - len(named)))
    # Some optimizers keep sums over axes of a parameter, with its names.
    return named if len(named) == variable.ndim else None


def given_names(variable: nnx.Variable) -> tuple[AxisName, ...] | None:
    """Return the names in the metadata of a variable, after Flax's rules; None without names."""
    metadata = variable.get_metadata()
    names = metadata.get("out_sharding")
    if isinstance(names, NamedSharding):
        names = names.spec
    if not names:
        return None
    renamed = dict(get_logical_axis_rules()) | dict(metadata.get("sharding_rules") or ())
    return tuple(renamed.get(name, name) if isinstance(name, str) else name for name in names)


def _default(variable: nnx.Variable, mesh: Any) -> tuple[AxisName, ...] | None:
    # Vectors are small, and the state of random streams and batch statistics is read whole.
    if variable.ndim < 2 or not isinstance(variable, nnx.Param | nnx.OptVariable):
        return None
    axes = mesh_axes(_DEFAULT, mesh)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    # With Explicit axes JAX asks the model's own code where each product lies.
    if not axes or any(types[axis] == AxisType.Explicit for axis in axes):
        return None
    devices = 1
    for axis in axes:
        devices *= mesh.shape[axis]
    divided = [i for i, size in enumerate(variable.shape) if size % devices == 0]
    if not divided:
        return None
    largest = max(divided, key=lambda i: variable.shape[i])
    names: list[AxisName] = [None] * variable.ndim
    names[largest] = _DEFAULT
    return tuple(names)


def check_mesh(mesh: Any) -> None:
    """Raise unless a mesh has an axis of the table."""
    known = dict.fromkeys(axis for axes in table().values() for axis in axes)
    if known.keys().isdisjoint(mesh.axis_names):
        raise ValueError(
            f"a mesh must have an axis of the table, {', '.join(known)}; got the axes"
            f" {', '.join(mesh.axis_names)}. Name an axis of the mesh so, or change the table with"
            " flax_attn.sharding.rules"
        )


def specs(state: S, mesh: Any, only: str | None = None, but: Collection[str] = ()) -> S:
    """Return how the variables of a state are split over a mesh.

    Args:
        state: state of Flax variables.
        mesh: mesh with axes of the table.
        only: the one name whose axes are split; None is all.
        but: mesh axes that are used otherwise: what would be split over one of them is whole.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor"))
        >>> names = {"out_sharding": ("vocab", "embed"), "eager_sharding": False}
        >>> param = nnx.Param(jnp.ones((6, 8)), **names)
        >>> specs(param, mesh, only="vocab").get_value() == PartitionSpec("tensor", None)
        True
    """

    def of_one(x: nnx.Variable) -> nnx.Variable:
        names = axis_names(x, mesh)
        if names is None:
            return x.replace(PartitionSpec())
        unit = x.get_metadata().get(UNIT, (1,) * x.ndim)
        # The number of pieces that an axis may be cut into.
        pieces = [size // each for size, each in zip(x.shape, unit, strict=True)]
        entries = []
        for name, entry in zip(names, spec(names, mesh, pieces), strict=True):
            kept = only in (None, name) and not set(axes_in(entry)) & set(but)
            entries.append(entry if kept else None)
        return x.replace(PartitionSpec(*entries))

    return jax.tree.map(of_one, state, is_leaf=lambda x: isinstance(x, nnx.Variable))

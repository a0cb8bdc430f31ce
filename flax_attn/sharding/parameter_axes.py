"""The names of the axes of a parameter: those it has, as Flax's rules read them, or a default."""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from attn_spec.checks import check_type
from flax_attn.sharding.axes import AxisName, axes_in, device_count, mesh_axes, spec, table

S = TypeVar("S")
# The metadata that says how many elements along each axis stay on one device.
UNIT = "sharding_unit"
# The metadata that names the layer of an array which no mesh may split, see `check_may_split`.
ON_ONE_DEVICE = "on_one_device"
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
    return _renamed(names, metadata.get("sharding_rules") or ()) if names else None


def _renamed(names: Iterable[AxisName], own_rules: Any) -> tuple[AxisName, ...]:
    rules = dict(get_logical_axis_rules()) | dict(own_rules)
    # An axis may have several names, which have no rules.
    return tuple(rules.get(name, name) if isinstance(name, str) else name for name in names)


def _default(variable: nnx.Variable, mesh: Any) -> tuple[AxisName, ...] | None:
    # Vectors are small, and the state of random streams and batch statistics is read whole.
    if variable.ndim < 2 or not isinstance(variable, nnx.Param | nnx.OptVariable):
        return None
    largest = _largest(variable.shape, mesh)
    if largest is None:
        return None
    return tuple(_DEFAULT if i == largest else None for i in range(variable.ndim))


def _largest(shape: tuple[int, ...], mesh: Any) -> int | None:
    """Return the largest axis that the devices of the default divide, None if there is none."""
    axes = mesh_axes(_DEFAULT, mesh)
    if not axes or _some_explicit(axes, mesh):
        return None
    devices = device_count(mesh, axes)
    divided = [i for i, size in enumerate(shape) if size % devices == 0]
    return max(divided, key=lambda i: shape[i], default=None)


def _some_explicit(axes: Collection[str], mesh: Any) -> bool:
    # With Explicit axes JAX asks the model's own code where each product lies.
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return any(types[axis] == AxisType.Explicit for axis in axes)


def check_may_split(layer: str | None, mesh: Any) -> None:
    """Raise if a mesh would split a layer that runs on one device; None is any other layer."""
    if layer is not None and any(mesh_axes(name, mesh) for name in table()):
        raise ValueError(
            f"{layer} runs on one device; got a mesh of {mesh.size} devices. For a mesh keep the"
            " matrices as they are, without quantize() and weights=..., or run the quantized"
            " model outside of the mesh"
        )


def check_tree_and_mesh(tree: Any, mesh: Any) -> None:
    """Raise unless something has variables, and something is a mesh, with devices or without."""
    remedy = "a module, an nnx.Optimizer, or the state of one"
    check_type("what lies on a mesh", tree, nnx.Pytree | nnx.State, remedy)
    _check_is_mesh(mesh)


def check_mesh(mesh: Any) -> None:
    """Raise unless a mesh has an axis of the table."""
    _check_is_mesh(mesh)
    known = dict.fromkeys(chain.from_iterable(table().values()))
    if known.keys().isdisjoint(mesh.axis_names):
        raise ValueError(
            f"a mesh must have an axis of the table, {', '.join(known)}; got the axes"
            f" {', '.join(mesh.axis_names)}. Name an axis of the mesh so, or change the table with"
            " flax_attn.sharding.rules"
        )


def _check_is_mesh(mesh: Any) -> None:
    check_type("mesh", mesh, Mesh | AbstractMesh, 'jax.make_mesh((4, 2), ("fsdp", "tensor"))')


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
        return x.replace(_spec(x, mesh, only, but))

    return jax.tree.map(of_one, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _spec(x: nnx.Variable, mesh: Any, only: str | None, but: Collection[str]) -> PartitionSpec:
    names = axis_names(x, mesh)
    if names is None:
        return PartitionSpec()
    split = zip(names, spec(names, mesh, _pieces(x)), strict=True)
    asked = [entry if only in (None, name) else None for name, entry in split]
    return _without(asked, but)


def _without(entries: Sequence[Any], axes: Collection[str]) -> PartitionSpec:
    """Return a spec in which what would be split over one of these axes is whole."""
    taken = set(axes)
    free = [entry if taken.isdisjoint(axes_in(entry)) else None for entry in entries]
    return PartitionSpec(*free)


def _pieces(x: nnx.Variable) -> list[int]:
    """Return into how many pieces each axis of a variable may be cut."""
    unit = x.get_metadata().get(UNIT, (1,) * x.ndim)
    return [size // each for size, each in zip(x.shape, unit, strict=True)]

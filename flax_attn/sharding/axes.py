"""The mesh axes that each axis of an array is split over: a table from names to mesh axes."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

Rules = Mapping[str, tuple[str, ...]]
AxisName = str | Sequence[str] | None

#: The mesh axes over which each logical axis is split: those of them that the mesh in use has. Of
#: two axes of one array that ask for the same mesh axis, the first gets it.
RULES: Rules = MappingProxyType(
    {
        # of activations
        # Each device of an expert axis has tokens, and experts.
        "batch": ("data", "fsdp", "expert"),
        "tokens": ("context",),  # where attention and feed-forward layers compute
        "residual": ("context",),  # tokens in norms and sums; add "tensor" for sequence parallelism
        # of activations and parameters
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "hidden": ("tensor",),  # of a feed-forward layer
        "vocab": ("tensor",),
        # of parameters
        "expert": ("expert",),
        "embed": ("fsdp",),  # the width of the model
    }
)

TOKENS = ("batch", "tokens", None)  # the axes of what layers compute on
RESIDUAL = ("batch", "residual", None)  # and of what norms and sums do
_in_use = jax.make_user_context(None)  # part of the key of every compiled function


@contextmanager
def rules(**changes: str | Sequence[str] | None) -> Iterator[None]:
    """Replace lines of the table inside a `with` statement.

    A name is given one mesh axis or several, or None for none.

    Functions that were compiled outside are compiled again inside.

    Raises:
        ValueError: if the table has no line for a name, or is given other than names of mesh axes.

    Example:
        >>> with rules(batch="replica", embed=None):
        ...     table()["batch"], table()["embed"], table()["heads"]
        (('replica',), (), ('tensor',))
    """
    _check_known(changes)
    given = {name: _names_given(name, axes) for name, axes in changes.items()}
    lines = table() | given
    # A tuple, as what is part of the key of compiled functions must be hashable.
    with _in_use(tuple(sorted(lines.items()))):
        yield


def _check_known(names: Iterable[str]) -> None:
    unknown = sorted(set(names) - RULES.keys())
    if unknown:
        raise ValueError(
            f"the names of axes are {', '.join(RULES)}; got {', '.join(unknown)}. Pass one of these"
        )


def _names_given(name: str, axes: Any) -> tuple[str, ...]:
    given = axes_in(axes) if axes is None or isinstance(axes, Iterable) else (axes,)
    if not all(isinstance(axis, str) for axis in given):
        raise ValueError(
            f"a line of the table has names of mesh axes; got {name}={axes!r}. Pass names, or None"
        )
    return given


def table() -> dict[str, tuple[str, ...]]:
    """Return the table in use."""
    return dict(RULES if _in_use.value is None else _in_use.value)


def mesh_of(*arrays: Any) -> AbstractMesh:
    """Return the mesh in use, which may be empty.

    It is the mesh that was set, or else the one that an array lies on.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh_of(jnp.ones(3)).empty
        True
    """
    mesh = jax.sharding.get_abstract_mesh()
    for x in arrays:
        if not mesh.empty:
            break
        sharding = getattr(jax.typeof(x), "sharding", None)
        mesh = getattr(sharding, "mesh", mesh)
    return mesh


def mesh_in_use(*arrays: Any) -> AbstractMesh | None:
    """Return the mesh in use if arrays can be split over it, else None.

    It must have an axis of the table, larger than 1, that is not Manual already.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh_in_use(jnp.ones(3)) is None
        True
    """
    mesh = mesh_of(*arrays)
    if mesh.empty or not any(mesh_axes(name, mesh) for name in table()):
        return None
    return mesh


def free_axes(mesh: Any) -> set[str]:
    """Return the axes of a mesh that the code around does not compute on by itself.

    Example:
        >>> sorted(free_axes(jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))))
        ['data', 'tensor']
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, kind in kinds if kind != AxisType.Manual}


def mesh_axes(name: AxisName, mesh: Any, taken: Collection[str] = ()) -> tuple[str, ...]:
    """Return the axes of a mesh, larger than 1, that an axis of that name is split over.

    A name is one of the table, an axis of the mesh, or several of them. Axes that the code around
    computes on by itself, in `jax.shard_map`, are left out, and those that are taken by other axes
    of the array: of two that ask for the same one, the first gets it.

    Raises:
        ValueError: if the name is neither in the table nor an axis of the mesh.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((4, 1), ("data", "fsdp"))
        >>> mesh_axes("batch", mesh), mesh_axes("data", mesh)
        (('data',), ('data',))
    """
    wanted = _axes_named(name, mesh)
    usable = free_axes(mesh).difference(taken)
    return tuple(axis for axis in wanted if axis in usable and mesh.shape[axis] > 1)


def _axes_named(name: AxisName, mesh: Any) -> tuple[str, ...]:
    if name is None:
        return ()
    if not isinstance(name, str):
        parts = [_axes_named(part, mesh) for part in name]
        return tuple(chain.from_iterable(parts))
    lines = table()
    if name in lines:
        return lines[name]
    if name in mesh.axis_names:
        return (name,)
    raise ValueError(
        f"the name of an axis must be an axis of the mesh, {', '.join(mesh.axis_names)}, or a line"
        f" of the table, {', '.join(lines)}; got {name!r}. Give the mesh that axis (of size 1 it"
        " splits nothing), or say what the name means with flax.nnx.logical_axis_rules"
    )


def spec(names: Sequence[AxisName], mesh: Any, shape: Sequence[int] | None = None) -> PartitionSpec:
    """Return the partition spec of an array whose axes have these names; None is never split.

    With a `shape`, axes that their mesh axes do not divide are not split either.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
        >>> names = ("batch", "tokens", "heads", None)
        >>> spec(names, mesh) == PartitionSpec("data", None, "tensor", None)
        True
        >>> spec(("vocab", "embed"), mesh, (50257, 768)) == PartitionSpec(None, None)
        True
    """
    used: set[str] = set()
    entries = []
    for i, name in enumerate(names):
        # JAX refuses a spec that names a mesh axis twice.
        axes = mesh_axes(name, mesh, used)
        if shape is not None and shape[i] % device_count(mesh, axes):
            axes = ()
        used.update(axes)
        entries.append(axes)
    return PartitionSpec(*entries)


def device_count(mesh: Any, axes: Iterable[str]) -> int:
    """Return over how many devices some axes of a mesh divide.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((4, 2, 3), ("data", "tensor", "context"))
        >>> device_count(mesh, ("data", "context")), device_count(mesh, ())
        (12, 1)
    """
    return prod(mesh.shape[axis] for axis in axes)


def constrain(x: Array, *names: str | None) -> Array:
    """Return x, split over the mesh in use by the names of its last axes.

    Axes that have no name, or that their mesh axes do not divide, are not split. If the array has
    fewer axes than names, the last names hold: a sequence is a batch without its first axis.
    Without a mesh, or with one that has no axis of the table, x is returned as it is.

    Example:
        >>> import jax.numpy as jnp
        >>> constrain(jnp.ones((2, 5, 3)), "batch", "tokens", None).shape
        (2, 5, 3)
    """
    mesh = mesh_in_use(x)
    if mesh is None:
        return x
    unnamed = [None] * (x.ndim - len(names))
    names = (*unnamed, *names)[-x.ndim :] if x.ndim else ()
    return place(x, mesh, spec(names, mesh, x.shape))


def place(x: Array, mesh: Any, wanted: PartitionSpec) -> Array:
    """Return x as it lies on a mesh by a spec, whichever kind the axes of the mesh are of."""
    devices = None if isinstance(x, Tracer) else _devices()
    # Outside of a trace x may lie on one device of the mesh: a constraint would refuse it.
    if devices is not None:
        own: Any = getattr(x.sharding, "mesh", None)
        chosen = own if devices.empty else devices
        return jax.device_put(x, NamedSharding(chosen, wanted))
    return _constrained(place_by_type(x, mesh, wanted), mesh, wanted)


def _constrained(x: Array, mesh: Any, wanted: PartitionSpec) -> Array:
    if AxisType.Auto not in mesh.axis_types:
        return x
    over_auto = _only(wanted, mesh, AxisType.Auto)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, over_auto))


def place_by_type(x: Array, mesh: Any, wanted: PartitionSpec) -> Array:
    """Return x placed by a spec over the Explicit axes of a mesh; Auto axes stay as they were.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",), (AxisType.Auto,))
        >>> place_by_type(jnp.ones(3), mesh, PartitionSpec("data")).shape
        (3,)
    """
    if AxisType.Explicit not in mesh.axis_types:
        return x
    over_explicit = _only(wanted, mesh, AxisType.Explicit)
    return jax.sharding.reshard(x, NamedSharding(mesh, over_explicit))


def _devices() -> Any:
    """Return the mesh that was set; None inside `jax.jit`, which may close over constants."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        return None


def place_like(x: Array, other: Array) -> Array:
    """Return x split over Explicit axes as another array is; XLA decides about Auto axes.

    Example:
        >>> import jax.numpy as jnp
        >>> place_like(jnp.ones(3), jnp.zeros(3)).shape
        (3,)
    """
    mesh = mesh_of(other)
    if AxisType.Explicit not in mesh.axis_types:
        return x
    return place(x, mesh, jax.typeof(other).sharding.spec)


def axes_in(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a spec: none, one by its name, or several.

    Example:
        >>> axes_in(None), axes_in("data"), axes_in(("data", "fsdp"))
        ((), ('data',), ('data', 'fsdp'))
    """
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _only(wanted: PartitionSpec, mesh: Any, kind: AxisType) -> PartitionSpec:
    """Return a spec without the mesh axes of other kinds, which a sharding may not name."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = []
    for entry in wanted:
        axes = tuple(axis for axis in axes_in(entry) if kinds[axis] == kind)
        entries.append(axes)
    return PartitionSpec(*entries)

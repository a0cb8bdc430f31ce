"""The table of how a model is split over a mesh, and the warning about what is not."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from flax_attn.sharding.axes import axes_in, device_count, mesh_axes
from flax_attn.sharding.parameter_axes import check_tree_and_mesh, given_names, specs

# The lines of `RULES` that split parameters: a mesh with none of their axes copies all of them.
_OF_PARAMETERS = ("heads", "kv_heads", "hidden", "vocab", "expert", "embed")
# Vectors, and matrices that are smaller beside the rest than this share, are not worth a word.
_NOTABLE = 0.01


@dataclass(frozen=True)
class Placement:
    """How one array is split.

    Args:
        path: path of the array in the model.
        shape: shape of the whole array.
        names: names of its axes as the model gives them, or None.
        spec: mesh axes that each axis is split over.
        size: bytes of the whole array.
        share: bytes on each device.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[Any, ...] | None
    spec: PartitionSpec
    size: int
    share: int

    @property
    def whole(self) -> bool:
        """Whether every device has all of it."""
        return self.share == self.size

    def line(self, path: int, shape: int) -> str:
        """Return a line of the table, with columns of these widths for path and shape."""
        split = "whole" if self.whole else _entries(self.spec)
        return f"{self.path:{path}}  {self.shape!s:{shape}}  {_bytes(self.share):>9}  {split}"


@dataclass(frozen=True)
class ShardingTable:
    """The result of `sharding_table`: a line for each array of parameters.

    Args:
        axes: axes of the mesh and their sizes.
        placements: how each array is split, in the order of the model.
    """

    axes: dict[str, int]
    placements: tuple[Placement, ...]

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        return sum(one.size for one in self.placements)

    @property
    def share(self) -> int:
        """Bytes on each device."""
        return sum(one.share for one in self.placements)

    @property
    def unnamed(self) -> tuple[Placement, ...]:
        """Arrays that are whole on every device, name no axis, and are not small."""
        least = _NOTABLE * self.size
        large = [one for one in self.placements if len(one.shape) > 1 and one.size > least]
        return tuple(one for one in large if one.whole and not one.names)

    def __str__(self) -> str:
        paths = max((len(one.path) for one in self.placements), default=0)
        shapes = max((len(str(one.shape)) for one in self.placements), default=0)
        lines = [one.line(paths, shapes) for one in self.placements]
        return "\n".join([self._heading(), *lines])

    def _heading(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        devices = prod(self.axes.values())
        size = _bytes(self.size)
        return f"{size} over {devices} devices ({mesh}): {_bytes(self.share)} on each"


def sharding_table(tree: Any, mesh: Any) -> ShardingTable:
    """Return how the parameters of a model are split over a mesh, as `shard` splits them.

    Nothing is moved: the model may be one of `nnx.eval_shape`, and the mesh an `AbstractMesh`.

    Args:
        tree: a module, or the state of one.
        mesh: mesh.

    Raises:
        ValueError: if an axis has a name that is neither in the table nor an axis of the mesh, or
            if tree or mesh is something else.

    Example:
        >>> from jax.sharding import AbstractMesh, AxisType
        >>> mesh = AbstractMesh((4, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
        >>> print(sharding_table(nnx.Linear(512, 256, rngs=nnx.Rngs(0)), mesh))
        513.0 KiB over 8 devices (fsdp=4, tensor=2): 129.0 KiB on each
        bias    (256,)        1.0 KiB  whole
        kernel  (512, 256)  128.0 KiB  fsdp, -
    """
    check_tree_and_mesh(tree, mesh)
    params = nnx.filter_state(nnx.state(tree), nnx.Param)
    found = [_placement(path, param, mesh) for path, param in nnx.to_flat_state(params)]
    return ShardingTable(dict(mesh.shape), tuple(found))


def _placement(path: tuple, param: nnx.Param, mesh: Any) -> Placement:
    name = ".".join(map(str, path))
    where = specs(param, mesh).get_value()
    axes = chain.from_iterable(map(axes_in, where))
    size = prod(param.shape) * param.dtype.itemsize
    share = size // device_count(mesh, axes)
    return Placement(name, param.shape, given_names(param), where, size, share)


def warn_of_whole(tree: Any, mesh: Any) -> None:
    """Warn of large parameters without axis names that stay whole on all devices of a mesh.

    A mesh that splits no parameters, for data or tokens alone, copies all of them, as it should.
    """
    if not any(mesh_axes(name, mesh) for name in _OF_PARAMETERS):
        return
    found = sharding_table(tree, mesh)
    if not found.unnamed:
        return
    count = len(found.unnamed)
    amount = _bytes(sum(one.size for one in found.unnamed))
    size = _bytes(found.size)
    names = _names_of(found.unnamed)
    message = (
        f"{count} parameters without axis names, {amount} of {size},"
        f" stay whole on each of the {mesh.size} devices: {names}. Name their axes where they are"
        ' made, kernel_init=nnx.with_partitioning(init, ("embed", "hidden"), eager_sharding=False),'
        " or give the mesh an Auto fsdp axis that divides one of them;"
        " flax_attn.sharding.sharding_table(model, mesh) prints how each is split"
    )
    # Of the line that calls `shard` or `create`.
    warnings.warn(message, stacklevel=3)


def _names_of(placements: Sequence[Placement]) -> str:
    names = [f"{one.path} {one.shape}" for one in placements]
    # A model may have hundreds of them.
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _entries(where: PartitionSpec) -> str:
    axes = [" x ".join(axes_in(entry)) or "-" for entry in where]
    return ", ".join(axes)


def _bytes(count: int) -> str:
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"

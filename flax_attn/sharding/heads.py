"""A function of rows and heads over a mesh: each device computes its own, over all tokens."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec as P

from flax_attn.sharding.axes import device_count, mesh_axes, mesh_in_use
from flax_attn.sharding.mapped import on_devices
from flax_attn.sharding.options import in_use

R = TypeVar("R")
Names = tuple[str | None, ...]


def by_rows_and_heads(
    function: Callable[[Any], R],
    arrays: Any,
    names: Any,
    outputs: Any,
    rows: int,
    heads: Sequence[int],
) -> R:
    """Return `function(arrays)`, divided by rows and heads over the devices of the mesh in use.

    Tokens that are split over devices are gathered. Rows or heads that the axes of the mesh do not
    divide are computed on every device.

    Args:
        function: function of a tree of arrays, which computes each row and each head by itself.
        arrays: argument of `function`.
        names: tree like `arrays` of the names of their axes: `"batch"`, `"heads"` or None.
        outputs: tree like the result of the names of its axes.
        rows: size of the axes named `"batch"`.
        heads: numbers of heads, all of which are divided, or none.

    Raises:
        ValueError: if tokens are in zigzag order.

    Example:
        >>> import jax.numpy as jnp
        >>> axes = ("batch", "heads")
        >>> x = jnp.ones((2, 4))
        >>> by_rows_and_heads(lambda x: 2 * x, x, axes, axes, rows=2, heads=[4]).sum()
        Array(16., dtype=float32)
    """
    if in_use().order == "zigzag":
        raise ValueError(
            "a state passes through the tokens in their own order; got order='zigzag'. Pass"
            " order='natural' to context_parallel, and balance='zigzag' where attention by softmax"
            " needs it"
        )
    mesh = mesh_in_use(*jax.tree.leaves(arrays))
    if mesh is None:
        return function(arrays)
    split = {
        "batch": _divided("batch", [rows], mesh),
        "heads": _divided("heads", heads, mesh),
        None: None,
    }

    def specs(names: Any) -> Any:
        return jax.tree.map(lambda own: P(*(split[name] for name in own)), names, is_leaf=_is_names)

    return on_devices(function, mesh, arrays, specs(names), specs(outputs))


def _divided(name: str, sizes: Sequence[int], mesh: Any) -> tuple[str, ...] | None:
    axes = mesh_axes(name, mesh)
    count = device_count(mesh, axes)
    # All or none: a layer may have more heads of one kind than of another.
    divide = all(size % count == 0 for size in sizes)
    return axes if axes and divide else None


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str | None) for name in value)

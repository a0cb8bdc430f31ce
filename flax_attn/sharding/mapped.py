"""`jax.shard_map` for functions of arrays that lie on a mesh."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from flax_attn.sharding.axes import free_axes, mesh_in_use, place_by_type, spec

R = TypeVar("R")


def on_devices(
    function: Callable[[Any], R],
    mesh: Any,
    arrays: Any,
    specs: Any,
    outputs: Any,
    axes: Collection[str] | None = None,
    typed: bool = False,
) -> R:
    """Return `function(arrays)`, where each device of a mesh computes its own part.

    Args:
        function: function of a tree of arrays.
        mesh: mesh in use, or that the arrays lie on.
        arrays: tree of arrays, the argument of `function`.
        specs: partition spec of each array, in the form of `arrays`.
        outputs: partition spec of each result, in the form of the result.
        axes: mesh axes over which devices compute by themselves; None is all that are free.
        typed: whether JAX checks what varies over devices. Loops and branches of kernels do not
            say it.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> rows = PartitionSpec("data")
        >>> on_devices(lambda x: 2 * x, mesh, jnp.ones((4, 3)), rows, rows).sum()
        Array(24., dtype=float32)
    """
    # `shard_map` refuses arrays whose type says another split over Explicit axes.
    arrays = jax.tree.map(lambda x, to: place_by_type(x, mesh, to), arrays, specs)
    is_set = not jax.sharding.get_abstract_mesh().empty
    sharded = jax.shard_map(
        function,
        # It takes the mesh that was set by itself, and refuses another beside it.
        mesh=None if is_set else mesh,
        in_specs=(specs,),
        out_specs=outputs,
        axis_names=set(free_axes(mesh) if axes is None else axes),
        check_vma=typed,
    )
    # A call outside of `jax.jit` would compile its parts one by one.
    return jax.jit(sharded)(arrays)


def by_tokens(function: Callable[..., R], *arrays: Array) -> R:
    """Return `function(*arrays)` of arrays `(..., features)`, each device computing its tokens.

    XLA gathers the tokens of all devices for what it does not divide, such as `jax.lax.top_k`.

    Example:
        >>> import jax.numpy as jnp
        >>> by_tokens(lambda x, y: x + y, jnp.ones((2, 5, 3)), jnp.ones((2, 5, 3))).shape
        (2, 5, 3)
    """
    mesh = mesh_in_use(*arrays)
    if mesh is None:
        return function(*arrays)
    tokens = PartitionSpec(*rows_of(arrays[0], mesh), None)
    specs = (tokens,) * len(arrays)
    return on_devices(lambda arrays: function(*arrays), mesh, arrays, specs, tokens)


def rows_of(x: Array, mesh: Any) -> PartitionSpec:
    """Return how the axes of tokens `(..., features)` are split over a mesh, all but the last."""
    # A sequence is a batch without its first axis, and of more axes the last two count.
    names = ("batch", "tokens")[max(0, 3 - x.ndim) :]
    unnamed = [None] * (x.ndim - 1 - len(names))
    return spec((*unnamed, *names), mesh, x.shape[:-1])

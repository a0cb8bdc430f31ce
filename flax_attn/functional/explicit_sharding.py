"""Results on a mesh with Explicit axes, split in the same way as the arrays they are made of.

Only in flax_attn: torch_ref runs on one device.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array


def split_as(x: Array, *axes: int | None) -> NamedSharding | None:
    """Return the `out_sharding` of a result that is split as x is; None without Explicit axes.

    Args:
        x: array on any mesh, or none.
        axes: for each axis of the result, the axis of x that it is split as; None is not split.

    Example:
        >>> split_as(jnp.ones((3, 4)), 0, None) is None
        True
    """
    sharding = jax.typeof(x).sharding
    # On other axes the compiler divides results, or `shard_map` does.
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec = [None if i is None else sharding.spec[i] for i in axes]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def join(first: Array, second: Array, axis: int) -> Array:
    """Return two arrays joined along an axis.

    The axis is whole on every device, unless both arrays are split in the same way.

    Example:
        >>> join(jnp.ones((2, 3)), jnp.ones((2, 4)), axis=1).shape
        (2, 7)
    """
    axes = [None if i == axis else i for i in range(second.ndim)]
    whole = split_as(second, *axes)
    if whole is not None and jax.typeof(first).sharding != jax.typeof(second).sharding:
        first = jax.sharding.reshard(first, whole)
        second = jax.sharding.reshard(second, whole)
    return jnp.concatenate([first, second], axis)

"""Products with parameters, and rows of tables, on a mesh with Explicit axes.

There JAX asks how the result is split.
"""

from itertools import chain
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from flax_attn.sharding.axes import axes_in, mesh_of


def sharded_dot_general(x: Array, matrix: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Return `jax.lax.dot_general` of tokens `(..., d)` with a matrix, on a mesh.

    XLA splits a product over Auto axes. Over Explicit ones the result is split as the tokens are,
    and its last axis as that of the matrix: what the matrix splits over axes that split tokens
    already (`fsdp`) is gathered for the product, and parts of a sum are summed.

    Example:
        >>> import jax.numpy as jnp
        >>> contract = (((2,), (0,)), ((), ()))
        >>> sharded_dot_general(jnp.ones((2, 5, 3)), jnp.ones((3, 4)), contract).shape
        (2, 5, 4)
    """
    mesh = mesh_of(x, matrix)
    if AxisType.Explicit not in mesh.axis_types:
        return jax.lax.dot_general(x, matrix, dimension_numbers, **options)
    (_, (contracted,)), _ = dimension_numbers
    *tokens, summed = _entries(x)
    kept = _kept(x, _entries(matrix)[1 - contracted])
    # Both sides of a sum are split alike: each device adds up its part.
    entries = (summed, kept) if contracted == 0 else (kept, summed)
    of_matrix = PartitionSpec(*entries)
    matrix = jax.sharding.reshard(matrix, NamedSharding(mesh, of_matrix))
    of_result = PartitionSpec(*tokens, kept)
    options["out_sharding"] = NamedSharding(mesh, of_result)
    return jax.lax.dot_general(x, matrix, dimension_numbers, **options)


def _kept(x: Array, own: Any) -> tuple[str, ...] | None:
    # An axis that splits tokens cannot split the last axis of the result as well.
    taken = set(chain.from_iterable(map(axes_in, _entries(x))))
    return tuple(axis for axis in axes_in(own) if axis not in taken) or None


def sharding_of_rows(ids: Array, table: Array) -> NamedSharding | None:
    """Return the sharding of rows of a table, split as the ids are; None without Explicit axes.

    Example:
        >>> import jax.numpy as jnp
        >>> sharding_of_rows(jnp.ones((2, 5), int), jnp.ones((7, 4))) is None
        True
    """
    mesh = mesh_of(ids, table)
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return NamedSharding(mesh, PartitionSpec(*_entries(ids), None))


def _entries(x: Array) -> tuple[Any, ...]:
    """Return for each axis of an array the mesh axes that it is split over by its type."""
    entries = tuple(jax.typeof(x).sharding.spec)
    # A spec may leave out the last axes, which are whole.
    whole = [None] * (x.ndim - len(entries))
    return (*entries, *whole)

"""Where the arrays of a row of the table lie on the mesh in use."""

from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import NamedSharding

from flax_attn import convert
from flax_attn.proof.variant import Variant
from flax_attn.sharding.axes import spec
from flax_attn.sharding.parameters import sharding_of


def placement(variant: Variant, module: nnx.Module) -> Callable[[str, jax.Array], jax.Array]:
    """Return the function that places an array by its name.

    Parameters are placed as `shard` places them, inputs by rows and tokens.

    Without a mesh it returns arrays as they are.

    Args:
        variant: row of the table.
        module: JAX module of the variant.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return lambda name, array: array
    parameters = {}
    for name, tensor in convert.tensors(module).items():
        # Layers that are stacked are placed together, and have no place of their own.
        if isinstance(tensor, nnx.Variable):
            parameters[name] = sharding_of(tensor, mesh)
    ranks = {f"input {i}": len(shape) for i, shape in enumerate(variant.inputs)}

    def place(name: str, array: jax.Array) -> jax.Array:
        if name in parameters:
            return jax.device_put(array, parameters[name])
        # Such as a cotangent.
        if name not in ranks:
            return array
        rank = ranks[name]
        axes = ("batch", "tokens", *[None] * rank)[:rank]
        # A single example has no batch.
        own = axes[rank - array.ndim :]
        sharding = NamedSharding(mesh, spec(own, mesh, array.shape))
        return jax.device_put(array, sharding)

    return place

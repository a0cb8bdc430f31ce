"""Where the arrays of a row of the table lie on the mesh in use."""

from __future__ import annotations

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
    found = {name: x for name, x in convert.tensors(module).items() if isinstance(x, nnx.Variable)}
    parameters = {name: sharding_of(variable, mesh) for name, variable in found.items()}
    inputs = {f"input {i}": len(shape) for i, shape in enumerate(variant.inputs)}

    def place(name: str, array: jax.Array) -> jax.Array:
        if name in parameters:
            return jax.device_put(array, parameters[name])
        if name not in inputs:  # such as a cotangent
            return array
        names = ("batch", "tokens", *[None] * inputs[name])[: inputs[name]]
        names = names[inputs[name] - array.ndim :]  # a single example has no batch
        return jax.device_put(array, NamedSharding(mesh, spec(names, mesh, array.shape)))

    return place

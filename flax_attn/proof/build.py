"""Modules with parameters that are drawn at random, made from their shapes alone."""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from flax_attn.sharding.parameters import abstract


def drawn(make: Callable[[], nnx.Module], seed: int = 0) -> nnx.Module:
    """Return the module that `make` returns, with parameters drawn from the normal distribution.

    It is made from its shapes alone, with numpy: as constructed, JAX would compile a random
    function for each shape.

    Args:
        make: function that constructs the module.
        seed: seed of the parameters, and of the streams that dropout draws its keys from.

    Example:
        >>> from flax_attn import LayerNorm
        >>> drawn(lambda: LayerNorm(4)).scale.shape
        (4,)
    """
    return draw_parameters(abstract(make), seed)


def draw_parameters(module: nnx.Module, seed: int = 0) -> nnx.Module:
    """Return a module with its parameters drawn anew, from their shapes alone; see `drawn`."""
    state = nnx.state(module)
    draw = np.random.default_rng(seed)
    for i, (_, leaf) in enumerate(nnx.to_flat_state(state)):
        if isinstance(leaf, nnx.RngKey):
            leaf.set_value(_key(1000 * seed + i, leaf.shape))
        elif isinstance(leaf, nnx.RngCount):
            leaf.set_value(jax.device_put(np.zeros(leaf.shape, np.uint32)))
        else:
            values = draw.normal(0, 0.4, leaf.shape).astype(leaf.dtype)
            leaf.set_value(jax.device_put(values))
    nnx.update(module, state)
    return module


def _key(seed: int, shape: tuple[int, ...]) -> jax.Array:
    # Stacked layers have a key each.
    key = jax.random.key(seed)
    return jax.random.split(key, shape) if shape else key

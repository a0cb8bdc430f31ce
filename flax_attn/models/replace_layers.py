"""Layers of a model replaced by quantized ones.

Only in flax_attn: torch_ref reads no files, which may hold matrices in fewer bits.
"""

from typing import Any

from flax import nnx
from jaxtyping import Array

from flax_attn.functional.quantized import QuantizedMatrix
from flax_attn.modules.latent_attention import MultiHeadLatentAttention
from flax_attn.modules.linear import Linear
from flax_attn.modules.quantized_linear import QuantizedLinear


def put(parent: Any, name: str, layer: nnx.Module) -> None:
    """Put a layer in the place of another, in the module or list that holds it.

    Example:
        >>> from flax_attn import FeedForward, RMSNorm
        >>> layer = FeedForward(6, 8, rngs=nnx.Rngs(0))
        >>> put(layer.layers, "0", RMSNorm(6))
        >>> type(layer.layers[0]).__name__
        'RMSNorm'
    """
    if isinstance(parent, nnx.List):
        parent[int(name)] = layer
    else:
        setattr(parent, name, layer)


def is_linear(parent: Any, name: str) -> bool:
    """Return whether a part of a module is a `Linear` that may be held in fewer bits.

    Example:
        >>> from flax_attn import FeedForward
        >>> is_linear(FeedForward(6, 8, rngs=nnx.Rngs(0)).layers, "0")
        True
    """
    # Latent attention absorbs this matrix, and reads its numbers.
    absorbed = name == "W_key_value" and isinstance(parent, MultiHeadLatentAttention)
    # A subclass computes something else.
    return not absorbed and type(vars(parent).get(name)) is Linear


def quantized_as(layer: nnx.Module, matrix: Array | QuantizedMatrix) -> QuantizedLinear:
    """Return a quantized layer that has the bias of a layer, and computes its products as it does.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Linear(3, 2, rngs=nnx.Rngs(0))
        >>> quantized_as(layer, layer.kernel[...])(jnp.ones((5, 3))).shape
        (5, 2)
    """
    numerics = {name: getattr(layer, name, None) for name in ("dtype", "precision")}
    made = QuantizedLinear(matrix, **numerics)
    # It may have no value yet.
    made.bias = nnx.data(getattr(layer, "bias", None))
    made.dot_general = getattr(layer, "dot_general", made.dot_general)
    return made

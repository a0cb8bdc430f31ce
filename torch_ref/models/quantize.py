"""A model whose matrices are held in 8 bits, for generating."""

from typing import Any

from torch import nn

from attn_spec.checks import check_choice, check_type
from torch_ref.modules.latent_attention import MultiHeadLatentAttention
from torch_ref.modules.linear import Linear
from torch_ref.modules.quantized_linear import QuantizedLinear

WEIGHTS = ("int8",)


def quantize(model: nn.Module, weights: str = "int8") -> None:
    """Replace each `Linear` of a model by a `QuantizedLinear`.

    A tied output head becomes a quantized layer of its own. Embeddings, norms, routers, experts,
    convolutions and the matrix that latent attention absorbs stay as they are, and so do
    subclasses of `Linear`.

    Args:
        model: any module that holds linear layers.
        weights: `"int8"`, with a scale for each row.

    Raises:
        ValueError: if `weights` is unknown, or if the model has no `Linear`.

    Example:
        >>> from torch_ref import FeedForward
        >>> layer = FeedForward(6, 8)
        >>> quantize(layer)
        >>> type(layer.layers[0]).__name__, layer.layers[0].weight.dtype
        ('QuantizedLinear', torch.int8)
    """
    check_choice("weights", weights, WEIGHTS)
    check_type("model", model, nn.Module, "an nn.Module")
    found = _linear_layers(model)
    if not found:
        raise ValueError(
            f"quantize needs a model with a Linear; got {type(model).__name__}, which has none that"
            " is not quantized. Pass the model that holds the layers"
        )
    # All are found before any is replaced: a layer that two modules share stays one.
    made: dict[int, QuantizedLinear] = {}
    for parent, name, layer in found:
        if id(layer) not in made:
            made[id(layer)] = QuantizedLinear(layer.weight.T, layer.bias)
        setattr(parent, name, made[id(layer)])
    _give_head(model)


def _linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, Linear]]:
    """Return each linear layer, with the module that holds it and its name there."""
    found = []
    for parent in model.modules():
        # Latent attention absorbs this matrix, and reads its numbers.
        kept = ("W_key_value",) if isinstance(parent, MultiHeadLatentAttention) else ()
        for name, part in parent.named_children():
            # A subclass computes something else.
            if type(part) is Linear and name not in kept:
                found.append((parent, name, part))
    return found


def _give_head(model: Any) -> None:
    if getattr(model, "out_head", ()) is None:
        model.out_head = QuantizedLinear(model.tok_emb.weight.T)

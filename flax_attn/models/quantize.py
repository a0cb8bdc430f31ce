"""A model whose matrices are held in 8 bits, for generating."""

from typing import Any

from flax import nnx

from attn_spec.checks import check_choice, check_type
from flax_attn.models.replace_layers import is_linear, put, quantized_as
from flax_attn.modules.linear import Linear
from flax_attn.modules.quantized_linear import QuantizedLinear

WEIGHTS = ("int8",)


def quantize(model: nnx.Module, weights: str = "int8") -> None:
    """Replace each `Linear` of a model by a `QuantizedLinear`.

    A tied output head becomes a quantized layer of its own: it is read whole for each token, and
    the table of tokens only where tokens are looked up. Embeddings, norms, routers, experts,
    convolutions and the matrix that latent attention absorbs stay as they are, and so do
    subclasses of `Linear`.

    Args:
        model: any module that holds linear layers, its blocks one by one.
        weights: `"int8"`, with a scale for each column.

    Raises:
        ValueError: if `weights` is unknown, if the layers of the model are stacked, or if it has
            no `Linear`.

    Example:
        >>> from flax_attn import FeedForward
        >>> layer = FeedForward(6, 8, rngs=nnx.Rngs(0))
        >>> quantize(layer)
        >>> type(layer.layers[0]).__name__, layer.layers[0].weight.dtype
        ('QuantizedLinear', dtype('int8'))
    """
    check_choice("weights", weights, WEIGHTS)
    check_type("model", model, nnx.Module, "an nnx.Module")
    found = _linear_layers(model)
    if not found:
        raise ValueError(
            f"quantize needs a model with a Linear; got {type(model).__name__}, which has none that"
            " is not quantized. Pass the model that holds the layers"
        )
    if any(layer.kernel.ndim != 2 for _, _, layer in found):
        raise ValueError(
            "quantize takes the layers of a model one by one; got a model whose layers are stacked."
            " Build or load it without scan_layers"
        )
    # All are found before any is replaced: a layer that two modules share stays one.
    made: dict[int, QuantizedLinear] = {}
    for parent, name, layer in found:
        if id(layer) not in made:
            made[id(layer)] = quantized_as(layer, layer.kernel[...])
        put(parent, name, made[id(layer)])
    _give_head(model)


def _linear_layers(model: nnx.Module) -> list[tuple[Any, str, Linear]]:
    """Return each linear layer, with the module or list that holds it and its name there."""
    found = []
    for _, parent in nnx.iter_modules(model):
        for name, part in vars(parent).items():
            if is_linear(parent, name):
                found.append((parent, name, part))
    return found


def _give_head(model: Any) -> None:
    if getattr(model, "out_head", ()) is None:
        table = model.tok_emb
        head = quantized_as(table, table.embedding[...].T)
        model.out_head = nnx.data(head)

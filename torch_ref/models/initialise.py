"""Drawing the parameters of a whole model."""

from collections.abc import Callable

from torch import nn


def draw(model: nn.Module, std: Callable[[str], float] | None = None) -> None:
    """Draw weights and tables from a normal distribution; biases are 0, norms keep 1 and 0.

    Args:
        model: model whose parameters are drawn.
        std: standard deviation, by the name of a parameter; None is 0.02 for all.

    Example:
        >>> from torch_ref import Linear
        >>> layer = Linear(2, 3)
        >>> draw(layer)
        >>> layer.bias.tolist()
        [0.0, 0.0, 0.0]
    """
    for name, param in model.named_parameters():
        if name.rpartition(".")[2] == "bias":
            nn.init.zeros_(param)
        elif name.rpartition(".")[2] == "weight":
            nn.init.normal_(param, std=0.02 if std is None else std(name))

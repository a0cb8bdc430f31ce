"""The feed-forward layer of a transformer block."""

from jaxtyping import Float
from torch import Tensor, nn

from torch_ref.functional.checks import check_choice, check_positive, check_width
from torch_ref.modules.linear import Linear

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu_exact": "none"}


class FeedForward(nn.Module):
    """`Linear(d_hidden, d_model)(gelu(Linear(d_model, d_hidden)(x)))`.

    The two forms of GELU differ by up to 5e-4: a model trained with one and run with the other is a different model.

    Args:
        d_model: width of input and output.
        d_hidden: width in between; None is `4 * d_model`.
        activation: `"gelu_tanh"` (GPT-2) or `"gelu_exact"` (BERT).

    Shapes:
        `(..., d_model)`, kept.

    Raises:
        ValueError: if a width is not positive, the activation is unknown, or the input has another width.

    Example:
        >>> import torch
        >>> FeedForward(3, 8)(torch.ones((5, 3))).shape
        torch.Size([5, 3])

    References:
        Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    """

    def __init__(self, d_model: int, d_hidden: int | None = None, activation: str = "gelu_tanh"):
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        check_positive(d_model=d_model, d_hidden=d_hidden)
        self.d_model = d_model
        self.layers = nn.Sequential(
            Linear(d_model, d_hidden), nn.GELU(approximate=ACTIVATIONS[activation]), Linear(d_hidden, d_model)
        )

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        check_width("x", tuple(x.shape), "d_model", self.d_model)
        return self.layers(x)

"""The feed-forward layers of a transformer block: plain and gated."""

from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_choice, check_positive, check_width
from torch_ref.modules.linear import Linear
from torch_ref.modules.typed import TypedModule

# Modules, not functions: they stand in a `Sequential`, where state dicts count them.
ACTIVATIONS = {
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "gelu_exact": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
}


class FeedForward(TypedModule):
    """`Linear(d_hidden, d_model)(activation(Linear(d_model, d_hidden)(x)))`.

    The two forms of GELU differ by up to 5e-4: a model trained with one and run with the other is a
    different model.

    Shapes:
        `(..., d_model)`, kept.

    Raises:
        ValueError: if a width is not positive, the activation is unknown, or the input has another
            width.

    Example:
        >>> import torch
        >>> FeedForward(3, 8)(torch.ones((5, 3))).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        activation: str = "gelu_tanh",
        bias: bool = True,
    ):
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        check_positive(d_model=d_model, d_hidden=d_hidden)
        self.d_model = d_model
        self.layers = nn.Sequential(
            Linear(d_model, d_hidden, bias),
            ACTIVATIONS[activation](),
            Linear(d_hidden, d_model, bias),
        )

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        return self.layers(x)


class GatedFeedForward(TypedModule):
    """`W_down(activation(W_gate(x)) * W_up(x))`.

    This is SwiGLU with `"silu"` (Llama), and GeGLU with a GELU (Gemma).

    Shapes:
        `(..., d_model)`, kept.

    Raises:
        ValueError: if a width is not positive, the activation is unknown, or the input has another
            width.

    Example:
        >>> import torch
        >>> GatedFeedForward(3, 8)(torch.ones((5, 3))).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        activation: str = "silu",
        bias: bool = False,
    ):
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        check_positive(d_model=d_model, d_hidden=d_hidden)
        self.d_model, self.activation = d_model, ACTIVATIONS[activation]()
        self.W_gate = Linear(d_model, d_hidden, bias)
        self.W_up = Linear(d_model, d_hidden, bias)
        self.W_down = Linear(d_hidden, d_model, bias)

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        return self.W_down(self.activation(self.W_gate(x)) * self.W_up(x))

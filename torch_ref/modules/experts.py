"""The experts of a mixture: gated feed-forward layers of equal shape, their weights stacked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_choice, check_positive, check_type, check_width
from attn_spec.swiglu import SwiGLUBounds
from torch_ref.modules.feed_forward import ACTIVATIONS
from torch_ref.modules.quantized_linear import QuantizedLinear
from torch_ref.modules.router import Routing
from torch_ref.modules.typed import TypedModule

FORMS = ("auto", "dense", "sorted")


class ClampedSwiGLU(SwiGLUBounds, portable=True):
    """The clamped SwiGLU of gpt-oss.

        min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clip(up, -limit, limit) + 1)

    Example:
        >>> gate, up = torch.tensor([-1.0, 9.0]), torch.tensor([0.0, 5.0])
        >>> activated = ClampedSwiGLU(limit=2.0)(gate, up)
        >>> [round(number, 3) for number in activated.tolist()]
        [-0.154, 5.807]
    """

    def __call__(
        self, gate: Float[Tensor, "*shape h"], up: Float[Tensor, "*shape h"]
    ) -> Float[Tensor, "*shape h"]:
        bounded = gate.clamp(max=self.limit)
        other = up.clamp(-self.limit, self.limit)
        swish = bounded * torch.sigmoid(self.alpha * bounded)
        return swish * (other + 1)


class _Linears(TypedModule):
    """One linear layer for each expert: weight `(e, d_out, d_in)`, bias `(e, d_out)`."""

    def __init__(self, num_experts: int, d_in: int, d_out: int, bias: bool):
        super().__init__()
        bound = d_in**-0.5
        weight = torch.empty(num_experts, d_out, d_in)
        self.weight = nn.Parameter(weight.uniform_(-bound, bound))
        own = None
        if bias:
            values = torch.empty(num_experts, d_out)
            own = nn.Parameter(values.uniform_(-bound, bound))
        self.bias = own

    def forward(self, x: Float[Tensor, "e *shape d_in"]) -> Float[Tensor, "e *shape d_out"]:
        biases = [None] * len(x) if self.bias is None else self.bias
        layers = zip(x, self.weight, biases, strict=True)
        return torch.stack([nn.functional.linear(x, weight, bias) for x, weight, bias in layers])


class Experts(TypedModule):
    """The weighted sum of the outputs of each token's experts.

        y = sum_j weights_j E_(experts_j)(x)
        with E_e(x) = W_down_e(activation(W_gate_e x) * W_up_e x)

    No token is dropped, whatever the load of an expert. Here every expert computes every token, in
    any form.

    Shapes:
        `(..., d_model)`, kept; weights `(num_experts, d_hidden, d_model)`, for `W_down`
        `(num_experts, d_model, d_hidden)`.

    Raises:
        ValueError: if a size is not positive, the activation or the form is unknown, or the input
            has another width.

    Example:
        >>> from torch_ref import Router
        >>> x = torch.ones((5, 3))
        >>> Experts(4, 3, 6)(x, Router(3, 4, top_k=2)(x)).shape
        torch.Size([5, 3])
    """

    # Quantized where the files of a model hold them so.
    W_gate: _Linears | QuantizedLinear
    W_up: _Linears | QuantizedLinear
    W_down: _Linears | QuantizedLinear

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        activation: str | Callable[[Tensor, Tensor], Tensor] = "silu",
        bias: bool = False,
        form: str = "auto",
    ):
        super().__init__()
        check_choice("form", form, FORMS)
        check_positive(num_experts=num_experts, d_model=d_model, d_hidden=d_hidden)
        self.num_experts, self.d_model, self.form = num_experts, d_model, form
        self.activation = gated(activation)
        self.W_gate = _Linears(num_experts, d_model, d_hidden, bias)
        self.W_up = _Linears(num_experts, d_model, d_hidden, bias)
        self.W_down = _Linears(num_experts, d_hidden, d_model, bias)

    def forward(self, x: Float[Tensor, "*shape d"], routing: Routing) -> Float[Tensor, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        # Every expert computes every token, which is plain, and slow: others have weight 0.
        every = x.expand(self.num_experts, *x.shape)
        outputs = self.W_down(self.activation(self.W_gate(every), self.W_up(every)))
        # As a sum over all experts, so that the order of the chosen ones rounds nothing.
        chosen = nn.functional.one_hot(routing.experts, self.num_experts).to(outputs.dtype)
        weights = torch.einsum("...k,...ke->...e", routing.weights.to(outputs.dtype), chosen)
        return torch.einsum("...e,e...d->...d", weights, outputs)


def gated(
    activation: str | Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of gate and up that an activation stands for.

    Example:
        >>> gated("silu")(torch.tensor([0.0]), torch.tensor([3.0]))
        tensor([0.])
    """
    if not isinstance(activation, str):
        remedy = 'activation="silu", or a function of gate and up'
        check_type("activation", activation, Callable, remedy)
        return activation
    check_choice("activation", activation, tuple(ACTIVATIONS))
    return _Gated(ACTIVATIONS[activation]())


@dataclass(frozen=True)
class _Gated:
    """`activation(gate) * up`."""

    activation: nn.Module

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up

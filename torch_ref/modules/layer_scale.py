"""A learned factor for each feature of what a layer adds to the residual."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_positive, check_width
from torch_ref.modules.typed import TypedModule


class LayerScale(TypedModule):
    """`x * scale` over the last axis; stands where a `TransformerBlock` has its post norms.

    Shapes:
        `(..., d_model)`, kept; `scale` is `(d_model,)`.

    Example:
        >>> LayerScale(2, 0.5)(torch.tensor([1.0, 4.0]))
        tensor([0.5000, 2.0000], grad_fn=<MulBackward0>)
    """

    def __init__(self, d_model: int, initial: float = 1.0):
        super().__init__()
        check_positive(d_model=d_model)
        self.d_model = d_model
        # It starts small where a model is deep: each layer then adds little at first.
        self.scale = nn.Parameter(torch.full((d_model,), initial))

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        # Another width of 1 would broadcast.
        check_width("x", x, "d_model", self.d_model)
        return x * self.scale

"""Self-attention without parameters: the idea alone."""

from torch import Tensor

from attn_spec.checks import check_tokens
from torch_ref.attention import attend_one_head, check_backend
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.shapes import Tokens
from torch_ref.modules.typed import TypedModule


class SimplifiedSelfAttention(TypedModule):
    """`softmax(x x^T) x`: no parameters, no scaling.

    Shapes:
        `(t, d)` or `(b, t, d)`, kept; the weights are `(t, t)` or `(b, t, t)`.

    Example:
        >>> import torch
        >>> SimplifiedSelfAttention()(torch.eye(2))
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
    """

    def __init__(self, *, backend: str = "auto"):
        super().__init__()
        check_backend(backend)
        self.backend = backend

    def attend(self, x: Tokens, *, return_weights: bool = False) -> Outputs[Cache]:
        """Return the context vectors, with the weights if `return_weights`."""
        # Any width does, so that only the rank is checked.
        check_tokens("x", x, "d", x.shape[-1], None)
        return attend_one_head(
            # The idea alone is not scaled; the default would divide by the square root of the
            # width.
            x,
            x,
            x,
            scale=1.0,
            backend=self.backend,
            return_weights=return_weights,
        )

    def forward(self, x: Tokens) -> Tensor:
        """Return the context vectors."""
        return self.attend(x).output

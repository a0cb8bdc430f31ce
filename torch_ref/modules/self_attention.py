"""One head of self-attention with learned projections."""

from torch import Tensor

from attn_spec.checks import check_positive, check_tokens
from torch_ref.attention import attend_one_head, check_backend
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.masks import Mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.shapes import Tokens
from torch_ref.modules.linear import Linear
from torch_ref.modules.typed import TypedModule


class SelfAttention(TypedModule):
    """One head, every token attending to every token.

        softmax(q k^T / sqrt(d_key)) v    with q = x W_query, k = x W_key, v = x W_value

    Shapes:
        `(t, d_in)` to `(t, d_out)` or `(b, t, d_in)` to `(b, t, d_out)`; the weights are `(t, t)`
        or `(b, t, t)`.

    Raises:
        ValueError: if a width is not positive or the backend is unknown; in the call, if the input
            has another rank or width, or if the mask is not boolean or does not broadcast to the
            weights.

    Example:
        >>> import torch
        >>> layer = SelfAttention(3, 2)
        >>> layer(torch.ones((6, 3))).shape
        torch.Size([6, 2])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        qkv_bias: bool = False,
        *,
        d_key: int | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        # Products of queries and keys do not depend on the width of the values.
        d_key = d_out if d_key is None else d_key
        check_positive(d_in=d_in, d_out=d_out, d_key=d_key)
        check_backend(backend)
        self.d_in, self.d_out, self.d_key = d_in, d_out, d_key
        self.backend = backend
        self.W_query = Linear(d_in, d_key, qkv_bias)
        self.W_key = Linear(d_in, d_key, qkv_bias)
        self.W_value = Linear(d_in, d_out, qkv_bias)

    def project(self, x: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def attend(
        self, x: Tokens, *, mask: Mask | Tensor | None = None, return_weights: bool = False
    ) -> Outputs[Cache]:
        """Return the context vectors, with the weights if `return_weights`."""
        check_tokens("x", x, "d_in", self.d_in, None)
        # Without the axis of heads, which the textbook's formula does not have either.
        return attend_one_head(
            *self.project(x),
            mask=mask,
            backend=self.backend,
            return_weights=return_weights,
        )

    def forward(self, x: Tokens, *, mask: Mask | Tensor | None = None) -> Tensor:
        """Return the context vectors."""
        return self.attend(x, mask=mask).output

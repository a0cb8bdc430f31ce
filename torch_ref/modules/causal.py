"""One head of causal self-attention, with dropout on the weights."""

from torch import Tensor

from attn_spec.checks import check_context_length, check_tokens
from torch_ref.attention import attend_one_head
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.masks import Mask, as_mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.shapes import Tokens
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.self_attention import SelfAttention


class CausalAttention(SelfAttention):
    """One head, every token attending to itself and what came before.

        dropout(softmax(causal(q k^T / sqrt(d_key)))) v
        with q = x W_query, k = x W_key, v = x W_value

    Shapes:
        `(t, d_in)` to `(t, d_out)` or `(b, t, d_in)` to `(b, t, d_out)`; the weights are `(t, t)`
        or `(b, t, t)`.

    Raises:
        ValueError: if a width is not positive, `dropout` lies outside [0, 1) or the backend is
            unknown; in the call, if the input has another rank or width or is longer than
            `context_length`, or if the mask is not boolean or does not broadcast to the weights.

    Example:
        >>> import torch
        >>> layer = CausalAttention(3, 2)
        >>> layer(torch.ones((4, 6, 3))).shape
        torch.Size([4, 6, 2])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None = None,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        *,
        d_key: int | None = None,
        backend: str = "auto",
    ):
        # Before any parameter is drawn: a refused layer must not take keys from a stream.
        check_context_length(context_length)
        super().__init__(d_in, d_out, qkv_bias, d_key=d_key, backend=backend)
        self.context_length = context_length
        self.dropout = Dropout(dropout)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # Other implementations, with modules of the same names, save the mask as a buffer.
        state_dict.pop(f"{prefix}mask", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def attend(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        return_weights: bool = False,
        dropout_key: Tensor | None = None,
    ) -> Outputs[Cache]:
        """Return the context vectors, with the weights if `return_weights`.

        `mask` hides more than the causal mask does. In train mode `dropout_key` decides what is
        dropped; without it a key is drawn from torch's generator.
        """
        check_tokens("x", x, "d_in", self.d_in, self.context_length)
        return attend_one_head(
            *self.project(x),
            # The mask that is passed can hide more, and show nothing that is behind a token.
            mask=Mask.causal() & as_mask(mask, heads=False),
            dropout=self.dropout.keyed(dropout_key),
            backend=self.backend,
            return_weights=return_weights,
        )

    def forward(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Return the context vectors; `attend` describes the arguments."""
        return self.attend(x, mask=mask, dropout_key=dropout_key).output

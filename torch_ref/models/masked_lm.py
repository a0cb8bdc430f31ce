"""The head of masked language models: which token stands where one was hidden."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_choice
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.feed_forward import ACTIVATIONS
from torch_ref.modules.linear import Linear
from torch_ref.modules.norm import LayerNorm
from torch_ref.modules.typed import TypedModule


class MaskedLMHead(TypedModule):
    """`norm(activation(dense(x))) @ table^T + bias`, with the table of the token embedding.

    Shapes:
        `(..., d_model)` to `(..., vocab_size)`.

    Example:
        >>> from torch_ref import LayerNorm
        >>> table, head = Embedding(11, 4), MaskedLMHead(4, 11, LayerNorm(4))
        >>> head(torch.ones((2, 3, 4)), table).shape
        torch.Size([2, 3, 11])
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        norm: LayerNorm,
        activation: str = "gelu_exact",
        *,
        dense_bias: bool = True,
        bias: bool = True,
    ):
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        self.dense = Linear(d_model, d_model, dense_bias)
        self.activation, self.norm = ACTIVATIONS[activation](), norm
        # It starts at 0, as in transformers.
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    def forward(
        self, x: Float[Tensor, "*shape d"], table: Embedding
    ) -> Float[Tensor, "*shape vocab"]:
        # The table of the embedding is the last matrix: only the bias is the head's own.
        logits = table.attend(self.norm(self.activation(self.dense(x))))
        return logits if self.bias is None else logits + self.bias

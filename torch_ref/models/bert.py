"""BERT: the encoder, and its masked language model."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from attn_spec.models.bert import BertConfig
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.models.encoder import TextEncoder
from torch_ref.models.masked_lm import MaskedLMHead
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.feed_forward import FeedForward
from torch_ref.modules.linear import Linear
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import LayerNorm


class Bert(TextEncoder[BertConfig]):
    """BERT: learned positions, token types, norm after the sublayer, GELU in its exact form.

        x = drop(norm(tok_emb[tokens] + type_emb[token_types] + pos_emb[positions]))
        x = block_i(x) for each i

    Arguments and errors are those of `Encoder`, and a call takes `token_types` beside. `BertModel`
    of transformers has the same function; where its config names a `pad_token_id`, it leaves the
    row of that token out of the gradient.

    Example:
        >>> model = Bert(BertConfig(6, 2, 3, context_length=8, vocab_size=11))
        >>> hidden = model(torch.ones((4, 5), dtype=torch.long), lengths=torch.tensor([5, 3, 1, 2]))
        >>> hidden.shape, model.pooled(hidden).shape
        (torch.Size([4, 5, 6]), torch.Size([4, 6]))
    """

    pooler: Linear | None

    def create_embeddings(self) -> None:
        """Set the tables of tokens, types and positions, and the norm and dropout of their sum."""
        config = self.config
        d_model = config.d_model
        self.tok_emb = Embedding(config.vocab_size, d_model)
        # Both sentences of a pair pass through the model together.
        self.type_emb = Embedding(config.num_types, d_model)
        self.pos_emb = Embedding(config.context_length, d_model)
        self.emb_norm = self.norm()
        self.drop_emb = self.drop()

    def block(self, layer: int, backend: str) -> TransformerBlock:
        """Return a block: norms after the sums, dropout on what is added."""
        config = self.config
        d = config.d_model
        options = {"qkv_bias": True, "causal": False, "backend": backend}
        return TransformerBlock(
            MultiHeadAttention(
                d, d, config.context_length, config.attention_dropout, config.num_heads, **options
            ),
            FeedForward(d, config.d_hidden, config.activation),
            self.norm(),
            self.norm(),
            # As in the first Transformer: the norms stand after the sums.
            norm_first=False,
            drop_shortcut=self.drop(),
        )

    def norm(self) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, self.config.eps)

    def drop(self) -> Dropout:
        """Return the dropout of the embeddings, and of what the layers of a block add."""
        return Dropout(self.config.dropout)

    def create_head(self) -> None:
        """Set the layer of `pooled`."""
        d = self.config.d_model
        self.pooler = Linear(d, d) if self.config.pooler else None

    def embed(
        self,
        tokens: Integer[Tensor, "*b t"],
        positions: Tensor,
        dropout_key: Tensor | None,
        token_types: ArrayLike | None = None,
    ) -> Tokens:
        """Return the normed sum of the vectors of tokens, of their types, and of their positions.

        `token_types` are integers `(t,)` or `(b, t)`; None is 0.
        """
        types = (
            torch.zeros_like(tokens)
            if token_types is None
            else torch.as_tensor(token_types, device=tokens.device)
        )
        x = self.tok_emb(tokens) + self.type_emb(types) + self.pos_emb(positions)
        return self.drop_emb(self.emb_norm(x), dropout_key=dropout_key)

    def pooled(self, hidden: Tokens) -> Float[Tensor, "*b d"]:
        """Return `tanh(pooler(x))` of the first token of `x`, a vector for the whole input."""
        if self.pooler is None:
            raise ValueError(
                "this BERT has no pooler; got pooler=False. Take the first token, hidden[..., 0,"
                " :], or average them"
            )
        return torch.tanh(self.pooler(hidden[..., 0, :]))


class BertMaskedLM(Bert):
    """BERT with the head that it was trained with: the logits of every token.

        logits = norm(gelu(dense(x))) @ tok_emb^T + bias

    Arguments and errors are those of `Encoder`; `BertForMaskedLM` of transformers has the same
    function.

    Example:
        >>> model = BertMaskedLM(BertConfig(6, 2, 3, context_length=8, vocab_size=11))
        >>> model(torch.ones((4, 5), dtype=torch.long)).shape
        torch.Size([4, 5, 11])
    """

    def create_head(self) -> None:
        """Set the head."""
        config = self.config
        norm = self.norm()
        self.pooler = None
        self.head = MaskedLMHead(config.d_model, config.vocab_size, norm, config.activation)

    def predict(self, hidden: Tokens) -> Tensor:
        """Return the logits of every token, `(b, t, vocab_size)`."""
        return self.head(hidden, self.tok_emb)

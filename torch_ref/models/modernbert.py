"""ModernBERT: the encoder, and its masked language model."""

from typing import Any

from jaxtyping import Integer
from torch import Tensor

from attn_spec.models.modernbert import ModernBertConfig
from torch_ref.functional.positions import RoPE
from torch_ref.functional.shapes import Tokens
from torch_ref.models.encoder import TextEncoder
from torch_ref.models.masked_lm import MaskedLMHead
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.feed_forward import GatedFeedForward
from torch_ref.modules.local import LocalAttention
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import LayerNorm


class ModernBert(TextEncoder[ModernBertConfig]):
    """ModernBERT: rotary positions, local and full attention in turn, GeGLU, pre-norm.

        x = drop(emb_norm(tok_emb[tokens]))
        x = x + att(norm1(x)), x = x + ff(norm2(x)) in each block
        final_norm(x)

    The first block has no norm before its attention. Arguments and errors are those of `Encoder`;
    `ModernBertModel` of transformers has the same function.

    Example:
        >>> import torch
        >>> model = ModernBert(ModernBertConfig(6, 8, 3, 2, vocab_size=11))
        >>> model(torch.ones((4, 5), dtype=torch.long)).shape
        torch.Size([4, 5, 6])
    """

    def create_embeddings(self) -> None:
        """Set the table of tokens, and the norm and the dropout of its vectors."""
        config = self.config
        self.tok_emb = Embedding(config.vocab_size, config.d_model)
        self.emb_norm = self.norm()
        self.drop_emb = Dropout(config.dropout)

    def block(self, layer: int, backend: str) -> TransformerBlock:
        """Return a block: norms before attention and feed-forward, except the first attention."""
        config = self.config
        feed_forward = GatedFeedForward(
            config.d_model, config.d_hidden, config.activation, config.ff_bias
        )
        # The embedding has a norm already, in front of the first layer.
        norm1 = self.norm() if layer else None
        attention = self.attention(layer, backend=backend)
        return TransformerBlock(attention, feed_forward, norm1, self.norm())

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention, full or local; `options` are arguments of `MultiHeadAttention`."""
        config, bias = self.config, self.config.attention_bias
        sizes = config.d_model, config.d_model, config.context_length, 0.0, config.num_heads, bias
        # Full layers have a base of their own, for longer texts.
        if layer in config.full:
            return MultiHeadAttention(
                *sizes, out_bias=bias, causal=False, rope=RoPE.of(config.rope), **options
            )
        return LocalAttention(
            *sizes,
            out_bias=bias,
            # The window of the config counts both sides.
            reach=config.window // 2,
            rope=RoPE.of(config.local_rope),
            **options,
        )

    def norm(self) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, self.config.eps, self.config.norm_bias)

    def create_head(self) -> None:
        """Set the norm behind the blocks."""
        self.final_norm = self.norm()

    def embed(
        self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None
    ) -> Tokens:
        """Return the normed vectors of tokens; positions are in the attention."""
        return self.drop_emb(self.emb_norm(self.tok_emb(tokens)), dropout_key=dropout_key)


class ModernBertMaskedLM(ModernBert):
    """ModernBERT with the head that it was trained with: the logits of every token.

        logits = norm(gelu(dense(x))) @ tok_emb^T + bias

    Arguments and errors are those of `Encoder`; `ModernBertForMaskedLM` of transformers has the
    same function.

    Example:
        >>> import torch
        >>> model = ModernBertMaskedLM(ModernBertConfig(6, 8, 3, 2, vocab_size=11))
        >>> model(torch.ones((4, 5), dtype=torch.long)).shape
        torch.Size([4, 5, 11])
    """

    def create_head(self) -> None:
        """Set the norm behind the blocks, and the head."""
        super().create_head()
        config, options = (
            self.config,
            {"dense_bias": self.config.head_bias, "bias": self.config.logits_bias},
        )
        norm = self.norm()
        self.head = MaskedLMHead(
            config.d_model, config.vocab_size, norm, config.head_activation, **options
        )

    def predict(self, hidden: Tokens) -> Tensor:
        """Return the logits of every token, `(b, t, vocab_size)`."""
        return self.head(hidden, self.tok_emb)

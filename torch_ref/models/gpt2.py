"""GPT-2: the model, the published sizes, and their attention layer."""

from dataclasses import replace
from typing import Any

from jaxtyping import Integer
from torch import Tensor

from attn_spec.checks import check_choice
from attn_spec.models.gpt2 import GPT2_CONFIGS, GPT2Config
from torch_ref.functional.shapes import Tokens
from torch_ref.models.language_model import LanguageModel
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.feed_forward import FeedForward
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import LayerNorm


class GPT2(LanguageModel[GPT2Config]):
    """GPT-2: learned positions, norm before the sublayer, GELU in its tanh form.

        x = drop(tok_emb[tokens] + pos_emb[positions])
        x = block_i(x) for each i
        logits = final_norm(x) @ tok_emb^T

    Arguments and errors are those of `LanguageModel`; `GPT2_CONFIGS` has the published sizes.

    Example:
        >>> import torch
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11))
        >>> model(torch.ones((4, 5), dtype=torch.long)).shape
        torch.Size([4, 5, 11])
    """

    def create_embeddings(self) -> None:
        """Set the tables of tokens and of positions, and the dropout of their sum."""
        super().create_embeddings()
        self.pos_emb = Embedding(self.config.context_length, self.config.d_model)
        self.drop_emb = Dropout(self.config.dropout)

    def block(self, layer: int, backend: str) -> TransformerBlock:
        """Return a block: norms before attention and feed-forward, dropout on their outputs."""
        config = self.config
        return TransformerBlock(
            _attention(config, backend=backend),
            FeedForward(config.d_model, config.d_hidden, config.activation),
            self.norm(),
            self.norm(),
            drop_shortcut=Dropout(config.dropout),
        )

    def norm(self) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, self.config.eps)

    def embed(
        self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None
    ) -> Tokens:
        """Return the sum of token and position vectors, with dropout in train mode."""
        x = self.tok_emb(tokens)
        return self.drop_emb(x + self.pos_emb(positions), dropout_key=dropout_key)


def _attention(config: GPT2Config, **options: Any) -> MultiHeadAttention:
    d, length = config.d_model, config.context_length
    return MultiHeadAttention(
        d, d, length, config.dropout, config.num_heads, config.qkv_bias, **options
    )


def create_gpt2_attention(
    size: str, dropout: float = 0.1, *, qkv_bias: bool | None = None, **options: Any
) -> MultiHeadAttention:
    """Return one attention layer of a published GPT-2 size.

    Args:
        size: `"small"`, `"medium"`, `"large"` or `"xl"`, or a key of `GPT2_CONFIGS`.
        dropout: the probability that a weight is dropped in train mode.
        qkv_bias: whether the input projections have a bias; None is as published: they do.
        options: other arguments of `MultiHeadAttention`, such as `backend`.

    Example:
        >>> create_gpt2_attention("small").num_heads
        12
    """
    # Both "small" and "gpt2-small" are names of a size.
    name = size if size in GPT2_CONFIGS else f"gpt2-{size}"
    check_choice("size", size if name not in GPT2_CONFIGS else name, tuple(GPT2_CONFIGS))
    config = GPT2_CONFIGS[name]
    bias = config.qkv_bias if qkv_bias is None else qkv_bias
    return _attention(replace(config, dropout=dropout, qkv_bias=bias), **options)

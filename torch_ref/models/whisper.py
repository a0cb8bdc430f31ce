"""Whisper: an encoder-decoder from sound to text."""

from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn.functional import gelu

from attn_spec.input_checks import check_features
from attn_spec.models.whisper import WhisperConfig
from torch_ref.functional.shapes import Tokens
from torch_ref.models.encoder_decoder import EncoderDecoder
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.convolution import Convolution
from torch_ref.modules.cross_attention import CrossAttention
from torch_ref.modules.cross_block import CrossBlock
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.feed_forward import FeedForward
from torch_ref.modules.linear import Linear
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import LayerNorm


class Whisper(EncoderDecoder[WhisperConfig]):
    """Whisper: two convolutions over log-mel features, an encoder, and a decoder of text.

        x = gelu(conv2(gelu(conv1(features)))) + enc_pos;  logits = final_norm(...) @ tok_emb^T

    The arguments are those of `EncoderDecoder`; its inputs are features `(b, mel, frames)`.
    `enc_pos` starts as sinusoids. `WhisperForConditionalGeneration` of transformers has the same
    function, and does not train `enc_pos`.

    Example:
        >>> config = WhisperConfig(6, 2, 1, 3, 1, 8, 10, num_mel=5, num_positions=7,
        ...                        context_length=9, vocab_size=11)
        >>> model = Whisper(config)
        >>> features, tokens = torch.ones((3, 5, 14)), torch.ones((3, 4), dtype=torch.long)
        >>> model(features, tokens).shape
        torch.Size([3, 4, 11])
    """

    def create_embeddings(self) -> None:
        """Set the convolutions, the tables of tokens and positions, and the dropout of sums."""
        config = self.config
        d = config.d_model
        super().create_embeddings()
        # The second halves the number of frames: two of them are one position.
        self.conv1 = Convolution(config.num_mel, d, 3)
        self.conv2 = Convolution(d, d, 3, 2)
        self.enc_pos = Embedding(config.num_positions, d)
        self.pos_emb = Embedding(config.context_length, d)
        self.drop_emb = self.drop()

    def encoder_block(self, layer: int, backend: str) -> TransformerBlock:
        """Return a block of the encoder."""
        config = self.config
        attention = self.attention(config.num_heads, causal=False, backend=backend)
        feed_forward = self.feed_forward(config.d_hidden)
        norms = self.norm(), self.norm()
        dropout = self.drop()
        return TransformerBlock(attention, feed_forward, *norms, drop_shortcut=dropout)

    def decoder_block(self, layer: int, backend: str) -> CrossBlock:
        """Return a block of the decoder."""
        config = self.config
        d = config.d_model
        rate = config.attention_dropout
        heads = config.num_decoder_heads
        attention = self.attention(heads, backend=backend)
        # Keys have no bias here either, as `CrossAttention` has none by default.
        cross = CrossAttention(d, d, rate, heads, qkv_bias=True, backend=backend)
        norms = [self.norm() for _ in range(3)]
        feed_forward = self.feed_forward(config.d_decoder_hidden)
        dropout = self.drop()
        return CrossBlock(attention, cross, feed_forward, *norms, drop_shortcut=dropout)

    def attention(self, num_heads: int, *, backend: str, causal: bool = True) -> MultiHeadAttention:
        """Return the self-attention of a layer; a bias of keys would not change the softmax."""
        config = self.config
        d = config.d_model
        rate = config.attention_dropout
        # The positions of the encoder are a table, which has its own length.
        length = config.context_length if causal else None
        options = {"qkv_bias": True, "causal": causal, "backend": backend}
        attention = MultiHeadAttention(d, d, length, rate, num_heads, **options)
        # A bias on keys adds the same to all scores of a query: Whisper has none.
        attention.W_key = Linear(d, d, False)
        return attention

    def feed_forward(self, d_hidden: int, **options: Any) -> FeedForward:
        """Return the feed-forward part of a layer."""
        return FeedForward(self.config.d_model, d_hidden, self.config.activation, **options)

    def norm(self) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model)

    def drop(self) -> Dropout:
        """Return the dropout of the embeddings, and of what the layers of a block add."""
        return Dropout(self.config.dropout)

    def initialise(self) -> None:
        """Draw the parameters; the encoder's positions are sinusoids."""
        super().initialise()
        table = self.enc_pos.weight
        table.data = torch.from_numpy(sinusoids(*table.shape)).to(table.dtype)

    def embed_inputs(
        self, inputs: Float[Tensor, "*b mel frames"], dropout_key: Tensor | None
    ) -> Tokens:
        """Return the vectors of sound, half as many as there are frames."""
        config = self.config
        # The encoder's positions are a table: sound of another length has none.
        check_features(tuple(inputs.shape), config.num_mel, 2 * config.num_positions)
        x = rearrange(inputs, "... mel frames -> ... frames mel")
        x = gelu(self.conv2(gelu(self.conv1(x)))) + self.enc_pos.weight
        return self.drop_emb(x, dropout_key=dropout_key)

    def embed(
        self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None
    ) -> Tokens:
        """Return the vectors of the decoder's tokens and of their positions, summed."""
        return self.drop_emb(
            self.tok_emb(tokens) + self.pos_emb(positions), dropout_key=dropout_key
        )


def sinusoids(num_positions: int, width: int) -> np.ndarray:
    """Return the positions of Whisper's encoder, `(num_positions, width)`.

    They are sines, then cosines, of ever slower angles.

    Example:
        >>> sinusoids(2, 4).round(2).tolist()
        [[0.0, 0.0, 1.0, 1.0], [0.84, 0.0, 0.54, 1.0]]
    """
    half = width // 2
    # The slowest angle turns 10,000 times slower than the first.
    exponents = -np.arange(half) / max(half - 1, 1)
    angles = np.outer(np.arange(num_positions), 10000.0**exponents)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

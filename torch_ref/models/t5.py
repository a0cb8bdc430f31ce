"""T5: an encoder-decoder with relative positions."""

from functools import partial
from typing import Any

from jaxtyping import Float, Integer
from torch import Tensor, nn

from attn_spec.generation_checks import check_token_ids
from attn_spec.models.t5 import T5Config
from attn_spec.scores import Scores
from torch_ref.functional.relative import t5_bias
from torch_ref.functional.shapes import Tokens
from torch_ref.models.encoder_decoder import EncoderDecoder
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.calls import Bias
from torch_ref.modules.cross_attention import CrossAttention
from torch_ref.modules.cross_block import CrossBlock
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.feed_forward import FeedForward, GatedFeedForward
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import RMSNorm


def _head_options(config: T5Config) -> dict[str, Any]:
    # Scores have no factor: the queries are drawn with it.
    return {"head_dim": config.head_dim, "out_bias": False, "scores": Scores(scale=1.0)}


class T5(EncoderDecoder[T5Config]):
    """T5: relative positions in buckets, RMS norms before the layers, no biases.

        scores = q k^T + bias[bucket(key position - query position)]
        logits = head(x / sqrt(d_model))

    All layers of a stack share the buckets. Arguments and errors are those of `EncoderDecoder`.
    `T5ForConditionalGeneration` of transformers has the same function; in train mode it drops
    elements inside the feed-forward layer and behind the last norms too.

    Example:
        >>> import torch
        >>> model = T5(T5Config(6, 8, 2, 4, 2, 1, vocab_size=11))
        >>> inputs = torch.ones((3, 7), dtype=torch.long)
        >>> tokens = torch.ones((3, 5), dtype=torch.long)
        >>> model(inputs, tokens).shape
        torch.Size([3, 5, 11])
    """

    def create_embeddings(self) -> None:
        """Set the table of tokens, the dropout of its vectors, and the relative positions."""
        super().create_embeddings()
        sizes = self.config.num_buckets, self.config.num_heads
        # Each head has a bias of its own.
        self.enc_bias = Embedding(*sizes)
        self.dec_bias = Embedding(*sizes)
        self.drop_emb = self.drop()

    def encoder_block(self, layer: int, backend: str) -> TransformerBlock:
        """Return a block of the encoder."""
        attention = self.attention(causal=False, backend=backend)
        norms = self.norm(), self.norm()
        feed_forward = self.feed_forward()
        dropout = self.drop()
        return TransformerBlock(attention, feed_forward, *norms, drop_shortcut=dropout)

    def decoder_block(self, layer: int, backend: str) -> CrossBlock:
        """Return a block of the decoder."""
        config = self.config
        d = config.d_model
        attention = self.attention(backend=backend)
        options = {**_head_options(config), "backend": backend}
        cross = CrossAttention(d, d, config.dropout, config.num_heads, **options)
        norms = [self.norm() for _ in range(3)]
        feed_forward = self.feed_forward()
        dropout = self.drop()
        return CrossBlock(attention, cross, feed_forward, *norms, drop_shortcut=dropout)

    def attention(self, **options: Any) -> MultiHeadAttention:
        """Return the self-attention of a layer: its scores are not scaled."""
        config = self.config
        d = config.d_model
        sizes = d, d, config.context_length, config.dropout, config.num_heads
        return MultiHeadAttention(*sizes, **_head_options(config), **options)

    def feed_forward(self, **options: Any) -> FeedForward | GatedFeedForward:
        """Return the feed-forward part of a layer, without biases."""
        config = self.config
        layer = GatedFeedForward if config.gated else FeedForward
        return layer(config.d_model, config.d_hidden, config.activation, False, **options)

    def norm(self) -> RMSNorm:
        """Return a norm."""
        return RMSNorm(self.config.d_model, self.config.eps)

    def drop(self) -> Dropout:
        """Return the dropout of what the layers of a block add."""
        return Dropout(self.config.dropout)

    def initialise(self) -> None:
        """Draw the parameters as published.

        Kernels keep the variance of their input; those of queries give scores of unit variance.
        """
        config = self.config
        for name, module in self.named_modules():
            # Norms keep 1, and the linear layers have no biases.
            if not isinstance(module, nn.Linear | nn.Embedding):
                continue
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
            else:
                std = 1.0 if name == "tok_emb" else config.d_model**-0.5
            if name.endswith("W_query"):
                std *= config.head_dim**-0.5
            nn.init.normal_(module.weight, std=std)

    def embed_inputs(self, inputs: Integer[Tensor, "*b s"], dropout_key: Tensor | None) -> Tokens:
        """Return the vectors of the encoder's tokens, dropped in train mode."""
        check_token_ids("inputs", inputs)
        return self.drop_emb(self.tok_emb(inputs), dropout_key=dropout_key)

    def embed(
        self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None
    ) -> Tokens:
        """Return the vectors of the decoder's tokens; positions are in the scores."""
        return self.embed_inputs(tokens, dropout_key)

    def biases(self) -> tuple[Bias, Bias]:
        """Return the bias of the encoder, in both directions, and that of the decoder."""
        # One table serves all layers of a stack.
        both = partial(t5_bias, self.enc_bias.weight)
        backwards = partial(t5_bias, self.dec_bias.weight, bidirectional=False)
        distance = {"max_distance": self.config.max_distance}
        return partial(both, **distance), partial(backwards, **distance)

    def logits(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        config = self.config
        # The first T5 has one matrix for table and head; this keeps the size of its logits.
        if config.scaled:
            hidden = hidden * config.d_model**-0.5
        return super().logits(hidden)

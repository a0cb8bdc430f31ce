"""ModernBERT: the encoder, and its masked language model."""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Integer
from torch import Tensor

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


@dataclass(frozen=True)
class ModernBertConfig:
    """The sizes of a ModernBERT.

    Args:
        d_model: width of the tokens.
        d_hidden: width inside the feed-forward layer.
        num_heads: number of heads.
        num_layers: number of blocks.
        context_length: length of the longest input.
        vocab_size: number of tokens.
        window: window of the local layers; a token attends to half of it on either side.
        full_layers: the layers that attend to all tokens, counted from 0; None is every third, from
            the first on.
        rope: rotary positions of these layers.
        local_rope: rotary positions of the local layers.
        activation: activation of the gated feed-forward layer.
        head_activation: activation of the head.
        eps: epsilon of the norms.
        norm_bias: whether the norms have a shift.
        attention_bias: whether the projections of the attention have a bias.
        ff_bias: whether the feed-forward layer has biases.
        head_bias: whether the hidden layer of the head has a bias.
        logits_bias: whether the logits have a bias.
        dropout: the probability that an element of an embedding is dropped in train mode.

    Raises:
        ValueError: if there is no layer of a number in `full_layers`.

    Example:
        >>> ModernBertConfig(768, 1152, 12, 22).full
        (0, 3, 6, 9, 12, 15, 18, 21)
    """

    d_model: int
    d_hidden: int
    num_heads: int
    num_layers: int
    context_length: int = 8192
    vocab_size: int = 50368
    window: int = 128
    full_layers: tuple[int, ...] | None = None
    rope: RoPE = field(default_factory=lambda: RoPE(160000.0))
    local_rope: RoPE = field(default_factory=RoPE)
    activation: str = "gelu_exact"
    head_activation: str = "gelu_exact"
    eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    ff_bias: bool = False
    head_bias: bool = False
    logits_bias: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        if not set(self.full) <= set(range(self.num_layers)):
            raise ValueError(
                f"full_layers must be numbers of layers, 0 to {self.num_layers - 1}; got"
                f" {self.full_layers}. Leave out those beyond num_layers"
            )

    @property
    def full(self) -> tuple[int, ...]:
        """The layers that attend to all tokens."""
        return tuple(range(0, self.num_layers, 3)) if self.full_layers is None else self.full_layers


class ModernBert(TextEncoder[ModernBertConfig]):
    """ModernBERT: rotary positions, local and full attention in turn, GeGLU, pre-norm.

        x = drop(emb_norm(tok_emb[tokens]))
        x = x + att(norm1(x)), x = x + ff(norm2(x)) in each block
        final_norm(x)

    The first block has no norm before its attention. The arguments are those of `Encoder`;
    `ModernBertModel` of transformers has the same function.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> model = ModernBert(ModernBertConfig(6, 8, 3, 2, vocab_size=11))
        >>> model(torch.ones((4, 5), dtype=torch.long)).shape
        torch.Size([4, 5, 6])

    References:
        Warner et al. 2024 (arXiv:2412.13663).
    """

    def create_embeddings(self) -> None:
        """Set the table of tokens, and the norm and the dropout of its vectors."""
        config = self.config
        self.tok_emb = Embedding(config.vocab_size, config.d_model)
        self.emb_norm = self.norm()
        self.drop_emb = Dropout(config.dropout)

    def block(self, layer: int, backend: str) -> TransformerBlock:
        """Return a block: norms before attention and feed-forward, but for the first attention."""
        config = self.config
        feed_forward = GatedFeedForward(
            config.d_model, config.d_hidden, config.activation, config.ff_bias
        )
        norm1 = self.norm() if layer else None
        attention = self.attention(layer, backend=backend)
        return TransformerBlock(attention, feed_forward, norm1, self.norm())

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention, full or local; `options` are arguments of `MultiHeadAttention`."""
        config, bias = self.config, self.config.attention_bias
        sizes = config.d_model, config.d_model, config.context_length, 0.0, config.num_heads, bias
        if layer in config.full:
            return MultiHeadAttention(
                *sizes, out_bias=bias, causal=False, rope=config.rope, **options
            )
        return LocalAttention(
            *sizes, out_bias=bias, reach=config.window // 2, rope=config.local_rope, **options
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

    The arguments are those of `Encoder`; `ModernBertForMaskedLM` of transformers has the same
    function.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> model = ModernBertMaskedLM(ModernBertConfig(6, 8, 3, 2, vocab_size=11))
        >>> model(torch.ones((4, 5), dtype=torch.long)).shape
        torch.Size([4, 5, 11])

    References:
        Warner et al. 2024 (arXiv:2412.13663).
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

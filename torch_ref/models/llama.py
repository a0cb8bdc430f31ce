"""Llama: rotary positions, RMS norms, grouped queries and a gated feed-forward layer."""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Integer
from torch import Tensor, nn

from torch_ref.functional.positions import RoPE
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.models.language_model import LanguageModel, initialise
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.linear import Linear
from torch_ref.modules.norm import RMSNorm


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers of one model of the Llama family.

    Args:
        d_model: width of the tokens.
        d_hidden: width inside the feed-forward layer.
        num_heads: number of query heads.
        num_layers: number of blocks.
        num_kv_heads: number of key/value heads; None is num_heads.
        head_dim: width of a head; None is `d_model / num_heads`.
        context_length: the longest input taken.
        vocab_size: number of tokens.
        rope: rotary positions.
        eps: of the norms.
        activation: of the gated feed-forward layer.
        attention_bias: whether the four projections of the attention have a bias.
        ff_bias: whether the feed-forward layer has biases.
        dropout: the probability that an attention weight is dropped in train mode.
        window: how many keys in all a token sees, itself included, as in Mistral; None is all.
        qk_norm: epsilon of an RMS norm over each head of queries and keys, as in Qwen 3; None is no norm.
        tied: whether the output head is the table of the tokens.

    Example:
        >>> LlamaConfig(4096, 14336, 32, 32, num_kv_heads=8, rope=RoPE(500000.0)).num_kv_heads
        8
    """

    d_model: int
    d_hidden: int
    num_heads: int
    num_layers: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    context_length: int = 2048
    vocab_size: int = 32000
    rope: RoPE = field(default_factory=RoPE)
    eps: float = 1e-6
    activation: str = "silu"
    attention_bias: bool = False
    ff_bias: bool = False
    dropout: float = 0.0
    window: int | None = None
    qk_norm: float | None = None
    tied: bool = False


class Llama(LanguageModel):
    """Llama: rotary positions, RMS norms before the sublayers, grouped queries, SwiGLU.

        x = tok_emb[tokens];  x = block_i(x) for each i;  logits = out_head(final_norm(x))

    Args:
        config: its numbers.
        backend: of the attention calls; `"auto"` or the name of one.
        remat: whether the backward pass computes each block again instead of keeping what it made.

    Shapes:
        tokens `(b, t)` or `(t,)` to logits `(b, t, vocab_size)` or `(t, vocab_size)`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> config = LlamaConfig(8, 12, num_heads=4, num_layers=2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Llama(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])

    References:
        Touvron et al. 2023 (arXiv:2302.13971); Llama Team 2024 (arXiv:2407.21783).
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        backend: str = "auto",
        remat: bool = False,
    ):
        super().__init__()
        self.config, self.remat = config, remat
        self.tok_emb = Embedding(config.vocab_size, config.d_model)
        self.trf_blocks = nn.ModuleList(
            TransformerBlock(
                config.d_model,
                config.context_length,
                config.dropout,
                config.num_heads,
                config.attention_bias,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                window=config.window,
                out_bias=config.attention_bias,
                rope=config.rope,
                qk_norm=config.qk_norm,
                d_hidden=config.d_hidden,
                activation=config.activation,
                gated=True,
                ff_bias=config.ff_bias,
                norm="rms_norm",
                eps=config.eps,
                shortcut_dropout=0.0,
                backend=backend,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = RMSNorm(config.d_model, config.eps)
        self.out_head = None if config.tied else Linear(config.d_model, config.vocab_size, bias=False)
        initialise(self)

    def embed(self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None) -> Tokens:
        """Return the vectors of tokens, wherever they stand: positions turn queries and keys."""
        return self.tok_emb(tokens)

    def block_options(self, positions: ArrayLike | None) -> dict[str, Any]:
        """Return the positions: the blocks turn by them."""
        return {"positions": positions}

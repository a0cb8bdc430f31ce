"""The base of Llama and its relatives.

They have rotary positions, RMS norms and a gated feed-forward layer.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from flax.typing import PrecisionLike

from attn_spec.checks import check_layers
from flax_attn.functional.positions import RoPE
from flax_attn.models.language_model import LanguageModel
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import RMSNorm


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder; a base class, a family adds what only its models have.

    Args:
        d_model: width of the tokens.
        d_hidden: width inside the feed-forward layer.
        num_heads: number of query heads.
        num_layers: number of blocks.
        num_kv_heads: number of key/value heads; None is num_heads.
        head_dim: width of a head; None is `d_model / num_heads`.
        context_length: length of the longest input.
        vocab_size: number of tokens.
        rope: rotary positions.
        eps: epsilon of the norms.
        activation: activation of the gated feed-forward layer.
        dropout: the probability that an attention weight is dropped in train mode.
        window: number of keys that a token sees, itself included; None is all.
        full_layers: the layers without the window, counted from 0.
        tied: whether the output head is the table of the tokens.

    Raises:
        ValueError: if there is no layer of a number in `full_layers`.

    Example:
        >>> DecoderConfig(8, 12, num_heads=4, num_layers=3, window=5, full_layers=(0,)).windows
        (None, 5, 5)
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
    dropout: float = 0.0
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    tied: bool = False

    def __post_init__(self):
        check_layers("full_layers", self.full_layers, self.num_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None where it has none."""
        return tuple(
            None if layer in self.full_layers else self.window for layer in range(self.num_layers)
        )

    @property
    def head_width(self) -> int:
        """The width of a head, given or not."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim


C = TypeVar("C", bound=DecoderConfig)


class Decoder(LanguageModel[C]):
    """A decoder with rotary positions; a base class, see `Llama`.

        x = tok_emb[tokens]
        x = x + att(norm1(x)), x = x + ff(norm2(x)) in each block
        logits = head(final_norm(x))

    A family overrides the parts that differ. `rope` and `window` are asked for each layer;
    `attention_type` is the class of the attention.
    """

    attention_type: ClassVar[type[MultiHeadAttention]] = MultiHeadAttention

    def block(
        self, layer: int, backend: str, *, precision: PrecisionLike = None, **numerics: Any
    ) -> TransformerBlock:
        """Return the block of a layer, without dropout on what its parts return."""
        products = {"precision": precision, **numerics}
        return TransformerBlock(
            self.attention(layer, backend=backend, **self.head_norms(**numerics), **products),
            self.feed_forward(layer, **products),
            **self.block_norms(**numerics),
        )

    def attention(
        self, layer: int, *, out_bias: bool = False, **options: Any
    ) -> MultiHeadAttention:
        """Return the attention of a layer; `options` are arguments of `attention_type`."""
        config = self.config
        return self.attention_type(
            config.d_model,
            config.d_model,
            config.context_length,
            config.dropout,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            out_bias=out_bias,
            window=self.window(layer),
            rope=self.rope(layer),
            **options,
        )

    def feed_forward(self, layer: int, *, bias: bool = False, **options: Any) -> GatedFeedForward:
        """Return the feed-forward layer; `options` are arguments of `GatedFeedForward`."""
        return GatedFeedForward(
            self.config.d_model, self.config.d_hidden, self.config.activation, bias, **options
        )

    def rope(self, layer: int) -> RoPE | None:
        """Return the rotary positions of a layer, None where it has none."""
        return self.config.rope

    def window(self, layer: int) -> int | None:
        """Return how many keys in all a token sees in a layer, None where it sees all."""
        return self.config.windows[layer]

    def block_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return the norms of a block, arguments of `TransformerBlock`."""
        return {"norm1": self.norm(**numerics), "norm2": self.norm(**numerics)}

    def head_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return `q_norm` and `k_norm` of `MultiHeadAttention`, if there are any."""
        return {}

    def norm(self, width: int | None = None, **options: Any) -> RMSNorm:
        """Return a norm of this width; `options` are arguments of `RMSNorm`."""
        return RMSNorm(self.config.d_model if width is None else width, self.config.eps, **options)

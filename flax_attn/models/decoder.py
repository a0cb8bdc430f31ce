"""The base of Llama and its relatives.

They have rotary positions, RMS norms and a gated feed-forward layer.
"""

from typing import Any, ClassVar, TypeVar

from flax.typing import PrecisionLike

from attn_spec.models.decoder import DecoderConfig
from flax_attn.functional.positions import RoPE
from flax_attn.models.language_model import LanguageModel
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import RMSNorm

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
        # By keyword, as a family may override some of them and pass on the rest.
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
        # Asked for each layer: Gemma 3 has two bases, and SmolLM 3 leaves some layers without.
        return RoPE.of(self.config.rope)

    def window(self, layer: int) -> int | None:
        """Return how many keys in all a token sees in a layer, None where it sees all."""
        # One entry a layer, whatever pattern the family has.
        return self.config.windows[layer]

    def block_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return the norms of a block, arguments of `TransformerBlock`."""
        return {"norm1": self.norm(**numerics), "norm2": self.norm(**numerics)}

    def head_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return `q_norm` and `k_norm` of `MultiHeadAttention`, if there are any."""
        return {}

    def norm(self, width: int | None = None, **options: Any) -> RMSNorm:
        """Return a norm of this width; `options` are arguments of `RMSNorm`."""
        # Of another width where it norms heads.
        return RMSNorm(self.config.d_model if width is None else width, self.config.eps, **options)

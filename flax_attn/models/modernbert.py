"""ModernBERT: the encoder, and its masked language model."""

from typing import Any

from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Integer

from attn_spec.models.modernbert import ModernBertConfig, read, write
from flax_attn.convert.rules import Layout, Rule
from flax_attn.functional.positions import RoPE
from flax_attn.functional.shapes import Tokens
from flax_attn.models.encoder import TextEncoder
from flax_attn.models.hugging_face.family import Family, embeddings, linears, norms
from flax_attn.models.masked_lm import MaskedLMHead
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.local import LocalAttention
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import LayerNorm


def _fused(part: str, names: tuple[str, ...], theirs: str, pattern: str) -> Rule:
    return Rule(tuple(f"trf_blocks.{{i}}.{name}.{part}" for name in names), theirs, pattern)


def _layout(base: str, ignored: str) -> Layout:
    """Return the names of the weights, those of the encoder behind a prefix; two are fused."""
    layer = f"{base}layers.{{i}}."
    qkv = "att.W_query", "att.W_key", "att.W_value"
    fused = {qkv: f"{layer}attn.Wqkv", ("ff.W_gate", "ff.W_up"): f"{layer}mlp.Wi"}
    prefixes = "trf_blocks.{i}.", layer
    return Layout(
        (
            *embeddings({"tok_emb": f"{base}embeddings.tok_embeddings"}),
            *(
                _fused("kernel", names, f"{theirs}.weight", "i o -> o i")
                for names, theirs in fused.items()
            ),
            *(_fused("bias", names, f"{theirs}.bias", "") for names, theirs in fused.items()),
            *linears({"att.out_proj": "attn.Wo", "ff.W_down": "mlp.Wo"}, *prefixes),
            *norms({"norm1": "attn_norm", "norm2": "mlp_norm"}, *prefixes),
            *norms({"emb_norm": "embeddings.norm", "final_norm": "final_norm"}, "", base),
            *norms({"head.norm": "head.norm"}),
            *linears({"head.dense": "head.dense"}),
            Rule(("head.bias",), "decoder.bias"),
        ),
        ignored=ignored,
    )


class ModernBert(TextEncoder[ModernBertConfig]):
    """ModernBERT: rotary positions, local and full attention in turn, GeGLU, pre-norm.

        x = drop(emb_norm(tok_emb[tokens]))
        x = x + att(norm1(x)), x = x + ff(norm2(x)) in each block
        final_norm(x)

    The first block has no norm before its attention. Arguments and errors are those of `Encoder`;
    `ModernBertModel` of transformers has the same function.

    Example:
        >>> import jax.numpy as jnp
        >>> model = ModernBert(ModernBertConfig(6, 8, 3, 2, vocab_size=11), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((4, 5), int)).shape
        (4, 5, 6)

    References:
        Warner et al. 2024 (arXiv:2412.13663).
    """

    family = Family(
        {"modernbert": read},
        lambda config: write("ModernBertModel", config),
        _layout("", r"(head|decoder)\..*"),
        base="",
        architecture="ModernBertModel",
    )

    def create_embeddings(
        self, *, precision: PrecisionLike = None, rngs: nnx.Rngs, **numerics: Any
    ) -> None:
        """Set the table of tokens, and the norm and the dropout of its vectors."""
        config, numerics = self.config, {"rngs": rngs, **numerics}
        self.tok_emb = Embedding(config.vocab_size, config.d_model, precision=precision, **numerics)
        self.emb_norm = self.norm(**numerics)
        self.drop_emb = Dropout(config.dropout, rngs=rngs)

    def block(self, layer: int, backend: str, **numerics: Any) -> TransformerBlock:
        """Return a block: norms before attention and feed-forward, except the first attention."""
        config = self.config
        sizes = config.d_model, config.d_hidden
        feed_forward = GatedFeedForward(*sizes, config.activation, config.ff_bias, **numerics)
        # The embedding has a norm already, in front of the first layer.
        norm1 = self.norm(**numerics) if layer else None
        attention = self.attention(layer, backend=backend, **numerics)
        return TransformerBlock(attention, feed_forward, norm1, self.norm(**numerics))

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

    def norm(self, *, precision: PrecisionLike = None, **numerics: Any) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, self.config.eps, self.config.norm_bias, **numerics)

    def create_head(self, **numerics: Any) -> None:
        """Set the norm behind the blocks."""
        self.final_norm = self.norm(**numerics)

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the normed vectors of tokens; positions are in the attention."""
        return self.drop_emb(self.emb_norm(self.tok_emb(tokens)), dropout_key=dropout_key)


class ModernBertMaskedLM(ModernBert):
    """ModernBERT with the head that it was trained with: the logits of every token.

        logits = norm(gelu(dense(x))) @ tok_emb^T + bias

    Arguments and errors are those of `Encoder`; `ModernBertForMaskedLM` of transformers has the
    same function.

    Example:
        >>> import jax.numpy as jnp
        >>> config = ModernBertConfig(6, 8, 3, 2, vocab_size=11)
        >>> model = ModernBertMaskedLM(config, rngs=nnx.Rngs(0))
        >>> model(jnp.ones((4, 5), int)).shape
        (4, 5, 11)

    References:
        Warner et al. 2024 (arXiv:2412.13663).
    """

    family = Family(
        {"modernbert": read},
        lambda config: write("ModernBertForMaskedLM", config),
        _layout("model.", r"decoder\.weight"),  # tied
        architecture="ModernBertForMaskedLM",
        copies={"decoder.weight": "tok_emb.embedding"},
    )

    def create_head(self, **numerics: Any) -> None:
        """Set the norm behind the blocks, and the head."""
        super().create_head(**numerics)
        config, options = (
            self.config,
            {"dense_bias": self.config.head_bias, "bias": self.config.logits_bias, **numerics},
        )
        norm = self.norm(**numerics)
        self.head = MaskedLMHead(
            config.d_model, config.vocab_size, norm, config.head_activation, **options
        )

    def predict(self, hidden: Tokens) -> Array:
        """Return the logits of every token, `(b, t, vocab_size)`."""
        return self.head(hidden, self.tok_emb)

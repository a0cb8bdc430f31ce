"""ModernBERT: the encoder, and its masked language model."""

from dataclasses import dataclass, field
from typing import Any

from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Integer

from flax_attn.convert.rules import Layout, Rule
from flax_attn.functional.positions import RoPE
from flax_attn.functional.shapes import Tokens
from flax_attn.models.encoder import TextEncoder
from flax_attn.models.hugging_face.bounds import BASES
from flax_attn.models.hugging_face.decoder import FULL, SLIDING, read_layer_types
from flax_attn.models.hugging_face.family import Family, embeddings, linears, norms
from flax_attn.models.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields
from flax_attn.models.masked_lm import MaskedLMHead
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.local import LocalAttention
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import LayerNorm


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


def _read(fields: Fields, dropout: float | None) -> ModernBertConfig:
    # transformers drops inside the feed-forward layer, and the output of the attention beside its
    # weights.
    fields.only(mlp_dropout=0.0, attention_dropout=0.0, tie_word_embeddings=True)
    layers, window = range(fields.count("num_hidden_layers")), fields.length("local_attention", 128)
    fields.only(
        rope_scaling=None, sliding_window=window // 2
    )  # transformers lets either replace what it has read
    d_model, num_heads = fields.integer("hidden_size"), fields.heads("num_attention_heads")
    fields.only(head_dim=d_model // num_heads)  # by another one transformers scales the scores
    return ModernBertConfig(
        d_model=d_model,
        d_hidden=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_layers=len(layers),
        context_length=fields.length("max_position_embeddings"),
        vocab_size=fields.integer("vocab_size"),
        window=window,
        full_layers=_read_full(fields, layers, window),
        rope=_read_rope(fields, FULL, "global_rope_theta", 160000.0),
        local_rope=_read_rope(fields, SLIDING, "local_rope_theta", 10000.0),
        activation=fields.choose("hidden_activation", ACTIVATIONS, "gelu"),
        head_activation=fields.choose("classifier_activation", ACTIVATIONS, "gelu"),
        eps=fields.epsilon("norm_eps", 1e-5),
        norm_bias=fields.flag("norm_bias", False),
        attention_bias=fields.flag("attention_bias", False),
        ff_bias=fields.flag("mlp_bias", False),
        head_bias=fields.flag("classifier_bias", False),
        logits_bias=fields.flag("decoder_bias", True),
        dropout=fields.rate("embedding_dropout", 0.0) if dropout is None else dropout,
    )


def _read_full(fields: Fields, layers: range, window: int) -> tuple[int, ...]:
    every = fields.length("global_attn_every_n_layers", 3)
    default = [SLIDING if layer % every else FULL for layer in layers]
    return read_layer_types(fields, window, default).get("full_layers", tuple(layers))


def _read_rope(fields: Fields, kind: str, name: str, default: float) -> RoPE:
    kinds = Fields(
        f"{fields.where}: rope_parameters", fields.optional_object("rope_parameters") or {}
    )
    own = kinds.optional_object(kind) or {}
    parameters = Fields(f"{kinds.where}: {kind}", own)
    parameters.only(rope_type="default")
    base = parameters.number("rope_theta", BASES, fields.number(name, BASES, default))
    parameters.check_all_used()
    return RoPE(float(base))


def _write(architecture: str, config: ModernBertConfig) -> dict[str, Any]:
    ropes = {FULL: config.rope, SLIDING: config.local_rope}
    if any(rope != RoPE(rope.base) for rope in ropes.values()) or config.window % 2:
        raise ValueError(
            "transformers' ModernBERT rotates plainly, and its window has two equal halves; got "
            f"rope={config.rope}, local_rope={config.local_rope}, window={config.window}. "
            "Save with flax_attn.convert.save"
        )
    return {
        "architectures": [architecture],
        "model_type": "modernbert",
        "hidden_size": config.d_model,
        "intermediate_size": config.d_hidden,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "vocab_size": config.vocab_size,
        "local_attention": config.window,
        "layer_types": [
            FULL if layer in config.full else SLIDING for layer in range(config.num_layers)
        ],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": r.base} for kind, r in ropes.items()
        },
        "hidden_activation": THEIR_ACTIVATIONS[config.activation],
        "classifier_activation": THEIR_ACTIVATIONS[config.head_activation],
        "norm_eps": config.eps,
        "norm_bias": config.norm_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.ff_bias,
        "classifier_bias": config.head_bias,
        "decoder_bias": config.logits_bias,
        "embedding_dropout": config.dropout,
        "attention_dropout": 0.0,
        "mlp_dropout": 0.0,
    }


def _fused(part: str, names: tuple[str, ...], theirs: str, pattern: str) -> Rule:
    return Rule(tuple(f"trf_blocks.{{i}}.{name}.{part}" for name in names), theirs, pattern)


def _layout(base: str, ignored: str) -> Layout:
    """Return the names of the weights, those of the encoder behind a prefix; two are fused."""
    layer, qkv = f"{base}layers.{{i}}.", ("att.W_query", "att.W_key", "att.W_value")
    fused = {qkv: f"{layer}attn.Wqkv", ("ff.W_gate", "ff.W_up"): f"{layer}mlp.Wi"}
    return Layout(
        (
            *embeddings({"tok_emb": f"{base}embeddings.tok_embeddings"}),
            *(
                _fused("kernel", names, f"{theirs}.weight", "i o -> o i")
                for names, theirs in fused.items()
            ),
            *(_fused("bias", names, f"{theirs}.bias", "") for names, theirs in fused.items()),
            *linears(
                {
                    "trf_blocks.{i}.att.out_proj": f"{layer}attn.Wo",
                    "trf_blocks.{i}.ff.W_down": f"{layer}mlp.Wo",
                }
            ),
            *norms(
                {
                    "trf_blocks.{i}.norm1": f"{layer}attn_norm",
                    "trf_blocks.{i}.norm2": f"{layer}mlp_norm",
                }
            ),
            *norms(
                {
                    "emb_norm": f"{base}embeddings.norm",
                    "final_norm": f"{base}final_norm",
                    "head.norm": "head.norm",
                }
            ),
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

    The first block has no norm before its attention. The arguments are those of `Encoder`;
    `ModernBertModel` of transformers has the same function.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> model = ModernBert(ModernBertConfig(6, 8, 3, 2, vocab_size=11), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((4, 5), int)).shape
        (4, 5, 6)

    References:
        Warner et al. 2024 (arXiv:2412.13663).
    """

    family = Family(
        {"modernbert": _read},
        lambda config: _write("ModernBertModel", config),
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
        """Return a block: norms before attention and feed-forward, but for the first attention."""
        config = self.config
        feed_forward = GatedFeedForward(
            config.d_model, config.d_hidden, config.activation, config.ff_bias, **numerics
        )
        norm1 = self.norm(**numerics) if layer else None
        attention = self.attention(layer, backend=backend, **numerics)
        return TransformerBlock(attention, feed_forward, norm1, self.norm(**numerics))

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

    The arguments are those of `Encoder`; `ModernBertForMaskedLM` of transformers has the same
    function.

    Raises:
        ValueError: where its layers do.

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
        {"modernbert": _read},
        lambda config: _write("ModernBertForMaskedLM", config),
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

"""ModernBERT: the encoder, and its masked language model."""

from dataclasses import dataclass, field
from typing import Any

from attn_spec.hugging_face.bounds import BASES
from attn_spec.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields
from attn_spec.models.decoder import FULL, SLIDING, read_layer_types
from attn_spec.rope import RotaryPositions


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
    rope: RotaryPositions = field(default_factory=lambda: RotaryPositions(160000.0))
    local_rope: RotaryPositions = field(default_factory=RotaryPositions)
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


def read(fields: Fields, dropout: float | None) -> ModernBertConfig:
    """Return the config that the fields of a `config.json` describe."""
    # transformers drops inside the feed-forward layer, and the output of the attention beside its
    # weights.
    fields.without_dropout(dropout, "mlp_dropout", "attention_dropout")
    fields.only(tie_word_embeddings=True)
    layers, window = range(fields.count("num_hidden_layers")), fields.length("local_attention", 128)
    # transformers lets either replace what it has read.
    fields.only(rope_scaling=None, sliding_window=window // 2)
    d_model, num_heads = fields.integer("hidden_size"), fields.heads("num_attention_heads")
    # By another one transformers scales the scores.
    fields.only(head_dim=d_model // num_heads)
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
    # Files of older versions have no `layer_types`.
    every = fields.length("global_attn_every_n_layers", 3)
    default = [SLIDING if layer % every else FULL for layer in layers]
    return read_layer_types(fields, window, default).get("full_layers", tuple(layers))


def _read_rope(fields: Fields, kind: str, name: str, default: float) -> RotaryPositions:
    kinds = Fields(
        f"{fields.where}: rope_parameters", fields.optional_object("rope_parameters") or {}
    )
    own = kinds.optional_object(kind) or {}
    parameters = Fields(f"{kinds.where}: {kind}", own)
    parameters.only(rope_type="default")
    base = parameters.number("rope_theta", BASES, fields.number(name, BASES, default))
    parameters.check_all_used()
    return RotaryPositions(float(base))


def write(architecture: str, config: ModernBertConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    # One plain RoPE for each kind of layer is all that the file can say.
    ropes = {FULL: config.rope, SLIDING: config.local_rope}
    if any(rope != RotaryPositions(rope.base) for rope in ropes.values()) or config.window % 2:
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

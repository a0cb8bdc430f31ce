"""Whisper: an encoder-decoder from sound to text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.checks import check_features
from flax_attn.convert.headers import Stored
from flax_attn.convert.rules import ConversionError, Layout, Rule
from flax_attn.functional.shapes import Tokens
from flax_attn.models.encoder_decoder import EncoderDecoder
from flax_attn.models.hugging_face.family import Family, embeddings, linears, norms
from flax_attn.models.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.convolution import Convolution
from flax_attn.modules.cross_attention import CrossAttention
from flax_attn.modules.cross_block import CrossBlock
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import ACTIVATIONS as FUNCTIONS
from flax_attn.modules.feed_forward import FeedForward
from flax_attn.modules.linear import Linear
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import LayerNorm


@dataclass(frozen=True)
class WhisperConfig:
    """The sizes of a Whisper.

    Args:
        d_model: width of the tokens.
        num_heads: number of heads of the encoder.
        num_layers: number of blocks of the encoder.
        num_decoder_heads: number of heads of the decoder.
        num_decoder_layers: number of blocks of the decoder.
        d_hidden: width inside the feed-forward layers of the encoder.
        d_decoder_hidden: width inside the feed-forward layers of the decoder.
        num_mel: number of mel bands.
        num_positions: number of tokens of the encoder, half the number of its input frames.
        context_length: length of the longest text.
        vocab_size: number of tokens.
        activation: activation of the feed-forward layers.
        dropout: the probability that an element of an embedding or a sublayer's output is dropped
            in train mode.
        attention_dropout: the probability that an attention weight is dropped in train mode.
        start_token: token that the decoder begins with.

    Example:
        >>> WhisperConfig(384, 6, 4, 6, 4, 1536, 1536).num_positions
        1500
    """

    d_model: int
    num_heads: int
    num_layers: int
    num_decoder_heads: int
    num_decoder_layers: int
    d_hidden: int
    d_decoder_hidden: int
    num_mel: int = 80
    num_positions: int = 1500
    context_length: int = 448
    vocab_size: int = 51865
    activation: str = "gelu_exact"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    start_token: int = 50257

    @property
    def tied(self) -> bool:
        """Whether the output head is the table of the tokens."""
        return True


def _read(fields: Fields, dropout: float | None) -> WhisperConfig:
    fields = fields.under_one_name(
        hidden_size="d_model",
        num_attention_heads="encoder_attention_heads",
        num_key_value_heads="encoder_attention_heads",
        num_hidden_layers="encoder_layers",
    )
    fields.only(
        activation_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        is_encoder_decoder=True,
    )
    fields.only(scale_embedding=False, tie_word_embeddings=True, apply_spec_augment=False)
    return WhisperConfig(
        d_model=fields.integer("d_model"),
        num_heads=fields.heads("encoder_attention_heads"),
        num_layers=fields.count("encoder_layers"),
        num_decoder_heads=fields.heads("decoder_attention_heads"),
        num_decoder_layers=fields.count("decoder_layers"),
        d_hidden=fields.integer("encoder_ffn_dim"),
        d_decoder_hidden=fields.integer("decoder_ffn_dim"),
        num_mel=fields.integer("num_mel_bins", 80),
        num_positions=fields.length("max_source_positions", 1500),
        context_length=fields.length("max_target_positions", 448),
        vocab_size=fields.integer("vocab_size"),
        activation=fields.choose("activation_function", ACTIVATIONS, "gelu"),
        dropout=fields.rate("dropout", 0.0) if dropout is None else dropout,
        attention_dropout=fields.rate("attention_dropout", 0.0) if dropout is None else dropout,
        start_token=fields.token("decoder_start_token_id", 50257),
    )


def _fit(config: WhisperConfig, stored: Mapping[str, Stored]) -> WhisperConfig:
    """Return the config if its number of encoder positions is that of the files.

    They are computed when a model is built, so the number is compared before.
    """
    name, wanted = "encoder.embed_positions.weight", (config.num_positions, config.d_model)
    found = [entry.shape for key, entry in stored.items() if key.endswith(name)]
    if found != [wanted]:
        raise ConversionError(
            f"{name} must have the shape (max_source_positions, d_model); got {found} for {wanted}."
            " Take the config.json that came with the weights"
        )
    return config


def _write(config: WhisperConfig) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": config.d_model,
        "encoder_attention_heads": config.num_heads,
        "encoder_layers": config.num_layers,
        "decoder_attention_heads": config.num_decoder_heads,
        "decoder_layers": config.num_decoder_layers,
        "encoder_ffn_dim": config.d_hidden,
        "decoder_ffn_dim": config.d_decoder_hidden,
        "num_mel_bins": config.num_mel,
        "max_source_positions": config.num_positions,
        "max_target_positions": config.context_length,
        "vocab_size": config.vocab_size,
        "activation_function": THEIR_ACTIVATIONS[config.activation],
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "decoder_start_token_id": config.start_token,
    }


_ATTENTION = {"W_query": "q_proj", "W_key": "k_proj", "W_value": "v_proj", "out_proj": "out_proj"}


def _stack(ours: str, theirs: str, last: int, **attentions: str) -> tuple:
    """Return the rules of the blocks of a stack with these attentions and `last` norms."""
    ours, layer = f"{ours}.{{i}}.", f"model.{theirs}.layers.{{i}}."
    names = {
        f"{ours}{own}.{a}": f"{layer}{n}.{b}"
        for own, n in attentions.items()
        for a, b in _ATTENTION.items()
    }
    names |= {f"{ours}ff.layers.0": f"{layer}fc1", f"{ours}ff.layers.2": f"{layer}fc2"}
    before = [f"{layer}{name}_layer_norm" for name in (*attentions.values(), "final")]
    return *linears(names), *norms({f"{ours}norm{i + 1}": before[i] for i in range(last)})


def _convolution(name: str) -> tuple[Rule, Rule]:
    theirs = f"model.encoder.{name}"
    kernel = Rule((f"{name}.proj.kernel",), f"{theirs}.weight", "(c k) d -> d c k")
    return kernel, Rule((f"{name}.proj.bias",), f"{theirs}.bias")


_LAYOUT = Layout(
    (
        *embeddings(
            {"tok_emb": "model.decoder.embed_tokens", "pos_emb": "model.decoder.embed_positions"}
        ),
        *embeddings({"enc_pos": "model.encoder.embed_positions"}),
        *_convolution("conv1"),
        *_convolution("conv2"),
        *_stack("enc_blocks", "encoder", 2, att="self_attn"),
        *_stack("dec_blocks", "decoder", 3, att="self_attn", cross="encoder_attn"),
        *norms({"enc_norm": "model.encoder.layer_norm", "final_norm": "model.decoder.layer_norm"}),
    ),
    ignored=r"(.*\.)?proj_out\.weight",  # tied
)


class Whisper(EncoderDecoder[WhisperConfig]):
    """Whisper: two convolutions over log-mel features, an encoder, and a decoder of text.

        x = gelu(conv2(gelu(conv1(features)))) + enc_pos;  logits = final_norm(...) @ tok_emb^T

    The arguments are those of `EncoderDecoder`; its inputs are features `(b, mel, frames)`.
    `enc_pos` starts as sinusoids. `WhisperForConditionalGeneration` of transformers has the same
    function, and does not train `enc_pos`.

    Raises:
        ValueError: where its layers do, or if the features have another number of bands or frames.

    Example:
        >>> config = WhisperConfig(6, 2, 1, 3, 1, 8, 10, num_mel=5, num_positions=7,
        ...                        context_length=9, vocab_size=11)
        >>> model = Whisper(config, rngs=nnx.Rngs(0))
        >>> features, tokens = jnp.ones((3, 5, 14)), jnp.ones((3, 4), int)
        >>> model(features, tokens).shape
        (3, 4, 11)

    References:
        Radford et al. 2022 (arXiv:2212.04356).
    """

    _COPIES = {"proj_out.weight": "tok_emb.embedding"}
    _NAME = "WhisperForConditionalGeneration"
    family = Family(
        {"whisper": _read}, _write, _LAYOUT, architecture=_NAME, fit=_fit, copies=_COPIES
    )

    def create_embeddings(
        self, *, precision: PrecisionLike = None, rngs: nnx.Rngs, **numerics: Any
    ) -> None:
        """Set the convolutions, the tables of tokens and positions, and the dropout of sums."""
        config, numerics = self.config, {"rngs": rngs, **numerics}
        super().create_embeddings(precision=precision, **numerics)
        self.conv1 = Convolution(config.num_mel, config.d_model, 3, precision=precision, **numerics)
        self.conv2 = Convolution(
            config.d_model, config.d_model, 3, 2, precision=precision, **numerics
        )
        self.enc_pos = Embedding(
            config.num_positions, config.d_model, axes=(None, "embed"), **numerics
        )
        self.pos_emb = Embedding(
            config.context_length, config.d_model, axes=(None, "embed"), **numerics
        )
        self.drop_emb = Dropout(config.dropout, rngs=rngs)

    def encoder_block(
        self, layer: int, backend: str, *, rngs: nnx.Rngs, **numerics: Any
    ) -> TransformerBlock:
        """Return a block of the encoder."""
        config, numerics = self.config, {"rngs": rngs, **numerics}
        attention = self.attention(config.num_heads, causal=False, backend=backend, **numerics)
        feed_forward, norms = (
            self.feed_forward(config.d_hidden, **numerics),
            (self.norm(**numerics) for _ in range(2)),
        )
        return TransformerBlock(
            attention, feed_forward, *norms, drop_shortcut=Dropout(config.dropout, rngs=rngs)
        )

    def decoder_block(
        self, layer: int, backend: str, *, rngs: nnx.Rngs, **numerics: Any
    ) -> CrossBlock:
        """Return a block of the decoder."""
        config, numerics = self.config, {"rngs": rngs, **numerics}
        attention = self.attention(config.num_decoder_heads, backend=backend, **numerics)
        sizes = config.d_model, config.d_model, config.attention_dropout, config.num_decoder_heads
        cross = CrossAttention(*sizes, qkv_bias=True, backend=backend, **numerics)
        norms = (self.norm(**numerics) for _ in range(3))
        feed_forward = self.feed_forward(config.d_decoder_hidden, **numerics)
        return CrossBlock(
            attention, cross, feed_forward, *norms, drop_shortcut=Dropout(config.dropout, rngs=rngs)
        )

    def attention(
        self, num_heads: int, *, backend: str, causal: bool = True, **numerics: Any
    ) -> MultiHeadAttention:
        """Return the self-attention of a layer; a bias of keys would not change the softmax."""
        d, length = self.config.d_model, self.config.context_length if causal else None
        options = {"qkv_bias": True, "causal": causal, "backend": backend}
        attention = MultiHeadAttention(
            d, d, length, self.config.attention_dropout, num_heads, **options, **numerics
        )
        axes = {"axes": ("embed", "kv_heads"), "unit": (1, d // num_heads)}
        attention.W_key = Linear(d, d, False, **axes, **numerics)
        return attention

    def feed_forward(self, d_hidden: int, **options: Any) -> FeedForward:
        """Return the feed-forward part of a layer."""
        return FeedForward(self.config.d_model, d_hidden, self.config.activation, **options)

    def norm(self, *, precision: PrecisionLike = None, **numerics: Any) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, **numerics)

    def initialise(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters; the encoder's positions are sinusoids."""
        super().initialise(rngs)
        table = self.enc_pos.embedding
        table.set_value(jnp.asarray(sinusoids(*table.shape), table.dtype))

    def embed_inputs(
        self, inputs: Float[Array, "*b mel frames"], dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of sound, half as many as there are frames."""
        check_features(inputs.shape, self.config.num_mel, 2 * self.config.num_positions)
        gelu, x = FUNCTIONS["gelu_exact"], rearrange(inputs, "... mel frames -> ... frames mel")
        x = gelu(self.conv2(gelu(self.conv1(x))))
        x = x + jnp.broadcast_to(self.enc_pos.embedding[...].astype(x.dtype), x.shape)
        return self.drop_emb(x, dropout_key=dropout_key)

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of the decoder's tokens and of their positions, summed."""
        x = self.tok_emb(tokens)
        return self.drop_emb(
            x + jnp.broadcast_to(self.pos_emb(positions), x.shape), dropout_key=dropout_key
        )


def sinusoids(num_positions: int, width: int) -> np.ndarray:
    """Return the positions of Whisper's encoder, `(num_positions, width)`.

    They are sines, then cosines, of ever slower angles.

    Example:
        >>> sinusoids(2, 4).round(2).tolist()
        [[0.0, 0.0, 1.0, 1.0], [0.84, 0.0, 0.54, 1.0]]
    """
    half = width // 2
    angles = np.outer(np.arange(num_positions), 10000.0 ** (-np.arange(half) / max(half - 1, 1)))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

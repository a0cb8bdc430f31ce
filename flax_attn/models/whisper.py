"""Whisper: an encoder-decoder from sound to text."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.input_checks import check_features
from attn_spec.models.whisper import WhisperConfig, read, write
from flax_attn.convert.headers import Stored
from flax_attn.convert.rules import ConversionError, Layout, Rule
from flax_attn.functional.parameter_sums import add
from flax_attn.functional.shapes import Tokens
from flax_attn.models.encoder_decoder import EncoderDecoder
from flax_attn.models.hugging_face.family import Family, embeddings, linears, norms
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


def _fit(config: WhisperConfig, stored: Mapping[str, Stored]) -> WhisperConfig:
    """Return the config if its number of encoder positions is that of the files.

    They are computed when a model is built, so the number is compared before.
    """
    name = "encoder.embed_positions.weight"
    wanted = config.num_positions, config.d_model
    found = [entry.shape for key, entry in stored.items() if key.endswith(name)]
    if found != [wanted]:
        raise ConversionError(
            f"{name} must have the shape (max_source_positions, d_model); got {found} for {wanted}."
            " Take the config.json that came with the weights"
        )
    return config


_ATTENTION = {"W_query": "q_proj", "W_key": "k_proj", "W_value": "v_proj", "out_proj": "out_proj"}


def _stack(ours: str, theirs: str, **attentions: str) -> tuple:
    """Return the rules of the blocks of a stack with these attentions, theirs by ours."""
    block = f"{ours}.{{i}}."
    layer = f"model.{theirs}.layers.{{i}}."
    rules = linears({"ff.layers.0": "fc1", "ff.layers.2": "fc2"}, block, layer)
    for own, name in attentions.items():
        rules += linears(_ATTENTION, f"{block}{own}.", f"{layer}{name}.")
    # A norm is named after what it stands before; the last stands before the feed-forward layer.
    for i, name in enumerate((*attentions.values(), "final"), 1):
        rules += norms({f"norm{i}": f"{name}_layer_norm"}, block, layer)
    return rules


def _convolution(name: str) -> tuple[Rule, Rule]:
    theirs = f"model.encoder.{name}"
    kernel = Rule((f"{name}.proj.kernel",), f"{theirs}.weight", "(c k) d -> d c k")
    return kernel, Rule((f"{name}.proj.bias",), f"{theirs}.bias")


_LAYOUT = Layout(
    (
        *embeddings(
            {"tok_emb": "embed_tokens", "pos_emb": "embed_positions"}, "", "model.decoder."
        ),
        *embeddings({"enc_pos": "model.encoder.embed_positions"}),
        *_convolution("conv1"),
        *_convolution("conv2"),
        *_stack("enc_blocks", "encoder", att="self_attn"),
        *_stack("dec_blocks", "decoder", att="self_attn", cross="encoder_attn"),
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
    family = Family({"whisper": read}, write, _LAYOUT, architecture=_NAME, fit=_fit, copies=_COPIES)

    def create_embeddings(self, **numerics: Any) -> None:
        """Set the convolutions, the tables of tokens and positions, and the dropout of sums."""
        config = self.config
        d = config.d_model
        super().create_embeddings(**numerics)
        # The second halves the number of frames: two of them are one position.
        self.conv1 = Convolution(config.num_mel, d, 3, **numerics)
        self.conv2 = Convolution(d, d, 3, 2, **numerics)
        tables = {"axes": (None, "embed"), **numerics}
        self.enc_pos = Embedding(config.num_positions, d, **tables)
        self.pos_emb = Embedding(config.context_length, d, **tables)
        self.drop_emb = self.drop(**numerics)

    def encoder_block(self, layer: int, backend: str, **numerics: Any) -> TransformerBlock:
        """Return a block of the encoder."""
        config = self.config
        attention = self.attention(config.num_heads, causal=False, backend=backend, **numerics)
        feed_forward = self.feed_forward(config.d_hidden, **numerics)
        norms = self.norm(**numerics), self.norm(**numerics)
        dropout = self.drop(**numerics)
        return TransformerBlock(attention, feed_forward, *norms, drop_shortcut=dropout)

    def decoder_block(self, layer: int, backend: str, **numerics: Any) -> CrossBlock:
        """Return a block of the decoder."""
        config = self.config
        d = config.d_model
        rate = config.attention_dropout
        heads = config.num_decoder_heads
        attention = self.attention(heads, backend=backend, **numerics)
        # Keys have no bias here either, as `CrossAttention` has none by default.
        cross = CrossAttention(d, d, rate, heads, qkv_bias=True, backend=backend, **numerics)
        norms = [self.norm(**numerics) for _ in range(3)]
        feed_forward = self.feed_forward(config.d_decoder_hidden, **numerics)
        dropout = self.drop(**numerics)
        return CrossBlock(attention, cross, feed_forward, *norms, drop_shortcut=dropout)

    def attention(
        self, num_heads: int, *, backend: str, causal: bool = True, **numerics: Any
    ) -> MultiHeadAttention:
        """Return the self-attention of a layer; a bias of keys would not change the softmax."""
        config = self.config
        d = config.d_model
        rate = config.attention_dropout
        # The positions of the encoder are a table, which has its own length.
        length = config.context_length if causal else None
        options = {"qkv_bias": True, "causal": causal, "backend": backend}
        attention = MultiHeadAttention(d, d, length, rate, num_heads, **options, **numerics)
        # A bias on keys adds the same to all scores of a query: Whisper has none.
        axes = {"axes": ("embed", "kv_heads"), "unit": (1, d // num_heads)}
        attention.W_key = Linear(d, d, False, **axes, **numerics)
        return attention

    def feed_forward(self, d_hidden: int, **options: Any) -> FeedForward:
        """Return the feed-forward part of a layer."""
        return FeedForward(self.config.d_model, d_hidden, self.config.activation, **options)

    def norm(self, *, precision: PrecisionLike = None, **numerics: Any) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, **numerics)

    def drop(self, rngs: nnx.Rngs, **numerics: Any) -> Dropout:
        """Return the dropout of the embeddings, and of what the layers of a block add."""
        return Dropout(self.config.dropout, rngs=rngs)

    def initialise(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters; the encoder's positions are sinusoids."""
        super().initialise(rngs)
        table = self.enc_pos.embedding
        table.set_value(jnp.asarray(sinusoids(*table.shape), table.dtype))

    def embed_inputs(
        self, inputs: Float[Array, "*b mel frames"], dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of sound, half as many as there are frames."""
        config = self.config
        # The encoder's positions are a table: sound of another length has none.
        check_features(inputs.shape, config.num_mel, 2 * config.num_positions)
        gelu = FUNCTIONS["gelu_exact"]
        x = rearrange(inputs, "... mel frames -> ... frames mel")
        x = gelu(self.conv1(x))
        x = gelu(self.conv2(x))
        positions = self.enc_pos.embedding[...].astype(x.dtype)
        x = add(x, positions)
        return self.drop_emb(x, dropout_key=dropout_key)

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of the decoder's tokens and of their positions, summed."""
        x = self.tok_emb(tokens)
        return self.drop_emb(add(x, self.pos_emb(positions)), dropout_key=dropout_key)


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

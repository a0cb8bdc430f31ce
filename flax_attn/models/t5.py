"""T5: an encoder-decoder with relative positions."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Float, Integer

from flax_attn.convert.rules import Layout
from flax_attn.functional.relative import t5_bias
from flax_attn.functional.scores import Scores
from flax_attn.functional.shapes import Tokens
from flax_attn.models.encoder_decoder import EncoderDecoder
from flax_attn.models.hugging_face.family import Family, embeddings, linears, norms
from flax_attn.models.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.calls import Bias
from flax_attn.modules.cross_attention import CrossAttention
from flax_attn.modules.cross_block import CrossBlock
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import FeedForward, GatedFeedForward
from flax_attn.modules.initialisation import next_key, normal
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import RMSNorm


@dataclass(frozen=True)
class T5Config:
    """The sizes of a T5.

    Args:
        d_model: width of the tokens.
        d_hidden: width inside the feed-forward layer.
        num_heads: number of heads.
        head_dim: width of a head.
        num_layers: number of blocks of the encoder.
        num_decoder_layers: number of blocks of the decoder.
        vocab_size: number of tokens.
        num_buckets: number of buckets of the relative positions.
        max_distance: distance from which on all share a bucket.
        activation: activation of the feed-forward layer.
        gated: whether the feed-forward layer is gated, as in T5 1.1.
        eps: epsilon of the norms.
        dropout: the probability that an attention weight, or an element of an embedding or a
            sublayer's output, is dropped in train mode.
        tied: whether the output head is the table of the tokens.
        scaled: whether the input of the head is divided by `sqrt(d_model)`; not in T5 1.1.
        start_token: token that the decoder begins with.
        context_length: length of the longest input; None is no limit, as positions are relative.

    Example:
        >>> T5Config(512, 2048, 8, 64, 6, 6).num_buckets
        32
    """

    d_model: int
    d_hidden: int
    num_heads: int
    head_dim: int
    num_layers: int
    num_decoder_layers: int
    vocab_size: int = 32128
    num_buckets: int = 32
    max_distance: int = 128
    activation: str = "relu"
    gated: bool = False
    eps: float = 1e-6
    dropout: float = 0.1
    tied: bool = True
    scaled: bool = True
    start_token: int = 0
    context_length: int | None = None


def _read(fields: Fields, dropout: float | None) -> T5Config:
    fields = fields.under_one_name(
        hidden_size="d_model",
        num_attention_heads="num_heads",
        num_hidden_layers="num_layers",
        head_dim="d_kv",
    )
    fields.only(is_decoder=False, is_encoder_decoder=True)
    # Files without the field scale where the head is tied; of a head of its own only the weights
    # tell.
    scaled = fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))
    layers, decoder_layers = fields.count("num_layers"), fields.optional_count("num_decoder_layers")
    start = fields.optional_token("decoder_start_token_id")
    return T5Config(
        d_model=fields.integer("d_model"),
        d_hidden=fields.integer("d_ff"),
        num_heads=fields.heads("num_heads"),
        head_dim=fields.integer("d_kv"),
        num_layers=layers,
        num_decoder_layers=layers if decoder_layers is None else decoder_layers,
        vocab_size=fields.integer("vocab_size"),
        num_buckets=fields.integer("relative_attention_num_buckets", 32),
        max_distance=fields.length("relative_attention_max_distance", 128),
        **_read_feed_forward(fields),
        eps=fields.epsilon("layer_norm_epsilon", 1e-6),
        dropout=fields.rate("dropout_rate", 0.1) if dropout is None else dropout,
        scaled=scaled,
        start_token=(fields.optional_token("pad_token_id") or 0) if start is None else start,
    )


# transformers computes the tanh form where a file says "gated-gelu", and no other name does.
_FEED_FORWARD = {
    **{name: {"activation": ours, "gated": False} for name, ours in ACTIVATIONS.items()},
    **{f"gated-{name}": {"activation": ours, "gated": True} for name, ours in ACTIVATIONS.items()},
    "gated-gelu": {"activation": "gelu_tanh", "gated": True},
}


def _read_feed_forward(fields: Fields) -> dict[str, Any]:
    found = fields.choose("feed_forward_proj", _FEED_FORWARD, "relu")
    # Files of transformers have both of these beside it, which win there where they say otherwise.
    fields.only(is_gated_act=found["gated"])
    if ACTIVATIONS.get(str(fields.values.get("dense_act_fn"))) != found["activation"]:
        fields.only(dense_act_fn=THEIR_ACTIVATIONS[found["activation"]])
    return found


def _fit(config: T5Config, names: Collection[str]) -> T5Config:
    """The head of T5 1.1 is stored beside the table, and belongs to it where it is not."""
    return replace(config, tied=config.scaled or "lm_head.weight" not in names)


def _write(config: T5Config) -> dict[str, Any]:
    if config.scaled and not config.tied:
        raise ValueError(
            "transformers' T5 divides the input of a tied head alone; got scaled=True, tied=False. "
            "Save with flax_attn.convert.save"
        )
    if config.gated and config.activation == "gelu_exact":
        raise ValueError(
            "transformers' T5 has no gated feed-forward layer with the exact GELU; got"
            " activation='gelu_exact', gated=True. Save with flax_attn.convert.save"
        )
    name = THEIR_ACTIVATIONS[config.activation]
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": config.d_model,
        "d_ff": config.d_hidden,
        "num_heads": config.num_heads,
        "d_kv": config.head_dim,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "vocab_size": config.vocab_size,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "feed_forward_proj": f"gated-{name}" if config.gated else name,
        "layer_norm_epsilon": config.eps,
        "dropout_rate": config.dropout,
        "tie_word_embeddings": config.scaled,
        "decoder_start_token_id": config.start_token,
    }


_ATTENTION = {"W_query": "q", "W_key": "k", "W_value": "v", "out_proj": "o"}
_FF = {"layers.0": "wi", "layers.2": "wo", "W_gate": "wi_0", "W_up": "wi_1", "W_down": "wo"}


def _stack(ours: str, theirs: str, cross: bool) -> tuple:
    """Return the rules of the blocks of a stack; the feed-forward layer is the last of a block."""
    ours, layer, last = f"{ours}.{{i}}.", f"{theirs}.block.{{i}}.layer.", 2 if cross else 1
    names = {f"{ours}att.{a}": f"{layer}0.SelfAttention.{b}" for a, b in _ATTENTION.items()}
    names |= {f"{ours}ff.{a}": f"{layer}{last}.DenseReluDense.{b}" for a, b in _FF.items()}
    if cross:
        names |= {
            f"{ours}cross.{a}": f"{layer}1.EncDecAttention.{b}" for a, b in _ATTENTION.items()
        }
    return *linears(names), *norms(
        {f"{ours}norm{n + 1}": f"{layer}{n}.layer_norm" for n in range(last + 1)}
    )


_COPIES = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_TABLE = "{}.block.0.layer.0.SelfAttention.relative_attention_bias"
_LAYOUT = Layout(
    (
        *embeddings(
            {
                "tok_emb": "shared",
                "enc_bias": _TABLE.format("encoder"),
                "dec_bias": _TABLE.format("decoder"),
            }
        ),
        *_stack("enc_blocks", "encoder", cross=False),
        *_stack("dec_blocks", "decoder", cross=True),
        *norms({"enc_norm": "encoder.final_layer_norm", "final_norm": "decoder.final_layer_norm"}),
        *linears({"out_head": "lm_head"}),
    ),
    # The table may be stored for each stack, and for a tied head; the cross-attention of the first
    # files had a bias.
    ignored=(
        r"(encoder|decoder)\.embed_tokens\.weight|lm_head\.weight|"
        r"decoder\.block\.0\.layer\.1\..*relative_attention_bias.*"
    ),
)


class T5(EncoderDecoder[T5Config]):
    """T5: relative positions in buckets, RMS norms before the layers, no biases.

        scores = q k^T + bias[bucket(key position - query position)]
        logits = head(x / sqrt(d_model))

    All layers of a stack share the buckets. The arguments are those of `EncoderDecoder`.
    `T5ForConditionalGeneration` of transformers has the same function; in train mode it drops
    elements inside the feed-forward layer and behind the last norms too.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> model = T5(T5Config(6, 8, 2, 4, 2, 1, vocab_size=11), rngs=nnx.Rngs(0))
        >>> inputs, tokens = jnp.ones((3, 7), int), jnp.ones((3, 5), int)
        >>> model(inputs, tokens).shape
        (3, 5, 11)

    References:
        Raffel et al. 2019 (arXiv:1910.10683); Shazeer 2020, gated (arXiv:2002.05202).
    """

    family = Family(
        {"t5": _read},
        _write,
        _LAYOUT,
        base="",
        architecture="T5ForConditionalGeneration",
        fit=_fit,
        copies=dict.fromkeys(_COPIES, "tok_emb.embedding"),
    )

    def create_embeddings(
        self, *, precision: PrecisionLike = None, rngs: nnx.Rngs, **numerics: Any
    ) -> None:
        """Set the table of tokens, the dropout of its vectors, and the relative positions."""
        super().create_embeddings(precision=precision, rngs=rngs, **numerics)
        sizes, numerics = (
            (self.config.num_buckets, self.config.num_heads),
            {"rngs": rngs, **numerics},
        )
        self.enc_bias, self.dec_bias = (
            Embedding(*sizes, axes=(None, "heads"), **numerics) for _ in range(2)
        )
        self.drop_emb = Dropout(self.config.dropout, rngs=rngs)

    def encoder_block(
        self, layer: int, backend: str, *, rngs: nnx.Rngs, **numerics: Any
    ) -> TransformerBlock:
        """Return a block of the encoder."""
        numerics = {"rngs": rngs, **numerics}
        attention = self.attention(causal=False, backend=backend, **numerics)
        norms = self.norm(**numerics), self.norm(**numerics)
        return TransformerBlock(
            attention, self.feed_forward(**numerics), *norms, drop_shortcut=self.drop(rngs)
        )

    def decoder_block(
        self, layer: int, backend: str, *, rngs: nnx.Rngs, **numerics: Any
    ) -> CrossBlock:
        """Return a block of the decoder."""
        config, numerics = self.config, {"rngs": rngs, **numerics}
        sizes = config.d_model, config.d_model, config.dropout, config.num_heads
        options = {
            "head_dim": config.head_dim,
            "out_bias": False,
            "scores": Scores(scale=1.0),
            "backend": backend,
        }
        attention, cross = (
            self.attention(backend=backend, **numerics),
            CrossAttention(*sizes, **options, **numerics),
        )
        norms = (self.norm(**numerics) for _ in range(3))
        return CrossBlock(
            attention, cross, self.feed_forward(**numerics), *norms, drop_shortcut=self.drop(rngs)
        )

    def attention(self, **options: Any) -> MultiHeadAttention:
        """Return the self-attention of a layer: its scores are not scaled."""
        config = self.config
        sizes = (
            config.d_model,
            config.d_model,
            config.context_length,
            config.dropout,
            config.num_heads,
        )
        own = {"head_dim": config.head_dim, "out_bias": False, "scores": Scores(scale=1.0)}
        return MultiHeadAttention(*sizes, **own, **options)

    def feed_forward(self, **options: Any) -> FeedForward | GatedFeedForward:
        """Return the feed-forward part of a layer, without biases."""
        config = self.config
        layer = GatedFeedForward if config.gated else FeedForward
        return layer(config.d_model, config.d_hidden, config.activation, False, **options)

    def norm(self, *, precision: PrecisionLike = None, **numerics: Any) -> RMSNorm:
        """Return a norm."""
        return RMSNorm(self.config.d_model, self.config.eps, **numerics)

    def drop(self, rngs: nnx.Rngs) -> Dropout:
        """Return the dropout of what the layers of a block add."""
        return Dropout(self.config.dropout, rngs=rngs)

    def initialise(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters as published.

        Kernels keep the variance of their input; those of queries give scores of unit variance.
        """
        for path, param in nnx.iter_graph(self):
            if isinstance(param, nnx.Param) and path[-1] in ("kernel", "embedding"):
                std = 1.0 if path[-2] == "tok_emb" else self.config.d_model**-0.5
                std = param.shape[0] ** -0.5 if path[-1] == "kernel" else std
                std *= self.config.head_dim**-0.5 if path[-2] == "W_query" else 1.0
                param.set_value(normal(std)(next_key(rngs.params), param.shape, param.dtype))

    def embed_inputs(self, inputs: Integer[Array, "*b s"], dropout_key: Array | None) -> Tokens:
        """Return the vectors of the encoder's tokens, dropped in train mode."""
        return self.drop_emb(self.tok_emb(inputs), dropout_key=dropout_key)

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of the decoder's tokens; positions are in the scores."""
        return self.embed_inputs(tokens, dropout_key)

    def biases(self) -> tuple[Bias, Bias]:
        """Return the bias of the encoder, in both directions, and that of the decoder."""
        tables, distance = (
            (self.enc_bias.embedding[...], self.dec_bias.embedding[...]),
            self.config.max_distance,
        )

        def both(query: Array, key: Array) -> Array:
            return t5_bias(tables[0], query, key, max_distance=distance)

        def backwards(query: Array, key: Array) -> Array:
            return t5_bias(tables[1], query, key, bidirectional=False, max_distance=distance)

        return both, backwards

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        return super().logits(hidden * self.config.d_model**-0.5 if self.config.scaled else hidden)

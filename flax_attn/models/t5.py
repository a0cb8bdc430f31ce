"""T5: an encoder-decoder with relative positions."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.generation_checks import check_token_ids
from attn_spec.models.t5 import T5Config, read, write
from attn_spec.scores import Scores
from flax_attn.convert.rules import Layout
from flax_attn.functional.relative import t5_bias
from flax_attn.functional.shapes import Tokens
from flax_attn.models.encoder_decoder import EncoderDecoder
from flax_attn.models.hugging_face.family import Family, embeddings, linears, norms
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


def _fit(config: T5Config, names: Collection[str]) -> T5Config:
    """The head of T5 1.1 is stored beside the table, and belongs to it where it is not."""
    return replace(config, tied=config.scaled or "lm_head.weight" not in names)


_ATTENTION = {"W_query": "q", "W_key": "k", "W_value": "v", "out_proj": "o"}
_FF = {"layers.0": "wi", "layers.2": "wo", "W_gate": "wi_0", "W_up": "wi_1", "W_down": "wo"}
# The parts of a block by our names: the name of each, and those of its layers.
_PARTS = {
    "att": ("SelfAttention", _ATTENTION),
    "cross": ("EncDecAttention", _ATTENTION),
    "ff": ("DenseReluDense", _FF),
}


def _stack(ours: str, theirs: str, *parts: str) -> tuple:
    """Return the rules of the blocks of a stack, whose parts come in this order."""
    block = f"{ours}.{{i}}."
    rules = ()
    # Hugging Face counts the parts of a block, and each has the norm before it.
    for n, part in enumerate(parts):
        layer = f"{theirs}.block.{{i}}.layer.{n}."
        name, names = _PARTS[part]
        rules += linears(names, f"{block}{part}.", f"{layer}{name}.")
        rules += norms({f"norm{n + 1}": "layer_norm"}, block, layer)
    return rules


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
        *_stack("enc_blocks", "encoder", "att", "ff"),
        *_stack("dec_blocks", "decoder", "att", "cross", "ff"),
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


def _head_options(config: T5Config) -> dict[str, Any]:
    # Scores have no factor: the queries are drawn with it.
    return {"head_dim": config.head_dim, "out_bias": False, "scores": Scores(scale=1.0)}


class T5(EncoderDecoder[T5Config]):
    """T5: relative positions in buckets, RMS norms before the layers, no biases.

        scores = q k^T + bias[bucket(key position - query position)]
        logits = head(x / sqrt(d_model))

    All layers of a stack share the buckets. Arguments and errors are those of `EncoderDecoder`.
    `T5ForConditionalGeneration` of transformers has the same function; in train mode it drops
    elements inside the feed-forward layer and behind the last norms too.

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
        {"t5": read},
        write,
        _LAYOUT,
        base="",
        architecture="T5ForConditionalGeneration",
        fit=_fit,
        copies=dict.fromkeys(_COPIES, "tok_emb.embedding"),
    )

    def create_embeddings(self, **numerics: Any) -> None:
        """Set the table of tokens, the dropout of its vectors, and the relative positions."""
        super().create_embeddings(**numerics)
        sizes = self.config.num_buckets, self.config.num_heads
        # Each head has a bias of its own.
        tables = {"axes": (None, "heads"), **numerics}
        self.enc_bias = Embedding(*sizes, **tables)
        self.dec_bias = Embedding(*sizes, **tables)
        self.drop_emb = self.drop(**numerics)

    def encoder_block(self, layer: int, backend: str, **numerics: Any) -> TransformerBlock:
        """Return a block of the encoder."""
        attention = self.attention(causal=False, backend=backend, **numerics)
        norms = self.norm(**numerics), self.norm(**numerics)
        feed_forward = self.feed_forward(**numerics)
        dropout = self.drop(**numerics)
        return TransformerBlock(attention, feed_forward, *norms, drop_shortcut=dropout)

    def decoder_block(self, layer: int, backend: str, **numerics: Any) -> CrossBlock:
        """Return a block of the decoder."""
        config = self.config
        d = config.d_model
        attention = self.attention(backend=backend, **numerics)
        options = {**_head_options(config), "backend": backend, **numerics}
        cross = CrossAttention(d, d, config.dropout, config.num_heads, **options)
        norms = [self.norm(**numerics) for _ in range(3)]
        feed_forward = self.feed_forward(**numerics)
        dropout = self.drop(**numerics)
        return CrossBlock(attention, cross, feed_forward, *norms, drop_shortcut=dropout)

    def attention(self, **options: Any) -> MultiHeadAttention:
        """Return the self-attention of a layer: its scores are not scaled."""
        config = self.config
        d = config.d_model
        sizes = d, d, config.context_length, config.dropout, config.num_heads
        return MultiHeadAttention(*sizes, **_head_options(config), **options)

    def feed_forward(self, **options: Any) -> FeedForward | GatedFeedForward:
        """Return the feed-forward part of a layer, without biases."""
        config = self.config
        layer = GatedFeedForward if config.gated else FeedForward
        return layer(config.d_model, config.d_hidden, config.activation, False, **options)

    def norm(self, *, precision: PrecisionLike = None, **numerics: Any) -> RMSNorm:
        """Return a norm."""
        return RMSNorm(self.config.d_model, self.config.eps, **numerics)

    def drop(self, rngs: nnx.Rngs, **numerics: Any) -> Dropout:
        """Return the dropout of what the layers of a block add."""
        return Dropout(self.config.dropout, rngs=rngs)

    def initialise(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters as published.

        Kernels keep the variance of their input; those of queries give scores of unit variance.
        """
        config = self.config
        for path, param in nnx.iter_graph(self):
            # Norms keep 1, and the linear layers have no biases.
            if not isinstance(param, nnx.Param) or path[-1] not in ("kernel", "embedding"):
                continue
            layer, kind = path[-2:]
            if kind == "kernel":
                std = param.shape[0] ** -0.5
            else:
                std = 1.0 if layer == "tok_emb" else config.d_model**-0.5
            if layer == "W_query":
                std *= config.head_dim**-0.5
            draw_normal = normal(std)
            value = draw_normal(next_key(rngs.params), param.shape, param.dtype)
            param.set_value(value)

    def embed_inputs(self, inputs: Integer[Array, "*b s"], dropout_key: Array | None) -> Tokens:
        """Return the vectors of the encoder's tokens, dropped in train mode."""
        check_token_ids("inputs", inputs)
        return self.drop_emb(self.tok_emb(inputs), dropout_key=dropout_key)

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of the decoder's tokens; positions are in the scores."""
        return self.embed_inputs(tokens, dropout_key)

    def biases(self) -> tuple[Bias, Bias]:
        """Return the bias of the encoder, in both directions, and that of the decoder."""
        # One table serves all layers of a stack.
        both = partial(t5_bias, self.enc_bias.embedding[...])
        backwards = partial(t5_bias, self.dec_bias.embedding[...], bidirectional=False)
        distance = {"max_distance": self.config.max_distance}
        return partial(both, **distance), partial(backwards, **distance)

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        config = self.config
        # The first T5 has one matrix for table and head; this keeps the size of its logits.
        if config.scaled:
            hidden = hidden * config.d_model**-0.5
        return super().logits(hidden)

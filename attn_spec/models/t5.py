"""T5: an encoder-decoder with relative positions."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields


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
    # Relative positions have no end.
    context_length: int | None = None


def read(fields: Fields, dropout: float | None) -> T5Config:
    """Return the config that the fields of a `config.json` describe."""
    fields = fields.under_one_name(
        hidden_size="d_model",
        num_attention_heads="num_heads",
        num_hidden_layers="num_layers",
        head_dim="d_kv",
    )
    # An encoder or a decoder alone is another class of transformers.
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


def write(config: T5Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
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
    # "gated-gelu_new" is what transformers reads as the tanh form, too.
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

"""BERT: the encoder, and its masked language model."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT.

    Args:
        d_model: width of the tokens.
        num_heads: number of heads.
        num_layers: number of blocks.
        context_length: length of the longest input.
        vocab_size: number of tokens.
        num_types: number of token types, such as first and second sentence.
        d_hidden: width inside the feed-forward layer; None is `4 * d_model`.
        activation: activation of the feed-forward layer, and of the head.
        eps: epsilon of the norms.
        dropout: the probability that an element of an embedding or a sublayer's output is dropped
            in train mode.
        attention_dropout: the probability that an attention weight is dropped in train mode.
        pooler: whether `Bert` has the layer of `pooled`.

    Example:
        >>> BertConfig(768, 12, 12).eps
        1e-12
    """

    d_model: int
    num_heads: int
    num_layers: int
    context_length: int = 512
    vocab_size: int = 30522
    num_types: int = 2
    d_hidden: int | None = None
    activation: str = "gelu_exact"
    eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    # The files tell whether there is one, not `config.json`.
    pooler: bool = True


def read(fields: Fields, dropout: float | None) -> BertConfig:
    """Return the config that the fields of a `config.json` describe."""
    # A BERT as a decoder, or with relative positions, is another model.
    fields.only(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    return BertConfig(
        d_model=fields.integer("hidden_size"),
        num_heads=fields.heads("num_attention_heads"),
        num_layers=fields.count("num_hidden_layers"),
        context_length=fields.length("max_position_embeddings"),
        vocab_size=fields.integer("vocab_size"),
        num_types=fields.integer("type_vocab_size", 2),
        d_hidden=fields.integer("intermediate_size"),
        activation=fields.choose("hidden_act", ACTIVATIONS, "gelu"),
        eps=fields.epsilon("layer_norm_eps", 1e-12),
        dropout=fields.rate("hidden_dropout_prob", 0.1) if dropout is None else dropout,
        attention_dropout=(
            fields.rate("attention_probs_dropout_prob", 0.1) if dropout is None else dropout
        ),
    )


def read_tied(fields: Fields, dropout: float | None) -> BertConfig:
    """Return the config of a masked language model, whose head is the table of the tokens."""
    # The masked head is the table of the tokens; a head of its own has no place here.
    fields.only(tie_word_embeddings=True)
    return read(fields, dropout)


def write(architecture: str, config: BertConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return {
        "architectures": [architecture],
        "model_type": "bert",
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "vocab_size": config.vocab_size,
        "type_vocab_size": config.num_types,
        "intermediate_size": config.d_hidden or 4 * config.d_model,
        "hidden_act": THEIR_ACTIVATIONS[config.activation],
        "layer_norm_eps": config.eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }

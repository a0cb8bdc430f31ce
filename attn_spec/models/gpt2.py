"""GPT-2: the model, the published sizes, and their attention layer."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from attn_spec.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a GPT-2.

    Args:
        d_model: width of the tokens.
        num_heads: number of heads.
        num_layers: number of blocks.
        context_length: length of the longest input.
        vocab_size: number of tokens.
        qkv_bias: whether the input projections of the attention have a bias.
        dropout: the probability that an attention weight, or an element of an embedding or a
            sublayer's output, is dropped in train mode.
        d_hidden: width inside the feed-forward layer; None is `4 * d_model`.
        activation: activation of the feed-forward layer.
        eps: epsilon of the norms.
        tied: whether the output head is the table of the tokens.

    Example:
        >>> GPT2_CONFIGS["gpt2-medium"].num_heads
        16
    """

    d_model: int
    num_heads: int
    num_layers: int
    context_length: int = 1024
    vocab_size: int = 50257
    qkv_bias: bool = True
    dropout: float = 0.1
    # None stays None: `n_inner` is null in the published files.
    d_hidden: int | None = None
    activation: str = "gelu_tanh"
    eps: float = 1e-5
    tied: bool = True


#: The configs of the published GPT-2, by name.
GPT2_CONFIGS = MappingProxyType(
    {
        "gpt2-small": GPT2Config(768, 12, 12),
        "gpt2-medium": GPT2Config(1024, 16, 24),
        "gpt2-large": GPT2Config(1280, 20, 36),
        "gpt2-xl": GPT2Config(1600, 25, 48),
    }
)


def read(fields: Fields, dropout: float | None) -> GPT2Config:
    """Return the config that the fields of a `config.json` describe."""
    # GPT-2 has names of its own, and transformers also takes the usual ones.
    fields = fields.under_one_name(
        hidden_size="n_embd",
        max_position_embeddings="n_positions",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    )
    # reorder_and_upcast_attn asks for a softmax in float32, and ours is in that at least.
    fields.only(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    return GPT2Config(
        d_model=fields.integer("n_embd"),
        num_heads=fields.heads("n_head"),
        num_layers=fields.count("n_layer"),
        context_length=fields.length("n_positions"),
        vocab_size=fields.integer("vocab_size"),
        dropout=_read_dropout(fields) if dropout is None else dropout,
        d_hidden=fields.optional_integer("n_inner", None),
        activation=fields.choose("activation_function", ACTIVATIONS, "gelu_new"),
        eps=fields.epsilon("layer_norm_epsilon", 1e-5),
        tied=fields.flag("tie_word_embeddings", True),
    )


def _read_dropout(fields: Fields) -> float:
    # transformers has three rates, and all published files the same one in each.
    rates = {name: fields.rate(name, 0.1) for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")}
    if len(set(rates.values())) > 1:
        got = ", ".join(f"{name}={rate}" for name, rate in rates.items())
        raise ValueError(
            f"{fields.where}: a GPT2 has one probability of dropout; got {got}. Pass dropout="
        )
    return rates["attn_pdrop"]


def write(config: GPT2Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    if not config.qkv_bias:
        raise ValueError(
            "transformers' GPT-2 has biases in the projections of queries, keys and values; got"
            " qkv_bias=False. Save with flax_attn.convert.save"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_head": config.num_heads,
        "n_layer": config.num_layers,
        "n_positions": config.context_length,
        "vocab_size": config.vocab_size,
        # One rate stands for the weights, the embeddings and the outputs of sublayers.
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "n_inner": config.d_hidden,
        "activation_function": THEIR_ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.eps,
        "tie_word_embeddings": config.tied,
    }

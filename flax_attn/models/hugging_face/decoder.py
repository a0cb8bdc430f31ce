"""What the decoders with rotary positions have in common in Hugging Face's folders: fields and names of weights."""

import json
from typing import Any

from flax_attn.convert.rules import Layout
from flax_attn.functional.frequencies import DynamicNTKScaling
from flax_attn.models.decoder import DecoderConfig
from flax_attn.models.hugging_face.family import embeddings, linears, norms
from flax_attn.models.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields
from flax_attn.models.hugging_face.rope import dynamic_length, read_rope, write_rope

DECODER_LAYOUT = Layout(
    (
        *embeddings({"tok_emb": "model.embed_tokens"}),
        *linears(
            {
                "trf_blocks.{i}.att.W_query": "model.layers.{i}.self_attn.q_proj",
                "trf_blocks.{i}.att.W_key": "model.layers.{i}.self_attn.k_proj",
                "trf_blocks.{i}.att.W_value": "model.layers.{i}.self_attn.v_proj",
                "trf_blocks.{i}.att.out_proj": "model.layers.{i}.self_attn.o_proj",
                "trf_blocks.{i}.ff.W_gate": "model.layers.{i}.mlp.gate_proj",
                "trf_blocks.{i}.ff.W_up": "model.layers.{i}.mlp.up_proj",
                "trf_blocks.{i}.ff.W_down": "model.layers.{i}.mlp.down_proj",
                "out_head": "lm_head",
            }
        ),
        *norms(
            {
                "trf_blocks.{i}.att.q_norm": "model.layers.{i}.self_attn.q_norm",
                "trf_blocks.{i}.att.k_norm": "model.layers.{i}.self_attn.k_norm",
                "trf_blocks.{i}.norm1": "model.layers.{i}.input_layernorm",
                "trf_blocks.{i}.norm2": "model.layers.{i}.post_attention_layernorm",
                "final_norm": "model.norm",
            }
        ),
    ),
    # The frequencies of RoPE are no parameters, and a tied head may be stored a second time.
    ignored=r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?lm_head\.weight",
)
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_decoder(
    fields: Fields, dropout: float | None, *, num_kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """Return the arguments of a `DecoderConfig`, all but the window.

    Args:
        fields: of `config.json`.
        dropout: replaces that of the file; None keeps it.
        num_kv_heads: what transformers takes where the file has no `num_key_value_heads`.
        head_dim: what transformers takes where the file has no `head_dim`.

    Raises:
        ValueError: if a field is missing, of another kind, or asks for what our models do not compute.
    """
    length = fields.integer("max_position_embeddings")
    rope = read_rope(fields, length)
    return {
        "d_model": fields.integer("hidden_size"),
        "d_hidden": fields.integer("intermediate_size"),
        "num_heads": fields.integer("num_attention_heads"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_kv_heads": fields.optional_integer("num_key_value_heads", num_kv_heads),
        "head_dim": fields.optional_integer("head_dim", head_dim),
        "context_length": dynamic_length(rope.scaling) if isinstance(rope.scaling, DynamicNTKScaling) else length,
        "vocab_size": fields.integer("vocab_size"),
        "rope": rope,
        "eps": fields.number("rms_norm_eps", 1e-6),
        "activation": fields.choose("hidden_act", ACTIVATIONS, "silu"),
        "dropout": fields.number("attention_dropout", 0.0) if dropout is None else dropout,
        "tied": fields.flag("tie_word_embeddings", False),
    }


def write_decoder(name: str, config: DecoderConfig, **fields: Any) -> dict[str, Any]:
    """Return the fields of `config.json` for `{name}ForCausalLM` of transformers, `fields` among them.

    Raises:
        ValueError: if transformers does not rotate queries and keys like this.
    """
    head_dim = config.d_model // config.num_heads if config.head_dim is None else config.head_dim
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "hidden_size": config.d_model,
        "intermediate_size": config.d_hidden,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.eps,
        "hidden_act": THEIR_ACTIVATIONS[config.activation],
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
        **write_rope(config.rope, config.context_length, head_dim),
        **fields,
    }


def read_windows(fields: Fields) -> dict[str, Any]:
    """Return the arguments `window` and `full_layers` of a `DecoderConfig`.

    The layers from `max_window_layers` on have the window, unless `layer_types` names the kind of each layer.

    Raises:
        ValueError: if `layer_types` does not fit the layers, names an unknown kind, or a window that is switched off.
    """
    layers, first = range(fields.integer("num_hidden_layers")), fields.integer("max_window_layers", 28)
    used, size = fields.flag("use_sliding_window", False), fields.optional_integer("sliding_window", 4096)
    window = size if used else None
    default = [_FULL if window is None or layer < first else _SLIDING for layer in layers]
    kinds = fields.optional_list("layer_types") or default
    if len(kinds) != len(layers) or not set(kinds) <= {_SLIDING, _FULL}:
        raise ValueError(
            f"{fields.where}: layer_types must name {_SLIDING!r} or {_FULL!r} for each of num_hidden_layers="
            f"{len(layers)} layers; got {kinds}"
        )
    if window is None and _SLIDING in kinds:
        raise ValueError(
            f"{fields.where}: layer_types names {_SLIDING!r}, which needs a window; got use_sliding_window="
            f"{json.dumps(used)}, sliding_window={json.dumps(size)}"
        )
    full = tuple(layer for layer in layers if kinds[layer] == _FULL)
    return {} if len(full) == len(layers) else {"window": window, "full_layers": full}


def write_windows(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that say which layers have the window."""
    if not any(config.windows):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": config.window,
        "max_window_layers": next(layer for layer, window in enumerate(config.windows) if window is not None),
        "layer_types": [_FULL if window is None else _SLIDING for window in config.windows],
    }

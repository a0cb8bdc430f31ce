"""The `config.json` of a Hugging Face folder: into our configs, and out of them."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from flax_attn.functional.frequencies import DynamicNTKScaling
from flax_attn.models.gpt2 import GPT2Config
from flax_attn.models.hf_fields import Fields, Number, read_fields
from flax_attn.models.hf_rope import dynamic_length, read_rope, write_rope
from flax_attn.models.llama import LlamaConfig

Config = GPT2Config | LlamaConfig

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_exact",
    "silu": "silu",
    "swish": "silu",
}
_THEIR_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu_exact": "gelu", "silu": "silu"}


def read_config(path: str | PathLike[str], *, dropout: float | None = None) -> Config:
    """Return the config of a Hugging Face folder: a `GPT2Config`, or a `LlamaConfig` for Llama and for Mistral.

    Files of transformers 4 and 5 are read. Every field that changes the function is honoured or refused.

    Args:
        path: the folder that holds `config.json`.
        dropout: the probability of dropout; None is that of the file.

    Raises:
        FileNotFoundError: if there is no such folder or file.
        ValueError: if the file is not JSON, is that of another architecture, lacks a field, or asks for what our models
            do not compute.

    Example:
        >>> import tempfile
        >>> sizes = {"n_embd": 6, "n_head": 2, "n_layer": 3, "n_positions": 8, "vocab_size": 11}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
        ...     read_config(folder).num_layers
        3
    """
    fields = read_fields(Path(path))
    read = fields.choose("model_type", _READERS)
    fields.only(is_causal=True, quantization_config=None)
    return read(fields, dropout)


def write_config(config: Config, dtype: str) -> str:
    """Return the text of a `config.json` that transformers 4 and 5 read.

    Args:
        config: of the model.
        dtype: of the weights, such as `"bfloat16"`.

    Raises:
        ValueError: if the models of transformers cannot compute what the config says.

    Example:
        >>> json.loads(write_config(GPT2Config(6, 2, 3), "float32"))["n_layer"]
        3
    """
    fields = _from_gpt2(config) if isinstance(config, GPT2Config) else _from_llama(config)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # known to the tokenizer, not to a model
    return json.dumps({**fields, **ids, "dtype": dtype, "torch_dtype": dtype}, indent=2) + "\n"


def _to_gpt2(fields: Fields, dropout: float | None) -> GPT2Config:
    # reorder_and_upcast_attn needs no look: it asks for a softmax in float32, and ours is at least in that.
    fields.only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return GPT2Config(
        d_model=fields.get("n_embd", int),
        num_heads=fields.get("n_head", int),
        num_layers=fields.get("n_layer", int),
        context_length=fields.get("n_positions", int),
        vocab_size=fields.get("vocab_size", int),
        dropout=_one_dropout(fields) if dropout is None else dropout,
        d_hidden=fields.get("n_inner", int | None, None),
        activation=fields.choose("activation_function", _ACTIVATIONS, "gelu_new"),
        eps=fields.get("layer_norm_epsilon", Number, 1e-5),
        tied=fields.get("tie_word_embeddings", bool, True),
    )


def _one_dropout(fields: Fields) -> float:
    rates = {name: fields.get(name, Number, 0.1) for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")}
    if len(set(rates.values())) > 1:
        got = ", ".join(f"{name}={rate}" for name, rate in rates.items())
        raise ValueError(f"{fields.where}: a model here has one probability of dropout; got {got}. Pass dropout=")
    return rates["attn_pdrop"]


def _from_gpt2(config: GPT2Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_head": config.num_heads,
        "n_layer": config.num_layers,
        "n_positions": config.context_length,
        "vocab_size": config.vocab_size,
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "n_inner": config.d_hidden,
        "activation_function": _THEIR_ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.eps,
        "tie_word_embeddings": config.tied,
    }


def _to_llama(fields: Fields, dropout: float | None) -> LlamaConfig:
    fields.only(sliding_window=None)  # their Llama heeds it in the cache, but not in the mask
    return _of_the_family(fields, dropout, None, None)


def _to_mistral(fields: Fields, dropout: float | None) -> LlamaConfig:
    return _of_the_family(fields, dropout, 8, fields.get("sliding_window", int | None, 4096))


def _of_the_family(fields: Fields, dropout: float | None, num_kv_heads: int | None, window: int | None) -> LlamaConfig:
    length = fields.get("max_position_embeddings", int)
    rope = read_rope(fields, length)
    return LlamaConfig(
        d_model=fields.get("hidden_size", int),
        d_hidden=fields.get("intermediate_size", int),
        num_heads=fields.get("num_attention_heads", int),
        num_layers=fields.get("num_hidden_layers", int),
        num_kv_heads=fields.get("num_key_value_heads", int | None, num_kv_heads),
        head_dim=fields.get("head_dim", int | None, None),
        context_length=dynamic_length(rope.scaling) if isinstance(rope.scaling, DynamicNTKScaling) else length,
        vocab_size=fields.get("vocab_size", int),
        rope=rope,
        eps=fields.get("rms_norm_eps", Number, 1e-6),
        activation=fields.choose("hidden_act", _ACTIVATIONS, "silu"),
        attention_bias=fields.get("attention_bias", bool, False),
        ff_bias=fields.get("mlp_bias", bool, False),
        dropout=fields.get("attention_dropout", Number, 0.0) if dropout is None else dropout,
        window=window,
        tied=fields.get("tie_word_embeddings", bool, False),
    )


def _from_llama(config: LlamaConfig) -> dict[str, Any]:
    head_dim = config.d_model // config.num_heads if config.head_dim is None else config.head_dim
    name, fields = ("Llama", _only_llama(config)) if config.window is None else ("Mistral", _only_mistral(config))
    if config.qk_norm is not None:
        raise ValueError(f"{name} of transformers has no norms of queries and keys; got qk_norm={config.qk_norm}")
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
        "hidden_act": _THEIR_ACTIVATIONS[config.activation],
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
        **write_rope(config.rope, config.context_length, head_dim),
        **fields,
    }


def _only_llama(config: LlamaConfig) -> dict[str, Any]:
    if config.d_model % config.num_heads:
        raise ValueError(
            "Llama of transformers has a width that its heads divide, whatever their own; got "
            f"d_model={config.d_model}, num_heads={config.num_heads}. Save with flax_attn.convert.save"
        )
    return {"attention_bias": config.attention_bias, "mlp_bias": config.ff_bias}


def _only_mistral(config: LlamaConfig) -> dict[str, Any]:
    if config.attention_bias or config.ff_bias:
        raise ValueError(
            "a model with a window is stored as Mistral, which has no biases; got "
            f"attention_bias={config.attention_bias}, ff_bias={config.ff_bias}. Save with flax_attn.convert.save"
        )
    return {"sliding_window": config.window}


_READERS = {"gpt2": _to_gpt2, "llama": _to_llama, "mistral": _to_mistral}

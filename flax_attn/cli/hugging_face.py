"""`hf:TYPE`: a small model of a type that the installed transformers has, as the PyTorch side."""

import difflib
import importlib
import re
import sys
from typing import Any

from flax_attn.cli.guard import UsageError
from flax_attn.cli.specs import CannotCompareError

PREFIX = "hf:"
# Sizes of a small model: no two that could be confused are equal. A type has some of them.
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "moe_intermediate_size": 18,
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "image_size": 12,
    "patch_size": 4,
}

# The same of a model in stages, such as Swin and ConvNeXt: the widths of all follow from these.
STAGES = {
    "depths": [1, 2, 1, 1],
    "hidden_sizes": [8, 16, 20, 32],
    "embed_dim": 12,
    "window_size": 2,
    "image_size": 64,
}

# What a port needs to know beside its sizes.
_TOLD = re.compile(r"(?:\A|_)(?:eps|epsilon|theta|rope|act|activation)(?:_|\Z)")


def build(kind: str) -> Any:
    """Return a small model of a type in eval mode, with random weights.

    Raises:
        UsageError: if transformers is not installed, or has no such type.
        CannotCompareError: if it has the type, and no model of these sizes can be built.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.utils import logging
    except ImportError:
        raise UsageError(f"{PREFIX}{kind} needs transformers: pip install transformers") from None
    known = list(CONFIG_MAPPING)
    if kind not in known:
        near = difflib.get_close_matches(kind, known, 3, cutoff=0.0)
        raise UsageError(f"transformers has no type {kind!r}; the nearest are {', '.join(near)}")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # tokens that end a text are not in a small vocabulary
    try:
        model = _built(kind, CONFIG_MAPPING[kind])
    # The configurations of some hundred types refuse what they refuse.
    except Exception as error:
        raise CannotCompareError(
            f"no small model of the type {kind!r}: {type(error).__name__}: {error}. Name a function"
            " that builds one: FILE.py:make"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    # The port is to have these sizes and constants: nothing else says what they are.
    print(f"flax-attn: {PREFIX}{kind} is {_description(model)}", file=sys.stderr)
    return model


def _description(model: Any) -> str:
    """Return the class of a model, and the sizes, constants and functions of its config."""
    config = model.config
    # Parts of a model, such as an encoder of images, have configs of their own.
    parts = {name: getattr(config, name) for name in getattr(config, "sub_configs", {})}
    lines = []
    for prefix, part in {"": config, **parts}.items():
        own = dict(getattr(part, "attribute_map", {}))
        told = {own.get(name, name) for name in (*SMALL, *STAGES)}
        for name, value in part.to_dict().items():
            if value is not None and (name in told or _TOLD.search(name)):
                lines.append(f"{prefix}{'.' if prefix else ''}{name}={value}")
    return f"{type(model).__name__}: {', '.join(lines)}"


def _built(kind: str, config_class: Any) -> Any:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto import modeling_auto

    from flax_attn.parity.adapters.adapter import Float32
    from flax_attn.parity.adapters.torch_float32 import reading

    config = config_class(**_small(config_class))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    config._experts_implementation = "eager"  # the grouped products do not know float64
    # Most encoders can be made decoders, and are none.
    decodes = kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    encodes = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if decodes and not encodes else AutoModel
    importlib.import_module(auto._model_mapping[type(config)].__module__)
    # Tables of angles are computed once, in the constructor.
    with reading(Float32.NAMED):
        return auto.from_config(config, dtype=torch.float64).eval()


def _small(config_class: Any) -> dict[str, Any]:
    """Return the arguments that make a configuration small; what it does not have stays away."""
    # A class has attributes of its own, and names that stand for others.
    default = config_class()
    fields: dict[str, Any] = {}
    sizes = SMALL if getattr(default, "depths", None) is None else STAGES
    for name, size in sizes.items():
        whole = isinstance(getattr(default, name, 0.0), int)
        if hasattr(default, name) and whole == isinstance(size, int):
            fields[name] = size
    if "qk_rope_head_dim" in fields:  # heads of latent attention share it, and no key
        fields["head_dim"] = SMALL["qk_rope_head_dim"]
        fields["num_key_value_heads"] = SMALL["num_attention_heads"]
    padding = getattr(default, "pad_token_id", None)
    if isinstance(padding, int) and padding >= fields.get("vocab_size", padding + 1):
        fields["pad_token_id"] = 0
    for name, inner in getattr(config_class, "sub_configs", {}).items():
        if hasattr(inner, "model_type") and getattr(default, name, None) is not None:
            fields[name] = _small(type(getattr(default, name)))
    return fields


def call(module: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return the logits of a model of transformers, or the last hidden state of one without."""
    output = module(*arguments, **keywords)
    found = getattr(output, "logits", None)
    return output[0] if found is None else found

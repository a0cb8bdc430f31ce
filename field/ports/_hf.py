"""How a Flax model of transformers and its PyTorch twin are built and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from field.port import CHECKS, Built, FlaxError, Port

OUTPUTS = (
    *(
        "logits",
        "last_hidden_state",
        "pooler_output",
        "prediction_logits",
        "prediction_scores",
        "sop_logits",
    ),
    *(
        "seq_relationship_logits",
        "start_logits",
        "end_logits",
        "text_embeds",
        "image_embeds",
        "extract_features",
    ),
    *("encoder_last_hidden_state", "projected_states", "logits_per_image"),
)
# Patterns from a kernel to PyTorch's weight, by the rank of the kernel.
AXES = {2: "i o -> o i", 3: "w i o -> o i w", 4: "h w i o -> o i h w"}
NORMED = (  # of PyTorch's weight_norm: the lengths, and the directions
    "parametrizations.weight.original"
)
NAMES = {"weight_g": f"{NORMED}0", "weight_v": f"{NORMED}1"} | {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running_mean",
    "var": "running_var",
}

TEXT = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
IMAGE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 12,
    "patch_size": 4,
}
SEQ2SEQ = {
    "vocab_size": 37,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def row(
    name: str,
    model: str,
    words: str,
    base: Mapping[str, Any],
    call: str = "text",
    config: str = "",
    torch: str = "",
    checks: tuple[str, ...] = CHECKS,
    renames: Mapping[str, str] | None = None,
    alone: str = "",
    **settings: Any,
) -> Port:
    """Return the row of one configuration.

    Args:
        name: model and configuration, such as `mistral/window`.
        model: the class on the PyTorch side, such as `BertModel`; the Flax one is `FlaxBertModel`.
        words: description of the configuration.
        base: settings of the family.
        call: key of `CALLS`.
        config: class of the configuration; `""` is the one that the model names.
        torch: class on the PyTorch side if it has another name.
        checks: names of the checks to run.
        renames: parts of parameter names in Flax, and their replacements in PyTorch.
        alone: regular expression for parameters that only the PyTorch side has.
        settings: settings that differ from those of the family.
    """
    build = partial(
        _build,
        flax_name=model,
        torch_name=torch or model,
        config_name=config,
        settings={**base, **settings},
        call=call,
        renames=renames or {},
        alone=alone,
    )
    return Port(
        f"transformers/{name}",
        "transformers",
        words,
        build,
        f"`transformers.{torch or model}`",
        tuple(checks),
    )


def _build(
    dtype: str,
    *,
    flax_name: str,
    torch_name: str,
    config_name: str,
    settings: Mapping[str, Any],
    call: str,
    renames: Mapping[str, str],
    alone: str,
) -> Built:
    import jax.numpy as jnp
    import transformers

    _as_older_jax()
    kind = getattr(transformers, f"Flax{flax_name}")
    twin = getattr(transformers, torch_name)
    config = (getattr(transformers, config_name) if config_name else twin.config_class)(**settings)
    theirs = twin(config).eval()
    try:
        ours = kind(config, dtype=getattr(jnp, dtype), _do_init=False)
    except Exception as error:
        raise FlaxError(f"Flax{flax_name}: {type(error).__name__}: {error}") from error
    return pair(ours, theirs, call, renames, alone)


def _as_older_jax() -> None:
    """Restore the argument names of `jnp.clip` that T5 uses, from older JAX releases."""
    import jax.numpy as jnp

    clip = jnp.clip
    jnp.clip = lambda x, min=None, max=None, *, a_min=None, a_max=None: clip(  # noqa: A006, JAX's names
        x, min if a_min is None else a_min, max if a_max is None else a_max
    )


def pair(
    model: Any, twin: Any, call: str, renames: Mapping[str, str] | None = None, alone: str = ""
) -> Built:
    """Return both sides of a model of transformers that is built."""
    import jax
    import jax.numpy as jnp
    import torch

    tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape), dict(model.params_shape_tree))
    # A parameter in Flax that PyTorch has as a buffer, and that neither trains: both are 0.
    held = {name: tree.pop(name) for name in ("final_logits_bias",) if name in tree}
    module = model.module.bind(tree if "batch_stats" in tree else {"params": tree})

    def parameters(bound):
        return (
            dict(bound.variables)
            if "batch_stats" in tree
            else {**bound.variables["params"], **held}
        )

    inputs, arguments, takes_mask = CALLS[call]

    def flax_call(bound, *arrays, mask=None):
        ones = None if mask is None else mask.astype(jnp.int32)
        found = model(**arguments(jnp, *arrays, mask=ones), params=parameters(bound))
        return _outputs(found)

    def torch_call(module, *tensors, mask=None):
        ones = None if mask is None else mask.to(torch.int64)
        # Some make the lowest number of the model's dtype a tensor of the default one.
        default = torch.get_default_dtype()
        torch.set_default_dtype(next(module.parameters()).dtype)
        try:
            return _outputs(module(**arguments(torch, *tensors, mask=ones)))
        finally:
            torch.set_default_dtype(default)

    calls = {"flax_call": flax_call, "torch_call": torch_call}
    if not takes_mask:
        calls = {name: _without_mask(function) for name, function in calls.items()}
    layouts = ("auto", partial(by_name, renames=renames or {}, alone=alone))
    return Built(module, twin, inputs(model.config), layouts, **calls)


def _without_mask(call: Callable) -> Callable:
    return lambda module, *inputs: call(module, *inputs)


def _outputs(found: Any) -> dict[str, Any]:
    named = {name: found[name] for name in OUTPUTS if found.get(name) is not None}
    if not named:
        raise ValueError(f"none of the outputs is known: {', '.join(found)}")
    return named


def by_name(flax: Any, torch: Any, renames: Mapping[str, str], alone: str = "") -> Any:
    """Return the rules of parameters whose names match on both sides.

    The last part may differ, and the parts in `renames`.

    Args:
        flax: a bound Linen module.
        torch: its PyTorch twin.
        renames: parts of names in Flax, and their replacements in PyTorch.
        alone: regular expression for parameters that only the PyTorch side has.
    """
    from flax import traverse_util

    from flax_attn.convert import Layout, Rule

    theirs = {name for name, _ in torch.named_parameters()} | {
        name for name, _ in torch.named_buffers()
    }
    rules = []
    for collection in ("params", "batch_stats"):
        for path, leaf in traverse_util.flatten_dict(
            dict(flax.variables.get(collection, {})), sep="."
        ).items():
            name, last = path.rpartition(".")[::2]
            for old, new in renames.items():
                name = name.replace(old, new)
            full = f"{name}.{NAMES.get(last, last)}" if name else NAMES.get(last, last)
            full = full if full in theirs else f"{name}.{last}"
            rules.append(Rule((path,), full, AXES.get(leaf.ndim, "") if last == "kernel" else ""))
    # A name is looked for under any prefix, so the longer of two that end alike comes first.
    return Layout(tuple(sorted(rules, key=lambda rule: -rule.ours[0].count("."))), ignored=alone)


# Calls: the inputs of a configuration, and the arguments that both sides take.


def tokens(config: Any) -> list[np.ndarray]:
    """Return ids (b, t) without those of special tokens."""
    vocabulary = getattr(config, "vocab_size", None) or config.encoder.vocab_size
    return [np.random.default_rng(0).integers(5, vocabulary, (3, 11))]


def _text(xp: Any, ids: Any, mask: Any = None) -> dict[str, Any]:
    return {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})


def _both(xp: Any, ids: Any, mask: Any = None) -> dict[str, Any]:
    # The decoder reads other tokens than the encoder, and fewer.
    decoder = {"decoder_input_ids": xp.flip(ids, (1,))[:, :7]}
    return {**_text(xp, ids, mask), **decoder}


def _padded(config: Any) -> list[np.ndarray]:
    ids = tokens(config)[0]
    ids[1, 7:] = ids[2, 4:] = config.pad_token_id
    return [ids]


def _pixels(config: Any) -> list[tuple[int, ...]]:
    size = getattr(config, "image_size", 12)
    return [(2, getattr(config, "num_channels", 3), size, size)]


def _waves(xp: Any, waves: Any, mask: Any = None) -> dict[str, Any]:
    return {"input_values": waves} | ({} if mask is None else {"attention_mask": mask})


def _both_kinds(xp: Any, ids: Any, pixels: Any, mask: Any = None) -> dict[str, Any]:
    return {**_text(xp, ids, mask), "pixel_values": pixels}


def _written(name: str) -> Callable:
    return lambda xp, x, ids, mask=None: {name: x, "decoder_input_ids": ids}


def _image_config(config: Any) -> Any:
    return getattr(config, "vision_config", getattr(config, "encoder", config))


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", getattr(config, "decoder", config))


def _spectrum(config: Any) -> list[Any]:
    return [(3, config.num_mel_bins, 2 * config.max_source_positions)]


# By name: the inputs of a configuration, the arguments that both sides are called with, and whether
# with a mask.
CALLS: dict[str, tuple[Callable, Callable, bool]] = {
    "text": (tokens, _text, True),
    "pad tokens": (_padded, _text, True),
    "seq2seq": (tokens, _both, True),
    "image": (_pixels, lambda xp, pixels, mask=None: {"pixel_values": pixels}, False),
    "image as long as it is": (
        lambda config: [(2, 3, 20, 12)],
        lambda xp, p, mask=None: {"pixel_values": p},
        False,
    ),
    "large image": (
        lambda config: [(2, 3, 32, 24)],
        lambda xp, p, mask=None: {"pixel_values": p},
        False,
    ),
    "waves": (lambda config: [(2, 400)], _waves, True),
    "text and image": (
        lambda config: [*tokens(_text_config(config)), (3, *_pixels(_image_config(config))[0][1:])],
        _both_kinds,
        False,
    ),
    "image to text": (
        lambda config: [(3, *_pixels(_image_config(config))[0][1:]), *tokens(_text_config(config))],
        _written("pixel_values"),
        False,
    ),
    "waves to text": (
        lambda config: [(3, 400), *tokens(_text_config(config))],
        _written("inputs"),
        False,
    ),
    "spectrum": (
        lambda config: [*_spectrum(config), *tokens(config)],
        _written("input_features"),
        False,
    ),
    "spectrum alone": (_spectrum, lambda xp, x, mask=None: {"input_features": x}, False),
}

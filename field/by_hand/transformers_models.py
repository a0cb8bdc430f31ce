"""Models of transformers: weights cross by the converter of transformers itself."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from field.by_hand.both import Case, JaxError, call_with, random_values
from field.ports import hf_pairs, hf_senses, hf_seq2seq, hf_text

PADDED = ("text", "pad tokens", "seq2seq", "waves")
OUTPUTS = (  # that both sides return
    *(
        "logits",
        "last_hidden_state",
        "pooler_output",
        "prediction_logits",
        "sop_logits",
        "seq_relationship_logits",
    ),
    *("text_embeds", "image_embeds", "logits_per_image", "logits_per_text", "extract_features"),
    "encoder_last_hidden_state",
)
# Variables in Flax that neither side trains.
BUFFERS = ("running_mean", "running_var", "final_logits_bias")


class OtherParametersError(Exception):
    """One side has parameters that the other lacks."""


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    for port in [*hf_text.ports(), *hf_seq2seq.ports(), *hf_senses.ports()]:
        yield port.name, partial(_single, **port.build.keywords)
    for name, kind, first, second, call, _ in hf_pairs.ROWS:
        yield f"transformers/{name}", partial(_pair, kind, first, second, call)


def _single(
    *,
    flax_name: str,
    torch_name: str,
    config_name: str,
    settings: Mapping[str, Any],
    call: str,
    alone: str,
    **_: Any,
) -> Case:
    twin = getattr(transformers, torch_name)
    config = (getattr(transformers, config_name) if config_name else twin.config_class)(**settings)
    torch.manual_seed(0)  # for parameters that are left alone
    original = twin(config)
    try:
        flax = getattr(transformers, f"Flax{flax_name}")(config, dtype=jnp.float64, _do_init=False)
    except Exception as error:
        raise JaxError(f"{type(error).__name__}: {error}") from error
    return _case(flax, original, call, alone)


def _pair(kind: str, first: tuple[str, Any], second: tuple[str, Any], call: str) -> Case:
    parts = [
        getattr(transformers, f"{name}Config")(**settings) for name, settings in (first, second)
    ]
    config_class = getattr(transformers, kind.replace("Model", "Config"))
    if kind == "VisionTextDualEncoderModel":
        config = config_class.from_vision_text_configs(*parts, projection_dim=10)
    else:
        config = config_class.from_encoder_decoder_configs(*parts)
        config.decoder_start_token_id, config.pad_token_id = 2, 0
    flax = getattr(transformers, f"Flax{kind}")(config, dtype=jnp.float64)
    return _case(flax, getattr(transformers, kind)(config), call, "")


def _case(flax: Any, twin: torch.nn.Module, call: str, alone: str) -> Case:
    _as_older_jax()
    twin = twin.double().eval()
    shapes = {name: p.shape for name, p in twin.named_parameters() if p.requires_grad}
    shapes = {
        name: shape for name, shape in shapes.items() if not (alone and re.fullmatch(alone, name))
    }
    held = {name: b.shape for name, b in twin.named_buffers() if name.endswith(BUFFERS)}
    held |= {
        name: p.shape
        for name, p in twin.named_parameters()
        if not p.requires_grad and _has(flax, name, p.shape)
    }
    shapes |= held
    _check_parameters(_converted(flax, random_values(shapes)), flax.params_shape_tree)
    integers, floats = _inputs(call, twin.config)

    def ours(v: Mapping[str, Any], mask: Any) -> Any:
        given = {name: jnp.asarray(x) for name, x in integers.items()} | {
            name: v[name] for name in floats
        }
        given |= {} if mask is None else {"attention_mask": mask.astype(jnp.int32)}
        weights = {
            name: jax.lax.stop_gradient(v[name]) if name in held else v[name] for name in shapes
        }
        return _arrays(flax(**given, params=_converted(flax, weights)))

    def theirs(v: Mapping[str, Any], mask: Any) -> Any:
        given = {name: torch.tensor(x) for name, x in integers.items()} | {
            name: v[name] for name in floats
        }
        given |= {} if mask is None else {"attention_mask": mask.long()}
        weights = {name: v[name].detach() if name in held else v[name] for name in shapes}
        return _arrays(call_with(twin, weights, **given))

    tokens = next(iter((integers | floats).values())).shape[:2]
    return Case(
        ours,
        theirs,
        random_values(shapes) | floats,
        tuple(floats),
        tokens if call in PADDED else None,
    )


def _converted(flax: Any, values: Mapping[str, Any]) -> Any:
    if "layer_0" in {part for path in flatten_dict(dict(flax.params_shape_tree)) for part in path}:
        # ResNet's basic layers, which have a name of their own in Flax that the converter does not
        # know.
        values = {
            re.sub(r"\.layer\.(\d)\.", r".layer.layer_\1.", name): x for name, x in values.items()
        }
    described = SimpleNamespace(
        base_model_prefix=flax.base_model_prefix, params=flax.params_shape_tree
    )
    try:
        return convert_pytorch_state_dict_to_flax(dict(values), described)
    except ValueError as error:
        raise OtherParametersError(str(error)) from error


def _has(flax: Any, name: str, shape: Any) -> bool:
    """Whether Flax has a variable for what PyTorch calls by a name."""
    (path,) = flatten_dict(_converted(flax, {name: np.zeros(tuple(shape))}))
    return path in flatten_dict(dict(flax.params_shape_tree))


def _check_parameters(found: Any, wanted: Any) -> None:
    flat = [flatten_dict(dict(tree)) for tree in (wanted, found)]
    sides = [{".".join(path): leaf.shape for path, leaf in tree.items()} for tree in flat]
    problems = [
        f"{words} {name} {side[name]}"
        for words, side, other in (("Flax alone has", *sides), ("PyTorch alone has", *sides[::-1]))
        for name in side
        if name not in other
    ]
    if problems:
        raise OtherParametersError("; ".join(problems))


def _arrays(outputs: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: x for name, x in outputs.items() if name in OUTPUTS}
    return {name: kept[name] for name in sorted(kept) if kept[name] is not None}


def _inputs(call: str, config: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the integers and the floats that a model is called with."""
    random = np.random.default_rng(5)
    images = getattr(config, "vision_config", getattr(config, "encoder", config))
    words = getattr(config, "text_config", getattr(config, "decoder", config))
    side, channels = getattr(images, "image_size", 12), getattr(images, "num_channels", 3)

    def ids(tokens: int, vocabulary: int | None = None) -> np.ndarray:
        return random.integers(5, vocabulary or words.vocab_size, (3, tokens))

    def floats(*shape: int) -> np.ndarray:
        return random.normal(size=shape)

    if call == "pad tokens":
        padded = ids(11)
        padded[1, 8:] = padded[2, 5:] = config.pad_token_id
        return {"input_ids": padded}, {}
    if call.startswith("spectrum"):
        sound = {"input_features": floats(3, config.num_mel_bins, 2 * config.max_source_positions)}
        return ({"decoder_input_ids": ids(7)} if call == "spectrum" else {}), sound
    return {
        "text": lambda: ({"input_ids": ids(11)}, {}),
        "seq2seq": lambda: ({"input_ids": ids(11), "decoder_input_ids": ids(6)}, {}),
        "image": lambda: ({}, {"pixel_values": floats(2, channels, side, side)}),
        "image as long as it is": lambda: ({}, {"pixel_values": floats(2, 3, 20, 12)}),
        "large image": lambda: ({}, {"pixel_values": floats(2, 3, 32, 24)}),
        "waves": lambda: ({}, {"input_values": floats(2, 400)}),
        "text and image": lambda: (
            {"input_ids": ids(11)},
            {"pixel_values": floats(3, channels, side, side)},
        ),
        "image to text": lambda: (
            {"decoder_input_ids": ids(7)},
            {"pixel_values": floats(3, channels, side, side)},
        ),
        "waves to text": lambda: ({"decoder_input_ids": ids(7)}, {"inputs": floats(3, 400)}),
    }[call]()


def _as_older_jax() -> None:
    """Let `jnp.clip` be called as by T5, which was written for an older JAX."""
    plain = jnp.clip

    def clip(x, *bounds, a_min=None, a_max=None, **named):
        if a_min is not None or a_max is not None:
            return plain(x, a_min, a_max)
        return plain(x, *bounds, **named)

    if plain.__module__ != __name__:
        clip.__module__ = __name__
        jnp.clip = clip

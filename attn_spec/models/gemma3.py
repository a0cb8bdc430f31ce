"""Gemma 3, its text models."""

from dataclasses import dataclass, field
from typing import Any

from attn_spec.hugging_face.bounds import BASES
from attn_spec.hugging_face.fields import Fields
from attn_spec.hugging_face.rope import read_rope, write_rope
from attn_spec.models import gemma2
from attn_spec.models.decoder import FULL, SLIDING
from attn_spec.models.gemma2 import Gemma2Config
from attn_spec.rope import RotaryPositions


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """The sizes of a Gemma 3: those of a `Gemma2Config` without caps, and local positions.

    Args:
        rope: rotary positions of the layers without a window.
        local_rope: rotary positions of the layers with a window.

    Example:
        >>> config = Gemma3Config(
        ...     1152, 6912, 4, 26, 1, head_dim=256, window=512, full_layers=(5, 11, 17, 23))
        >>> config.rope.base, config.local_rope.base
        (1000000.0, 10000.0)
    """

    context_length: int = 131072
    vocab_size: int = 262208
    rope: RotaryPositions = field(default_factory=lambda: RotaryPositions(1e6))
    score_cap: float | None = None
    logit_cap: float | None = None
    local_rope: RotaryPositions = field(default_factory=RotaryPositions)


def read(fields: Fields, dropout: float | None) -> Gemma3Config:
    """Return the config that the fields of a `config.json` describe."""
    # Transformers reads the cap and does not apply it, and takes the positions of each kind from
    # inside their field.
    fields.only(attn_logit_softcapping=None, original_max_position_embeddings=None)
    # Older versions say every how many layers one sees all tokens.
    every, length = (
        fields.length("sliding_window_pattern", 6),
        fields.length("max_position_embeddings"),
    )
    layers = [
        SLIDING if (layer + 1) % every else FULL
        for layer in range(fields.count("num_hidden_layers"))
    ]
    rope, local = _ropes(fields.filled(rope_theta=1e6, rope_local_base_freq=1e4))
    fields = fields.filled(attn_logit_softcapping=None, final_logit_softcapping=None)
    changed = {**fields.values, "rope_parameters": rope, "rope_scaling": None}
    changed["layer_types"] = fields.optional_texts("layer_types") or layers
    # A Gemma 3 is read as a Gemma 2 of its global positions; the local ones come on top.
    as_gemma2 = gemma2.read(Fields(fields.where, changed, fields.used), dropout)
    return Gemma3Config(**vars(as_gemma2), local_rope=read_rope(local, length))


def _ropes(fields: Fields) -> tuple[dict[str, Any], Fields]:
    """Return the fields of the rotary positions of layers without and with a window."""
    kinds = Fields(
        f"{fields.where}: rope_parameters", fields.optional_object("rope_parameters") or {}
    )
    # transformers keeps the positions of each kind of layer in an object of its own.
    full, local = ((kinds.optional_object(kind) or {}) for kind in (FULL, SLIDING))
    kinds.check_all_used()
    full = {
        "rope_theta": fields.number("rope_theta", BASES),
        **full,
        **(fields.optional_object("rope_scaling") or {}),
    }
    local = {"rope_theta": fields.number("rope_local_base_freq", BASES), **local}
    return full, Fields(f"{kinds.where}: {SLIDING}", {"rope_parameters": local})


def write(config: Gemma3Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    if config.score_cap is not None:
        raise ValueError(
            f"transformers' Gemma 3 does not cap scores; got score_cap={config.score_cap}. "
            "Save with flax_attn.convert.save"
        )
    ropes = {
        kind: write_rope(rope, config.context_length, config.head_width)["rope_parameters"]
        for kind, rope in ((FULL, config.rope), (SLIDING, config.local_rope))
    }
    names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    ropes = {"rope_parameters": ropes, "rope_local_base_freq": config.local_rope.base}
    return {**gemma2.write(config), **names, **ropes}

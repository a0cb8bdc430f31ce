"""Rotary positions in a `config.json`: into our `RoPE`, and out of it.

Transformers 5 has `rope_parameters`, transformers 4 had `rope_theta` beside `rope_scaling`; both
are read and written. Each field means what it means in `modeling_rope_utils.py` of transformers 5.
"""

import math
from typing import Any

from attn_spec.frequencies import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    Scaling,
    YaRNScaling,
)
from attn_spec.hugging_face.bounds import BASES, FACTORS, PARTS
from attn_spec.hugging_face.fields import REQUIRED, Fields
from attn_spec.longrope import LongRoPEScaling
from attn_spec.rope import RotaryPositions


def read_rope(fields: Fields, length: int, head_dim: int | None = None) -> RotaryPositions:
    """Return the rotary positions of a config with `max_position_embeddings=length`.

    Args:
        fields: fields of `config.json`.
        length: length of the longest input.
        head_dim: width of the heads where transformers rotates a part of them,
            `partial_rotary_factor`; None where it rotates whole heads.

    Raises:
        ValueError: if their type is unknown, a field is missing, or one would be ignored.

    Example:
        >>> scaling = {"rope_type": "linear", "factor": 8.0}
        >>> fields = Fields("config.json", {"rope_theta": 500.0, "rope_scaling": scaling})
        >>> read_rope(fields, 16).scaling
        LinearScaling(factor=8.0)
    """
    # Where a file has both, transformers takes the older one.
    old, new = (fields.optional_object(name) for name in ("rope_scaling", "rope_parameters"))
    rope = Fields(
        f"{fields.where}: {'rope_scaling' if old else 'rope_parameters'}", old or new or {}
    )
    if head_dim is None:
        for part in (fields, rope):
            # With another value, transformers' Llama fails or rotates whole heads.
            part.only(partial_rotary_factor=1.0)
    base = rope.number("rope_theta", BASES, fields.number("rope_theta", BASES, 10000.0))
    name = "rope_type" if "rope_type" in rope.values else "type"
    read = rope.choose(name, _READERS, "default")
    scaling = read(rope, length, fields.optional_length("original_max_position_embeddings", None))
    width = None if head_dim is None else _rotated(fields, rope, head_dim)
    rope.used.add("type")
    rope.check_all_used()
    return RotaryPositions(float(base), width, scaling=scaling)


def _rotated(fields: Fields, rope: Fields, head_dim: int) -> int | None:
    """Return how many features of a head are rotated, None for all."""
    name = "partial_rotary_factor"
    # Null beside the parameters counts as missing.
    outside = fields.optional_number(name, PARTS)
    part = rope.number(name, PARTS, 1.0 if outside is None else outside)
    width = int(head_dim * part)
    if width % 2 or not width:
        raise ValueError(
            f"{fields.where}: partial_rotary_factor must rotate an even number of features of a"
            f" head, 2 or more; got {part} of head_dim={head_dim}, which is {width}. Other widths"
            " are not supported"
        )
    return None if width == head_dim else width


def _default(rope: Fields, length: int, original: int | None) -> None:
    return None


def _linear(rope: Fields, length: int, original: int | None) -> LinearScaling:
    return LinearScaling(rope.factor("factor"))


def _dynamic(rope: Fields, length: int, original: int | None) -> DynamicNTKScaling:
    return DynamicNTKScaling(rope.factor("factor"), length)


def _llama3(rope: Fields, length: int, original: int | None) -> Llama3Scaling:
    return Llama3Scaling(
        rope.factor("factor"),
        _original(rope, length, original),
        rope.factor("low_freq_factor"),
        rope.factor("high_freq_factor"),
    )


def _yarn(rope: Fields, length: int, original: int | None) -> YaRNScaling:
    original = _original(rope, length, original)
    optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    fast, slow, mscale, mscale_all_dim, amplitude = (
        rope.optional_factor(name) for name in optional
    )
    # One scale without the other is ignored by transformers.
    scales = (
        {"mscale": mscale, "mscale_all_dim": mscale_all_dim} if mscale and mscale_all_dim else {}
    )
    return YaRNScaling(
        rope.optional_factor("factor", REQUIRED) or length / original,
        original,
        beta_fast=fast or 32.0,
        beta_slow=slow or 1.0,
        truncate=rope.flag("truncate", True),
        attention_factor=amplitude,
        **scales,
    )


def _longrope(rope: Fields, length: int, original: int | None) -> LongRoPEScaling:
    original = _original(rope, length, original)
    factor = rope.optional_factor("factor") or length / original
    short = rope.numbers("short_factor", FACTORS)
    long = rope.numbers("long_factor", FACTORS)
    return LongRoPEScaling(
        # A smaller factor changes nothing.
        max(factor, 1.0),
        original,
        tuple(short),
        tuple(long),
        attention_factor=rope.optional_factor("attention_factor"),
    )


def _original(rope: Fields, length: int, original: int | None) -> int:
    inside = rope.optional_length("original_max_position_embeddings", None)
    return original or inside or length


_READERS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def write_rope(
    rope: RotaryPositions, length: int, head_dim: int, partial: bool = False
) -> dict[str, Any]:
    """Return the fields of rotary positions in a model of this `context_length`.

    Args:
        rope: the rotary positions.
        length: the `context_length`.
        head_dim: width of the heads.
        partial: whether transformers rotates a part of the heads, where `rope.width` says so.

    Raises:
        ValueError: if transformers does not rotate heads like this.
    """
    width = head_dim if rope.width is None else rope.width
    if rope.interleaved or (width != head_dim and not partial):
        raise ValueError(
            "transformers rotates whole heads here, in pairs (i, i + h / 2); got"
            f" rope.interleaved={rope.interleaved}, rope.width={rope.width}. Save with"
            " flax_attn.convert.save"
        )
    inside = {} if rope.scaling is None else _write_scaling(rope.scaling, length)
    part = {"partial_rotary_factor": _factor(width, head_dim)} if partial else {}
    # The file has the length before it is stretched.
    if isinstance(rope.scaling, DynamicNTKScaling):
        length = rope.scaling.original_context_length
    return {
        "max_position_embeddings": length,
        "rope_theta": rope.base,
        "rope_scaling": inside or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.base, **inside, **part},
        **part,
    }


def _factor(width: int, head_dim: int) -> float:
    """Return a factor that times the width of a head, rounded down, is this width."""
    factor = width / head_dim
    return factor if int(head_dim * factor) == width else math.nextafter(factor, 1.0)


def _write_scaling(scaling: Scaling, length: int) -> dict[str, Any]:
    if type(scaling) not in _WRITERS:
        known = ", ".join(kind.__name__ for kind in _WRITERS)
        raise ValueError(
            f"transformers scales RoPE by {known}; got {scaling}. Save with flax_attn.convert.save"
        )
    name, write = _WRITERS[type(scaling)]
    return {"rope_type": name, "factor": scaling.factor, **write(scaling, length)}


def _write_linear(scaling: LinearScaling, length: int) -> dict[str, Any]:
    return {}


def _write_dynamic(scaling: DynamicNTKScaling, length: int) -> dict[str, Any]:
    end = dynamic_length(scaling)
    if length != end:
        raise ValueError(
            "with dynamic scaling the context_length is not stored, it is read as factor times the"
            f" original one: {end}; got context_length={length}. Construct it with"
            f" context_length={end}"
        )
    return {}


def dynamic_length(scaling: DynamicNTKScaling) -> int:
    """Return the `context_length` under dynamic scaling; in transformers it has no limit."""
    return int(scaling.factor * scaling.original_context_length)


def _write_llama3(scaling: Llama3Scaling, length: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": scaling.original_context_length,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
    }


def _write_yarn(scaling: YaRNScaling, length: int) -> dict[str, Any]:
    fields = {
        "original_max_position_embeddings": scaling.original_context_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    scales = scaling.mscale, scaling.mscale_all_dim
    if scaling.attention_factor is None and scales == (1.0, 0.0):
        return fields
    if scaling.attention_factor is None and all(scales):
        return {**fields, "mscale": scales[0], "mscale_all_dim": scales[1]}
    return {
        **fields,
        "attention_factor": float(scaling.amplitude()),
    }  # transformers ignores one scale without the other


def _write_longrope(scaling: LongRoPEScaling, length: int) -> dict[str, Any]:
    amplitude = (
        {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    )
    return {
        "original_max_position_embeddings": scaling.original_context_length,
        "short_factor": list(scaling.short_factors),
        "long_factor": list(scaling.long_factors),
        **amplitude,
    }


_WRITERS = {
    LinearScaling: ("linear", _write_linear),
    DynamicNTKScaling: ("dynamic", _write_dynamic),
    Llama3Scaling: ("llama3", _write_llama3),
    YaRNScaling: ("yarn", _write_yarn),
    LongRoPEScaling: ("longrope", _write_longrope),
}

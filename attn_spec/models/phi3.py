"""Phi-3."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.longrope import LongRoPEScaling
from attn_spec.models.decoder import DecoderConfig, read_decoder, write_decoder


@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """The sizes of a Phi-3: those of a `DecoderConfig`.

    With `RoPE(width=...)` a part of each head is rotated.

    Example:
        >>> Phi3Config(3072, 8192, num_heads=32, num_layers=32, window=2047).vocab_size
        32064
    """

    context_length: int = 4096
    vocab_size: int = 32064
    eps: float = 1e-5


def read(fields: Fields, dropout: float | None) -> Phi3Config:
    """Return the config that the fields of a `config.json` describe."""
    fields.without_dropout(dropout, "resid_pdrop", "embd_pdrop")
    fields = fields.filled(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    ropes = {name: fields.optional_object(name) for name in ("rope_scaling", "rope_parameters")}
    # The first files say "su" or "yarn", and transformers reads both as LongRoPE.
    ropes = {name: _renamed(rope) for name, rope in ropes.items() if rope}
    fields = Fields(fields.where, {**fields.values, **ropes}, fields.used)
    # Phi-4-mini, of the same kind, rotates a part of each head.
    arguments = read_decoder(fields, dropout, partial_rope=True)
    if not isinstance(arguments["rope"].scaling, LongRoPEScaling | None):
        raise ValueError(
            f"{fields.where}: the rope_type of a Phi-3 must be 'default' or 'longrope',"
            f" transformers takes no other; got {arguments['rope'].scaling}"
        )
    return Phi3Config(**arguments, window=fields.optional_length("sliding_window"))


def _renamed(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rotary positions, LongRoPE under the name that it has by now."""
    return rope | {
        name: "longrope" for name in ("type", "rope_type") if rope.get(name) in ("su", "yarn")
    }


def write(config: Phi3Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    scaling = config.rope.scaling
    if not isinstance(scaling, LongRoPEScaling | None) or config.full_layers:
        raise ValueError(
            "transformers' Phi-3 scales RoPE by LongRoPEScaling alone, and has its window in every"
            f" layer; got rope.scaling={scaling}, full_layers={config.full_layers}. Save with"
            " flax_attn.convert.save"
        )
    # Phi-3 has the original length beside the scaling, not inside.
    original: dict[str, Any] = (
        {}
        if scaling is None
        else {"original_max_position_embeddings": scaling.original_context_length}
    )
    return write_decoder(
        "Phi3", config, partial_rope=True, sliding_window=config.window, **original
    )

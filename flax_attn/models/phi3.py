"""Phi-3."""

from dataclasses import dataclass
from typing import Any

from attn_spec.longrope import LongRoPEScaling
from flax_attn.convert.rules import Rule
from flax_attn.models.decoder import Decoder, DecoderConfig
from flax_attn.models.hugging_face.decoder import decoder_layout, read_decoder, write_decoder
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import Fields


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


def _read(fields: Fields, dropout: float | None) -> Phi3Config:
    fields.only(resid_pdrop=0.0, embd_pdrop=0.0)
    fields = fields.filled(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    ropes = {name: fields.optional_object(name) for name in ("rope_scaling", "rope_parameters")}
    ropes = {name: _renamed(rope) for name, rope in ropes.items() if rope}
    fields = Fields(fields.where, {**fields.values, **ropes}, fields.used)
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


def _write(config: Phi3Config) -> dict[str, Any]:
    scaling = config.rope.scaling
    if not isinstance(scaling, LongRoPEScaling | None) or config.full_layers:
        raise ValueError(
            "transformers' Phi-3 scales RoPE by LongRoPEScaling alone, and has its window in every"
            f" layer; got rope.scaling={scaling}, full_layers={config.full_layers}. Save with"
            " flax_attn.convert.save"
        )
    original: dict[str, Any] = (
        {}
        if scaling is None
        else {"original_max_position_embeddings": scaling.original_context_length}
    )
    return write_decoder(
        "Phi3", config, partial_rope=True, sliding_window=config.window, **original
    )


def _fused(ours: tuple[str, ...], theirs: str) -> Rule:
    block = "trf_blocks.{i}"
    return Rule(
        tuple(f"{block}.{name}.kernel" for name in ours),
        f"model.layers.{{i}}.{theirs}.weight",
        "i o -> o i",
    )


class Phi3(Decoder[Phi3Config]):
    """Phi-3: a Llama that may rotate a part of each head.

    Its projections are fused in the files. The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Phi3Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Phi3(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Microsoft 2024 (arXiv:2404.14219).
    """

    family = Family(
        {"phi3": _read},
        _write,
        decoder_layout(
            _fused(("att.W_query", "att.W_key", "att.W_value"), "self_attn.qkv_proj"),
            _fused(("ff.W_gate", "ff.W_up"), "mlp.gate_up_proj"),
        ),
    )

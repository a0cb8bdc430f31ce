"""SmolLM3."""

import json
from dataclasses import dataclass, field
from typing import Any

from attn_spec.checks import check_layers
from flax_attn.functional.positions import RoPE
from flax_attn.models.hugging_face.decoder import (
    DECODER_LAYOUT,
    FULL,
    SLIDING,
    read_decoder,
    read_layer_types,
    write_decoder,
    write_layer_types,
)
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.models.llama import Llama, LlamaConfig


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """The sizes of a SmolLM3: those of a `LlamaConfig`, and the layers without rotary positions.

    Args:
        unrotated_layers: the layers whose queries and keys are not rotated, counted from 0.

    Raises:
        ValueError: if there is no layer of a number in `full_layers` or `unrotated_layers`.

    Example:
        >>> config = SmolLM3Config(2048, 11008, 16, 36, 4, unrotated_layers=tuple(range(3, 36, 4)))
        >>> config.rope.base, config.unrotated_layers[:2]
        (2000000.0, (3, 7))
    """

    context_length: int = 32768
    vocab_size: int = 128256
    rope: RoPE = field(default_factory=lambda: RoPE(2e6))
    tied: bool = True
    unrotated_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        check_layers("unrotated_layers", self.unrotated_layers, self.num_layers)


def _read(fields: Fields, dropout: float | None) -> SmolLM3Config:
    defaults = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6}
    fields = fields.filled(use_sliding_window=False, sliding_window=None, **defaults)
    used = fields.flag("use_sliding_window")
    window = fields.optional_length("sliding_window") if used else None
    unrotated, layers = _unrotated(fields), range(fields.count("num_hidden_layers"))
    kinds = [SLIDING if window is not None and layer in unrotated else FULL for layer in layers]
    return SmolLM3Config(
        **read_decoder(fields, dropout),
        **read_layer_types(fields, window, kinds),
        attention_bias=fields.flag("attention_bias", False),
        ff_bias=fields.flag("mlp_bias", False),
        unrotated_layers=unrotated,
    )


def _unrotated(fields: Fields) -> tuple[int, ...]:
    """Return the layers without rotary positions."""
    layers, every = fields.count("num_hidden_layers"), fields.length("no_rope_layer_interval", 4)
    rotated = fields.optional_integers("no_rope_layers")
    if rotated is None:
        return tuple(range(every - 1, layers, every))
    if len(rotated) != layers or not set(rotated) <= {0, 1}:
        raise ValueError(
            f"{fields.where}: no_rope_layers must hold 1 or 0 for each of"
            f" num_hidden_layers={layers} layers, 0 for one without rotary positions; got"
            f" {json.dumps(rotated)}"
        )
    return tuple(layer for layer in range(layers) if not rotated[layer])


def _write(config: SmolLM3Config) -> dict[str, Any]:
    return write_decoder(
        "SmolLM3",
        config,
        attention_bias=config.attention_bias,
        mlp_bias=config.ff_bias,
        use_sliding_window=any(config.windows),
        sliding_window=config.window,
        layer_types=write_layer_types(config),
        no_rope_layers=[
            int(layer not in config.unrotated_layers) for layer in range(config.num_layers)
        ],
    )


class SmolLM3(Llama[SmolLM3Config]):
    """SmolLM3: a Llama without rotary positions in every fourth layer, and windows in some.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = SmolLM3Config(
        ...     8, 12, 4, 2, 2, context_length=16, vocab_size=11, unrotated_layers=(1,))
        >>> SmolLM3(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; Yang et al. 2025,
        layers without positions (arXiv:2501.18795).
    """

    family = Family({"smollm3": _read}, _write, DECODER_LAYOUT)

    def rope(self, layer: int) -> RoPE | None:
        """Return the rotary positions of a layer, None where it has none."""
        return None if layer in self.config.unrotated_layers else super().rope(layer)

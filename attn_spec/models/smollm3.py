"""SmolLM3."""

import json
from dataclasses import dataclass, field
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import (
    FULL,
    SLIDING,
    read_decoder,
    read_layer_types,
    write_decoder,
    write_layer_types,
)
from attn_spec.models.llama import LlamaConfig
from attn_spec.module_checks import check_layers
from attn_spec.rope import RotaryPositions


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
    rope: RotaryPositions = field(default_factory=lambda: RotaryPositions(2e6))
    tied: bool = True
    unrotated_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        check_layers("unrotated_layers", self.unrotated_layers, self.num_layers)


def read(fields: Fields, dropout: float | None) -> SmolLM3Config:
    """Return the config that the fields of a `config.json` describe."""
    defaults = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6}
    fields = fields.filled(use_sliding_window=False, sliding_window=None, **defaults)
    used = fields.flag("use_sliding_window")
    window = fields.optional_length("sliding_window") if used else None
    # A window is for the layers without positions, where the file does not say otherwise.
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
    # By default every fourth layer has none.
    if rotated is None:
        return tuple(range(every - 1, layers, every))
    if len(rotated) != layers or not set(rotated) <= {0, 1}:
        raise ValueError(
            f"{fields.where}: no_rope_layers must hold 1 or 0 for each of"
            f" num_hidden_layers={layers} layers, 0 for one without rotary positions; got"
            f" {json.dumps(rotated)}"
        )
    return tuple(layer for layer in range(layers) if not rotated[layer])


def write(config: SmolLM3Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return write_decoder(
        "SmolLM3",
        config,
        attention_bias=config.attention_bias,
        mlp_bias=config.ff_bias,
        use_sliding_window=any(config.windows),
        sliding_window=config.window,
        layer_types=write_layer_types(config),
        # The field says which layers are rotated, in spite of its name.
        no_rope_layers=[
            int(layer not in config.unrotated_layers) for layer in range(config.num_layers)
        ],
    )

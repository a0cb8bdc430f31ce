"""The base of Llama and its relatives.

They have rotary positions, RMS norms and a gated feed-forward layer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_spec.frequencies import DynamicNTKScaling
from attn_spec.hugging_face.bounds import HEADS, LENGTHS
from attn_spec.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields
from attn_spec.hugging_face.rope import dynamic_length, read_rope, write_rope
from attn_spec.module_checks import check_layers
from attn_spec.rope import RotaryPositions

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder; a base class, a family adds what only its models have.

    Args:
        d_model: width of the tokens.
        d_hidden: width inside the feed-forward layer.
        num_heads: number of query heads.
        num_layers: number of blocks.
        num_kv_heads: number of key/value heads; None is num_heads.
        head_dim: width of a head; None is `d_model / num_heads`.
        context_length: length of the longest input.
        vocab_size: number of tokens.
        rope: rotary positions.
        eps: epsilon of the norms.
        activation: activation of the gated feed-forward layer.
        dropout: the probability that an attention weight is dropped in train mode.
        window: number of keys that a token sees, itself included; None is all.
        full_layers: the layers without the window, counted from 0.
        tied: whether the output head is the table of the tokens.

    Raises:
        ValueError: if there is no layer of a number in `full_layers`.

    Example:
        >>> DecoderConfig(8, 12, num_heads=4, num_layers=3, window=5, full_layers=(0,)).windows
        (None, 5, 5)
    """

    d_model: int
    d_hidden: int
    num_heads: int
    num_layers: int
    # None keeps what is derived: a config says what its file says, and no more.
    num_kv_heads: int | None = None
    head_dim: int | None = None
    context_length: int = 2048
    vocab_size: int = 32000
    rope: RotaryPositions = field(default_factory=RotaryPositions)
    eps: float = 1e-6
    activation: str = "silu"
    dropout: float = 0.0
    # One window for all layers but the full ones: no family has windows of two sizes.
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    tied: bool = False

    def __post_init__(self):
        check_layers("full_layers", self.full_layers, self.num_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None where it has none."""
        return tuple(
            None if layer in self.full_layers else self.window for layer in range(self.num_layers)
        )

    @property
    def head_width(self) -> int:
        """The width of a head, given or not."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim


def read_decoder(
    fields: Fields,
    dropout: float | None,
    *,
    activation: str = "hidden_act",
    partial_rope: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a `DecoderConfig`, all but the window.

    Args:
        fields: fields of `config.json`, filled with the defaults of transformers for the family.
        dropout: dropout probability in place of that of the file; None keeps it.
        activation: field that names the activation.
        partial_rope: whether transformers rotates a part of the heads, where the file says so.

    Raises:
        ValueError: if a field is missing, of another kind, or asks for what our models do not
            compute.
    """
    # What a file lacks has the default of its family, which `fields` is filled with.
    length, d_model = fields.length("max_position_embeddings"), fields.integer("hidden_size")
    num_heads, head_dim = fields.heads("num_attention_heads"), fields.optional_integer("head_dim")
    rope = read_rope(fields, length, (head_dim or d_model // num_heads) if partial_rope else None)
    return {
        "d_model": d_model,
        "d_hidden": fields.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_layers": fields.count("num_hidden_layers"),
        "num_kv_heads": fields.optional_integer("num_key_value_heads", within=HEADS),
        "head_dim": head_dim,
        "context_length": _context_length(fields, length, rope),
        "vocab_size": fields.integer("vocab_size"),
        "rope": rope,
        "eps": fields.epsilon("rms_norm_eps", 1e-6),
        "activation": fields.choose(activation, ACTIVATIONS, "silu"),
        "dropout": fields.rate("attention_dropout", 0.0) if dropout is None else dropout,
        "tied": fields.flag("tie_word_embeddings", False),
    }


def _context_length(fields: Fields, length: int, rope: RotaryPositions) -> int:
    if not isinstance(rope.scaling, DynamicNTKScaling):
        return length
    # The stretch grows with the input, so the context ends where the factor does.
    longest = dynamic_length(rope.scaling)
    if not LENGTHS.hold(longest):
        raise ValueError(
            f"{fields.where}: the factor of dynamic scaling times max_position_embeddings must be "
            f"{LENGTHS}; got {longest}. Take the config.json that came with the weights"
        )
    return longest


def write_decoder(
    name: str,
    config: DecoderConfig,
    *,
    activation: str = "hidden_act",
    partial_rope: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Return the fields of `config.json` for `{name}ForCausalLM` of transformers.

    Args:
        name: name of the family.
        config: the sizes.
        activation: field that names the activation.
        partial_rope: whether transformers rotates a part of the heads, where the config says so.
        fields: fields of this family, added to those of all decoders or in their place.

    Raises:
        ValueError: if transformers does not rotate queries and keys like this.
    """
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "hidden_size": config.d_model,
        "intermediate_size": config.d_hidden,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        # Written out, as the defaults of transformers differ between families.
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_width,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.eps,
        activation: THEIR_ACTIVATIONS[config.activation],
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
        **write_rope(config.rope, config.context_length, config.head_width, partial_rope),
        **fields,
    }


def check_no_window(family: str, config: DecoderConfig) -> None:
    """Raise if a layer has a window, in a family of which transformers' models have none."""
    if any(config.windows):
        raise ValueError(
            f"transformers' {family} has no window; got window={config.window}. Save with"
            " flax_attn.convert.save"
        )


def read_windows(fields: Fields) -> dict[str, Any]:
    """Return the arguments `window` and `full_layers` of a `DecoderConfig`.

    The layers from `max_window_layers` on have the window, unless `layer_types` names the kind of
    each layer.

    Raises:
        ValueError: if `layer_types` does not fit the layers, names an unknown kind, or a window
            that is switched off.
    """
    # Without `layer_types`, in files of older versions, the first layers see all tokens.
    layers, first = range(fields.count("num_hidden_layers")), fields.count("max_window_layers", 28)
    fields = fields.filled(use_sliding_window=False, sliding_window=4096)
    window = fields.optional_length("sliding_window") if fields.flag("use_sliding_window") else None
    return read_layer_types(
        fields, window, [FULL if window is None or i < first else SLIDING for i in layers]
    )


def read_layer_types(fields: Fields, window: int | None, default: Sequence[str]) -> dict[str, Any]:
    """Return `window` and `full_layers` of a `DecoderConfig`, by the kind of each layer.

    Args:
        fields: fields of `config.json`.
        window: window of the layers that have one.
        default: kinds of the layers where `layer_types` is missing.

    Raises:
        ValueError: if `layer_types` does not fit the layers, names an unknown kind, or a window
            that there is not.
    """
    layers = range(fields.count("num_hidden_layers"))
    kinds = fields.optional_texts("layer_types") or default
    if len(kinds) != len(layers) or not set(kinds) <= {SLIDING, FULL}:
        raise ValueError(
            f"{fields.where}: layer_types must name {SLIDING!r} or {FULL!r} for each of"
            f" num_hidden_layers={len(layers)} layers; got {list(kinds)}"
        )
    if window is None and SLIDING in kinds:
        # The fields that a reader would look for, of those that the file has.
        names = [name for name in ("use_sliding_window", "sliding_window") if name in fields.values]
        got = ", ".join(f"{name}={json.dumps(fields.values[name])}" for name in names)
        raise ValueError(
            f"{fields.where}: layer_types names {SLIDING!r}, which needs a window; got {got}"
        )
    full = tuple(layer for layer in layers if kinds[layer] == FULL)
    # A window that no layer has is none: both are written alike.
    return {} if len(full) == len(layers) else {"window": window, "full_layers": full}


def write_layer_types(config: DecoderConfig) -> list[str]:
    """Return the kind of each layer.

    Example:
        >>> config = DecoderConfig(8, 12, num_heads=4, num_layers=2, window=5, full_layers=(0,))
        >>> write_layer_types(config)
        ['full_attention', 'sliding_attention']
    """
    return [FULL if window is None else SLIDING for window in config.windows]


def write_windows(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that say which layers have the window."""
    if not any(config.windows):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": config.window,
        # For older versions of transformers, which know no `layer_types`.
        "max_window_layers": next(
            layer for layer, window in enumerate(config.windows) if window is not None
        ),
        "layer_types": write_layer_types(config),
    }


def write_window(name: str, config: DecoderConfig) -> int | None:
    """Return the window of a model that has one in every layer, or in none.

    Raises:
        ValueError: if some layers have it and others not.
    """
    if config.full_layers:
        raise ValueError(
            f"{name} has its window in every layer of transformers; got"
            f" full_layers={config.full_layers}. Save with flax_attn.convert.save"
        )
    return config.window

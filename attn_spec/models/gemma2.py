"""Gemma 2."""

from dataclasses import dataclass
from typing import Any

from attn_spec.attention_checks import check_soft_cap
from attn_spec.checks import check_positive
from attn_spec.hugging_face.fields import GEMMA_ACTIVATIONS, Fields
from attn_spec.models.decoder import (
    FULL,
    SLIDING,
    read_decoder,
    read_layer_types,
    write_decoder,
    write_layer_types,
)
from attn_spec.models.gemma import GemmaConfig


@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """The sizes of a Gemma 2: those of a `GemmaConfig`, the scale and the caps.

    Args:
        query_pre_attn_scalar: number whose square root divides the scores.
        score_cap: bound of the scores; None is no bound.
        logit_cap: bound of the logits; None is no bound.

    Raises:
        ValueError: if there is no layer of a number in `full_layers`, or a cap or the scalar is not
            positive.

    Example:
        >>> layers = tuple(range(1, 26, 2))
        >>> config = Gemma2Config(
        ...     2304, 9216, 8, 26, 4, head_dim=256, window=4096, full_layers=layers)
        >>> config.windows[:3]
        (4096, None, 4096)
    """

    # The scale is 1 / sqrt of this number, which need not be the width of a head.
    query_pre_attn_scalar: int = 256
    score_cap: float | None = 50.0
    logit_cap: float | None = 30.0

    def __post_init__(self):
        super().__post_init__()
        check_positive(query_pre_attn_scalar=self.query_pre_attn_scalar)
        check_soft_cap(self.score_cap)
        check_soft_cap(self.logit_cap)


def read(fields: Fields, dropout: float | None) -> Gemma2Config:
    """Return the config that the fields of a `config.json` describe."""
    # The defaults of transformers; a cap of null is none, and is kept.
    fields = fields.filled(
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    fields = fields.filled(
        hidden_activation="gelu_pytorch_tanh", num_key_value_heads=4, head_dim=256
    )
    fields = fields.filled(query_pre_attn_scalar=256, tie_word_embeddings=True)
    fields.only(use_bidirectional_attention=False)
    # Files of older versions have no `layer_types`: layers have the window in turn.
    layers = [FULL if layer % 2 else SLIDING for layer in range(fields.count("num_hidden_layers"))]
    return Gemma2Config(
        **read_decoder(fields, dropout, activation="hidden_activation"),
        **read_layer_types(fields, fields.optional_length("sliding_window"), layers),
        attention_bias=fields.flag("attention_bias", False),
        query_pre_attn_scalar=fields.length("query_pre_attn_scalar"),
        score_cap=fields.optional_factor("attn_logit_softcapping"),
        logit_cap=fields.optional_factor("final_logit_softcapping"),
    )


def write(config: Gemma2Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return write_decoder(
        "Gemma2",
        config,
        activation="hidden_activation",
        hidden_activation=GEMMA_ACTIVATIONS[config.activation],
        attention_bias=config.attention_bias,
        query_pre_attn_scalar=config.query_pre_attn_scalar,
        sliding_window=config.window,
        layer_types=write_layer_types(config),
        attn_logit_softcapping=config.score_cap,
        final_logit_softcapping=config.logit_cap,
    )

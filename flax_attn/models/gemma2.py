"""Gemma 2."""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from attn_spec.attention_checks import check_soft_cap
from attn_spec.checks import check_positive
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.scores import Scores
from flax_attn.models.gemma import Gemma, GemmaConfig
from flax_attn.models.hugging_face.decoder import (
    FULL,
    POST_NORM_LAYOUT,
    SLIDING,
    read_decoder,
    read_layer_types,
    write_decoder,
    write_layer_types,
)
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import GEMMA_ACTIVATIONS, Fields
from flax_attn.modules.multi_head import MultiHeadAttention


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

    query_pre_attn_scalar: int = 256
    score_cap: float | None = 50.0
    logit_cap: float | None = 30.0

    def __post_init__(self):
        super().__post_init__()
        check_positive(query_pre_attn_scalar=self.query_pre_attn_scalar)
        check_soft_cap(self.score_cap)
        check_soft_cap(self.logit_cap)


def _read(fields: Fields, dropout: float | None) -> Gemma2Config:
    fields = fields.filled(
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    fields = fields.filled(
        hidden_activation="gelu_pytorch_tanh", num_key_value_heads=4, head_dim=256
    )
    fields = fields.filled(query_pre_attn_scalar=256, tie_word_embeddings=True)
    fields.only(use_bidirectional_attention=False)
    layers = [FULL if layer % 2 else SLIDING for layer in range(fields.count("num_hidden_layers"))]
    return Gemma2Config(
        **read_decoder(fields, dropout, activation="hidden_activation"),
        **read_layer_types(fields, fields.optional_length("sliding_window"), layers),
        attention_bias=fields.flag("attention_bias", False),
        query_pre_attn_scalar=fields.length("query_pre_attn_scalar"),
        score_cap=fields.optional_factor("attn_logit_softcapping"),
        logit_cap=fields.optional_factor("final_logit_softcapping"),
    )


def _write(config: Gemma2Config) -> dict[str, Any]:
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


C = TypeVar("C", bound=Gemma2Config)


class Gemma2(Gemma[C]):
    """Gemma 2: a Gemma with more norms, capped scores and logits, and windows in turn.

        logits = logit_cap * tanh(head(final_norm(x)) / logit_cap)

    There are norms before and after the sublayers. The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Gemma2Config(
        ...     8, 12, 4, 2, 1, context_length=16, vocab_size=11, window=3, full_layers=(1,))
        >>> Gemma2(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Gemma Team 2024 (arXiv:2408.00118).
    """

    family: ClassVar[Family] = Family({"gemma2": _read}, _write, POST_NORM_LAYOUT)

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, its scores scaled and capped."""
        config = self.config
        scores = Scores(scale=config.query_pre_attn_scalar**-0.5, soft_cap=config.score_cap)
        return super().attention(layer, scores=scores, **options)

    def block_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return the norms of a block, before and after both of its parts."""
        return {
            name: self.norm(**numerics) for name in ("norm1", "norm2", "post_norm1", "post_norm2")
        }

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b vocab"]:
        """Return the logits of what `hidden` returned, capped in at least float32."""
        found, cap = super().logits(hidden), self.config.logit_cap
        if cap is None:
            return found
        return (cap * jnp.tanh(found.astype(accumulation_dtype(found.dtype)) / cap)).astype(
            found.dtype
        )

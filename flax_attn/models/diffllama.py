"""DiffLlama."""

from typing import Any

from attn_spec.models.diffllama import DiffLlamaConfig, read, write
from flax_attn.convert.rules import Rule
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.decoder import decoder_layout
from flax_attn.models.hugging_face.family import Family
from flax_attn.modules.differential import DifferentialAttention, differential_lambda
from flax_attn.modules.multi_head import MultiHeadAttention

_LAMBDAS = tuple(
    Rule((f"trf_blocks.{{i}}.att.{name}",), f"model.layers.{{i}}.self_attn.{name}")
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
)


class DiffLlama(Decoder[DiffLlamaConfig]):
    """DiffLlama: a Llama with differential attention.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = DiffLlamaConfig(
        ...     8, 12, num_heads=4, num_layers=2, context_length=16, vocab_size=11)
        >>> DiffLlama(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Ye et al. 2024 (arXiv:2410.05258).
    """

    family = Family({"diffllama": read}, write, decoder_layout(*_LAMBDAS))

    attention_type = DifferentialAttention

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, whose lambda starts near that of the paper."""
        config = self.config
        return super().attention(
            layer,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            # Deeper layers subtract more, as in the paper.
            lambda_init=differential_lambda(layer),
            eps=config.eps,
            **options,
        )

"""Phi-3."""

from attn_spec.models.phi3 import Phi3Config, read, write
from flax_attn.convert.rules import Rule
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.decoder import decoder_layout
from flax_attn.models.hugging_face.family import Family


def _fused(ours: tuple[str, ...], theirs: str) -> Rule:
    block = "trf_blocks.{i}"
    return Rule(
        tuple(f"{block}.{name}.kernel" for name in ours),
        f"model.layers.{{i}}.{theirs}.weight",
        "i o -> o i",
    )


class Phi3(Decoder[Phi3Config]):
    """Phi-3: a Llama that may rotate a part of each head.

    Its projections are fused in the files. Arguments and errors are those of `LanguageModel`.

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
        {"phi3": read},
        write,
        decoder_layout(
            _fused(("att.W_query", "att.W_key", "att.W_value"), "self_attn.qkv_proj"),
            _fused(("ff.W_gate", "ff.W_up"), "mlp.gate_up_proj"),
        ),
    )

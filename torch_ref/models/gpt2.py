"""GPT-2: the published sizes, and their attention layer."""

from dataclasses import dataclass
from types import MappingProxyType

from torch_ref.functional.checks import check_choice
from torch_ref.modules.multi_head import MultiHeadAttention


@dataclass(frozen=True)
class GPT2Config:
    """The numbers of one size of GPT-2.

    Example:
        >>> GPT2_CONFIGS["gpt2-medium"].num_heads
        16
    """

    d_model: int
    num_heads: int
    num_layers: int
    context_length: int = 1024
    vocab_size: int = 50257
    qkv_bias: bool = True
    dropout: float = 0.1


GPT2_CONFIGS = MappingProxyType(
    {
        "gpt2-small": GPT2Config(768, 12, 12),
        "gpt2-medium": GPT2Config(1024, 16, 24),
        "gpt2-large": GPT2Config(1280, 20, 36),
        "gpt2-xl": GPT2Config(1600, 25, 48),
    }
)


def create_gpt2_attention(
    size: str, dropout: float = 0.1, *, qkv_bias: bool | None = None, backend: str = "auto"
) -> MultiHeadAttention:
    """Return one attention layer of a published GPT-2 size.

    Args:
        size: `"small"`, `"medium"`, `"large"` or `"xl"`, or a key of `GPT2_CONFIGS`.
        dropout: the probability that a weight is dropped in train mode.
        qkv_bias: whether the input projections have a bias; None is as published: they do.
        backend: of the attention call; `"auto"` or the name of one.

    Raises:
        ValueError: if the size is not a published one or the backend is unknown.

    Example:
        >>> create_gpt2_attention("small").num_heads
        12

    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    name = size if size in GPT2_CONFIGS else f"gpt2-{size}"
    check_choice("size", size if name not in GPT2_CONFIGS else name, tuple(GPT2_CONFIGS))
    config = GPT2_CONFIGS[name]
    return MultiHeadAttention(
        config.d_model,
        config.d_model,
        config.context_length,
        dropout,
        config.num_heads,
        config.qkv_bias if qkv_bias is None else qkv_bias,
        backend=backend,
    )

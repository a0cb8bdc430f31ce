"""OLMo 2."""

from typing import Any

from attn_spec.models.olmo2 import Olmo2Config
from torch_ref.models.decoder import Decoder
from torch_ref.modules.multi_head import MultiHeadAttention


class Olmo2(Decoder[Olmo2Config]):
    """OLMo 2: a Llama with norms after the sublayers only, and query and key norms.

        x = x + post_norm1(att(x));  x = x + post_norm2(ff(x))

    Queries and keys are normed over all heads together. Arguments and errors are those of
    `LanguageModel`.

    Example:
        >>> import torch
        >>> config = Olmo2Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Olmo2(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def block_norms(self) -> dict[str, Any]:
        """Return the norms of a block, after both of its parts."""
        return {
            # Without norms before the parts, what they add is normed alone.
            "norm1": None,
            "norm2": None,
            **{name: self.norm() for name in ("post_norm1", "post_norm2")},
        }

    def head_norms(self) -> dict[str, Any]:
        """Return the norms of queries and keys, all heads together."""
        config = self.config
        # As wide as all heads together, which tells the attention to join them.
        heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads or config.num_heads}
        return {name: self.norm(number * config.head_width) for name, number in heads.items()}

"""The vision transformer of vit_torch.py in Flax NNX, built from the parts of flax_attn.

python examples/vit_nnx.py
"""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn import FeedForward, LayerNorm, Linear, MultiHeadAttention, Patches, TransformerBlock
from flax_attn.convert import Rule


def block(d_model, num_heads, *, rngs):
    """Return attention and feed-forward with norms."""
    att = MultiHeadAttention(
        d_in=d_model,
        d_out=d_model,
        context_length=None,
        dropout=0.0,
        num_heads=num_heads,
        qkv_bias=True,
        causal=False,
        rngs=rngs,
    )
    ff = FeedForward(
        d_model,
        activation="gelu_exact",
        rngs=rngs,
    )
    norms = LayerNorm(d_model), LayerNorm(d_model)
    return TransformerBlock(att, ff, *norms)


class ViT(nnx.Module):
    """Images `(b, c, h, w)` to logits `(b, classes)`."""

    def __init__(
        self,
        image_size=12,
        patch_size=4,
        channels=3,
        d_model=24,
        num_heads=3,
        num_layers=2,
        num_classes=5,
        *,
        rngs,
    ):
        tokens = 1 + (image_size // patch_size) ** 2
        layers = range(num_layers)
        self.patches = Patches(
            d_model,
            channels,
            height=patch_size,
            width=patch_size,
            rngs=rngs,
        )
        cls_token = rngs.params.normal((1, 1, d_model))
        pos_embed = rngs.params.normal((1, tokens, d_model))
        self.cls_token = nnx.Param(0.02 * cls_token)
        self.pos_embed = nnx.Param(0.02 * pos_embed)
        self.blocks = nnx.List(
            [block(d_model, num_heads, rngs=rngs) for _ in layers],
        )
        self.norm = LayerNorm(d_model)
        self.head = Linear(d_model, num_classes, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)  # (b, patches, d)
        shape = len(x), 1, x.shape[-1]
        first = jnp.broadcast_to(self.cls_token, shape)
        x = jnp.concatenate([first, x], axis=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


QKV = ("att.W_query", "att.W_key", "att.W_value")
RULES = [  # a convolution that is a matrix, and three layers that are one
    Rule(("patches.proj.kernel",), "patch.weight", "(c p q) d -> d c p q"),
    Rule(("patches.proj.bias",), "patch.bias"),
    Rule(tuple(f"{name}.kernel" for name in QKV), "attn.qkv.weight", "i o -> o i"),
    Rule(tuple(f"{name}.bias" for name in QKV), "attn.qkv.bias"),
]

if __name__ == "__main__":
    print(ViT(rngs=nnx.Rngs(0))(jax.random.normal(jax.random.key(0), (2, 3, 12, 12))).shape)

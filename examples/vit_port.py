"""A hand-written port of vit_torch.py to Flax NNX: docs/validate.md finds its two faults.

python examples/vit_port.py
"""

import jax
import jax.numpy as jnp
from flax import nnx


class Attention(nnx.Module):
    """Self-attention whose queries, keys and values are made by one layer."""

    def __init__(self, d_model, num_heads, *, rngs):
        self.num_heads = num_heads
        self.qkv = nnx.Linear(d_model, 3 * d_model, rngs=rngs)
        self.proj = nnx.Linear(d_model, d_model, rngs=rngs)

    def __call__(self, x):
        b, t, d = x.shape
        qkv = self.qkv(x).reshape(b, t, self.num_heads, 3, -1)
        q, k, v = jnp.moveaxis(qkv, 3, 0)
        wide = jnp.promote_types(q.dtype, jnp.float32)  # of the softmax, also in bfloat16
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide)
        weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5).astype(v.dtype)
        x = jnp.einsum("bnts,bsnh->btnh", weights, v)
        return self.proj(x.reshape(b, t, d))


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, d_model, num_heads, *, rngs):
        self.norm1 = nnx.LayerNorm(d_model, rngs=rngs)
        self.norm2 = nnx.LayerNorm(d_model, rngs=rngs)
        self.attn = Attention(d_model, num_heads, rngs=rngs)
        self.up = nnx.Linear(d_model, 4 * d_model, rngs=rngs)
        self.down = nnx.Linear(4 * d_model, d_model, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        hidden = jax.nn.gelu(self.up(self.norm2(x)), approximate=False)
        return x + self.down(hidden)


class ViT(nnx.Module):
    """Images `(b, image_size, image_size, channels)` to logits `(b, num_classes)`."""

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
        size, tokens = (patch_size, patch_size), 1 + (image_size // patch_size) ** 2
        self.patch = nnx.Conv(channels, d_model, size, size, padding="VALID", rngs=rngs)
        self.cls_token = nnx.Param(0.02 * rngs.params.normal((1, 1, d_model)))
        self.pos_embed = nnx.Param(0.02 * rngs.params.normal((1, tokens, d_model)))
        blocks = [Block(d_model, num_heads, rngs=rngs) for _ in range(num_layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(d_model, rngs=rngs)
        self.head = nnx.Linear(d_model, num_classes, rngs=rngs)

    def __call__(self, images):
        x = self.patch(images)
        x = x.reshape(len(x), -1, x.shape[-1])  # rows and columns become tokens
        first = jnp.broadcast_to(self.cls_token[...], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=1) + self.pos_embed[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


if __name__ == "__main__":
    images = jax.random.normal(jax.random.key(0), (2, 12, 12, 3))
    print(ViT(rngs=nnx.Rngs(0))(images).shape)

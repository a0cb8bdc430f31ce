"""A vision transformer in plain PyTorch: what the guide of migration ports to Flax.

python examples/vit_torch.py
"""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention: one layer makes q, k and v."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(x)
        qkv = qkv.reshape(b, t, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(b, t, d)
        return self.proj(x)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.attn = Attention(d_model, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model),
            nn.GELU(),
            nn.Linear(4 * d_model, d_model),
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
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
    ):
        super().__init__()
        tokens = 1 + (image_size // patch_size) ** 2
        layers = range(num_layers)
        self.patch = nn.Conv2d(
            channels,
            d_model,
            kernel_size=patch_size,
            stride=patch_size,
        )
        cls_token = torch.randn(1, 1, d_model)
        pos_embed = torch.randn(1, tokens, d_model)
        self.cls_token = nn.Parameter(0.02 * cls_token)
        self.pos_embed = nn.Parameter(0.02 * pos_embed)
        self.blocks = nn.Sequential(
            *[Block(d_model, num_heads) for _ in layers],
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, num_classes)

    def forward(self, images):
        x = self.patch(images)  # (b, d, rows, columns)
        x = x.flatten(2).transpose(1, 2)  # (b, patches, d)
        first = self.cls_token.expand(len(x), -1, -1)
        x = torch.cat([first, x], dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


if __name__ == "__main__":
    print(ViT()(torch.randn(2, 3, 12, 12)).shape)

"""A vision transformer of Flax layers against its twin of torch layers.

No rule says which parameter is which.
"""

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx

from flax_attn.parity import PairingError, assert_parity

WIDTH, HEADS, HIDDEN, PATCH, CLASSES = 12, 3, 20, 4, 7
IMAGES, PATCHES = (2, 16, 16, 3), 16


def attend(query, key, value, **options):
    """Take the softmax in the dtype of the inputs: that of Flax is in float32."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)


def norm(rngs):
    # PyTorch takes the mean of squared differences: a difference of means rounds otherwise.
    return nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


def batch_norm(rngs):
    # Flax keeps 0.9 of the old statistics where PyTorch takes 0.1 of the new.
    options = {"epsilon": 1e-5, "momentum": 0.9, "use_fast_variance": False}
    return nnx.BatchNorm(WIDTH, **options, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs, **options):
        self.norm1 = norm(rngs)
        self.norm2 = norm(rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, **options)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        # PyTorch takes the exact one by default, Flax does not.
        active = nnx.gelu(self.up(self.norm2(x)), approximate=False)
        return x + self.down(active)


class Embedding(nnx.Module):
    """Images to tokens: one that is learned, and one for each patch."""

    def __init__(self, rngs):
        size = (PATCH, PATCH)
        self.patches = nnx.Conv(3, WIDTH, size, strides=size, padding="VALID", rngs=rngs)
        self.stem_norm = batch_norm(rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.positions = nnx.Param(jnp.zeros((1, 1 + PATCHES, WIDTH)))

    def embed(self, images):
        patches = self.stem_norm(self.patches(images))
        x = patches.reshape(len(images), -1, WIDTH)
        token = jnp.broadcast_to(self.token[...], (len(images), 1, WIDTH))
        return jnp.concatenate([token, x], axis=1) + self.positions[...]


class VisionTransformer(Embedding):
    def __init__(self, depth, rngs, **options):
        super().__init__(rngs)
        self.blocks = nnx.List([Block(rngs, **options) for _ in range(depth)])
        self.norm = norm(rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(WIDTH)
        self.norm2 = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        active = torch.nn.functional.gelu(self.up(self.norm2(x)))
        return x + self.down(active)


class TorchEmbedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.stem_norm = torch.nn.BatchNorm2d(WIDTH)
        self.token = torch.nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = torch.nn.Parameter(torch.zeros(1, 1 + PATCHES, WIDTH))

    def embed(self, images):
        # PyTorch has channels before pixels.
        patches = self.stem_norm(self.patches(images.permute(0, 3, 1, 2)))
        x = patches.flatten(2).transpose(1, 2)
        token = self.token.expand(len(x), -1, -1)
        return torch.cat([token, x], dim=1) + self.positions


class TorchVisionTransformer(TorchEmbedding):
    def __init__(self, depth):
        super().__init__()
        self.blocks = torch.nn.ModuleList([TorchBlock() for _ in range(depth)])
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@pytest.fixture(scope="module")
def twins():
    return VisionTransformer(2, nnx.Rngs(0), attention_fn=attend), TorchVisionTransformer(2).eval()


def test_a_vision_transformer_needs_no_rules(twins, checks):
    names = (*checks.core, "bfloat16")
    report = assert_parity(*twins, [IMAGES], checks=names, locate=False)
    pairs = {entry.theirs: entry for entry in report.pair.entries}
    assert len(pairs["blocks.1.attention.in_proj_weight"].ours) == 3
    assert "torch" in str(report.pair.layout)


def test_the_softmax_of_the_attention_of_flax_itself_is_no_difference(twins, checks):
    ours = VisionTransformer(2, nnx.Rngs(0))
    report = assert_parity(ours, twins[1], [IMAGES], checks=checks.core)
    assert "in float64, JAX's attention takes its softmax in float64" in report.notes


def test_running_statistics_are_copied_and_drawn(twins):
    report = assert_parity(*twins, [IMAGES], checks=["forward"], locate=False)
    trainable = {entry.theirs: entry.trainable for entry in report.pair.entries}
    assert not trainable["stem_norm.running_var"]
    assert not trainable["stem_norm.running_mean"]
    assert (report.pair.weights["stem_norm.running_var"] >= 0.5).all()
    assert (report.pair.weights["stem_norm.running_mean"] != 0).all()


class Difference(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(3, 3, rngs=rngs)
        self.b = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.a(x) - self.b(x)


class TorchDifference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = {name: torch.nn.Linear(3, 3) for name in ("u", "v")}
        self.layers = torch.nn.ModuleDict(layers)
        # Three layers for two: neither names nor shapes say which one is left over.
        self.extra = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layers["u"](x) - self.layers["v"](x)


def test_layers_that_fit_in_two_ways_are_refused():
    sides = Difference(), TorchDifference().eval()
    rule = r"(?s)do not pair.*layout=convert.auto\(flax_module, torch_module"
    with pytest.raises(PairingError, match=rule):
        assert_parity(*sides, [(2, 3)])

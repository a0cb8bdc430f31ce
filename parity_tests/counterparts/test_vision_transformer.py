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


class Block(nnx.Module):
    def __init__(self, rngs, **options):
        self.norm1, self.norm2 = (
            nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs) for _ in "12"
        )
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, **options)
        self.up, self.down = (
            nnx.Linear(WIDTH, HIDDEN, rngs=rngs),
            nnx.Linear(HIDDEN, WIDTH, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x)), approximate=False))


class VisionTransformer(nnx.Module):
    def __init__(self, depth, rngs, **options):
        self.patches = nnx.Conv(
            3, WIDTH, (PATCH, PATCH), strides=(PATCH, PATCH), padding="VALID", rngs=rngs
        )
        self.stem_norm = nnx.BatchNorm(
            WIDTH, epsilon=1e-5, momentum=0.9, use_fast_variance=False, rngs=rngs
        )
        self.token, self.positions = (nnx.Param(jnp.zeros((1, n, WIDTH))) for n in (1, 1 + PATCHES))
        self.blocks = nnx.List([Block(rngs, **options) for _ in range(depth)])
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = self.stem_norm(self.patches(images)).reshape(images.shape[0], -1, WIDTH)
        token = jnp.broadcast_to(self.token[...], (images.shape[0], 1, WIDTH))
        x = jnp.concatenate([token, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class TorchVisionTransformer(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.stem_norm = torch.nn.BatchNorm2d(WIDTH)
        self.token, self.positions = (
            torch.nn.Parameter(torch.zeros(1, n, WIDTH)) for n in (1, 1 + PATCHES)
        )
        self.blocks = torch.nn.ModuleList([TorchBlock() for _ in range(depth)])
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.stem_norm(self.patches(images.permute(0, 3, 1, 2)))
        x = (
            torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1)
            + self.positions
        )
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


def test_layers_that_fit_in_two_ways_are_refused():
    class Ambiguous(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in "ab")

        def __call__(self, x):
            return self.a(x) - self.b(x)

    class TorchAmbiguous(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = {name: torch.nn.Linear(3, 3) for name in ("u", "v")}
            self.layers = torch.nn.ModuleDict(layers)
            self.extra = torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.layers["u"](x) - self.layers["v"](x)

    with pytest.raises(
        PairingError, match=r"(?s)do not pair.*layout=convert.auto\(flax_module, torch_module"
    ):
        assert_parity(Ambiguous(), TorchAmbiguous().eval(), [(2, 3)])

"""A linear layer over patches of an image beside a convolution over them."""

import jax.numpy as jnp
import pytest
from flax import nnx
from torch import nn

from flax_attn import convert
from flax_attn.parity import compare

pytestmark = pytest.mark.usefixtures("usual_promotion")

WIDTH, SIZE, CHANNELS = 6, 4, 3
X = [(2, CHANNELS, 2 * SIZE, 3 * SIZE)]
PATCH = CHANNELS * SIZE * SIZE


def patches(image, permute, channels_last):
    """Return the patches of images `(b, c, height, width)` as `(b, patches, features)`."""
    b, c, height, width = image.shape
    cut = image.reshape(b, c, height // SIZE, SIZE, width // SIZE, SIZE)
    order = (0, 2, 4, 3, 5, 1) if channels_last else (0, 2, 4, 1, 3, 5)
    return permute(cut, order).reshape(b, -1, PATCH)


class TorchConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(CHANNELS, WIDTH, SIZE, SIZE)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class TorchLinear(nn.Module):
    def __init__(self, channels_last):
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.channels_last = channels_last

    def forward(self, x):
        def permute(image, order):
            return image.permute(order)

        return self.embed(patches(x, permute, self.channels_last))


class Linear(nnx.Module):
    def __init__(self, channels_last):
        self.patch = nnx.Linear(PATCH, WIDTH, rngs=nnx.Rngs(0))
        self.channels_last = channels_last

    def __call__(self, x):
        return self.patch(patches(x, jnp.transpose, self.channels_last))


class Raw(Linear):
    def __init__(self, channels_last):
        self.w_patch = nnx.Param(jnp.zeros((PATCH, WIDTH)))
        self.b_patch = nnx.Param(jnp.zeros(WIDTH))
        self.channels_last = channels_last

    def patch(self, x):
        return x @ self.w_patch + self.b_patch


class Conv(nnx.Module):
    def __init__(self, channels_last):
        shape, strides = (SIZE, SIZE), (SIZE, SIZE)
        options = {"padding": "VALID", "rngs": nnx.Rngs(0)}
        self.patch = nnx.Conv(CHANNELS, WIDTH, shape, strides, **options)

    def __call__(self, x):
        return self.patch(jnp.moveaxis(x, 1, -1)).reshape(len(x), -1, WIDTH)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(Linear, lambda _: TorchConv()), (Raw, lambda _: TorchConv()), (Conv, TorchLinear)],
    ids=["linear layer", "array", "convolution"],
)
def test_both_orders_of_a_patch_are_told_by_the_outputs(ours, theirs, channels_last):
    options = {"checks": ["forward", "gradients", "training"]}
    report = compare(ours(channels_last), theirs(channels_last).eval(), X, **options)
    assert report.passed, report.explain()
    assert len(report.coverage.untested) == 1


def test_the_weights_of_patches_are_loaded_and_stored():
    rule = convert.Rule(
        ("patch.kernel",),
        "proj.weight",
        "(p q c) o -> o c p q",
        sizes=(("p", SIZE), ("q", SIZE), ("c", CHANNELS)),
    )
    ours, theirs = Linear(channels_last=True), TorchConv()
    pairing = convert.auto(ours, theirs, rules=[rule])
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    back = convert.state_dict(ours, pairing)
    assert (back["proj.weight"] == theirs.proj.weight.detach().numpy()).all()
    assert (ours.patch.kernel[1 * CHANNELS + 2] == back["proj.weight"][:, 2, 0, 1]).all()

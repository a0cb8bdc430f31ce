"""`convert.auto` on convolutional networks and mixers: outputs are equal with no rule written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from flax_attn import convert

pytestmark = pytest.mark.usefixtures("usual_promotion")

D, CLASSES = 8, 7
F64 = {"param_dtype": jnp.float64}
R = nnx.Rngs(0)
NORM = {"epsilon": 1e-5, "use_fast_variance": False, "rngs": R, **F64}


def conv(d_in, d_out, size, strides=1):
    return nnx.Conv(
        d_in, d_out, (size, size), strides, padding=size // 2, use_bias=False, rngs=R, **F64
    )


def batch_norm(d):
    norm = nnx.BatchNorm(d, use_running_average=True, epsilon=1e-5, momentum=0.9, rngs=R, **F64)
    norm.mean, norm.var = (
        nnx.BatchStat(jnp.zeros(d, jnp.float64)) for _ in range(2)
    )  # float32 otherwise
    return norm


class Residual(nnx.Module):
    def __init__(self, d_in, d_out, strides=1):
        self.conv1, self.bn1 = conv(d_in, d_out, 3, strides), batch_norm(d_out)
        self.conv2, self.bn2 = conv(d_out, d_out, 3), batch_norm(d_out)
        self.shortcut = (
            nnx.Sequential(conv(d_in, d_out, 1, strides), batch_norm(d_out))
            if strides > 1
            else None
        )

    def __call__(self, x):
        y = self.bn2(self.conv2(jax.nn.relu(self.bn1(self.conv1(x)))))
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    def __init__(self):
        self.conv1, self.bn1 = conv(3, 4, 3), batch_norm(4)
        self.stages = nnx.List(
            [
                nnx.List([Residual(4, 4), Residual(4, 4)]),
                nnx.List([Residual(4, 6, 2), Residual(6, 6)]),
            ]
        )
        self.fc = nnx.Linear(6, CLASSES, rngs=R, **F64)

    def __call__(self, x):
        x = jax.nn.relu(self.bn1(self.conv1(x)))
        for block in (block for stage in self.stages for block in stage):
            x = block(x)
        return self.fc(x.mean((1, 2)))


class TorchResidual(nn.Module):
    def __init__(self, d_in, d_out, strides=1):
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(d_in, d_out, 3, strides, 1, bias=False),
            nn.BatchNorm2d(d_out),
        )
        self.conv2, self.bn2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False), nn.BatchNorm2d(d_out)
        if strides > 1:
            down = nn.Conv2d(d_in, d_out, 1, strides, bias=False)
            self.downsample = nn.Sequential(down, nn.BatchNorm2d(d_out))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))


class TorchResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.layer1 = nn.Sequential(TorchResidual(4, 4), TorchResidual(4, 4))
        self.layer2 = nn.Sequential(TorchResidual(4, 6, 2), TorchResidual(6, 6))
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(torch.relu(self.stem(x)))).mean((2, 3)))


def test_resnet_with_running_statistics(rig):
    ours, theirs = ResNet(), TorchResNet()
    pairing = convert.auto(ours, theirs)
    assert str(pairing).startswith("32 parameters paired, and 20 running statistics\n")
    assert {row.theirs.rpartition(".")[2] for row in pairing.rows if not row.trainable} == {
        "running_mean",
        "running_var",
    }
    rig.theirs(theirs)
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    images = rig.normal(2, 3, 6, 8)
    rig.assert_equal(rig.run(ours, np.moveaxis(images, 1, -1)), theirs(torch.from_numpy(images)))
    stored = convert.state_dict(ours, pairing)
    published = {
        name: value for name, value in theirs.state_dict().items() if not name.endswith("tracked")
    }
    assert stored.keys() == published.keys()
    assert all((stored[name] == value.numpy()).all() for name, value in published.items())


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transpose_kernel", [True, False])
def test_transposed_convolutions(rig, rank, transpose_kernel):
    size = (2, 3, 4)[:rank]
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    options = {"padding": "VALID", "transpose_kernel": transpose_kernel, "rngs": R, **F64}
    ours = nnx.ConvTranspose(3, 5, size, strides=2, **options)
    theirs = rig.theirs(kind(3, 5, size, stride=2))
    convert.load_state_dict(ours, theirs.state_dict(), convert.auto(ours, theirs))
    x = rig.normal(2, 3, *(4, 5, 6)[:rank])
    rig.assert_equal(
        np.moveaxis(np.asarray(ours(jnp.asarray(np.moveaxis(x, 1, -1)))), -1, 1),
        theirs(torch.from_numpy(x)),
    )
    # What is not transposed has its axes of space from the other end.
    assert ("flipped" in str(convert.auto(ours, theirs))) is not transpose_kernel
    stored = convert.state_dict(ours, layout=convert.auto(ours, theirs))
    assert all((stored[name] == value.numpy()).all() for name, value in theirs.state_dict().items())


class Mixer(nnx.Module):
    def __init__(self):
        self.norms = nnx.List([nnx.LayerNorm(D, **NORM) for _ in range(2)])
        self.tokens = nnx.Sequential(
            nnx.Linear(5, 9, rngs=R, **F64), jnp.tanh, nnx.Linear(9, 5, rngs=R, **F64)
        )
        self.channels = nnx.Sequential(
            nnx.Linear(D, 9, rngs=R, **F64), jnp.tanh, nnx.Linear(9, D, rngs=R, **F64)
        )

    def __call__(self, x):
        x = x + self.tokens(self.norms[0](x).mT).mT
        return x + self.channels(self.norms[1](x))


class TorchMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(D), nn.LayerNorm(D)
        self.token_mixer = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
        self.channel_mixer = nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, D))

    def forward(self, x):
        x = x + self.token_mixer(self.norm_a(x).mT).mT
        return x + self.channel_mixer(self.norm_b(x))


def test_mixer(rig):
    ours = nnx.Sequential(*(Mixer() for _ in range(3)))
    theirs = rig.theirs(nn.Sequential(*(TorchMixer() for _ in range(3))))
    pairing = convert.auto(ours, theirs)
    assert {row.evidence for row in pairing.rows} == {
        "shape",
        "order",
    }  # the norms have no name alike
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    x = rig.normal(2, 5, D)
    rig.assert_equal(rig.run(ours, x), theirs(torch.from_numpy(x)))


class PointwiseTorch(nn.Module):
    """Linear layers over channels, written as convolutions over single places."""

    def __init__(self, rank):
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.wide = convolution(D, D, 3, padding=1)
        self.up = convolution(D, 9, 1)
        self.down = convolution(9, D, 1, bias=False)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(self.wide(x))))
        return self.head((x + y).flatten(2).mean(-1))


class Pointwise(nnx.Module):
    def __init__(self, rank):
        self.wide = nnx.Conv(D, D, (3,) * rank, padding=1, rngs=R, **F64)
        self.up = nnx.Linear(D, 9, rngs=R, **F64)
        self.down = nnx.Linear(9, D, use_bias=False, rngs=R, **F64)
        self.head = nnx.Linear(D, CLASSES, rngs=R, **F64)

    def __call__(self, x):
        x = jnp.moveaxis(x, 1, -1)
        y = self.down(jnp.tanh(self.up(self.wide(x))))
        mean = jnp.mean(x + y, axis=range(1, x.ndim - 1))
        return self.head(mean)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_over_single_places_is_paired_with_a_linear_layer(rig, rank):
    ours, theirs = Pointwise(rank), rig.theirs(PointwiseTorch(rank))
    pairing = convert.auto(ours, theirs)
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    x = rig.normal(2, D, *(4, 5, 3)[:rank])
    rig.assert_equal(rig.run(ours, x), theirs(torch.from_numpy(x)))
    # And back, with the axes of size 1 that PyTorch has.
    weights = convert.state_dict(ours, pairing)
    assert weights["up.weight"].shape == (9, D, *[1] * rank)
    assert np.array_equal(weights["up.weight"], theirs.up.weight.detach().numpy())


def test_convolutions_over_single_places_are_told_from_linear_layers_where_both_sides_have_them():
    class Both(nnx.Module):
        def __init__(self):
            self.first = nnx.Conv(D, D, (1,), rngs=R)
            self.second = nnx.Linear(D, D, rngs=R)

    class TorchBoth(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, D)
            self.b = nn.Conv1d(D, D, 1)

    rows = convert.auto(Both(), TorchBoth()).rows
    pairs = {row.theirs: row.ours for row in rows}
    assert pairs["a.weight"] == ("second.kernel",)
    assert pairs["b.weight"] == ("first.kernel",)

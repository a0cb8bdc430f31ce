"""Layers that `nnx.vmap` has stacked along a first axis, beside a list of layers in PyTorch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from flax_attn import convert
from flax_attn.convert.api import parameters
from flax_attn.convert.stacked import stacked_modules
from flax_attn.parity import compare

pytestmark = pytest.mark.usefixtures("usual_promotion")

WIDTH, LAYERS = 8, 3


def stacked(make, count):
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def made(rngs):
        return make(rngs)

    return made(nnx.Rngs(0))


def scanned(blocks, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, block):
        return block(x)

    return run(x, blocks)


class Block(nnx.Module):
    """A norm, a layer inside of another module, and a parameter of its own."""

    def __init__(self, rngs, scale=0.5):
        options = {"epsilon": 1e-5, "use_fast_variance": False}
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, **options)
        self.mlp = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.silu)
        self.gamma = nnx.Param(jnp.ones(WIDTH))
        self.scale = scale

    def __call__(self, x):
        return x + self.gamma[...] * self.mlp(self.norm(x)) * self.scale


class Model(nnx.Module):
    def __init__(self, layers=LAYERS, scale=0.5):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.position = nnx.Param(jnp.ones((layers, WIDTH)))
        self.blocks = stacked(lambda rngs: Block(rngs, scale), layers)

    def __call__(self, x):
        return scanned(self.blocks, self.first(x) + self.position[...].sum(0))


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.gamma * self.mlp(self.norm(x)) * 0.5


class TorchModel(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(torch.ones(layers, WIDTH))
        self.blocks = nn.ModuleList([TorchBlock() for _ in range(layers)])

    def forward(self, x):
        x = self.first(x) + self.position.sum(0)
        for block in self.blocks:
            x = block(x)
        return x


# As many layers as an axis of other parameters is long, too.
@pytest.mark.parametrize("layers", [LAYERS, WIDTH])
def test_a_scan_over_layers_equals_a_loop(layers):
    checks = ["forward", "gradients", "float32", "training"]
    report = compare(Model(layers), TorchModel(layers), [(2, 5, WIDTH)], checks=checks)
    assert report.passed, report.explain()
    names = {entry.ours[0]: entry.theirs for entry in report.entries}
    assert names["blocks.1.mlp.0.kernel"] == "blocks.1.mlp.0.weight"
    assert names["position"] == "position"


def test_a_difference_in_the_block_is_one_of_all_layers():
    report = compare(Model(scale=0.25), TorchModel(), [(2, 5, WIDTH)], checks=["forward"])
    (cause,) = report.causes
    assert cause.startswith("blocks.0")
    assert "also blocks.1" in cause
    assert "flax multiplies by 0.25, torch by 0.5" in cause


def test_weights_go_both_ways():
    ours, theirs = Model(), TorchModel()
    with torch.no_grad():
        for number, parameter in enumerate(theirs.parameters()):
            parameter.add_(0.1 * number)
    pairing = convert.auto(ours, theirs)
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    back = convert.state_dict(ours, pairing)
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(back[name], tensor.numpy(), err_msg=name)
    x = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
    expected = theirs(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(ours(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


class Convolution(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_running_average=False, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(self.conv(x))


class Convolutions(nnx.Module):
    def __init__(self):
        self.blocks = stacked(Convolution, LAYERS)

    def __call__(self, x):
        return jnp.swapaxes(scanned(self.blocks, jnp.swapaxes(x, 1, 2)), 1, 2)


class TorchConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.01)

    def forward(self, x):
        return x + self.norm(self.conv(x))


class TorchConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([TorchConvolution() for _ in range(LAYERS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_stacked_convolutions_and_running_statistics():
    theirs = TorchConvolutions().eval()
    report = compare(Convolutions(), theirs, [(4, WIDTH, 6)], checks=["forward", "gradients"])
    assert report.passed, report.explain()
    assert {"blocks.2.norm.running_mean", "blocks.2.norm.running_var"} <= report.pair.weights.keys()


def test_the_axis_of_the_layers_is_told_by_the_class_alone():
    modules = dict(nnx.iter_modules(Model()))
    assert stacked_modules(modules) == {("blocks",): LAYERS}
    one = dict(nnx.iter_modules(Block(nnx.Rngs(0))))
    assert stacked_modules(one) == {}
    names = parameters(Model())
    assert names["blocks.2.gamma"].shape == (WIDTH,)
    assert names["first.kernel"].shape == (WIDTH, WIDTH)


def test_layers_of_other_counts_are_lists_of_their_own():
    class Two(nnx.Module):
        def __init__(self):
            self.left = stacked(Block, 2)
            self.right = stacked(Block, 4)

    modules = dict(nnx.iter_modules(Two()))
    assert stacked_modules(modules) == {("left",): 2, ("right",): 4}


def test_a_lone_layer_that_is_stacked_is_a_list_of_layers():
    class Lone(nnx.Module):
        def __init__(self):
            self.linear = stacked(lambda rngs: nnx.Linear(4, WIDTH, rngs=rngs), 2)

        def __call__(self, x):
            return sum(x @ self.linear.kernel[i] + self.linear.bias[i] for i in range(2))

    class TorchLone(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.ModuleList([nn.Linear(4, WIDTH) for _ in range(2)])

        def forward(self, x):
            return sum(layer(x) for layer in self.linear)

    report = compare(Lone(), TorchLone(), [(3, 4)], checks=["forward", "gradients"])
    assert report.passed, report.explain()
    names = ["linear.0.bias", "linear.1.bias", "linear.0.kernel", "linear.1.kernel"]
    assert list(parameters(Lone())) == names

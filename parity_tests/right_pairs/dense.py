"""Layers of single tokens: linear layers, embeddings, activations and norms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity_tests.right_pairs.pairs import IMAGES, Build, Sides, Size, rngs


def linear(size: Size) -> Sides:
    ours = nnx.Linear(size.width, size.out, rngs=rngs())
    return Sides(ours, torch.nn.Linear(size.width, size.out), [size.sequence])


def linear_without_bias(size: Size) -> Sides:
    ours = nnx.Linear(size.width, size.out, use_bias=False, rngs=rngs())
    return Sides(ours, torch.nn.Linear(size.width, size.out, bias=False), [size.sequence])


def linear_of_many_tokens(size: Size) -> Sides:
    """The pair whose bias sums over most tokens: 2,048 at the largest size."""
    # Few inputs: what is tested is the sum over tokens.
    ours = nnx.Linear(8, size.out, rngs=rngs())
    return Sides(ours, torch.nn.Linear(8, size.out), [(2, 32 * size.heads**2 // 2, 8)])


class _TwoHeads(nnx.Module):
    def __init__(self, size: Size):
        self.a = nnx.Linear(size.width, size.out, rngs=rngs())
        self.b = nnx.Linear(size.width, size.out + 1, rngs=rngs())

    def __call__(self, x):
        return self.a(x), self.b(x)


class _TorchTwoHeads(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.a = torch.nn.Linear(size.width, size.out)
        self.b = torch.nn.Linear(size.width, size.out + 1)

    def forward(self, x):
        return self.a(x), self.b(x)


# Outputs of different widths, which cannot be swapped.
def two_outputs(size: Size) -> Sides:
    return Sides(_TwoHeads(size), _TorchTwoHeads(size), [size.sequence])


# A parameter whose gradient is 0 in JAX is without one in PyTorch.
class _Unused(nnx.Module):
    def __init__(self, size: Size):
        self.used = nnx.Linear(size.width, size.out, rngs=rngs())
        self.unused = nnx.Linear(size.width, size.out + 2, rngs=rngs())

    def __call__(self, x):
        return self.used(x)


class _TorchUnused(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.used = torch.nn.Linear(size.width, size.out)
        self.unused = torch.nn.Linear(size.width, size.out + 2)

    def forward(self, x):
        return self.used(x)


def unused_parameters(size: Size) -> Sides:
    return Sides(_Unused(size), _TorchUnused(size), [size.sequence])


def general_linear(size: Size) -> Sides:
    """A product over two axes, as that behind the heads of attention."""
    ours = nnx.LinearGeneral((size.heads, size.width), size.out, axis=(-2, -1), rngs=rngs())
    theirs = torch.nn.Linear(size.heads * size.width, size.out)
    inputs = [(size.batch, size.tokens, size.heads, size.width)]
    # PyTorch's layer takes one axis, so that heads and their width are joined before it.
    flattened = {"torch_call": lambda layer, x: layer(x.flatten(-2))}
    return Sides(ours, theirs, inputs, flattened)


def embedding(size: Size) -> Sides:
    ours = nnx.Embed(size.out, size.width, rngs=rngs())
    return Sides(ours, torch.nn.Embedding(size.out, size.width), [_ids(size)])


class _Tied(nnx.Module):
    def __init__(self, size: Size):
        self.table = nnx.Embed(size.out, size.width, rngs=rngs())

    def __call__(self, ids):
        # One table is used twice, so that two gradients are added.
        return self.table.attend(jnp.tanh(self.table(ids)))


class _TorchTied(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.table = torch.nn.Embedding(size.out, size.width)

    def forward(self, ids):
        return self.table(ids).tanh() @ self.table.weight.T


def tied_embedding(size: Size) -> Sides:
    return Sides(_Tied(size), _TorchTied(size), [_ids(size)])


def one_hot(size: Size) -> Sides:
    """A function of integers, without parameters."""

    def ours(ids):
        return jax.nn.one_hot(ids, size.out, dtype=jnp.float64)

    def theirs(ids):
        return torch.nn.functional.one_hot(ids, size.out).double()

    return Sides(ours, theirs, [_ids(size)])


def parity_of_ids(size: Size) -> Sides:
    """A function of integers whose output is whole, too."""
    return Sides(lambda ids: ids % 2, lambda ids: ids % 2, [_ids(size)])


def _ids(size: Size) -> np.ndarray:
    return np.random.default_rng(0).integers(0, size.out, (size.batch, size.tokens))


def dropout_in_eval(size: Size) -> Sides:
    ours = nnx.Sequential(
        nnx.Linear(size.width, size.out, rngs=rngs()), nnx.Dropout(0.3, rngs=rngs())
    )
    theirs = torch.nn.Sequential(torch.nn.Linear(size.width, size.out), torch.nn.Dropout(0.3))
    return Sides(ours, theirs.eval(), [size.sequence])


def _activation(ours, theirs, size: Size) -> Sides:
    return Sides(lambda x: ours(x), theirs, [size.sequence])


# The softplus of PyTorch is x itself above a threshold, which is 20 by default.
ACTIVATIONS = {
    "relu": (jax.nn.relu, torch.nn.ReLU()),
    "relu6": (jax.nn.relu6, torch.nn.ReLU6()),
    "leaky_relu": (jax.nn.leaky_relu, torch.nn.LeakyReLU()),
    "elu": (jax.nn.elu, torch.nn.ELU()),
    "selu": (jax.nn.selu, torch.nn.SELU()),
    "celu": (jax.nn.celu, torch.nn.CELU()),
    "gelu": (partial(jax.nn.gelu, approximate=False), torch.nn.GELU()),
    "gelu_tanh": (jax.nn.gelu, torch.nn.GELU(approximate="tanh")),
    "silu": (jax.nn.silu, torch.nn.SiLU()),
    "mish": (jax.nn.mish, torch.nn.Mish()),
    "sigmoid": (jax.nn.sigmoid, torch.nn.Sigmoid()),
    "tanh": (jnp.tanh, torch.nn.Tanh()),
    "softplus": (jax.nn.softplus, torch.nn.Softplus(threshold=700)),
    "soft_sign": (jax.nn.soft_sign, torch.nn.Softsign()),
    # torch.nn.Hardsigmoid has 1 / 6 in float32 in its gradient.
    "hard_sigmoid": (jax.nn.hard_sigmoid, lambda x: torch.nn.functional.relu6(x + 3) / 6),
    "hard_swish": (jax.nn.hard_swish, torch.nn.Hardswish()),
    "hard_tanh": (jax.nn.hard_tanh, torch.nn.Hardtanh()),
    "log_sigmoid": (jax.nn.log_sigmoid, torch.nn.LogSigmoid()),
    "glu": (jax.nn.glu, torch.nn.GLU()),
    "softmax": (jax.nn.softmax, torch.nn.Softmax(dim=-1)),
    "log_softmax": (jax.nn.log_softmax, torch.nn.LogSoftmax(dim=-1)),
}


def layer_norm(size: Size) -> Sides:
    # The epsilon and the variance of PyTorch: Flax's own are 1e-6 and E[x^2] - E[x]^2.
    ours = nnx.LayerNorm(size.width, epsilon=1e-5, use_fast_variance=False, rngs=rngs())
    return Sides(ours, torch.nn.LayerNorm(size.width), [size.sequence])


def rms_norm(size: Size) -> Sides:
    ours = nnx.RMSNorm(size.width, epsilon=1e-6, rngs=rngs())
    return Sides(ours, torch.nn.RMSNorm(size.width, eps=1e-6), [size.sequence])


def group_norm(size: Size) -> Sides:
    options = {"num_groups": size.heads, "epsilon": 1e-5, "use_fast_variance": False}
    ours = nnx.GroupNorm(size.channels, **options, rngs=rngs())
    theirs = torch.nn.GroupNorm(size.heads, size.channels)
    return Sides(ours, theirs, [size.image], IMAGES)


def batch_norm_in_eval(size: Size) -> Sides:
    ours = nnx.BatchNorm(
        size.channels, use_running_average=True, epsilon=1e-5, momentum=0.9, rngs=rngs()
    )
    return Sides(ours, torch.nn.BatchNorm2d(size.channels).eval(), [size.image], IMAGES)


def instance_norm(size: Size) -> Sides:
    options = {"epsilon": 1e-5, "use_fast_variance": False}
    ours = nnx.InstanceNorm(size.channels, **options, rngs=rngs())
    # PyTorch has no parameters here unless asked for.
    theirs = torch.nn.InstanceNorm2d(size.channels, affine=True)
    return Sides(ours, theirs.eval(), [size.image], IMAGES)


LAYERS: tuple[Build, ...] = (
    linear,
    linear_without_bias,
    linear_of_many_tokens,
    two_outputs,
    unused_parameters,
    general_linear,
    embedding,
    tied_embedding,
    one_hot,
    parity_of_ids,
    dropout_in_eval,
    layer_norm,
    rms_norm,
    group_norm,
    batch_norm_in_eval,
    instance_norm,
)
PAIRS: dict[str, Build] = {build.__name__: build for build in LAYERS}
for _name, _sides in ACTIVATIONS.items():
    PAIRS[_name] = partial(_activation, *_sides)

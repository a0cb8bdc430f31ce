"""Blocks of images: with norms, residual, squeezed, and a U-Net."""

import jax
import jax.numpy as jnp
import torch
from flax import nnx

from parity_tests.right_pairs.pairs import IMAGES, Build, Sides, Size, channels_first, rngs


def _conv(d_in: int, d_out: int, width: int = 3, **options) -> nnx.Conv:
    """Return a convolution of square windows, padded so that the image keeps its size."""
    # Flax's own padding, 'SAME', lies elsewhere than PyTorch's where strides are 2.
    return nnx.Conv(d_in, d_out, (width, width), padding=width // 2, rngs=rngs(), **options)


class _ConvNormRelu(nnx.Module):
    def __init__(self, size: Size):
        self.conv = _conv(size.channels, size.channels)
        # PyTorch's momentum of 0.1 is the share of the new batch, Flax's that of the old ones.
        options = {"use_running_average": True, "epsilon": 1e-5, "momentum": 0.9}
        self.norm = nnx.BatchNorm(size.channels, **options, rngs=rngs())

    def __call__(self, x):
        return jax.nn.relu(self.norm(self.conv(x)))


class _TorchConvNormRelu(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.conv = torch.nn.Conv2d(size.channels, size.channels, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(size.channels)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def conv_norm_relu(size: Size) -> Sides:
    return Sides(_ConvNormRelu(size), _TorchConvNormRelu(size).eval(), [size.image], IMAGES)


class _Classifier(nnx.Module):
    def __init__(self, size: Size):
        self.conv = _conv(size.channels, size.channels)
        self.head = nnx.Linear(size.channels, size.out, rngs=rngs())

    def __call__(self, x):
        return self.head(jnp.mean(jax.nn.relu(self.conv(x)), (1, 2)))


class _TorchClassifier(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.conv = torch.nn.Conv2d(size.channels, size.channels, 3, padding=1)
        self.head = torch.nn.Linear(size.channels, size.out)

    def forward(self, x):
        return self.head(self.conv(x.movedim(-1, 1)).relu().mean((2, 3)))


def image_classifier(size: Size) -> Sides:
    return Sides(_Classifier(size), _TorchClassifier(size), [size.image])


class _Residual(nnx.Module):
    """The block of a diffusion U-Net, with the embedding of the time."""

    def __init__(self, size: Size):
        self.norm1 = self._norm(size)
        self.conv1 = _conv(size.channels, size.channels)
        self.time = nnx.Linear(size.width, size.channels, rngs=rngs())
        self.norm2 = self._norm(size)
        self.conv2 = _conv(size.channels, size.channels)

    @staticmethod
    def _norm(size: Size):
        options = {"num_groups": size.heads, "epsilon": 1e-5, "use_fast_variance": False}
        return nnx.GroupNorm(size.channels, **options, rngs=rngs())

    def __call__(self, x, time):
        hidden = self.conv1(jax.nn.silu(self.norm1(x)))
        hidden += self.time(jax.nn.silu(time))[:, None, None]
        return x + self.conv2(jax.nn.silu(self.norm2(hidden)))


class _TorchResidual(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm1 = torch.nn.GroupNorm(size.heads, size.channels)
        self.conv1 = torch.nn.Conv2d(size.channels, size.channels, 3, padding=1)
        self.time = torch.nn.Linear(size.width, size.channels)
        self.norm2 = torch.nn.GroupNorm(size.heads, size.channels)
        self.conv2 = torch.nn.Conv2d(size.channels, size.channels, 3, padding=1)

    def forward(self, x, time):
        silu = torch.nn.functional.silu
        # The time is added to channels that are first, in Flax to those that are last.
        x = x.movedim(-1, 1).contiguous()
        hidden = self.conv1(silu(self.norm1(x)))
        hidden = hidden + self.time(silu(time))[:, :, None, None]
        return (x + self.conv2(silu(self.norm2(hidden)))).movedim(1, -1)


def diffusion_block(size: Size) -> Sides:
    inputs = [size.image, (size.batch, size.width)]
    return Sides(_Residual(size), _TorchResidual(size), inputs)


class _SqueezeExcite(nnx.Module):
    def __init__(self, size: Size):
        self.reduce = nnx.Linear(size.channels, size.heads, rngs=rngs())
        self.expand = nnx.Linear(size.heads, size.channels, rngs=rngs())

    def __call__(self, x):
        pooled = jnp.mean(x, (1, 2))
        gate = jax.nn.sigmoid(self.expand(jax.nn.relu(self.reduce(pooled))))
        return x * gate[:, None, None]


class _TorchSqueezeExcite(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.reduce = torch.nn.Linear(size.channels, size.heads)
        self.expand = torch.nn.Linear(size.heads, size.channels)

    def forward(self, x):
        gate = self.expand(self.reduce(x.mean((1, 2))).relu()).sigmoid()
        return x * gate[:, None, None]


def squeeze_excite(size: Size) -> Sides:
    return Sides(_SqueezeExcite(size), _TorchSqueezeExcite(size), [size.image])


class _PatchEmbedding(nnx.Module):
    def __init__(self, size: Size):
        options = {"strides": 2, "padding": "VALID"}
        self.project = nnx.Conv(size.channels, size.width, (2, 2), **options, rngs=rngs())
        patches = size.pixels * (size.pixels - 2) // 4
        self.positions = nnx.Param(jnp.zeros((1, patches + 1, size.width)))
        self.cls = nnx.Param(jnp.zeros((1, 1, size.width)))

    def __call__(self, x):
        patches = self.project(x).reshape(len(x), -1, self.cls.shape[-1])
        first = jnp.broadcast_to(self.cls[...], (len(x), 1, self.cls.shape[-1]))
        # A float32 parameter would widen what is concatenated with it.
        first = first.astype(x.dtype)
        return jnp.concatenate([first, patches], 1) + self.positions[...]


class _TorchPatchEmbedding(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.project = torch.nn.Conv2d(size.channels, size.width, 2, stride=2)
        patches = size.pixels * (size.pixels - 2) // 4
        self.positions = torch.nn.Parameter(torch.zeros(1, patches + 1, size.width))
        self.cls = torch.nn.Parameter(torch.zeros(1, 1, size.width))

    def forward(self, x):
        patches = self.project(x.movedim(-1, 1)).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(x), -1, -1), patches], 1) + self.positions


def patch_embedding(size: Size) -> Sides:
    return Sides(_PatchEmbedding(size), _TorchPatchEmbedding(size), [size.image])


class _UNet(nnx.Module):
    """One level down and up again, with a skip."""

    def __init__(self, size: Size):
        few, many = size.channels, 2 * size.channels
        self.inner = _conv(few, few)
        self.down = _conv(few, many, strides=2)
        # Else the kernel is that of PyTorch turned around.
        options = {"strides": 2, "padding": "SAME", "transpose_kernel": True}
        self.up = nnx.ConvTranspose(many, few, (4, 4), **options, rngs=rngs())
        self.last = _conv(many, size.out)

    def __call__(self, x):
        skip = jax.nn.relu(self.inner(x))
        up = self.up(jax.nn.relu(self.down(skip)))
        return self.last(jnp.concatenate([skip, up], -1))


class _TorchUNet(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        few, many = size.channels, 2 * size.channels
        self.inner = torch.nn.Conv2d(few, few, 3, padding=1)
        self.down = torch.nn.Conv2d(few, many, 3, stride=2, padding=1)
        self.up = torch.nn.ConvTranspose2d(many, few, 4, stride=2, padding=1)
        self.last = torch.nn.Conv2d(many, size.out, 3, padding=1)

    def forward(self, x):
        skip = self.inner(x).relu()
        up = self.up(self.down(skip).relu())
        return self.last(torch.cat([skip, up], 1))


def u_net(size: Size) -> Sides:
    return Sides(_UNet(size), _TorchUNet(size), [size.image], IMAGES)


class _ConvNeXt(nnx.Module):
    def __init__(self, width: int):
        self.depthwise = _conv(width, width, 7, feature_group_count=width)
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, use_fast_variance=False, rngs=rngs())
        self.expand = nnx.Linear(width, 4 * width, rngs=rngs())
        self.project = nnx.Linear(4 * width, width, rngs=rngs())
        self.gamma = nnx.Param(jnp.ones((width,)))

    def __call__(self, x):
        hidden = self.expand(self.norm(self.depthwise(x)))
        hidden = self.project(jax.nn.gelu(hidden, approximate=False))
        return x + self.gamma[...] * hidden


class _TorchConvNeXt(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.depthwise = torch.nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = torch.nn.LayerNorm(width, eps=1e-6)
        self.expand = torch.nn.Linear(width, 4 * width)
        self.project = torch.nn.Linear(4 * width, width)
        self.gamma = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        # Only the convolution sees channels first.
        hidden = self.expand(self.norm(channels_first(self.depthwise, x)))
        return x + self.gamma * self.project(torch.nn.functional.gelu(hidden))


def convnext_block(size: Size) -> Sides:
    return Sides(_ConvNeXt(size.channels), _TorchConvNeXt(size.channels), [size.image])


LAYERS: tuple[Build, ...] = (
    conv_norm_relu,
    image_classifier,
    diffusion_block,
    squeeze_excite,
    patch_embedding,
    u_net,
    convnext_block,
)
PAIRS: dict[str, Build] = {build.__name__: build for build in LAYERS}

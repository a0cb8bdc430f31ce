"""Layers of images, channels last: convolutions, pools and resizing."""

from functools import partial

import jax
import jax.numpy as jnp
import torch
from flax import nnx

from parity_tests.right_pairs.pairs import IMAGES, Build, Sides, Size, rngs


def convolution(size: Size) -> Sides:
    ours = nnx.Conv(size.channels, size.out, (3, 3), padding=1, rngs=rngs())
    theirs = torch.nn.Conv2d(size.channels, size.out, 3, padding=1)
    return Sides(ours, theirs, [size.image], IMAGES)


def convolution_with_stride(size: Size) -> Sides:
    ours = nnx.Conv(size.channels, size.out, (3, 3), strides=2, padding=1, rngs=rngs())
    theirs = torch.nn.Conv2d(size.channels, size.out, 3, stride=2, padding=1)
    return Sides(ours, theirs, [size.image], IMAGES)


def dilated_convolution(size: Size) -> Sides:
    options = {"kernel_dilation": 2, "padding": "VALID", "use_bias": False}
    ours = nnx.Conv(size.channels, size.out, (3, 3), **options, rngs=rngs())
    theirs = torch.nn.Conv2d(size.channels, size.out, 3, dilation=2, bias=False)
    return Sides(ours, theirs, [size.image], IMAGES)


def depthwise_convolution(size: Size) -> Sides:
    groups = size.channels
    ours = nnx.Conv(groups, groups, (3, 3), padding=1, feature_group_count=groups, rngs=rngs())
    theirs = torch.nn.Conv2d(groups, groups, 3, padding=1, groups=groups)
    return Sides(ours, theirs, [size.image], IMAGES)


def grouped_convolution(size: Size) -> Sides:
    out = 2 * size.channels
    ours = nnx.Conv(
        size.channels, out, (3, 3), padding=1, feature_group_count=size.heads, rngs=rngs()
    )
    theirs = torch.nn.Conv2d(size.channels, out, 3, padding=1, groups=size.heads)
    return Sides(ours, theirs, [size.image], IMAGES)


def pointwise_convolution(size: Size) -> Sides:
    ours = nnx.Conv(size.channels, size.out, (1, 1), rngs=rngs())
    return Sides(ours, torch.nn.Conv2d(size.channels, size.out, 1), [size.image], IMAGES)


def convolution_of_rows(size: Size) -> Sides:
    ours = nnx.Conv(size.width, size.out, (3,), padding=1, rngs=rngs())
    theirs = torch.nn.Conv1d(size.width, size.out, 3, padding=1)
    return Sides(ours, theirs, [size.sequence], IMAGES)


def causal_convolution(size: Size) -> Sides:
    ours = nnx.Conv(size.width, size.out, (4,), padding="CAUSAL", rngs=rngs())

    def causal(layer, x):
        # Only in front: no output sees what comes after it.
        padded = torch.nn.functional.pad(x.movedim(-1, 1), (3, 0))
        return layer(padded).movedim(1, -1)

    theirs = torch.nn.Conv1d(size.width, size.out, 4)
    return Sides(ours, theirs, [size.sequence], {"torch_call": causal})


def convolution_of_volumes(size: Size) -> Sides:
    ours = nnx.Conv(size.heads, size.out, (3, 3, 3), padding=1, rngs=rngs())
    theirs = torch.nn.Conv3d(size.heads, size.out, 3, padding=1)
    # Three sides that differ, and smaller than those of images: volumes take long.
    depth = size.pixels // 2
    inputs = [(size.batch, depth, depth + 1, depth - 1, size.heads)]
    return Sides(ours, theirs, inputs, IMAGES)


def transposed_convolution(size: Size) -> Sides:
    options = {"strides": 2, "padding": "SAME", "transpose_kernel": True}
    # With strides of 2, 'SAME' is a padding of 1 in PyTorch where kernels are 4 wide.
    ours = nnx.ConvTranspose(size.channels, size.out, (4, 4), **options, rngs=rngs())
    theirs = torch.nn.ConvTranspose2d(size.channels, size.out, 4, stride=2, padding=1)
    return Sides(ours, theirs, [size.image], IMAGES)


def _pool(ours, theirs, size: Size) -> Sides:
    # A function of one argument, as partial objects have no signature of the pool's input.
    return Sides(lambda x: ours(x), theirs, [size.image], IMAGES)


def _window(pool, width: int):
    return partial(pool, window_shape=(width, width), strides=(width, width))


POOLS = {
    "average_pool": (_window(nnx.avg_pool, 2), torch.nn.AvgPool2d(2)),
    "average_pool_of_large_windows": (_window(nnx.avg_pool, 7), torch.nn.AvgPool2d(7)),
    "max_pool": (_window(nnx.max_pool, 2), torch.nn.MaxPool2d(2)),
    "mean_over_pixels": (
        lambda x: jnp.mean(x, (1, 2), keepdims=True),
        torch.nn.AdaptiveAvgPool2d(1),
    ),
    "nearest": (
        lambda x: jax.image.resize(x, (len(x), *_doubled(x), x.shape[-1]), "nearest"),
        torch.nn.Upsample(scale_factor=2),
    ),
    "bilinear": (
        lambda x: jax.image.resize(x, (len(x), *_doubled(x), x.shape[-1]), "bilinear"),
        torch.nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
    ),
}


def _doubled(x) -> tuple[int, int]:
    return 2 * x.shape[1], 2 * x.shape[2]


LAYERS: tuple[Build, ...] = (
    convolution,
    convolution_with_stride,
    dilated_convolution,
    depthwise_convolution,
    grouped_convolution,
    pointwise_convolution,
    convolution_of_rows,
    causal_convolution,
    convolution_of_volumes,
    transposed_convolution,
)
PAIRS: dict[str, Build] = {build.__name__: build for build in LAYERS}
for _name, _sides in POOLS.items():
    PAIRS[_name] = partial(_pool, *_sides)

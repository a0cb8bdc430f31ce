"""Causes in how images become tokens.

Padding, the order of patches and pixels, class tokens, positions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from einops import rearrange
from flax import nnx
from torch.nn import functional as F

from flax_attn.convert import Layout, Rule
from flax_attn.parity import compare
from flax_attn.parity.trace.causes import causes_of
from flax_attn.parity.trace.substitute import Evidence, Target

RANDOM = np.random.default_rng(0)


def draw(*shape):
    return torch.tensor(RANDOM.normal(size=shape))


def said(theirs, ours, sources, weights=None, label="output", alone=()):
    target = Target(label, ours.numpy(), theirs.numpy())
    found = Evidence("m", "module", [target], {name: x.numpy() for name, x in sources.items()})
    found.alone |= {name: (found.sources[name],) for name in alone}
    lines = causes_of(found, {f"m.{name}": w.numpy() for name, w in (weights or {}).items()})
    return [line.removeprefix("m, input of fc: ").removeprefix("m: ") for line in lines]


# Convolutions.

IMAGE, KERNEL, BIAS = draw(2, 4, 8, 6), draw(6, 2, 3, 3), draw(6)
WEIGHTS = {"weight": KERNEL, "bias": BIAS}


def conv(before=1, after=1, mode="constant", flip=False, **options):
    padded = F.pad(IMAGE, (before, after, before, after), mode=mode)
    return F.conv2d(
        padded, KERNEL.flip(2, 3) if flip else KERNEL, BIAS, **{"stride": 2, "groups": 2, **options}
    )


RIGHT = "a convolution of stride 2, padded by 1 before and 0 after"


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (conv(0, 1), "a convolution of stride 2, padded by 0 before and 1 after"),
        (conv(mode="circular"), f"{RIGHT} of the other end"),
        (conv(mode="replicate"), f"{RIGHT} of the last row"),
        (conv(flip=True), f"{RIGHT}, its kernel flipped"),
        (
            conv(2, 1, dilation=2),
            "a convolution of stride 2, padded by 2 before and 1 after, dilation 2",
        ),
    ],
)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_convolutions(ours, name, last):
    theirs, image = conv(), IMAGE
    if last:
        ours, theirs, image = (x.movedim(1, -1) for x in (ours, theirs, image))
    assert said(theirs, ours, {"input": image}, WEIGHTS) == [f"flax has {name}, torch has {RIGHT}"]


def test_another_error_of_a_convolution_is_not_called_padding():
    lines = said(conv() + 1e-3 * draw(*conv().shape), conv(), {"input": IMAGE}, WEIGHTS)
    assert lines == [f"flax has {RIGHT}, torch has none of the known formulas"]


def test_the_same_padding_of_flax_is_a_cause_within_a_model():
    class Ours(nnx.Module):
        def __init__(self, padding):
            self.conv = nnx.Conv(2, 3, (3, 3), strides=2, padding=padding, rngs=nnx.Rngs(0))

        def __call__(self, images):
            return jnp.tanh(self.conv(images)).mean((1, 2))

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 3, 3, stride=2, padding=1)

        def forward(self, images):
            return self.conv(images).tanh().mean((2, 3))

    def judged(padding):
        call = {"flax_call": lambda model, images: model(images.transpose(0, 2, 3, 1))}
        return compare(Ours(padding), Theirs(), [(2, 2, 8, 6)], checks=["forward"], **call)

    with jax.numpy_dtype_promotion("standard"):
        report, right = judged("SAME"), judged(1)
    assert report.causes == [
        "conv: flax has a convolution of stride 2, padded by 0 before and 1 after, torch has"
        f" {RIGHT}"
    ]
    assert right.passed


# Transposed convolutions.

SPREAD = draw(4, 3, 4, 2)  # the kernel, and its bias
SHIFT = draw(3)


def transposed(stride=2, cut=1, flip=False, bias=True):
    kernel = SPREAD.flip(2, 3) if flip else SPREAD
    whole = F.conv_transpose2d(IMAGE, kernel, SHIFT if bias else None, stride=stride)
    return whole[:, :, cut : cut + 16, cut : cut + 11]


WHOLE = "a transposed convolution of stride 2, 1 cut off before and 1, 0 after"


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (transposed(flip=True), f"{WHOLE}, its kernel flipped"),
        (
            transposed(cut=0),
            "a transposed convolution of stride 2, 0 cut off before and 2, 1 after",
        ),
    ],
)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_transposed_convolutions(ours, name, last):
    theirs, image = transposed(), IMAGE
    if last:
        ours, theirs, image = (x.movedim(1, -1) for x in (ours, theirs, image))
    assert said(theirs, ours, {"input": image}, {"weight": SPREAD, "bias": SHIFT}) == [
        f"flax has {name}, torch has {WHOLE}"
    ]


def test_another_error_of_a_transposed_convolution_is_not_called_a_cut():
    weights = {"weight": SPREAD, "bias": SHIFT}
    assert said(transposed(), transposed(bias=False), {"input": IMAGE}, weights) == [
        f"torch has {WHOLE}, flax has none of the known formulas"
    ]


# Patches.

PATCH = {"p": 4, "q": 2}  # of images of 8 by 6: 2 rows and 3 columns of patches


def patched(order, rows="i j"):
    return rearrange(IMAGE, f"b c (i p) (j q) -> b ({rows}) ({order})", **PATCH)


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (patched("p q c"), "patches of input row by row, each by row, column, channel"),
        (patched("c q p"), "patches of input row by row, each by channel, column, row"),
        (
            patched("c p q", "j i"),
            "patches of input column by column, each by channel, row, column",
        ),
    ],
)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_patches(ours, name, last):
    image = IMAGE.movedim(1, -1) if last else IMAGE
    lines = said(patched("c p q"), ours, {"input": image}, label="input of fc")
    right = "patches of input row by row, each by channel, row, column"
    assert lines == [f"flax has {name}, torch has {right}"]


# Tokens.

GRID = draw(2, 5, 3, 4)  # what a convolution makes of an image
ROWS, COLUMNS = GRID.flatten(2).mT, rearrange(GRID, "b d i j -> b (j i) d")
CLASS, POSITIONS = draw(1, 1, 5), draw(1, 15, 5)
TOKENS = {"cls_token": CLASS, "pos_embed": POSITIONS}


def row_of(grid=ROWS, first=True, start=0):
    token = CLASS.expand(2, 1, 5)
    whole = torch.cat([token, grid] if first else [grid, token], 1)
    return whole + POSITIONS[:, start : start + whole.shape[1]]


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (row_of(COLUMNS), "cls_token, then conv column by column + pos_embed"),
        (row_of(first=False), "conv row by row, then cls_token + pos_embed"),
        (row_of(start=2), "cls_token, then conv row by row + pos_embed from row 2 on"),
        (torch.cat([CLASS.expand(2, 1, 5), ROWS], 1), "cls_token, then conv row by row"),
    ],
)
def test_tokens(ours, name):
    lines = said(row_of(), ours, {"input": IMAGE, "conv": GRID}, TOKENS, label="input of fc")
    assert lines == [f"flax has {name}, torch has cls_token, then conv row by row + pos_embed"]


SQUARE = draw(1, 10, 5)  # a class token and 3 by 3 patches


def resized(how, grid=(5, 4), **options):
    """Return tokens with positions resized by PyTorch or by JAX."""
    square = SQUARE[:, 1:].reshape(1, 3, 3, 5)
    if how == "jax":
        with jax.enable_x64(True):
            image = torch.tensor(
                np.asarray(jax.image.resize(jnp.asarray(square.numpy()), (1, *grid, 5), **options))
            )
    else:
        image = F.interpolate(
            square.movedim(-1, 1), **({"size": grid, "mode": how} | options)
        ).movedim(1, -1)
    tokens = torch.cat([CLASS.expand(2, 1, 5), BIG.flatten(2).mT], 1)
    return tokens + torch.cat([SQUARE[:, :1], image.flatten(1, 2)], 1)


BIG = draw(2, 5, 5, 4)
FACTORS = {"size": None, "scale_factor": (5.1 / 3, 4.1 / 3), "recompute_scale_factor": False}


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (resized("jax", method="bicubic"), "bicubic (a = -0.5, as in JAX)"),
        (resized("jax", method="bilinear"), "bilinear"),
        (resized("bicubic", align_corners=True), "bicubic (a = -0.75), its corners aligned"),
        (resized("bilinear"), "bilinear"),
        (resized("bicubic", **FACTORS), "bicubic (a = -0.75), 0.1 added to the sizes"),
    ],
)
def test_resized_positions(ours, name):
    lines = said(
        resized("bicubic"),
        ours,
        {"conv": BIG},
        {"cls_token": CLASS, "pos_embed": SQUARE},
        "input of fc",
    )
    text = "cls_token, then conv row by row + pos_embed resized, "
    assert lines == [f"flax has {text}{name}, torch has {text}bicubic (a = -0.75, as in PyTorch)"]


def test_positions_are_resized_for_patches_that_come_as_a_row():
    row, weights = BIG.flatten(2).mT, {"cls_token": CLASS, "pos_embed": SQUARE}
    ours, theirs = resized("jax", method="bicubic"), resized("bicubic")
    text = "cls_token, then patch + pos_embed resized, bicubic (a = "
    assert said(theirs, ours, {"patch": row}, weights) == [
        f"flax has {text}-0.5, as in JAX), torch has {text}-0.75, as in PyTorch)"
    ]


def test_dropout_behind_positions_hides_nothing():
    ours, theirs = resized("jax", method="bicubic"), resized("bicubic")
    sources, weights = {"dropout": theirs, "conv": BIG}, {"cls_token": CLASS, "pos_embed": SQUARE}
    text = "cls_token, then conv row by row + pos_embed resized, bicubic (a = "
    assert said(theirs, ours, sources, weights, alone=["dropout"]) == [
        f"flax has {text}-0.5, as in JAX), torch has {text}-0.75, as in PyTorch)"
    ]


def test_what_pytorch_calls_last_is_no_formula_by_itself():
    assert said(ROWS, ROWS + draw(*ROWS.shape), {"norm": ROWS}, alone=["norm"]) == []


def test_tokens_of_something_else_are_not_named():
    lines = said(row_of() + draw(2, 13, 5), row_of(), {"conv": GRID}, TOKENS, "input of fc")
    assert lines == [
        (
            "flax has cls_token, then conv row by row + pos_embed, torch has none of the known"
            " formulas"
        ),
    ]


class FlaxViT(nnx.Module):
    def __init__(self, by_columns):
        self.conv = nnx.Conv(2, 5, (2, 2), strides=2, padding="VALID", rngs=nnx.Rngs(0))
        self.head, self.by_columns = nnx.Linear(5, 3, rngs=nnx.Rngs(0)), by_columns
        self.pos = nnx.Param(jnp.zeros((1, 12, 5)))

    def __call__(self, images):
        x = self.conv(images.transpose(0, 2, 3, 1))
        x = x.swapaxes(1, 2) if self.by_columns else x
        return self.head(x.reshape(len(x), -1, 5) + self.pos.get_value())


class TorchViT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(2, 5, 2, 2), torch.nn.Linear(5, 3)
        self.pos = torch.nn.Parameter(torch.zeros(1, 12, 5))

    def forward(self, images):
        return self.head(self.conv(images).flatten(2).mT + self.pos)


@pytest.mark.parametrize("by_columns", [True, False])
def test_the_order_of_patches_is_a_cause_within_a_model(by_columns):
    layout = Layout(
        (
            Rule(("conv.kernel",), "conv.weight", "h w i o -> o i h w"),
            Rule(("conv.bias",), "conv.bias"),
            Rule(("head.kernel",), "head.weight", "i o -> o i"),
            Rule(("head.bias",), "head.bias"),
            Rule(("pos",), "pos"),
        )
    )
    with jax.numpy_dtype_promotion("standard"):
        report = compare(
            FlaxViT(by_columns), TorchViT(), [(2, 2, 6, 8)], layout=layout, checks=["forward"]
        )
    text = (
        "the whole module, input of head: flax has conv column by column + pos, torch has conv row"
        " by row + pos"
    )
    assert report.causes == ([text] if by_columns else [])
    assert report.passed is not by_columns


@pytest.mark.parametrize("biased", [False, True])
def test_images_cast_to_float32_are_the_one_cause_of_what_follows(biased):
    class Ours(nnx.Module):
        def __init__(self):
            self.patch = nnx.Conv(2, 5, (2, 2), strides=2, padding="VALID", rngs=nnx.Rngs(0))

        def __call__(self, images):
            return self.patch(images.astype(jnp.float32)) + 1e-3 * biased

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = torch.nn.Conv2d(2, 5, 2, 2)

        def forward(self, images):
            return self.patch(images.movedim(-1, 1)).movedim(1, -1)

    with jax.numpy_dtype_promotion("standard"):
        report = compare(Ours(), Theirs(), [(2, 6, 8, 2)], layout="torch", checks=["forward"])
    wrong = {node.name for node in report.divergence.locally_wrong}
    assert report.causes == [
        "the whole module, input of patch: flax has numbers of float32, torch of float64"
    ]
    assert wrong == {"."}
    assert biased is (report.divergence.nodes[-1].local_error > 1e-5)

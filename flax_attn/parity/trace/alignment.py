"""The axes of activations: find out where the order differs between the sides, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from einops import rearrange

from flax_attn.parity import tolerance
from flax_attn.parity.trace.hooks import ROOT, Activation

# How the axes of PyTorch's scores and weights, `b n t s` with n = k * g heads, may stand on the
# Flax side.
SCORES = "b (k g) t s"
ORDERS = {4: (SCORES, "(k g) b t s"), 5: ("k b g t s", "b k g t s", "g b k t s", "b g k t s")}
CHANNELS_FIRST, CHANNELS_LAST = "b c ...", "b ... c"
AGREE = 1e-6  # the error of two sides that agree, though a part may be in float32
STEPS = ("scores", "masked", "weights")  # with the axes of scores

Nodes = Mapping[str, Activation]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Axes:
    """The order of the axes of an array on either side.

    Args:
        flax: the pattern of einops on the Flax side.
        torch: the pattern on the PyTorch side.
        sizes: sizes of axes in the patterns.
    """

    flax: str
    torch: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    def to_torch(self, x: Any) -> Any:
        """Return an array of the Flax side with the axes of PyTorch."""
        return rearrange(x, f"{self.flax} -> {self.torch}", **self.sizes)

    def to_flax(self, x: Any) -> Any:
        """Return an array with the axes of PyTorch with those of the Flax side."""
        return rearrange(x, f"{self.torch} -> {self.flax}", **self.sizes)


IMAGES = Axes(CHANNELS_LAST, CHANNELS_FIRST)


@dataclass(frozen=True)
class Aligned:
    """The nodes of both sides, with the axes of PyTorch.

    Args:
        flax: the nodes of the Flax side.
        torch: the nodes of the PyTorch side, including those that cannot be compared.
        axes: axes of the outputs that have another order on the Flax side.
        inputs: axes of the inputs of modules; None for inputs in the same order.
        differing: the shapes of both sides, where they cannot be compared.
        unpaired: a line for each node that cannot be compared.
        ambiguous: scores whose axes could be read in two ways, neither of which agrees.
    """

    flax: dict[str, Activation]
    torch: dict[str, Activation]
    axes: dict[str, Axes]
    inputs: dict[str, tuple[Axes | None, ...]]
    differing: dict[str, tuple[Shape, Shape]]
    unpaired: tuple[str, ...]
    ambiguous: tuple[str, ...]


def aligned(flax: Nodes, torch: Nodes) -> Aligned:
    """Return the nodes of both sides with the axes of PyTorch, and what cannot be compared."""
    ours, theirs, axes, ambiguous = dict(flax), dict(torch), {}, []
    shared = [name for name in theirs if name in ours]
    for name in shared:
        if step_of(name) in STEPS:
            ours[name], theirs[name], turned, clear = _aligned_scores(ours[name], theirs[name])
            ambiguous += [] if clear else [name]
        else:
            turned = _images(ours[name].output, theirs[name].output) if name != ROOT else None
            ours[name] = (
                replace(ours[name], output=turned.to_torch(ours[name].output))
                if turned
                else ours[name]
            )
        axes |= {name: turned} if turned else {}
    inputs = {
        name: tuple(
            _images(x, y) for x, y in zip(ours[name].inputs, theirs[name].inputs, strict=False)
        )
        for name in shared
        if name != ROOT
    }
    shapes = {
        name: (ours[name].output.shape, theirs[name].output.shape)
        for name in shared
        if name != ROOT
    }
    differing = {name: both for name, both in shapes.items() if both[0] != both[1]}
    lines = [f"{name}: flax {flax}, torch {torch}" for name, (flax, torch) in differing.items()]
    for framework, here, there in (("flax", ours, theirs), ("torch", theirs, ours)):
        alone = (name for name in here if name not in there)
        lines += [
            name if name.startswith(f"{framework}:") else f"{framework}:{name}" for name in alone
        ]
    ours = {name: x for name, x in ours.items() if name not in differing}
    return Aligned(ours, theirs, axes, inputs, differing, tuple(lines), tuple(ambiguous))


def _aligned_scores(
    ours: Activation, theirs: Activation
) -> tuple[Activation, Activation, Axes | None, bool]:
    """Return both with axes `b n t s`, in the order with the smallest error that fits the shapes.

    The last value is whether there is no doubt.
    """
    fits = []
    for pattern in ORDERS.get(ours.output.ndim, ()):
        axes = Axes(
            pattern,
            SCORES,
            {"k": 1 if "(k g)" in pattern else ours.output.shape[pattern.split().index("k")]},
        )
        flax, torch = axes.to_torch(ours.output), theirs.output
        if (
            torch.ndim == 3 and torch.size == flax.size
        ):  # torch.nn.MultiheadAttention folds batch and heads
            torch = rearrange(torch, "(b n) t s -> b n t s", b=flax.shape[0])
        if flax.shape == torch.shape:
            fits.append((_error(flax, torch), axes, flax, torch))
    if not fits:
        return ours, theirs, None, True
    error, axes, flax, torch = min(fits, key=lambda fit: fit[0])
    clear = error <= AGREE or all(
        np.array_equal(flax, other, equal_nan=True) for _, _, other, _ in fits
    )
    turned = None if axes.flax == SCORES else axes
    return replace(ours, output=flax), replace(theirs, output=torch), turned, clear


def _images(flax: np.ndarray, torch: np.ndarray) -> Axes | None:
    """Return the axes of images with channels last in Flax and first in PyTorch, or None."""
    if torch.ndim != flax.ndim or not 3 <= torch.ndim <= 5:
        return None
    moved = IMAGES.to_torch(flax)
    if moved.shape != torch.shape:
        return None
    if flax.shape != torch.shape:
        return IMAGES
    return IMAGES if _error(moved, torch) <= AGREE < _error(flax, torch) else None


def _error(flax: np.ndarray, torch: np.ndarray) -> float:
    return tolerance.relative({"": flax}, {"": torch})[""]


def step_of(name: str) -> str:
    """Return the step that a node is, or nothing.

    Example:
        >>> step_of("blocks.3.att/scores#2"), step_of("blocks.3.att")
        ('scores', '')
    """
    return name.partition("/")[2].split("#")[0]

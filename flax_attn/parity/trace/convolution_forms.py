"""Convolutions, in plain NumPy: which stride and which padding a side has, found in its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]
MODES: dict[str, Any] = {
    "zeros": "constant",
    "a reflection": "reflect",
    "the last row": "edge",
    "the other end": "wrap",
}
DILATIONS = (1, 2)
NEAR = 1e-4  # how near the first channel must come, before all channels are computed
WORK = 10**8  # products, beyond which none is tried


@dataclass(frozen=True)
class _Placing:
    """Where the windows of one axis stand: window i begins at `i * stride - before`."""

    stride: int
    before: int
    after: int


def convolution(value: np.ndarray, x: np.ndarray, own: Arrays) -> Forms:
    """A convolution, its channels first or last, with the stride and the padding that fit."""
    kernel, bias = (next((w for w in own.values() if w.ndim == ndim), None) for ndim in (x.ndim, 1))
    if kernel is None or value.ndim != x.ndim or not 3 <= x.ndim <= 5:
        return
    inputs = [x for x in (x, np.moveaxis(x, -1, 1)) if x.shape[1] % kernel.shape[1] == 0]
    outputs = [(value, lambda y: y), (np.moveaxis(value, -1, 1), lambda y: np.moveaxis(y, 1, -1))]
    for image, (found, back) in product(inputs, outputs):
        groups = image.shape[1] // kernel.shape[1]
        if found.shape[1] == len(kernel) and len(kernel) % groups == 0:
            shift = np.zeros(len(kernel)) if bias is None else bias
            for text, form in _convolved(found, image, kernel, shift, groups):
                yield text, back(form)


def _convolved(
    value: np.ndarray, x: np.ndarray, kernel: np.ndarray, bias: np.ndarray, groups: int
) -> Forms:
    flips = {"": kernel, ", its kernel flipped": np.flip(kernel, tuple(range(2, kernel.ndim)))}
    for (how, w), dilation, (filling, mode) in product(flips.items(), DILATIONS, MODES.items()):
        spread = [dilation * (k - 1) for k in w.shape[2:]]
        if x[:, 0].size * w[0].size > WORK or (
            mode == "reflect" and any(np.less_equal(x.shape[2:], spread))
        ):
            continue
        padded = np.pad(x, [(0, 0), (0, 0), *((k, k) for k in spread)], mode=mode)
        first = _correlated(padded[:, : w.shape[1]], w[:1], dilation)[:, 0] + bias[0]
        for placing in product(*_placings(value.shape[2:], x.shape[2:], spread)):
            if _near(first[(..., *_windows(placing, spread, value.shape[2:]))], value[:, 0]):
                where = _windows(placing, spread, value.shape[2:])
                parts = zip(np.split(padded, groups, 1), np.split(w, groups), strict=True)
                whole = np.concatenate(
                    [_correlated(part, own, dilation)[(..., *where)] for part, own in parts], 1
                )
                dilated = f", dilation {dilation}" if dilation > 1 else ""
                text = f"a convolution of {_spoken(placing)}{dilated}" + (
                    f" of {filling}" if mode != "constant" else ""
                )
                yield text + how, whole + bias.reshape(-1, *(1 for _ in spread))


def _correlated(x: np.ndarray, kernel: np.ndarray, dilation: int) -> np.ndarray:
    """Return the products of a kernel with every window of a padded image."""
    axes = tuple(range(2, x.ndim))
    sizes = [dilation * (k - 1) + 1 for k in kernel.shape[2:]]
    windows = np.lib.stride_tricks.sliding_window_view(x, sizes, axis=axes)  # pyright: ignore
    windows = windows[(..., *(slice(None, None, dilation) for _ in axes))]
    inner = [1, *range(x.ndim, x.ndim + len(axes))]
    return np.moveaxis(np.tensordot(windows, kernel, (inner, [1, *axes])), -1, 1)


def _placings(
    out: tuple[int, ...], size: tuple[int, ...], spread: list[int]
) -> list[list[_Placing]]:
    """Return where the windows of each axis may stand, given how many there are."""
    found = []
    for windows, length, reach in zip(out, size, spread, strict=True):
        axis = []
        for stride, before in product(range(1, length + 1), range(reach + 1)):
            after = (windows - 1) * stride + reach + 1 - before - length
            if -stride < after <= reach:
                axis.append(_Placing(stride, before, max(after, 0)))
        found.append(axis)
    return found


def _windows(
    placing: tuple[_Placing, ...], spread: list[int], out: tuple[int, ...]
) -> tuple[slice, ...]:
    starts = [reach - axis.before for axis, reach in zip(placing, spread, strict=True)]
    ends = [
        start + (n - 1) * axis.stride + 1
        for start, axis, n in zip(starts, placing, out, strict=True)
    ]
    return tuple(slice(s, e, axis.stride) for s, e, axis in zip(starts, ends, placing, strict=True))


def _near(found: np.ndarray, value: np.ndarray) -> bool:
    return found.shape == value.shape and bool(
        np.abs(found - value).max() <= NEAR * np.abs(value).max()
    )


def _spoken(placing: tuple[_Placing, ...]) -> str:
    axes = placing[:1] if len(set(placing)) == 1 else placing
    strides, padding = (
        {axis.stride for axis in placing},
        [f"{axis.before} before and {axis.after} after" for axis in axes],
    )
    stride = (
        str(strides.pop()) if len(strides) == 1 else str(tuple(axis.stride for axis in placing))
    )
    return f"stride {stride}, padded by {', '.join(padding)}"

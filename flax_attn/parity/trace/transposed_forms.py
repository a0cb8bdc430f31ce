"""Transposed convolutions, in plain NumPy: fit the stride, the cut and the kernel's direction."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]
WORK = 10**8  # products, beyond which none is tried


def transposed_convolution(value: np.ndarray, x: np.ndarray, own: Arrays) -> Forms:
    """Yield transposed convolutions of one group, with the stride and the cut that fit.

    Channels come first or last. PyTorch's formula is first: each element of the image spreads its
    multiple of the kernel, as it is, over the output.
    """
    kernel, bias = (next((w for w in own.values() if w.ndim == ndim), None) for ndim in (x.ndim, 1))
    if kernel is None or value.ndim != x.ndim or not 3 <= x.ndim <= 5:
        return
    inputs = [x for x in (x, np.moveaxis(x, -1, 1)) if x.shape[1] == len(kernel)]
    outputs = [(value, lambda y: y), (np.moveaxis(value, -1, 1), lambda y: np.moveaxis(y, 1, -1))]
    for image, (found, back) in product(inputs, outputs):
        if found.shape[1] == kernel.shape[1] and image.size * kernel[0].size <= WORK:
            shift = np.zeros(kernel.shape[1]) if bias is None else bias
            for text, form in _spread_forms(found.shape[2:], image, kernel):
                yield text, back(form + shift.reshape(-1, *(1 for _ in form.shape[2:])))


def _spread_forms(out: tuple[int, ...], x: np.ndarray, kernel: np.ndarray) -> Forms:
    flips = {"": kernel, ", its kernel flipped": np.flip(kernel, tuple(range(2, kernel.ndim)))}
    for (how, w), stride in product(flips.items(), _strides(out, x.shape[2:])):
        whole = _spread(x, w, stride)
        cut = [full - n for full, n in zip(whole.shape[2:], out, strict=True)]
        for before in range(min(cut) + 1):
            after = ", ".join(dict.fromkeys(str(rest - before) for rest in cut))
            text = (
                f"a transposed convolution of stride {stride}, {before} cut off before and {after}"
                " after"
            )
            yield text + how, whole[(..., *(slice(before, before + n) for n in out))]


def _strides(out: tuple[int, ...], size: tuple[int, ...]) -> range:
    """Return the strides that may make an axis of that length."""
    return range(1, max(n // max(length - 1, 1) for n, length in zip(out, size, strict=True)) + 1)


def _spread(x: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    """Return the uncut output of an image `(b, c, ...)` and a kernel `(c, o, ...)`."""
    sizes = [stride * (n - 1) + k for n, k in zip(x.shape[2:], kernel.shape[2:], strict=True)]
    whole = np.zeros((len(x), kernel.shape[1], *sizes))
    for place in np.ndindex(*kernel.shape[2:]):
        where = tuple(
            slice(i, i + stride * (n - 1) + 1, stride)
            for i, n in zip(place, x.shape[2:], strict=True)
        )
        whole[(..., *where)] += np.moveaxis(np.tensordot(x, kernel[(..., *place)], (1, 0)), -1, 1)
    return whole

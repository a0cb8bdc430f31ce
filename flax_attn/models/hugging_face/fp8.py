"""Weights of eight bits in blocks with a scale each, as DeepSeek-V3 is published."""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype

from flax_attn.convert.headers import Stored
from flax_attn.models.hugging_face.packed import Codes, Packed

_SCALE = "_scale_inv"
_SCALES = ("float32", "bfloat16", "float16")


def dequantized(
    stored: Mapping[str, Stored], block: tuple[int, int], dtype: Dtype
) -> dict[str, Stored]:
    """Return the entries of a file, `X` and `X_scale_inv` merged into `X` of this dtype.

    Each block of rows and columns has one scale; those at the end may be smaller:

        X[o, i] = E4M3(X[o, i]) X_scale_inv[o // block[0], i // block[1]]

    It is computed in float32, then rounded to `dtype`.

    Shapes:
        weights `(o, i)` and scales `(ceil(o / block[0]), ceil(i / block[1]))`, to `(o, i)`.

    References:
        DeepSeek-AI 2024, section 3.3 (arXiv:2412.19437).
    """
    found = dict(stored)
    for name, weight in stored.items():
        scales = stored.get(name + _SCALE)
        if scales is None or not _fit(weight, scales, block):
            continue
        # Nothing is read yet: a weight is computed when its turn comes.
        read = partial(_read, weight, scales, block, dtype)
        decoded = jnp.dtype(dtype).name
        codes = Codes(weight.read, lambda scales=scales: _wide(scales), block)
        found[name] = Packed(weight.file, weight.shape, decoded, read, codes)
        del found[name + _SCALE]
    return found


def _fit(weight: Stored, scales: Stored, block: tuple[int, int]) -> bool:
    """Return whether these are blocks with a scale each.

    Other weights keep their names, and are reported as unexpected.
    """
    if weight.dtype != "float8_e4m3fn" or scales.dtype not in _SCALES or len(weight.shape) != 2:
        return False
    return scales.shape == tuple(
        -(-size // edge) for size, edge in zip(weight.shape, block, strict=True)
    )


def _read(weight: Stored, scales: Stored, block: tuple[int, int], dtype: Dtype) -> np.ndarray:
    _, columns = weight.shape
    height, width = block
    # A block may be wider than the weight is.
    width = min(width, columns)
    values = _byte_values()
    packed = weight.read().view(np.uint8)
    numbers = np.empty(weight.shape, dtype)
    for i, factors in enumerate(_wide(scales)):
        part = slice(i * height, (i + 1) * height)
        # The last block of a row may be smaller.
        scale = np.repeat(factors, width)[:columns]
        numbers[part] = values[packed[part]] * scale
    return numbers


def _wide(scales: Stored) -> np.ndarray:
    return scales.read().astype(np.float32)


def _byte_values() -> np.ndarray:
    """Return the number of each byte: a lookup is faster than a conversion of each number."""
    codes = np.arange(256, dtype=np.uint8)
    return codes.view(jnp.float8_e4m3fn).astype(np.float32)

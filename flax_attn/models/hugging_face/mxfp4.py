"""Weights of four bits in blocks with a scale each, as gpt-oss is published.

They are read as bfloat16, which holds them exactly.
"""

from collections.abc import Mapping
from functools import cache, partial

import jax.numpy as jnp
import numpy as np

from attn_spec.quantized import E2M1
from flax_attn.convert.headers import Stored
from flax_attn.models.hugging_face.packed import Codes, Packed

_BYTES = 16  # of a block, two numbers in each


def dequantized(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the entries of a file, `X_blocks` and `X_scales` merged into `X`.

    Block `g` of row `o` of expert `e` has 32 numbers, and they have one scale:

        X[e, 32 g + 2 j + h, o] = 2^(scales[e, o, g] - 127) E2M1(4 bits of blocks[e, o, g, j])

    The lower 4 bits are those of h = 0.

    Shapes:
        blocks `(e, o, i / 32, 16)` and scales `(e, o, i / 32)`, both bytes, to `(e, i, o)` in
        bfloat16.

    References:
        OCP Microscaling Formats (MX) v1.0, 2023; arXiv:2310.10537.
    """
    found = dict(stored)
    for key, blocks in stored.items():
        name = key.removesuffix("_blocks")
        scales = stored.get(f"{name}_scales")
        if name == key or scales is None or not _fit(blocks, scales):
            continue
        found[name] = _joined(blocks, scales)
        del found[key], found[f"{name}_scales"]
    return found


def _fit(blocks: Stored, scales: Stored) -> bool:
    """Return whether these are blocks with a scale each.

    Other weights keep their names, and are reported as unexpected.
    """
    return (
        blocks.dtype == scales.dtype == "uint8"
        and len(blocks.shape) == 4
        and blocks.shape == (*scales.shape, _BYTES)
    )


def _joined(blocks: Stored, scales: Stored) -> Stored:
    e, o, groups, _ = blocks.shape
    codes = Codes(
        lambda: blocks.read().reshape(e, o, -1).swapaxes(1, 2),
        lambda: scales.read().swapaxes(1, 2),
        (1, 2 * _BYTES),
        per_element=2,
    )
    shape = e, 2 * _BYTES * groups, o
    return Packed(blocks.file, shape, "bfloat16", partial(_read, blocks, scales), codes)


def _read(blocks: Stored, scales: Stored) -> np.ndarray:
    e, o, groups, _ = blocks.shape
    table = _table()
    size = 2 * _BYTES * groups
    numbers = np.empty((e, o, size), jnp.bfloat16)
    # An expert at a time: the pairs of all would need as much memory again.
    experts = zip(numbers, blocks.read(), scales.read(), strict=True)
    for expert, packed, exponents in experts:
        first = 256 * exponents[..., None].astype(np.intp)
        pairs = table[first + packed]
        expert[...] = pairs.view(jnp.bfloat16).reshape(o, size)
    return numbers.swapaxes(1, 2)


@cache
def _table() -> np.ndarray:
    """Return the two numbers of each byte under each scale as one integer, for one lookup."""
    exponents = np.arange(255.0) - 127
    # The last one stands for no number.
    scales = np.append(np.exp2(exponents), np.nan).astype(np.float32)
    # Of the largest scales some numbers are infinite in bfloat16.
    with np.errstate(over="ignore"):
        scaled = scales[:, None, None] * _byte_values()
        pairs = scaled.astype(jnp.bfloat16)
    return pairs.view(np.uint32).reshape(-1)


def _byte_values() -> np.ndarray:
    """Return the two numbers of each byte, that of the lower four bits first."""
    values = np.array(E2M1, np.float32)
    byte = np.arange(256)
    low, high = byte & 15, byte >> 4
    return np.stack([values[low], values[high]], axis=-1)

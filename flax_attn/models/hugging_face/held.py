"""Matrices that layers hold in the 8 or 4 bits that files store them in."""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype

from flax_attn.convert.entry import Entry
from flax_attn.convert.headers import Stored
from flax_attn.functional.quantized import QuantizedMatrix
from flax_attn.models.hugging_face.packed import Codes, Packed
from flax_attn.models.hugging_face.reading import read_parts
from flax_attn.models.hugging_face.values import Memory
from flax_attn.models.replace_layers import is_linear, put, quantized_as
from flax_attn.modules.experts import Experts

# Of rules that change no more than the order of the axes of a matrix.
_PATTERNS = ("", "i o -> o i", "e i o -> e o i")


def hold(
    model: nnx.Module,
    entries: list[Entry],
    stored: Mapping[str, Stored],
    dtype: Dtype | None,
    memory: Memory,
) -> list[Entry]:
    """Give layers the matrices that files store in 8 or 4 bits; return the entries that are left.

    Each `Linear` and each layer of `Experts` that is stored so becomes a `QuantizedLinear`. Left
    are a matrix that latent attention absorbs, and one that shares blocks with another.

    Args:
        model: model whose layers are replaced.
        entries: entries of the model.
        stored: contents of the files, by name.
        dtype: dtype that the matrices stand for; None is that of the entry.
        memory: memory for what is held.

    Raises:
        ValueError: if no matrix is stored so.
    """
    left = []
    for entry in entries:
        places = [_place(model, name) for name in entry.ours]
        first, *_ = (stored[name] for name in entry.tensors)
        if not isinstance(first, Packed) or not _fits(entry, first.codes, places):
            left.append(entry)
            continue
        weights = _read(entry, stored, "weight", memory)
        scales = _read(entry, stored, "scale", memory)
        block = first.codes.block
        # What it stands for is read as floats elsewhere.
        wanted = jnp.dtype(first.dtype if dtype is None else dtype)
        for name, place in zip(entry.ours, places, strict=True):
            parent, part = place
            layer = vars(parent)[part]
            matrix = QuantizedMatrix(
                weights[name],
                scales[name],
                block,
                wanted,
            )
            made = quantized_as(layer, matrix)
            put(parent, part, made)
    if len(left) == len(entries):
        raise ValueError(
            'weights="stored" needs a folder whose matrices are stored in 8 or 4 bits, as'
            f" quantization_config of config.json says; got a {type(model).__name__} without one."
            ' Load it without this option, or with weights="int8"'
        )
    return left


def _place(model: nnx.Module, name: str) -> tuple[Any, str]:
    """Return the module that holds the layer of a parameter, and the name of the layer there."""
    *path, part, _ = name.split(".")
    return reduce(_child, path, model), part


def _child(module: Any, name: str) -> Any:
    return module[int(name)] if name.isdigit() else getattr(module, name)


def _fits(entry: Entry, codes: Codes, places: list[tuple[Any, str]]) -> bool:
    """Return whether the layers of an entry may hold their parts of it."""
    # A part of a block would need its scale.
    alone = len(entry.ours) == 1 or codes.block[0] == 1
    known = all(isinstance(parent, Experts) or is_linear(parent, part) for parent, part in places)
    matrices = all(name.endswith(".kernel") for name in entry.ours)
    return alone and known and matrices and entry.rule.pattern in _PATTERNS


def _read(
    entry: Entry,
    stored: Mapping[str, Stored],
    what: str,
    memory: Memory,
) -> dict[str, jax.Array]:
    """Return the numbers or the scales of each parameter of an entry, `(..., d_out, d_in)`."""
    found: dict[str, Stored] = {}
    narrow = entry
    for name in entry.tensors:
        one = stored[name]
        assert isinstance(one, Packed)
        codes = one.codes
        read = getattr(codes, what)
        found[name] = replace(one, read=read)
        # The same for each of several pieces.
        shapes = tuple(codes.shape(what, shape) for shape in entry.shapes)
        narrow = replace(entry, shapes=shapes)
    arrays = {}
    for name, pieces in read_parts(narrow, found).items():
        arrays[name] = _whole(pieces, memory)
    return arrays


def _whole(pieces: list[np.ndarray], memory: Memory) -> jax.Array:
    parts = [piece.swapaxes(-1, -2) for piece in pieces]
    shape = parts[0].shape
    # Experts may be stored one by one.
    if len(parts) > 1:
        shape = len(parts), *shape
    wanted = jax.ShapeDtypeStruct(shape, parts[0].dtype)
    return memory.copy(parts, wanted, wanted.dtype)

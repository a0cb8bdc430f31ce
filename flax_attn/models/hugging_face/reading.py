"""The reading of weights into the variables of a model, one after another."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype

from flax_attn.convert.entry import Entry
from flax_attn.convert.headers import Stored
from flax_attn.convert.stacked import LayerSlice, Tensor, whole
from flax_attn.models.hugging_face.values import Memory, OnMesh


def fill(
    own: Mapping[str, Tensor],
    entries: list[Entry],
    stored: Mapping[str, Stored],
    dtype: Dtype | None,
    progress: bool | None,
    memory: Memory | OnMesh,
) -> None:
    """Read the weights, the largest first: its copies are made while memory is free."""
    groups = sorted(_by_variables(entries, own), key=_size, reverse=True)
    # A log gets no bar, unless it is asked for.
    shown = sys.stderr.isatty() if progress is None else progress
    for group in _shown(groups) if shown else groups:
        mapped = {}
        for entry in group:
            mapped |= read_parts(entry, stored)
        for variable, layers in whole(own, mapped):
            arrays = [array for parts in layers for array in parts]
            # Statistics keep their dtype.
            kept = dtype is None or not isinstance(variable, nnx.Param)
            wanted = jnp.dtype(arrays[0].dtype if kept else dtype)
            variable.set_value(memory.copy(arrays, variable, wanted))


def _size(group: list[Entry]) -> int:
    return sum(math.prod(entry.shape) for entry in group)


def read_parts(entry: Entry, stored: Mapping[str, Stored]) -> dict[str, list[np.ndarray]]:
    """Return the parts of an entry: each parameter whole, or in the pieces that it is stored in."""
    if not entry.is_list:
        arrays = {name: stored[name].read() for name in entry.names}
        parts = entry.parts(entry.joined(arrays))
        return {name: [part] for name, part in parts.items()}
    # Each expert is taken apart by itself, as one of one.
    shapes = tuple((1, *shape[1:]) for shape in entry.shapes)
    single = replace(entry, shapes=shapes)
    found = {name: [] for name in entry.ours}
    for tensor in entry.tensors:
        parts = single.parts(stored[tensor].read()[None])
        for name, pieces in found.items():
            pieces.append(parts[name][0])
    return found


def _shown(groups: list[list[Entry]]) -> Iterable[list[Entry]]:
    """Yield the groups, under a bar on stderr."""
    from rich.console import Console
    from rich.progress import track

    return track(groups, "weights", console=Console(stderr=True))


def _by_variables(entries: list[Entry], tensors: Mapping[str, Tensor]) -> Iterable[list[Entry]]:
    """Return the entries that are of the same variables together: those of stacked layers."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        variables = [_variable(tensors[name]) for name in entry.ours]
        key = tuple(map(id, variables))
        groups.setdefault(key, []).append(entry)
    return groups.values()


def _variable(tensor: Tensor) -> nnx.Variable:
    return tensor.variable if isinstance(tensor, LayerSlice) else tensor

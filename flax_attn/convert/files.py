"""State dicts in files: read and write safetensors, read PyTorch checkpoints.

Files are written whole, or an entry at a time.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from safetensors import SafetensorError

from flax_attn.convert.api import load_state_dict, state_dict
from flax_attn.convert.entry import Entry
from flax_attn.convert.layouts import LayoutLike
from flax_attn.convert.rules import ConversionError
from flax_attn.convert.stacked import Tensor

# What a file begins with that Git LFS has not replaced by its content.
_POINTER = b"version https://git-lfs.github.com/spec/"


def save(
    module: nnx.Module,
    path: str | PathLike[str],
    layout: LayoutLike = "torch_ref",
    *,
    prefix: str = "",
) -> None:
    """Write the parameters of `module` to a safetensors file, in a layout.

    Args:
        module: any NNX module.
        path: path of the file, ending in `.safetensors`.
        layout: a name from `LAYOUTS`, or a `Layout` or a sequence of `Rule`s of your own.
        prefix: prefix of every name.

    Raises:
        ConversionError: if the layout cannot hold the module, or the file would be of another kind.

    Example:
        >>> import tempfile
        >>> from flax_attn import Linear
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(Linear(3, 2, rngs=nnx.Rngs(0)), f"{folder}/linear.safetensors")
        ...     sorted(read_file(f"{folder}/linear.safetensors"))
        ['bias', 'weight']
    """
    # Readers choose the format by the suffix.
    if Path(path).suffix != ".safetensors":
        raise ConversionError(
            f"weights are written as safetensors; got {path}. Name the file *.safetensors"
        )
    if not Path(path).absolute().parent.is_dir():
        raise ConversionError(f"weights are written into a folder that exists; got {path}")
    safetensors.numpy.save_file(state_dict(module, layout, prefix=prefix), path)


def load(
    module: nnx.Module,
    path: str | PathLike[str],
    layout: LayoutLike = "torch_ref",
    *,
    prefix: str = "",
) -> None:
    """Load the weights of a file: `load_state_dict(module, read_file(path), layout)`."""
    load_state_dict(module, read_file(path), layout, prefix=prefix)


def read_file(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the state dict in a `.safetensors` file, or in a `.pt`, `.pth` or `.bin` checkpoint.

    A checkpoint is a pickle, which can run any code: it is read with `weights_only=True`, and
    refused if it holds anything but weights.

    Raises:
        FileNotFoundError: if there is no such file.
        ConversionError: if the file is damaged, holds more than weights, or is of another kind.
            Also if Git LFS has not replaced its pointer by the weights.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    check_no_pointer(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _read_checkpoint(path)
    raise ConversionError(
        f"weights are read from .safetensors, .pt, .pth or .bin files; got {path}"
    )


def check_no_pointer(path: Path) -> None:
    """Raise if a file is the pointer that Git LFS replaces by the weights."""
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        raise ConversionError(
            f"{path} is a pointer of Git LFS, {path.stat().st_size} bytes without weights. Run"
            " git lfs pull in its folder"
        )


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load_file(path)
    except SafetensorError as error:
        raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise ConversionError(
            f"{path} is a PyTorch checkpoint, which needs torch to be read: pip install torch, or"
            " save it as safetensors"
        ) from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    # The errors of pickle and zip are of many kinds.
    except Exception as error:
        raise ConversionError(
            f"{path} is damaged or is not a checkpoint of weights only, and is refused: a pickle"
            " could run any code. Save the state_dict() alone, best as safetensors."
            f" ({type(error).__name__}: {str(error).partition('.')[0]})"
        ) from error
    if not isinstance(found, dict):
        raise ConversionError(
            f"{path} must hold weights by name; got {type(found).__name__}. Save the state_dict()"
            " alone"
        )
    return found


def write_shards(
    folder: Path,
    entries: list[Entry],
    params: Mapping[str, Tensor],
    max_shard_size: int,
    prefix: str = "",
) -> Path:
    """Write parameters as `model.safetensors`, or as shards with an index.

    No more than one shard is in memory at a time. An entry that is larger has a shard of its own.

    Args:
        folder: existing folder that the files are written to.
        entries: entries to write.
        params: parameters by name.
        max_shard_size: largest size of a shard in bytes.
        prefix: prefix of the name of every file.

    Returns:
        The file, or the index.
    """
    shards = _packed(entries, params, max_shard_size)
    path = folder / f"{prefix}model.safetensors"
    if len(shards) == 1:
        _write_shard(path, shards[0], params)
        return path
    places = {}
    for i, shard in enumerate(shards):
        name = f"{prefix}model-{i + 1:05}-of-{len(shards):05}.safetensors"
        stored = _write_shard(folder / name, shard, params)
        places |= dict.fromkeys(stored, name)
    size = sum(_size(entry, params) for entry in entries)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    path = path.with_name(f"{path.name}.index.json")
    path.write_text(json.dumps(index, indent=2) + "\n")
    return path


def _write_shard(path: Path, shard: list[Entry], params: Mapping[str, Tensor]) -> list[str]:
    """Write a shard, and return the names of what is in it."""
    arrays = {}
    for entry in shard:
        arrays |= entry.pieces(entry.join(_gathered(entry, params)))
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    return list(arrays)


def take_part(entries: list[Entry], params: Mapping[str, Tensor]) -> None:
    """Take part in gathering the weights that another process writes."""
    for entry in entries:
        _gathered(entry, params)


def _gathered(entry: Entry, params: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the parameters of an entry, also if other processes have parts of them."""
    return {name: _to_host(params[name][...]) for name in entry.ours}


def _to_host(array: Array) -> np.ndarray:
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    # All processes take part, or none returns.
    return multihost_utils.process_allgather(array, tiled=True)


def _packed(
    entries: list[Entry], params: Mapping[str, Tensor], max_shard_size: int
) -> list[list[Entry]]:
    shards = [[]]
    room = max_shard_size
    for entry in entries:
        size = _size(entry, params)
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_size
        shards[-1].append(entry)
        room -= size
    return shards


def _size(entry: Entry, params: Mapping[str, Tensor]) -> int:
    return sum(params[name].nbytes for name in entry.ours)

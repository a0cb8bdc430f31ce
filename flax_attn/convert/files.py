"""State dicts in files: safetensors both ways, PyTorch checkpoints in; whole, or an entry at a time."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open

from flax_attn.convert.api import load_state_dict, state_dict
from flax_attn.convert.arrays import flatten, to_numpy
from flax_attn.convert.layouts import LayoutLike
from flax_attn.convert.rules import ConversionError, Entry, Shape
from flax_attn.convert.stacked import Tensor

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
}


@dataclass(frozen=True)
class Stored:
    """An entry of a file; `read` maps it, and it is read where it is used."""

    file: Path
    shape: Shape
    dtype: str
    read: Callable[[], np.ndarray]


def save(module: nnx.Module, path: str | PathLike[str], layout: LayoutLike = "torch_ref", *, prefix: str = "") -> None:
    """Write the parameters of `module` to a safetensors file, in a layout.

    Args:
        module: any NNX module.
        path: of the file, ending in `.safetensors`.
        layout: a name from `LAYOUTS`, or a `Layout` or a sequence of `Rule`s of your own.
        prefix: put before every name.

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
    if Path(path).suffix != ".safetensors":
        raise ConversionError(f"weights are written as safetensors; got {path}. Name the file *.safetensors")
    if not Path(path).absolute().parent.is_dir():
        raise ConversionError(f"weights are written into a folder that exists; got {path}")
    safetensors.numpy.save_file(state_dict(module, layout, prefix=prefix), path)


def load(module: nnx.Module, path: str | PathLike[str], layout: LayoutLike = "torch_ref", *, prefix: str = "") -> None:
    """Write the weights of a file into `module`: `load_state_dict(module, read_file(path), layout)`."""
    load_state_dict(module, read_file(path), layout, prefix=prefix)


def read_file(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the state dict in a `.safetensors` file, or in a `.pt`, `.pth` or `.bin` checkpoint of PyTorch.

    A checkpoint is a pickle, which can run any code: it is read with `weights_only=True`, and refused if it holds
    anything but weights.

    Raises:
        FileNotFoundError: if there is no such file.
        ConversionError: if the file is damaged, holds more than weights, or is of another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _read_checkpoint(path)
    raise ConversionError(f"weights are read from .safetensors, .pt, .pth or .bin files; got {path}")


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
            f'{path} is a PyTorch checkpoint, which needs torch to be read: pip install "flax-attn[torch]", '
            "or save it as safetensors"
        ) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip errors of many kinds
        raise ConversionError(
            f"{path} is damaged or is not a checkpoint of weights only, and is refused: a pickle could run any code. "
            "Save the state_dict() alone, best as safetensors. "
            f"({type(error).__name__}: {str(error).partition('.')[0]})"
        ) from error


def find_weights(folder: Path, named: Any = None) -> Path:
    """Return the file of the weights in a folder, or the index of their shards; safetensors come first.

    Args:
        folder: of a model.
        named: the only file to take, as `transformers_weights` of `config.json` has it; None where
            it has none.

    Raises:
        FileNotFoundError: if there is none.
        ConversionError: if the name is not that of a safetensors file in the folder, or of an index
            of such files.
    """
    names = WEIGHTS if named is None else (named,)
    if named is not None and not _is_name(named):
        raise ConversionError(
            f"transformers_weights in {folder / 'config.json'} must be the name of a safetensors "
            f"file beside it, or of an index of such files; got {named!r}. Remove the field if the "
            "weights have their usual names"
        )
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"no weights in {folder}: it holds none of {', '.join(names)}")


def _is_name(named: Any) -> bool:
    if not isinstance(named, str) or Path(named).name != named:
        return False
    return named.endswith((".safetensors", ".safetensors.index.json"))


def read_headers(path: Path) -> dict[str, Stored]:
    """Return the entries of a file of weights, or of all shards of an index, without reading one.

    Only a PyTorch checkpoint is read as a whole, for it cannot be otherwise.

    Raises:
        FileNotFoundError: if a shard is not there.
        ConversionError: if a file is damaged, or holds an entry that another one holds too.
    """
    stored = {}
    for file in _shards(path):
        entries = _safetensors_header(file) if file.suffix == ".safetensors" else _checkpoint_header(file)
        if twice := stored.keys() & entries.keys():
            raise ConversionError(f"{file} holds {min(twice)}, and {stored[min(twice)].file} does too. Remove one")
        stored |= entries
    return stored


def _shards(path: Path) -> list[Path]:
    if path.suffix != ".json":
        return [path]
    try:
        names = sorted({str(Path(name)) for name in json.loads(path.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} is not an index, which names the file of each entry in weight_map") from error
    for name in names:
        if not (path.parent / name).is_file():
            raise FileNotFoundError(f"{path} names the shard {name}, and there is no such file. Copy all of them")
    return [path.parent / name for name in names]


def _safetensors_header(path: Path) -> dict[str, Stored]:
    try:
        with safe_open(path, framework="np"):  # checks the header against the size of the file
            pass
    except SafetensorError as error:
        raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: _stored(path, 8 + size, **entry) for name, entry in header.items() if name != "__metadata__"}


def _stored(path: Path, start: int, shape: list[int], dtype: str, data_offsets: list[int]) -> Stored:
    known, span = _DTYPES.get(dtype, dtype), slice(*(start + offset for offset in data_offsets))
    return Stored(path, tuple(shape), known, partial(_map, path, span, known, shape))


def _map(path: Path, span: slice, dtype: str, shape: list[int]) -> np.ndarray:
    # What was read of a mapped file takes memory until the map is closed: so there is one for each entry.
    return np.memmap(path, mode="r")[span].view(jnp.dtype(dtype)).reshape(shape)


def _checkpoint_header(path: Path) -> dict[str, Stored]:
    entries = flatten(read_file(path))
    dtypes = {name: str(getattr(value, "dtype", type(value).__name__)) for name, value in entries.items()}
    return {
        name: Stored(path, np.shape(value), dtypes[name].removeprefix("torch."), partial(to_numpy, value))
        for name, value in entries.items()
    }


def write_shards(
    folder: Path,
    entries: list[Entry],
    params: Mapping[str, Tensor],
    max_shard_size: int,
    prefix: str = "",
) -> Path:
    """Write parameters as `model.safetensors`, or as shards of up to `max_shard_size` bytes with an index.

    No more than one shard is in memory at a time. An entry that is larger has a shard of its own.

    Args:
        folder: that exists.
        entries: what is written.
        params: the parameters by name.
        max_shard_size: in bytes.
        prefix: put before the name of every file.

    Returns:
        The file, or the index.
    """
    shards = _packed(entries, params, max_shard_size)
    names = [f"{prefix}model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [f"{prefix}model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, params)
    if len(shards) == 1:
        return folder / names[0]
    own = zip(names, shards, strict=True)
    places = {tensor: name for name, shard in own for entry in shard for tensor in entry.tensors}
    size = sum(_size(entry, params) for entry in entries)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    path = folder / f"{prefix}model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n")
    return path


def _write_shard(path: Path, shard: list[Entry], params: Mapping[str, Tensor]) -> None:
    arrays = {}
    for entry in shard:
        arrays |= entry.pieces(entry.join(_gathered(entry, params)))
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})


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
    return multihost_utils.process_allgather(array, tiled=True)


def _packed(entries: list[Entry], params: Mapping[str, Tensor], max_shard_size: int) -> list[list[Entry]]:
    shards, room = [[]], max_shard_size
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

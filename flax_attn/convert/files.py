"""State dicts in files: safetensors both ways, PyTorch checkpoints in; whole, or an entry at a time."""

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open

from flax_attn.convert.api import load_state_dict, state_dict
from flax_attn.convert.arrays import as_shape, flatten, to_numpy
from flax_attn.convert.json_files import distinct, read_object
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


def find_weights(folder: Path) -> Path:
    """Return the file of the weights in a folder, or the index of their shards; safetensors come first.

    Raises:
        FileNotFoundError: if there is none.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"no weights in {folder}: it holds none of {', '.join(WEIGHTS)}")


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
    """Return the files of an index, each within the folder of the index, or the one file that is no index."""
    if path.suffix != ".json":
        return [path]
    files = [path.parent / name for name in _shard_names(path)]
    for file in files:
        if not _is_file(file):
            raise FileNotFoundError(
                f"{path} names the shard {file.name}, and there is no such file. Copy all of them"
            )
    return files


def _shard_names(index: Path) -> list[str]:
    try:
        places = read_object(index).get("weight_map")
    except ValueError as error:
        raise ConversionError(f"{index} is not an index: {error}") from error
    if not isinstance(places, dict) or not places:
        raise ConversionError(
            f"{index} is not an index, which names the file of each entry in weight_map; got "
            f"weight_map={reprlib.repr(places)}. Copy it once more"
        )
    for name in places.values():
        _check_shard_name(index, name)
    return sorted({str(PurePosixPath(name)) for name in places.values()})


def _check_shard_name(index: Path, name: Any) -> None:
    """Raise unless this is the name of a file of weights within the folder of an index.

    What is a link there may lead out of it: hubs keep the files of all versions in one place.
    """
    kinds = (".safetensors",) if index.name == WEIGHTS[1] else (".bin", ".pt", ".pth")
    paths = (PurePosixPath(name), PureWindowsPath(name)) if isinstance(name, str) else ()
    outside = any(path.anchor or ".." in path.parts for path in paths)
    if not paths or outside or "\0" in name or paths[0].suffix not in kinds:
        raise ConversionError(
            f"{index} is not an index: weight_map must name files within its folder that end in "
            f"{', '.join(kinds)}; got {reprlib.repr(name)}. Put the shards beside the index"
        )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that may not be read
        return False


def _safetensors_header(path: Path) -> dict[str, Stored]:
    try:
        with safe_open(path, framework="np"):  # checks the header against the size of the file
            pass
    except SafetensorError as error:
        raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size), object_pairs_hook=distinct)
        except (ValueError, RecursionError) as error:
            raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _stored(path, 8 + size, entry) for name, entry in entries.items()}


def _stored(path: Path, start: int, entry: Mapping[str, Any]) -> Stored:
    shape, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"], entry["dtype"])
    span = slice(*(start + offset for offset in entry["data_offsets"]))
    return Stored(path, shape, dtype, partial(_map, path, span, dtype, shape))


def _map(path: Path, span: slice, dtype: str, shape: Shape) -> np.ndarray:
    # What was read of a mapped file takes memory until the map is closed: so there is one for each entry.
    return np.memmap(path, mode="r")[span].view(jnp.dtype(dtype)).reshape(shape)


def _checkpoint_header(path: Path) -> dict[str, Stored]:
    entries = flatten(read_file(path))
    return {name: _of_checkpoint(path, name, value) for name, value in entries.items()}


def _of_checkpoint(path: Path, name: str, value: Any) -> Stored:
    dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout != "torch.strided":  # no memory that numpy could take
        dtype = layout
    return Stored(path, as_shape(name, value), dtype, partial(to_numpy, value))


def write_shards(folder: Path, entries: list[Entry], params: Mapping[str, Tensor], max_shard_size: int) -> None:
    """Write parameters as `model.safetensors`, or as shards of up to `max_shard_size` bytes with an index.

    No more than one shard is in memory at a time. An entry that is larger has a shard of its own.
    """
    shards = _packed(entries, params, max_shard_size)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, params)
    if len(shards) > 1:
        own = zip(names, shards, strict=True)
        places = {tensor: name for name, shard in own for entry in shard for tensor in entry.tensors}
        size = sum(_size(entry, params) for entry in entries)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


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

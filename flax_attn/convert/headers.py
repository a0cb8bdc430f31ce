"""What files of weights hold, before one is read: a file, or the shards of an index."""

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from attn_spec.json_files import distinct, read_object
from flax_attn.convert.arrays import as_shape, flatten, to_numpy
from flax_attn.convert.files import check_no_pointer, read_file
from flax_attn.convert.rules import ConversionError, Shape

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The most characters in the name of a shard.
_LONGEST = 255
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


def find_weights(folder: Path, named: Any = None) -> Path:
    """Return the file of the weights in a folder, or the index of their shards.

    Safetensors are preferred.

    Args:
        folder: folder of a model.
        named: the only file to take, `transformers_weights` in `config.json`; None where it has
            none.

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
        read = _safetensors_header if file.suffix == ".safetensors" else _checkpoint_header
        entries = read(file)
        twice = min(stored.keys() & entries.keys(), default=None)
        if twice is not None:
            raise ConversionError(
                f"{file} holds {twice}, and {stored[twice].file} does too. Remove one"
            )
        stored |= entries
    return stored


def _shards(path: Path) -> list[Path]:
    """Return the files of an index, which are in its folder, or the file itself if it is none."""
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
    kinds = (".safetensors",) if index.name.endswith(WEIGHTS[1]) else (".bin", ".pt", ".pth")
    if not isinstance(name, str) or not _is_within(name, kinds):
        raise ConversionError(
            f"{index} is not an index: weight_map must name files within its folder that end in "
            f"{', '.join(kinds)}; got {reprlib.repr(name)}. Put the shards beside the index"
        )


def _is_within(name: str, kinds: tuple[str, ...]) -> bool:
    if not name.isprintable() or len(name) > _LONGEST:
        return False
    # An index may come from another system: a path must lead out by the rules of none.
    paths = PurePosixPath(name), PureWindowsPath(name)
    outside = any(path.anchor or ".." in path.parts for path in paths)
    return not outside and paths[0].suffix in kinds


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # The name is too long, or the folder may not be read.
        return False


def _safetensors_header(path: Path) -> dict[str, Stored]:
    check_no_pointer(path)
    try:
        size, header = _read_header(path)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {name: _stored(path, 8 + size, entry) for name, entry in header.items()}


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    # This checks the header against the size of the file.
    with safe_open(path, framework="np"):
        pass
    with path.open("rb") as file:
        # The length of the header comes first, then the header.
        size = int.from_bytes(file.read(8), "little")
        return size, json.loads(file.read(size), object_pairs_hook=distinct)


def _stored(path: Path, start: int, entry: Mapping[str, Any]) -> Stored:
    name: str = entry["dtype"]
    shape, dtype = tuple(entry["shape"]), _DTYPES.get(name, name)
    span = slice(*(start + offset for offset in entry["data_offsets"]))
    return Stored(path, shape, dtype, partial(_map, path, span, dtype, shape))


def _map(path: Path, span: slice, dtype: str, shape: Shape) -> np.ndarray:
    # What was read of a map takes memory until it is closed: so there is one for each entry.
    # Pages that are written to are copied: the file stays as it is.
    return np.memmap(path, mode="c")[span].view(jnp.dtype(dtype)).reshape(shape)


def _checkpoint_header(path: Path) -> dict[str, Stored]:
    try:
        entries = flatten(read_file(path))
        return {name: _of_checkpoint(path, name, value) for name, value in entries.items()}
    except RecursionError as error:
        raise ConversionError(
            f"{path} is not a checkpoint of weights: it holds itself. Save the state_dict() alone"
        ) from error


def _of_checkpoint(path: Path, name: str, value: Any) -> Stored:
    dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    layout = str(getattr(value, "layout", "torch.strided"))
    # Such a tensor has no memory that NumPy could take: the dtype that is shown says why.
    if layout != "torch.strided" or getattr(value, "is_meta", False):
        dtype = f"{dtype}, {layout} on {value.device}"
    return Stored(path, as_shape(name, value), dtype, partial(to_numpy, value))

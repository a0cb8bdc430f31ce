"""State dicts in files: safetensors both ways, PyTorch checkpoints in."""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from flax import nnx
from safetensors import SafetensorError

from flax_attn.convert.api import load_state_dict, state_dict
from flax_attn.convert.layouts import LayoutLike
from flax_attn.convert.rules import ConversionError


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

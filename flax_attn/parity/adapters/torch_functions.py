"""PyTorch is the reference only while no function of it has been replaced."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional

from flax_attn.parity.adapters.adapter import ReplacedError

# What models call. The methods of the layers in `torch.nn` are not looked at.
PLACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
}
# Where the types of their other attributes come from.
KNOWN = ("torch", "builtins", "typing", "typing_extensions", "functools")
_FOLDER = str(Path(torch.__file__).parent)
_FUNCTIONS = FunctionType | BuiltinFunctionType


class TorchFunctions:
    """The public functions of PyTorch as they are now.

    Raises:
        ReplacedError: if one of them is not PyTorch's own.

    Example:
        >>> TorchFunctions().check()
    """

    def __init__(self):
        self._found = {place: dict(vars(space)) for place, space in PLACES.items()}
        for place, names in self._found.items():
            _refuse(place, [name for name, value in names.items() if _is_foreign(name, value)])

    def check(self) -> None:
        """Raise if a function has been replaced since, or added.

        Raises:
            ReplacedError: with its name.
        """
        for place, names in self._found.items():
            _refuse(place, list(_replaced(names, vars(PLACES[place]))))


def _replaced(before: dict[str, Any], now: Any) -> Iterator[str]:
    for name, value in before.items():
        if isinstance(value, _FUNCTIONS) and _differs(name, value, now.get(name)):
            yield name
    added = now.keys() - before.keys()
    yield from (name for name in added if _is_foreign(name, now[name]))


def _differs(name: str, before: Any, now: Any) -> bool:
    if now is before:
        return False
    # Parts that PyTorch imports later wrap functions of others, under the name they had.
    same = getattr(now, "__name__", "") == before.__name__
    return not same or _is_foreign(name, now)


def _is_foreign(name: str, value: Any) -> bool:
    """Whether a public function is not PyTorch's, or is another one of PyTorch's."""
    if name.startswith("_") or isinstance(value, type) or not callable(value):
        return False
    if isinstance(value, FunctionType):
        return not value.__code__.co_filename.startswith(_FOLDER)
    if isinstance(value, BuiltinFunctionType):
        # That of torch.linalg.norm is linalg_norm, that of logsigmoid log_sigmoid.
        return _plain(name) not in _plain(value.__name__)
    if isinstance(value, partial):
        return True
    # A special form of typing, which torch imports, or an object that stands for a function.
    package, _, _ = type(value).__module__.partition(".")
    return package not in KNOWN


def _plain(name: str) -> str:
    return name.replace("_", "")


def _refuse(place: str, names: list[str]) -> None:
    if names:
        raise ReplacedError(
            f"{place}.{names[0]} is not the function of PyTorch, which is the reference: something"
            " has replaced it. Compare where nothing patches torch, neither at import nor in a call"
        )

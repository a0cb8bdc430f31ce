"""The fields of a `config.json`, read with errors that name the file and the field."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Number = int | float
K = TypeVar("K")
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_exact",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
THEIR_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu_exact": "gelu", "silu": "silu", "relu": "relu"}
GEMMA_ACTIVATIONS = {**THEIR_ACTIVATIONS, "gelu_tanh": "gelu_pytorch_tanh"}
REQUIRED = object()


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object, and the names of those that were read.

    Args:
        where: what errors call the object.
        values: by name.
        used: the names that were read so far.

    Example:
        >>> Fields("config.json", {"n_embd": 768}).integer("n_embd")
        768
    """

    where: str
    values: dict[str, Any]
    used: set[str] = field(default_factory=set)

    def filled(self, **defaults: Any) -> Fields:
        """Return the fields with those that the file lacks: what transformers takes for them.

        Example:
            >>> Fields("config.json", {"hidden_act": "gelu"}).filled(hidden_act="silu", head_dim=8).values
            {'hidden_act': 'gelu', 'head_dim': 8}
        """
        return Fields(self.where, {**defaults, **self.values}, self.used)

    def integer(self, name: str, default: Any = REQUIRED) -> int:
        """Return an integer; raise if the field holds something else, or is missing without a default."""
        return self._get(name, int, default)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer, or None where the field holds null."""
        return self._get(name, int | None, default)

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """Return a number."""
        return self._get(name, Number, default)

    def optional_number(self, name: str, default: Any = None) -> float | None:
        """Return a number, or None where the field holds null."""
        return self._get(name, Number | None, default)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        """Return true or false."""
        return self._get(name, bool, default)

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """Return a string."""
        return self._get(name, str, default)

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """Return two integers; one stands for both."""
        value = self._get(name, int | list, default)
        pair = (value, value) if isinstance(value, int) else tuple(value)
        if len(pair) != 2 or not all(isinstance(size, int) for size in pair):
            raise ValueError(f"{self.where}: {name} must be one integer or two; got {json.dumps(value)}")
        return pair

    def optional_list(self, name: str) -> list[Any] | None:
        """Return a list, or None where the field is missing or holds null."""
        return self._get(name, list | None, None)

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers."""
        values = self._get(name, list, REQUIRED)
        if not all(isinstance(value, Number) for value in values):
            raise ValueError(f"{self.where}: {name} must be a list of numbers; got {json.dumps(values)}")
        return [float(value) for value in values]

    def optional_object(self, name: str) -> dict[str, Any] | None:
        """Return an object, or None where the field is missing or holds null."""
        return self._get(name, dict | None, None)

    def _get(self, name: str, kind: Any, default: Any) -> Any:
        self.used.add(name)
        value = self.values.get(name, default)
        if value is REQUIRED:
            raise ValueError(f"{self.where} lacks the field {name}. Take the config.json that came with the weights")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            expected = kind.__name__ if isinstance(kind, type) else kind
            raise ValueError(f"{self.where}: {name} must be of the kind {expected}; got {json.dumps(value)}")
        return value

    def choose(self, name: str, choices: dict[str, K], default: str | None = None) -> K:
        """Return the choice that a field names; raise if there is none of that name."""
        value = self.text(name, REQUIRED if default is None else default)
        if value not in choices:
            raise ValueError(f"{self.where}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
        return choices[value]

    def only(self, **wanted: Any) -> None:
        """Raise if a field has another value than the only one supported; null counts as missing."""
        self.used.update(wanted)
        for name, value in wanted.items():
            if self.values.get(name) not in (None, value):
                only, got = json.dumps(value), json.dumps(self.values[name])
                raise ValueError(f"{self.where}: {name} must be {only}, no other value is supported; got {got}")

    def check_all_used(self) -> None:
        """Raise if a field was not read; null counts as missing."""
        for name, value in self.values.items():
            if name not in self.used and value is not None:
                raise ValueError(
                    f"{self.where}: {name}={json.dumps(value)} would be ignored. Remove it if it means nothing"
                )


def read_fields(path: Path) -> Fields:
    """Return the fields of `config.json` in a folder.

    Raises:
        FileNotFoundError: if there is no such folder or file.
        ValueError: if the file does not hold a JSON object.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}. Nothing is downloaded: pass the path of a folder on this machine")
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no config.json in {path}, the folder of a model holds one beside the weights")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}. Copy it once more") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold an object, the fields of a config by name; got {type(values).__name__}")
    return Fields(str(file), values)

"""The fields of a `config.json`, read with errors that name the file and the field."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Number = int | float
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_exact",
    "silu": "silu",
    "swish": "silu",
}
THEIR_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu_exact": "gelu", "silu": "silu"}
_REQUIRED = object()


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object, and the names of those that were read.

    Args:
        where: what errors call the object.
        values: by name.
        used: the names that were read so far.

    Example:
        >>> Fields("config.json", {"n_embd": 768}).get("n_embd", int)
        768
    """

    where: str
    values: dict[str, Any]
    used: set[str] = field(default_factory=set)

    def get(self, name: str, kind: Any, default: Any = _REQUIRED) -> Any:
        """Return the value of a field; raise if it is of another kind, or missing without a default."""
        self.used.add(name)
        value = self.values.get(name, default)
        if value is _REQUIRED:
            raise ValueError(f"{self.where} lacks the field {name}. Take the config.json that came with the weights")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kind = kind.__name__ if isinstance(kind, type) else kind
            raise ValueError(f"{self.where}: {name} must be of the kind {kind}; got {json.dumps(value)}")
        return value

    def choose(self, name: str, choices: dict[str, Any], default: str | None = None) -> Any:
        """Return the choice that a field names; raise if there is none of that name."""
        value = self.get(name, str, _REQUIRED if default is None else default)
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

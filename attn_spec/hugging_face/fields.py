"""The fields of a `config.json`, read with errors that name the file and the field."""

from __future__ import annotations

import difflib
import json
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from attn_spec.hugging_face.bounds import (
    COUNTS,
    EPSILONS,
    FACTORS,
    HEADS,
    LENGTHS,
    RATES,
    TOKENS,
    WIDTHS,
    Bounds,
    Number,
)
from attn_spec.json_files import read_object

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
# How alike a name is to the one that it stands for: all but one letter of ten.
_NEAR = 0.9


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object, and the names of those that were read.

    Args:
        where: name of the object in errors.
        values: values of the fields, by name.
        used: names of the fields read so far.

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
            >>> fields = Fields("config.json", {"hidden_act": "gelu"})
            >>> fields.filled(hidden_act="silu", head_dim=8).values
            {'hidden_act': 'gelu', 'head_dim': 8}
        """
        # The names read are shared: what is read of the filled fields is read of the file.
        return Fields(self.where, {**defaults, **self.values}, self.used)

    def under_one_name(self, **aliases: str) -> Fields:
        """Return the fields, each second name replaced by the first; null counts as missing.

        Args:
            aliases: second name of each field, by its first; transformers takes both.

        Raises:
            ValueError: if both are there with different values, of which transformers takes one
                silently.

        Example:
            >>> found = Fields("config.json", {"hidden_size": 8})
            >>> found.under_one_name(hidden_size="n_embd").values
            {'n_embd': 8}
        """
        values = dict(self.values)
        for alias, name in aliases.items():
            found = values.pop(alias, None)
            if found is not None and values.setdefault(name, found) != found:
                raise ValueError(
                    f"{self.where}: {name} and {alias} name one field and must be equal; got "
                    f"{_shown(values[name])} and {_shown(found)}. Remove the wrong one"
                )
        return Fields(self.where, values, self.used)

    def integer(self, name: str, default: Any = REQUIRED, within: Bounds = WIDTHS) -> int:
        """Return an integer; raise if the field is another, or missing without a default."""
        return self._within(within, name, self._get(name, int, default))

    def optional_integer(
        self, name: str, default: int | None = None, within: Bounds = WIDTHS
    ) -> int | None:
        """Return an integer, or None where the field holds null."""
        return self._within(within, name, self._get(name, int | None, default))

    def heads(self, name: str, default: Any = REQUIRED) -> int:
        """Return a number of heads."""
        return self.integer(name, default, HEADS)

    def length(self, name: str, default: Any = REQUIRED) -> int:
        """Return a number of tokens that follow one another."""
        return self.integer(name, default, LENGTHS)

    def optional_length(self, name: str, default: int | None = None) -> int | None:
        """Return a number of tokens that follow one another, or None where the field holds null."""
        return self.optional_integer(name, default, LENGTHS)

    def count(self, name: str, default: Any = REQUIRED) -> int:
        """Return a number of layers or experts, which may be 0."""
        return self.integer(name, default, COUNTS)

    def optional_count(self, name: str) -> int | None:
        """Return a number of layers, or None where the field is missing or holds null."""
        return self.optional_integer(name, None, COUNTS)

    def token(self, name: str, default: Any = REQUIRED) -> int:
        """Return the number of a token in a vocabulary."""
        return self.integer(name, default, TOKENS)

    def optional_token(self, name: str) -> int | None:
        """Return the number of a token, or None where the field is missing or holds null."""
        return self.optional_integer(name, None, TOKENS)

    def number(self, name: str, within: Bounds, default: Any = REQUIRED) -> float:
        """Return a number."""
        return float(self._within(within, name, self._get(name, Number, default)))

    def optional_number(self, name: str, within: Bounds, default: Any = None) -> float | None:
        """Return a number, or None where the field holds null."""
        value = self._within(within, name, self._get(name, Number | None, default))
        return None if value is None else float(value)

    def epsilon(self, name: str, default: float) -> float:
        """Return what is added to a variance."""
        return self.number(name, EPSILONS, default)

    def rate(self, name: str, default: float) -> float:
        """Return a probability of dropout."""
        return self.number(name, RATES, default)

    def factor(self, name: str, default: Any = REQUIRED) -> float:
        """Return a factor, or a number of the size of one."""
        return self.number(name, FACTORS, default)

    def optional_factor(self, name: str, default: Any = None) -> float | None:
        """Return a factor, or None where the field holds null."""
        return self.optional_number(name, FACTORS, default)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        """Return true or false."""
        return self._get(name, bool, default)

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """Return a string."""
        return self._get(name, str, default)

    def pair(self, name: str, default: int, within: Bounds = WIDTHS) -> tuple[int, int]:
        """Return two integers; one stands for both."""
        value = self._get(name, int | list, default)
        # One integer stands for a square.
        values = value if isinstance(value, list) else [value, value]
        self._each(name, values, int)
        if len(values) != 2:
            raise ValueError(
                f"{self.where}: {name} must be one integer or two; got {_shown(value)}"
            )
        first, second = (self._within(within, name, one) for one in values)
        return first, second

    def optional_integers(self, name: str) -> list[int] | None:
        """Return a list of integers, or None where the field is missing or holds null."""
        values = self._get(name, list | None, None)
        return None if values is None else self._each(name, values, int)

    def optional_texts(self, name: str) -> list[str] | None:
        """Return a list of strings, or None where the field is missing or holds null."""
        values = self._get(name, list | None, None)
        return None if values is None else self._each(name, values, str)

    def numbers(self, name: str, within: Bounds) -> list[float]:
        """Return a list of numbers."""
        values = self._each(name, self._get(name, list, REQUIRED), Number)
        return [float(self._within(within, name, value)) for value in values]

    def optional_object(self, name: str) -> dict[str, Any] | None:
        """Return an object, or None where the field is missing or holds null."""
        return self._get(name, dict | None, None)

    def _get(self, name: str, kind: Any, default: Any) -> Any:
        # A field counts as read even where it is then refused.
        self.used.add(name)
        value = self.values.get(name, default)
        if value is REQUIRED:
            raise ValueError(
                f"{self.where} lacks the field {name}. Take the config.json that came with the"
                " weights"
            )
        if not _is_a(value, kind):
            raise ValueError(
                f"{self.where}: {name} must be of the kind {_called(kind)}; got {_shown(value)}. "
                "Take the config.json that came with the weights"
            )
        return value

    def _each(self, name: str, values: list[Any], kind: Any) -> list[Any]:
        wrong = [value for value in values if not _is_a(value, kind)]
        if wrong:
            raise ValueError(
                f"{self.where}: {name} must be a list of values of the kind {_called(kind)}; got "
                f"{_shown(values)}. Take the config.json that came with the weights"
            )
        return values

    def _within(self, bounds: Bounds, name: str, value: Any) -> Any:
        if value is not None and not bounds.hold(value):
            raise ValueError(
                f"{self.where}: {name} must be {bounds}; got {_shown(value)}. "
                "Take the config.json that came with the weights"
            )
        return value

    def choose(self, name: str, choices: dict[str, K], default: str | None = None) -> K:
        """Return the choice that a field names; raise if there is none of that name."""
        # The default is a name as well, so that it is one of the choices.
        value = self.text(name, REQUIRED if default is None else default)
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise ValueError(
                f"{self.where}: {name} must be one of {known}; got {reprlib.repr(value)}"
            )
        return choices[value]

    def only(self, **wanted: Any) -> None:
        """Raise if a field has another value than the only one supported.

        Null counts as missing, but where true is wanted: transformers takes it for false.
        """
        self.used.update(wanted)
        for name, value in wanted.items():
            # Missing, it has the value that is wanted.
            found = self.values.get(name, value)
            ignored = found is None and value is not True
            if found != value and not ignored:
                only, got = json.dumps(value), _shown(found)
                raise ValueError(
                    f"{self.where}: {name} must be {only}, no other value is supported; got {got}"
                )

    def without_dropout(self, given: float | None, *names: str) -> None:
        """Raise if a field drops where our models do not, unless `given` replaces its probability.

        Example:
            >>> Fields("config.json", {"resid_pdrop": 0.1}).without_dropout(0.0, "resid_pdrop")
        """
        self.used.update(names)
        if given is None:
            self.only(**dict.fromkeys(names, 0.0))

    def check_all_used(self) -> None:
        """Raise if a field was not read; null counts as missing."""
        for name, value in self.values.items():
            if name not in self.used and value is not None:
                raise ValueError(
                    f"{self.where}: {name}={_shown(value)} would be ignored. Remove it if it means"
                    " nothing"
                )

    def check_spelling(self) -> None:
        """Raise if a field that was not read nearly has the name of one that the file lacks.

        Call it when all is read. Fields of other names are those that transformers ignores as well.
        """
        lacking = sorted(self.used - self.values.keys())
        for name, value in self.values.items():
            # transformers keeps what it has computed under names that begin so.
            if name in self.used or name.startswith("_") or value is None:
                continue
            near = difflib.get_close_matches(name, lacking, 1, _NEAR)
            if near:
                raise ValueError(
                    f"{self.where}: {name}={_shown(value)} would be ignored, and the field"
                    f" {near[0]} is missing. Correct the name, or remove the field"
                )


NOTHING_DOWNLOADED = (
    "Nothing is downloaded here: pass a folder on this machine, such as the one that"
    " `hf download openai-community/gpt2 --local-dir gpt2` makes (pip install huggingface_hub)"
)


def read_fields(path: Path) -> Fields:
    """Return the fields of `config.json` in a folder.

    Raises:
        FileNotFoundError: if there is no such folder or file.
        ValueError: if the file does not hold a JSON object.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}. {NOTHING_DOWNLOADED}")
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"no config.json in {path}, the folder of a model holds one beside the weights"
        )
    return Fields(str(file), read_object(file))


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; true and false are no integers here."""
    # JSON has true and 1, and Python takes one for the other.
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _called(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _shown(value: Any) -> str:
    """Return a value as the file has it, its middle left out where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}"

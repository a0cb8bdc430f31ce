"""What happens while a module runs: calls of its submodules and named steps, told to a listener of either framework."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays, float64

ROOT = "."  # the whole module, the call of the caller's own included


@dataclass(frozen=True)
class Record:
    """One node on one side: a call of a submodule, or a step within one.

    Args:
        name: of the node, as both sides share it; a name of one side alone starts with `flax:` or `torch:`.
        kind: `"module"` or `"step"`.
        inputs: the floating arrays that the call was given, each once.
        output: the first floating array that it returned.
        dtype: of the output, as it was computed.
    """

    name: str
    kind: str
    inputs: tuple[np.ndarray, ...]
    output: np.ndarray
    dtype: str

    @property
    def shared(self) -> bool:
        """Whether the other side may have a node of this name."""
        return ":" not in self.name


@dataclass
class Frame:
    """A call that has not returned yet."""

    name: str
    inputs: tuple[Any, ...]
    notes: dict[str, Any] = field(default_factory=dict)


class Listener:
    """Follows a run through its calls and steps, and gives each a name. It changes nothing; its subclasses do.

    Args:
        framework: `"flax"` or `"torch"`.
        names: the shared names of submodules, by their paths on this side.
    """

    def __init__(self, framework: str, names: Mapping[str, str]):
        self.framework, self.names = framework, names
        self.frames: list[Frame] = []
        self._calls: Counter[str] = Counter()

    def enter(self, path: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Begin a call; return the arguments to call with."""
        frame = Frame(self._numbered(self.names.get(path, f"{self.framework}:{path}")), floats((args, kwargs)))
        args, kwargs = self.entered(frame, args, kwargs)
        self.frames.append(frame)
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """End the innermost call; return the output to go on with."""
        frame, found = self.frames.pop(), floats(output)
        return substitute(output, {id(found[0]): self.left(frame, found[0])}) if found else output

    def step(self, value: Any, step: str) -> Any:
        """Name a value within the innermost shared call; return the one to go on with."""
        return self.stepped(self._numbered(f"{self.enclosing.name}/{step}"), value)

    @property
    def enclosing(self) -> Frame:
        """The innermost call that both sides have."""
        return next((frame for frame in reversed(self.frames) if ":" not in frame.name), self.frames[0])

    def entered(self, frame: Frame, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Result `enter`."""
        return args, kwargs

    def left(self, frame: Frame, output: Any) -> Any:
        """Result `leave`."""
        return output

    def stepped(self, name: str, value: Any) -> Any:
        """Result `step`."""
        return value

    def _numbered(self, name: str) -> str:
        self._calls[name] += 1
        return name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"


class Recorder(Listener):
    """Keeps every value.

    Attributes:
        records: by name, in the order in which the calls return and the steps are taken.
    """

    def __init__(self, framework: str, names: Mapping[str, str]):
        super().__init__(framework, names)
        self.records: dict[str, Record] = {}

    def entered(self, frame: Frame, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        # Copied now: PyTorch may change them in place.
        frame.inputs = tuple(numpy64(x) for x in frame.inputs)
        return args, kwargs

    def left(self, frame: Frame, output: Any) -> Any:
        self._keep(frame.name, "module", frame.inputs, output)
        return self.passed(frame.name, output)

    def stepped(self, name: str, value: Any) -> Any:
        self._keep(name, "step", (), value)
        return self.passed(name, value)

    def passed(self, name: str, value: Any) -> Any:
        """Return the value to go on with."""
        return value

    def _keep(self, name: str, kind: str, inputs: tuple[np.ndarray, ...], output: Any) -> None:
        dtype = str(output.dtype).removeprefix("torch.")
        self.records[name] = Record(name, kind, inputs, numpy64(output), dtype)


def path_of(name: str) -> str:
    """Return the path of the module that a node belongs to.

    Example:
        >>> path_of("blocks.3.att#2/scores"), path_of("./scores")
        ('blocks.3.att', '.')
    """
    return name.split("/")[0].split("#")[0]


def spoken(name: str) -> str:
    """Return the name of a node as a sentence has it."""
    return "the whole module" if name == ROOT else name


def numpy64(array: Any) -> np.ndarray:
    """Return a copy of an array of either framework, in float64."""
    return np.array(float64({"": array})[""])


def floats(tree: Any) -> tuple[Any, ...]:
    """Return the floating arrays in nested tuples, lists and mappings, each once.

    Example:
        >>> x = np.ones(2)
        >>> len(floats(((x, x, "causal"), {"mask": np.ones(2, bool), "bias": np.zeros(3)})))
        2
    """
    return tuple({id(array): array for array in _arrays(tree)}.values())


def _arrays(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, tuple | list):
        for inner in tree:
            yield from _arrays(inner)
    elif hasattr(tree, "shape") and "float" in str(getattr(tree, "dtype", "")):
        yield tree


def substitute(tree: Any, new: Mapping[int, Any]) -> Any:
    """Return a tree in which arrays are exchanged for others, by the `id` of the old ones.

    Example:
        >>> x = np.ones(2)
        >>> substitute({"a": (x, 3)}, {id(x): "new"})
        {'a': ('new', 3)}
    """
    if id(tree) in new:
        return new[id(tree)]
    if isinstance(tree, Mapping):
        changed = copy.copy(tree)
        changed.update({key: substitute(value, new) for key, value in tree.items()})  # pyright: ignore
        return changed
    if isinstance(tree, tuple | list):
        inner = [substitute(value, new) for value in tree]
        return type(tree)(*inner) if hasattr(tree, "_fields") else type(tree)(inner)
    return tree


def by_name(records: Mapping[str, Record]) -> Arrays:
    """Return the outputs of records."""
    return {name: record.output for name, record in records.items()}

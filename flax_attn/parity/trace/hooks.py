"""Observe the calls of submodules and the named steps in a run, in either framework."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays, float64
from flax_attn.parity.adapters.module_adapter import by_field

ROOT = "."  # the whole module, together with the function that calls it

# Operations that must not run below float64 in a float64 run, by their names in either framework.
OPERATIONS = {
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax", "_log_softmax"), "the softmax"),
    **dict.fromkeys(("cos", "sin"), "cos and sin (rotary angles)"),
    **dict.fromkeys(
        (
            "dot_general",
            "native_product",
            "native_grouped_product",
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
        ),
        "matrix products",
    ),
    **dict.fromkeys(("rsqrt", "sqrt"), "the root in a norm"),
    **dict.fromkeys(("erf", "tanh", "logistic", "gelu", "silu", "sigmoid"), "the activation"),
    "exp": "exp",
    "cast": "a cast",
    "table": "a table of constants (such as rotary angles)",
}
TABLE = OPERATIONS["table"]
CAST = OPERATIONS["cast"]  # of values in float64, which loses digits whatever is computed after it


@dataclass(frozen=True)
class Activation:
    """What one node computed on one side: a call of a submodule, or a step within a call.

    Args:
        name: name of the node, shared by both sides; on one side alone, it starts with `flax:` or
            `torch:`.
        kind: `"module"` or `"step"`.
        inputs: the floating arrays that the call was given, each once.
        output: the first floating array that it returned.
        dtype: dtype in which the output was computed.
    """

    name: str
    kind: str
    inputs: tuple[Any, ...]
    output: Any
    dtype: str


@dataclass
class Frame:
    """A call that has not returned yet."""

    name: str
    inputs: tuple[Any, ...]
    path: str = ""


class Observer:
    """Follows and names the calls and steps of a run.

    It changes no value; subclasses may.

    Args:
        framework: `"flax"` or `"torch"`.
        names: the shared names of submodules, by their paths on this side.

    Attributes:
        lower: what was computed below float64, and in which dtype, by path of the shared module.
        tables: the ids of constants that hold numbers of float32.
    """

    def __init__(self, framework: str, names: Mapping[str, str]):
        self.framework, self.names = framework, names
        self.frames: list[Frame] = []
        self.lower: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self.tables: frozenset[int] = frozenset()
        self._calls: Counter[str] = Counter()

    def enter(self, path: str, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Begin a call with these floating arrays; return those to call with."""
        name = self._numbered(self.names.get(path, f"{self.framework}:{path}"))
        frame = Frame(name, inputs, path)
        inputs = self.entered(frame)
        self.frames.append(frame)
        return inputs

    def leave(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """End the innermost call; return the outputs to continue with.

        The call is recorded with its first floating output, if it has one.
        """
        frame = self.frames.pop()
        return tuple(self.left(frame, output) for output in outputs)

    def step(self, value: Any, step: str) -> Any:
        """Name a value within the innermost shared call; return the one to continue with."""
        return self.stepped(self._numbered(f"{self.enclosing.name}/{step}"), value)

    def computed(self, operation: str, dtype: str) -> None:
        """Note the dtype that an operation returns, if that is below float64."""
        kind = OPERATIONS.get(operation)
        if kind is not None and dtype in ("float32", "bfloat16", "float16"):
            self.lower[path_of(self.enclosing.name)][kind] = dtype

    @property
    def path(self) -> str:
        """The path of the innermost module that is called."""
        return self.frames[-1].path

    @property
    def enclosing(self) -> Frame:
        """The innermost call that both sides have."""
        return next(
            (frame for frame in reversed(self.frames) if ":" not in frame.name), self.frames[0]
        )

    def entered(self, frame: Frame) -> tuple[Any, ...]:
        """Return the inputs that a call is to continue with."""
        return frame.inputs

    def left(self, frame: Frame, output: Any) -> Any:
        """Return the output that the caller is to continue with."""
        return output

    def stepped(self, name: str, value: Any) -> Any:
        """Return the value that the call is to continue with."""
        return value

    def _numbered(self, name: str) -> str:
        self._calls[name] += 1
        return name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"


class ActivationRecorder(Observer):
    """Keeps every value.

    Attributes:
        activations: activations by name, in the order in which calls return and steps are taken.
    """

    def __init__(self, framework: str, names: Mapping[str, str]):
        super().__init__(framework, names)
        self.activations: dict[str, Activation] = {}

    def left(self, frame: Frame, output: Any) -> Any:
        self.keep(frame.name, "module", frame.inputs, output)
        return output

    def stepped(self, name: str, value: Any) -> Any:
        self.keep(name, "step", (), value)
        return value

    def keep(self, name: str, kind: str, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what one node computed."""
        self.activations[name] = Activation(
            name, kind, inputs, output, str(output.dtype).removeprefix("torch.")
        )


def path_of(name: str) -> str:
    """Return the path of the module that a node belongs to.

    Example:
        >>> path_of("blocks.3.att#2/scores"), path_of("./scores")
        ('blocks.3.att', '.')
    """
    return name.split("/")[0].split("#")[0]


def spoken(name: str) -> str:
    """Return the name of a node as it stands in a sentence.

    Example:
        >>> spoken("."), spoken("norm1")
        ('the whole module', 'norm1')
    """
    return "the whole module" if name == ROOT else name


def numpy64(array: Any) -> np.ndarray:
    """Return a copy of an array of either framework, in float64."""
    return np.array(float64({"": array})[""])


def floats(tree: Any) -> tuple[Any, ...]:
    """Return the floating arrays in nested tuples, lists, mappings and dataclasses, each once.

    Example:
        >>> x = np.ones(2)
        >>> len(floats(((x, x, "causal"), {"mask": np.ones(2, bool), "bias": np.zeros(3)})))
        2
    """
    return tuple({id(array): array for array in _arrays(tree)}.values())


def _arrays(tree: Any) -> Iterator[Any]:
    tree = by_field(tree)
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, tuple | list):
        for inner in tree:
            yield from _arrays(inner)
    elif hasattr(tree, "shape") and "float" in str(getattr(tree, "dtype", "")):
        yield tree


def replaced(tree: Any, old: tuple[Any, ...], new: tuple[Any, ...]) -> Any:
    """Return a tree in which the arrays `old` are replaced by `new`.

    Example:
        >>> x = np.ones(2)
        >>> replaced({"a": (x, 3)}, (x,), ("new",))
        {'a': ('new', 3)}
    """
    return _replaced(tree, {id(a): b for a, b in zip(old, new, strict=True)})


def _replaced(tree: Any, new: Mapping[int, Any]) -> Any:
    if id(tree) in new:
        return new[id(tree)]
    if isinstance(tree, Mapping):
        changed = copy.copy(tree)
        for key, value in tree.items():  # one by one: the outputs of transformers have no `update`
            changed[key] = _replaced(value, new)  # pyright: ignore
        return changed
    if isinstance(tree, tuple | list):
        inner = [_replaced(value, new) for value in tree]
        return type(tree)(*inner) if hasattr(tree, "_fields") else type(tree)(inner)
    held = by_field(tree)
    if held is tree:
        return tree
    changed = copy.copy(tree)
    for name, value in held.items():
        object.__setattr__(changed, name, _replaced(value, new))  # frozen ones too
    return changed


def weighs(module: Any) -> bool:
    """Return whether a module has a method `attend`, a call that also returns attention weights."""
    method = getattr(module, "attend", None)
    return method is not None and "return_weights" in inspect.signature(method).parameters


def outputs(activations: Mapping[str, Activation]) -> Arrays:
    """Return the output of each activation by name."""
    return {name: activation.output for name, activation in activations.items()}

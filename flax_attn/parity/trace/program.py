"""A run as a graph of operations with values and source lines, the same for both frameworks."""

from __future__ import annotations

import heapq
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

# A line in one of these is not where a user wrote an operation.
LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "haiku",
    "equinox",
    "einops",
    "optax",
    "torch",
    "numpy",
    "beartype",
    "contextlib",
    "jaxtyping",
    "typeguard",
    "functools",
)
# What the names of sources begin with that are parameters, and that PyTorch holds beside them.
PARAMETER, BUFFER = "parameter ", "buffer "
# A line that assigns a variable.
ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::[^=]+|[-+*/@])?=[^=]")
# Where libraries keep their layers, whose lines are shown if a layer alone is compared.
LAYERS = ("/flax/nnx/nn/", "/flax/linen/", "/equinox/nn/", "/haiku/_src/", "/torch/nn/modules/")
PYTHON = str(Path(linecache.__file__).parent)
PACKAGE = str(Path(__file__).parents[2])
HARNESS = str(Path(__file__).parents[1])
# It stands between a line of the user's and the function of PyTorch that the line calls.
PASSED = f"{HARNESS}/adapters/torch_float32.py"


# The file and line of a call, and of those around it.
Frames = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Place:
    """A line of source in which an operation stands.

    Args:
        file: path of the file.
        line: number of the line.
        module: dotted path of the innermost submodule that was called; empty at the top.
        callers: file and line of each call around it that a user wrote, from the inside out.
    """

    file: str
    line: int
    module: str = ""
    callers: tuple[tuple[str, int], ...] = ()

    def around(self) -> Iterator[Frames]:
        """Yield the line with its callers, and each caller with its own, from the inside out."""
        frames = ((self.file, self.line), *self.callers)
        for i in range(len(frames)):
            yield frames[i:]

    @property
    def caller(self) -> tuple[str, int] | None:
        """The file and line from which the function with this line was called, if a user's."""
        return self.callers[0] if self.callers else None

    @property
    def source(self) -> str:
        """The text of the line; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        """Return the name of the file and the line."""
        return f"{Path(self.file).name}:{self.line}"


@dataclass(eq=False)
class Node:
    """One value of a run, and the operation that computes it.

    Args:
        operation: name of the operation in plain notation: `"mul"`, `"dot"`, `"transpose"`; of what
            is given to the run, `"source"` or `"constant"`.
        operands: nodes of the operands.
        value: array that was computed.
        parameters: what the operation depends on beside its operands, such as axes.
        place: line of source; None where it is not known.
        name: name of a source: `"input 0"`, `"norm.weight"`.
        order: position in the execution.
        equation: the operation as its framework has it.
        compute: function that computes the value from those of the operands; None where a run
            cannot be repeated.
        steps: nodes of the steps of a loop whose values are stacked in this one; empty for a node
            that ran itself.
    """

    operation: str
    operands: tuple[Node, ...]
    value: np.ndarray
    parameters: Mapping[str, Any] = field(default_factory=dict)
    place: Place | None = None
    name: str = ""
    order: int = -1
    equation: Any = None
    compute: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None
    steps: tuple[Node, ...] = ()

    @property
    def module(self) -> str:
        """The path of the submodule in which it was computed; empty at the top."""
        return self.place.module if self.place else ""

    @property
    def line(self) -> tuple[str, int] | None:
        """The file and the number of the line of source; None where it is not known."""
        return None if self.place is None else (self.place.file, self.place.line)

    @property
    def floating(self) -> bool:
        """Whether the value has a floating dtype, complex numbers included."""
        return self.value.dtype.kind in "fc"

    @cached_property
    def constant(self) -> bool:
        """Whether all elements of the value are the same number."""
        flat = self.value.reshape(-1)
        return bool(flat.size == 0 or (flat == flat[0]).all())

    def __repr__(self) -> str:
        """Return the operation in short, for a debugger."""
        shape = list(self.value.shape)
        return f"<{self.order} {self.name or self.operation} {shape} at {self.place}>"


@dataclass
class Program:
    """The operations of one run, in the order in which they ran.

    Args:
        nodes: every value, operands before what is computed of them.
        outputs: nodes of the outputs, by name.
    """

    nodes: list[Node]
    outputs: dict[str, Node]

    def __post_init__(self):
        for order, node in enumerate(self.nodes):
            node.order = order

    @cached_property
    def users(self) -> dict[Node, list[Node]]:
        """The nodes that take a node as an operand."""
        found: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for operand in dict.fromkeys(node.operands):
                found[operand].append(node)
        return found

    @cached_property
    def varying(self) -> set[Node]:
        """The nodes that depend on what the run is given."""
        found: set[Node] = set()
        for node in self.nodes:
            if node.operation == "source" or not found.isdisjoint(node.operands):
                found.add(node)
        return found

    @cached_property
    def depending(self) -> set[Node]:
        """The nodes that depend on a parameter or on an input, as those of buffers do not."""
        found: set[Node] = set()
        for node in self.nodes:
            is_given = node.operation == "source" and not node.name.startswith(BUFFER)
            if is_given or not found.isdisjoint(node.operands):
                found.add(node)
        return found

    @cached_property
    def results(self) -> dict[Node, str]:
        """The names of what submodules return last, and of what lines assign to a variable."""
        modules: dict[str, Node] = {}
        lines: dict[Place, Node] = {}
        calls: dict[Frames, dict[str, Node]] = {}
        for node in self.nodes:
            if node.place is None or not node.operands:
                continue
            lines[node.place] = node
            for frames in node.place.around():
                calls.setdefault(frames, {})[node.module] = node
            for path in _around(node.module):
                modules[path] = node
        found = _assigned(lines, calls)
        # Of submodules that return the same value, the innermost comes last.
        for path in sorted(modules, key=len):
            found[modules[path]] = path
        return found

    def downstream(self, start: Iterable[Node]) -> Iterator[Node]:
        """Yield the nodes that depend on some nodes, in order, without these."""
        given = set(start)
        seen = set(given)
        # A sorted list is a heap.
        waiting = sorted(node.order for node in given)
        while waiting:
            node = self.nodes[heapq.heappop(waiting)]
            if node not in given:
                yield node
            for user in self.users[node]:
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, user.order)

    def rerun(
        self,
        replaced: Mapping[Node, np.ndarray],
        known: Mapping[Node, np.ndarray],
        most: int | None = None,
        until: Node | None = None,
        fixed: Collection[Node] = (),
    ) -> dict[Node, np.ndarray]:
        """Return the values that change when some are replaced, those included.

        Args:
            replaced: new values of nodes.
            known: values that take the place of those of the run.
            most: largest number of operations that run again; None is all.
            until: last operation that runs again; None is all.
            fixed: nodes that keep their values.
        """
        changed = {node: _as_kind(value, node.value) for node, value in replaced.items()}
        again = islice(self.downstream(replaced), most)
        for node in again:
            if until is not None and node.order > until.order:
                break
            if node.compute is None or node in fixed:
                continue
            operands = []
            for operand in node.operands:
                value = known.get(operand, operand.value)
                operands.append(changed.get(operand, value))
            changed[node] = node.compute(operands)
        return changed


def _as_kind(value: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return a value as one of flags, or of whole numbers, where that is what it replaces."""
    if before.dtype.kind in (value.dtype.kind, "f"):
        return value
    # One that is not finite is some whole number.
    with np.errstate(invalid="ignore"):
        return value.astype(before.dtype)


def unprefixed(name: str) -> str:
    """Return the name that a module has for a source."""
    return name.removeprefix(PARAMETER).removeprefix(BUFFER)


def _around(module: str) -> Iterator[str]:
    """Yield the path of a submodule, and of all modules that it is in, from the inside out."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _assigned(
    lines: Mapping[Place, Node], calls: Mapping[Frames, Mapping[str, Node]]
) -> dict[Node, str]:
    """Return the variables that lines assign, by the node that each computes last.

    Args:
        lines: what each line computes last by itself.
        calls: what is computed last in each call around a line, by submodules.
    """
    found = {}
    for place, node in lines.items():
        assigned = ASSIGNED.match(place.source)
        own = next(place.around())
        # What a layer or a function is given is not what it returns.
        after = [module for module, other in calls[own].items() if other.order > node.order]
        is_given = any(_is_inside(module, place.module) for module in after)
        if assigned and not is_given:
            found[node] = assigned[1]
    return found


def _is_inside(module: str, other: str) -> bool:
    """Whether a submodule is another one, or is in it."""
    return not other or module == other or module.startswith(f"{other}.")


def place_of(frames: Sequence[tuple[str, int]], module: str = "") -> Place | None:
    """Return the innermost line of some frames that a user wrote, else that of a library's layer.

    It is None where there is neither.
    """
    own = [frame for frame in frames if frame[0] != PASSED]
    # Beyond the harness stands who called it.
    inside = takewhile(lambda frame: not in_harness(frame[0]), own)
    written = [frame for frame in inside if not in_library(frame[0])]
    if not written:
        written = list(filter(_in_layer, frames))[:1]
    if not written:
        return None
    innermost, *callers = written
    return Place(*innermost, module, tuple(callers))


def _in_layer(frame: tuple[str, int]) -> bool:
    return any(name in frame[0] for name in LAYERS)


def in_harness(file: str) -> bool:
    """Whether a file belongs to the harness itself."""
    return file.startswith(f"{HARNESS}/")


_KNOWN: dict[str, bool] = {}


def in_library(file: str) -> bool:
    """Whether a file belongs to a framework, to Python or to the harness."""
    if file not in _KNOWN:
        _KNOWN[file] = _is_library(file)
    return _KNOWN[file]


def _is_library(file: str) -> bool:
    if file.startswith("<"):
        return True
    if file.startswith(f"{PACKAGE}/"):
        return in_harness(file)
    for name in LIBRARIES:
        folder = _folder_of(name)
        # Of a module of Python itself, the folder holds what is installed, too.
        if folder != PYTHON and file.startswith(f"{folder}/"):
            return True
    return file.startswith(f"{PYTHON}/") and "site-packages" not in file


def _folder_of(library: str) -> str | None:
    """Return where an imported library lies."""
    file = getattr(sys.modules.get(library), "__file__", None)
    return str(Path(file).parent) if file else None

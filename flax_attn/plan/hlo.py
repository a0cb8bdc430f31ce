"""Compiled programs, read from the text that XLA prints: instructions, and how often each runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|body|to_apply|called_computations|branch_computations|\w+_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BITS = re.compile(r"[a-z]+(\d+)")
CALLS = ("call", "call-start")  # the second runs on another core of the device, meanwhile
_OF_ELEMENTS = ("to_apply",)  # of a reduction or a sort: a function of single elements


@dataclass(frozen=True)
class Shape:
    """An array: its dtype as XLA writes it, its sizes, and its memory, 0 being the large one."""

    dtype: str
    sizes: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        """How many bytes it takes, without padding."""
        bits = _BITS.match(self.dtype)
        width = int(bits[1]) if bits else 8 * (self.dtype == "pred")
        return -(-prod(self.sizes) * width // 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        name: name, unique in its program.
        opcode: operation, such as `dot`.
        shapes: shape of its result; several if it is a tuple.
        operands: names of its inputs.
        attributes: text behind the operands.
        root: whether it is the result of its computation.
        literal: value of a constant, or for a parameter, which input of its computation it is.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool = False
    literal: str = ""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs, apart from functions of single elements."""
        found = _CALLED.finditer(self.attributes)
        texts = (
            match[1]
            for match in found
            if self.opcode in CALLS or not match[0].startswith(_OF_ELEMENTS)
        )
        return tuple(name for text in texts for name in _OPERAND.findall(text))


Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class Run:
    """An instruction that a program runs.

    Args:
        instruction: the instruction.
        computation: computation that it is in, a mapping of instructions by name.
        times: number of times that one device runs it.
        fused: whether it is inside a fusion, which keeps its intermediates out of memory.
    """

    instruction: Instruction
    computation: Computation
    times: int
    fused: bool


@dataclass(frozen=True)
class Hlo:
    """A program of one device.

    Args:
        computations: computations by name.
        entry: name of the one that is run.
    """

    computations: Mapping[str, Computation]
    entry: str

    def runs(self) -> Iterator[Run]:
        """Yield every instruction that is run, those of a loop as often as is known, or once.

        Of branches all are taken to run.
        """
        return self._runs(self.entry, 1, False)

    @property
    def endless(self) -> int:
        """How many loops there are of which XLA does not know how often they run."""
        return sum(
            run.instruction.opcode == "while" and self._trips(run.instruction) is None
            for run in self.runs()
        )

    def _trips(self, loop: Instruction) -> int | None:
        """Return how often a loop runs, or None if that is not known.

        XLA says it, or the loop counts from 0 up to below a constant, as JAX's do.
        """
        if found := _TRIPS.search(loop.attributes):
            return int(found[1])
        condition, body = (self.computations[name] for name in self._parts(loop))
        root = _root(condition)
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        count, limit = (condition[name] for name in root.operands)
        place = re.search(r"index=(\d+)", count.attributes)
        if limit.opcode != "constant" or place is None or _root(body).opcode != "tuple":
            return None
        step = _added(body[_root(body).operands[int(place[1])]], body)
        return -(-int(limit.literal) // step) if step else None

    def _parts(self, loop: Instruction) -> tuple[str, str]:
        """Return the names of the condition and the body of a loop."""
        names = dict(re.findall(r"(condition|body)=%([\w.\-]+)", loop.attributes))
        return names["condition"], names["body"]

    def _runs(self, name: str, times: int, fused: bool) -> Iterator[Run]:
        computation = self.computations[name]
        for instruction in computation.values():
            yield Run(instruction, computation, times, fused)
            inner = (
                times * (self._trips(instruction) or 1) if instruction.opcode == "while" else times
            )
            for called in instruction.called:
                yield from self._runs(called, inner, fused or instruction.opcode == "fusion")


def read(text: str) -> Hlo:
    r"""Return the program of a text that `jax.stages.Compiled.as_text()` returned.

    Example:
        >>> body = "  ROOT %y = f32[3]{0} negate(%x)"
        >>> program = read("ENTRY %main (x: f32[2,3]) -> f32[3] {\n" + body + "\n}")
        >>> next(program.runs()).instruction.shapes[0].bytes
        12
    """
    computations: dict[str, dict[str, Instruction]] = {}
    current, entry = {}, ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif name := _NAME.match(line):
            current[name[1]] = _instruction(
                name[1], line[name.end() :], line.lstrip().startswith("ROOT ")
            )
    return Hlo(computations, entry)


def _root(computation: Computation) -> Instruction:
    return next(x for x in computation.values() if x.root)


def _added(value: Instruction, computation: Computation) -> int | None:
    """Return the constant added to an element of a loop's state; None where it is not just that."""
    if value.opcode == "get-tuple-element":
        return 0
    operands = [computation[name] for name in value.operands]
    if value.opcode in ("copy", "bitcast"):
        return _added(operands[0], computation)
    constants = [int(x.literal) for x in operands if x.opcode == "constant"]
    others = [x for x in operands if x.opcode != "constant"]
    if value.opcode not in ("add", "fusion") or len(constants) != 1 or len(others) != 1:
        return None
    before = _added(others[0], computation)
    return None if before is None else before + constants[0]


def _instruction(name: str, text: str, root: bool) -> Instruction:
    """Return the instruction of a line, from behind the equals sign."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode, _, _ = text[end:].lstrip().partition("(")
    start = text.index("(", end)
    behind = _closing(text, start)
    operands = tuple(_OPERAND.findall(text[start:behind]))
    literal = text[start + 1 : behind - 1] if opcode in ("parameter", "constant") else ""
    return Instruction(name, opcode, _shapes(text[:end]), operands, text[behind:], root, literal)


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(map(int, filter(None, sizes.split(",")))), _space(layout))
        for dtype, sizes, layout in _SHAPE.findall(text)
    )


def _space(layout: str) -> int:
    found = re.search(r"S\((\d+)\)", layout)
    return int(found[1]) if found else 0


def _closing(text: str, start: int) -> int:
    """Return the index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(
        f"XLA's text has a parenthesis that is not closed; got {text[:80]!r}. Pass a whole program"
    )

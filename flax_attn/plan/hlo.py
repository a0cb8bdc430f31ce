"""Compiled programs, read from the text that XLA prints: instructions, and how often each runs."""

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
# The second runs on another core of the device, meanwhile.
CALLS = ("call", "call-start")
# Of a reduction or a sort: a function of single elements.
_OF_ELEMENTS = ("to_apply",)


@dataclass(frozen=True)
class Shape:
    """An array: its dtype as XLA writes it, its sizes, and its memory, 0 being the large one."""

    dtype: str
    sizes: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        """How many bytes it takes, without padding."""
        # A boolean has no number in its name, and takes a byte; int4 takes half of one.
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
        names = []
        for match in _CALLED.finditer(self.attributes):
            if self.opcode in CALLS or not match[0].startswith(_OF_ELEMENTS):
                names += _OPERAND.findall(match[1])
        return tuple(names)


Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class ExecutedInstruction:
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

    def runs(self) -> Iterator[ExecutedInstruction]:
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
        limit = _limit(condition)
        step = None if limit is None else _step(body, limit.place)
        return -(-limit.value // step) if limit and step else None

    def _parts(self, loop: Instruction) -> tuple[str, str]:
        """Return the names of the condition and the body of a loop."""
        names = dict(re.findall(r"(condition|body)=%([\w.\-]+)", loop.attributes))
        return names["condition"], names["body"]

    def _runs(self, name: str, times: int, fused: bool) -> Iterator[ExecutedInstruction]:
        for instruction in self.computations[name].values():
            yield ExecutedInstruction(instruction, self.computations[name], times, fused)
            turns = self._trips(instruction) or 1 if instruction.opcode == "while" else 1
            within = fused or instruction.opcode == "fusion"
            for called in instruction.called:
                yield from self._runs(called, turns * times, within)


def read(text: str) -> Hlo:
    r"""Return the program of a text that `jax.stages.Compiled.as_text()` returned.

    Example:
        >>> body = "  ROOT %y = f32[3]{0} negate(%x)"
        >>> program = read("ENTRY %main (x: f32[2,3]) -> f32[3] {\n" + body + "\n}")
        >>> next(program.runs()).instruction.shapes[0].bytes
        12
    """
    computations: dict[str, dict[str, Instruction]] = {}
    name = entry = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header[2]
            computations[name] = {}
            if header[1]:
                entry = name
        elif _NAME.match(line):
            found = _instruction(line)
            computations[name][found.name] = found
    return Hlo(computations, entry)


def _root(computation: Computation) -> Instruction:
    return next(x for x in computation.values() if x.root)


@dataclass(frozen=True)
class _Limit:
    """The constant below which an element of a loop's state stays, and its place in the state."""

    place: int
    value: int


def _limit(condition: Computation) -> _Limit | None:
    """Return the limit that the condition of a loop compares with, if it is just that."""
    comparison = _root(condition)
    if comparison.opcode != "compare" or "direction=LT" not in comparison.attributes:
        return None
    count, limit = (condition[name] for name in comparison.operands)
    # What is compared is an element of the state, which the condition takes as one tuple.
    place = re.search(r"index=(\d+)", count.attributes)
    if place is None or limit.opcode != "constant":
        return None
    return _Limit(int(place[1]), int(limit.literal))


def _step(body: Computation, place: int) -> int | None:
    """Return the constant that a loop adds to an element of its state in each turn, if any."""
    result = _root(body)
    if result.opcode != "tuple":
        return None
    return _added(body[result.operands[place]], body)


def _added(value: Instruction, computation: Computation) -> int | None:
    """Return the constant added to an element of a loop's state; None where it is not just that."""
    if value.opcode == "get-tuple-element":
        return 0
    operands = [computation[name] for name in value.operands]
    if value.opcode in ("copy", "bitcast"):
        return _added(operands[0], computation)
    # XLA may fuse the addition, and puts the constant on either side.
    if value.opcode not in ("add", "fusion") or len(operands) != 2:
        return None
    constants = [x for x in operands if x.opcode == "constant"]
    others = [x for x in operands if x.opcode != "constant"]
    if len(constants) != 1:
        return None
    before = _added(others[0], computation)
    added = int(constants[0].literal)
    return None if before is None else before + added


def _instruction(line: str) -> Instruction:
    """Return the instruction of a line: `ROOT %name = shapes opcode(operands), attributes`."""
    name = _NAME.match(line)
    assert name is not None, "the caller has seen it"
    text = line[name.end() :]
    # Shapes are one word, or a tuple in parentheses.
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode = text[end:].lstrip().partition("(")[0]
    start = text.index("(", end)
    behind = _closing(text, start)
    inside = text[start + 1 : behind - 1]
    return Instruction(
        name=name[1],
        opcode=opcode,
        shapes=_shapes(text[:end]),
        operands=tuple(_OPERAND.findall(inside)),
        attributes=text[behind:],
        root=line.lstrip().startswith("ROOT "),
        # In other instructions the operands stand there.
        literal=inside if opcode in ("parameter", "constant") else "",
    )


def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for dtype, sizes, layout in _SHAPE.findall(text):
        numbers = [int(size) for size in sizes.split(",") if size]
        shapes.append(Shape(dtype, tuple(numbers), _space(layout)))
    return tuple(shapes)


def _space(layout: str) -> int:
    found = re.search(r"S\((\d+)\)", layout)
    return int(found[1]) if found else 0


def _closing(text: str, start: int) -> int:
    """Return the index behind the parenthesis that closes the one at `start`."""
    # Parentheses nest: shapes may be tuples of tuples, and layouts have tiles in parentheses.
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(
        f"XLA's text has a parenthesis that is not closed; got {text[:80]!r}. Pass a whole program"
    )

"""Expressions in plain notation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from typing import Any

from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.expression import Expression, scaled
from flax_attn.parity.trace.patterns import moved_from
from flax_attn.parity.trace.program import Node, unprefixed

# The strength with which an operation holds its operands together.
SUM, PRODUCT, POWER, ATOM = range(4)
SIGNS = {"lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|"}
# Operations inside the name of a value that has none of its own.
DEPTH = 3
# Operations inside one another that are written.
LEVELS = 12
# Characters of an expression; a longer one is written over the variables of its source.
LONGEST = 160


class Names:
    """Names of the values that both runs have, as the source of one side has them.

    A value has the name of the parameter or input that it is, of the submodule that returns it, or
    of the variable that it is assigned to; else its name on the other side; any other is written
    out.

    Args:
        alignment: values that both runs have.
        built: function that returns the expression of a node of this side.
        module: path of the submodule in which the names stand: what is in it is named from there.
        ours: whether this side is JAX.
    """

    def __init__(
        self,
        alignment: Alignment,
        built: Callable[[Node], Expression],
        module: str = "",
        ours: bool = False,
    ):
        self._alignment, self._built, self._ours = alignment, built, ours
        self._inside = f"{module}." if module else ""
        self._names: dict[int, str] = {}
        self._depth = 0
        # How many expressions are being written inside one another.
        self.level = 0
        # What has been written, by the identity of the expression.
        self.wholes: dict[int, tuple[Expression, str]] = {}
        # Whether what is assigned to a variable has its name, though one side alone has it.
        self.brief = False

    def of(self, leaf: Expression) -> tuple[str, int]:
        """Return the name of a shared value, and how strongly it holds together."""
        quantity = leaf.settings[0]
        known = self._alignment
        node = known.torch.nodes[quantity]
        ours = known.flax_of.get(node, [])
        theirs = [node]
        for one in ours:
            theirs += known.torch_of[one]
        names = [
            _name(leaf.origin, ours, known.flax.results),
            _name(leaf.origin, theirs, known.torch.results),
        ]
        own, other = names if self._ours else reversed(names)
        if not own and not other:
            return self._written(ours[0] if self._ours and ours else node)
        if quantity not in self._names:
            name = own or other
            self._names[quantity] = self._unique(name.removeprefix(self._inside))
        return self._names[quantity], ATOM

    def local(self, part: Expression) -> str:
        """Return the name of what one side alone computes; empty where it is to be written."""
        inside = self.brief and self.level > 1 and part.operation != "leaf"
        return self._local.get(part.origin, "") if inside and part.origin is not None else ""

    @cached_property
    def _local(self) -> dict[Node, str]:
        program = self._alignment.flax if self._ours else self._alignment.torch
        return {moved_from(node): name for node, name in program.results.items()}

    def _unique(self, name: str) -> str:
        taken = set(self._names.values())
        count = 1
        unique = name
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        return unique

    def _written(self, node: Node) -> tuple[str, int]:
        if self._depth == DEPTH:
            return _in_brackets(node), ATOM
        self._depth += 1
        try:
            return _with_strength(self._built(node), self)
        finally:
            self._depth -= 1


def _in_brackets(node: Node) -> str:
    """Return what stands for an operation that is not written out."""
    line = f" of line {node.place.line}" if node.place else ""
    return f"[{node.operation}{line}]"


def _name(own: Node | None, nodes: Sequence[Node], results: Mapping[Node, str]) -> str:
    """Return the name of the first of some nodes that has one, of `own` if that is among them."""
    first = () if own is None else (own, moved_from(own))
    for node in sorted(nodes, key=lambda node: node not in first):
        if node.name or node in results:
            return unprefixed(node.name) or results[node]
    return ""


def whole(expression: Expression, names: Names) -> str:
    """Return an expression over values that both sides have, however long it is."""
    # Inside another expression fewer levels of it are written.
    if names.level:
        return _with_strength(expression, names)[0]
    key = id(expression)
    if key not in names.wholes:
        # It is kept as well, so that no other one gets its identity.
        names.wholes[key] = expression, _with_strength(expression, names)[0]
    return names.wholes[key][1]


def text(expression: Expression, names: Names) -> str:
    """Return an expression in plain notation."""
    written = whole(expression, names)
    if len(written) <= LONGEST:
        return written
    names.brief = True
    brief = _with_strength(expression, names)[0]
    names.brief = False
    return brief


def _text(x: Expression, names: Names, within: int) -> str:
    found, strength = _with_strength(x, names)
    return f"({found})" if strength < within else found


def _with_strength(x: Expression, names: Names) -> tuple[str, int]:
    if names.level > LEVELS:
        return "...", ATOM
    names.level += 1
    try:
        name = names.local(x)
        return (name, ATOM) if name else _written(x, names)
    finally:
        names.level -= 1


def _written(x: Expression, names: Names) -> tuple[str, int]:
    match x.operation:
        case "leaf":
            return names.of(x)
        case "sum":
            return _sum(x, names), SUM
        case "product":
            return _statistic(x, names) or _product(x, names)
        case "dot":
            return _infix(x, "@", names, POWER), PRODUCT
        case "number" | "setting" | "source" | "constant":
            return unprefixed(plain(x.settings[0])), ATOM
    if x.operation in SIGNS and len(x.operands) == 2:
        return _infix(x, SIGNS[x.operation], names, PRODUCT), SUM
    return _call(x, names), ATOM


def _infix(x: Expression, sign: str, names: Names, within: int) -> str:
    left, right = (_text(operand, names, within) for operand in x.operands)
    return f"{left} {sign} {right}"


def _statistic(x: Expression, names: Names) -> tuple[str, int] | None:
    """Return a mean, or a variance, which are sums over a number."""
    if len(x.operands) != 1 or x.operands[0].operation != "sum_over":
        return None
    (summed,) = x.operands
    factor, exponent = x.settings
    sizes = summed.settings[0]
    if exponent != 1 or abs(factor * math.prod(sizes) - 1) > 1e-9:
        return None
    name, inner = "mean", summed.operands[0]
    centred = _centred(inner, sizes)
    if centred is not None:
        name, inner = "var", centred
    return f"{name}({text(inner, names)}, over {plain(sizes)})", ATOM


def _centred(squares: Expression, sizes: tuple[int, ...]) -> Expression | None:
    """Return `x` of `(x - mean(x))**2`."""
    if squares.operation != "product" or squares.settings != (1.0, 2.0):
        return None
    difference = squares.operands[0]
    if difference.operation != "sum" or len(difference.operands) != 2:
        return None
    for x, mean in permutations(difference.operands):
        summed = Expression("sum_over", (x,), (sizes,))
        if mean == summed or mean.operation == "leaf":
            return x
    return None


def _sum(x: Expression, names: Names) -> str:
    terms = sorted(zip(x.settings, x.operands, strict=True), key=_rank)
    signed = [_signed(factor, term, names) for factor, term in terms]
    # The first is "- x" or "+ x", which reads "-x" or "x".
    sign, _, others = " ".join(signed).partition(" ")
    return others if sign == "+" else f"-{others}"


def _signed(factor: float, term: Expression, names: Names) -> str:
    size = scaled(abs(factor), term)
    sign = "-" if factor < 0 else "+"
    return f"{sign} {_text(size, names, PRODUCT)}"


def _rank(term: tuple[float, Expression]) -> tuple[bool, bool]:
    # Numbers come last, and what is added before what is subtracted.
    factor, base = term
    return factor < 0, base.number is not None


def _product(x: Expression, names: Names) -> tuple[str, int]:
    factor, *exponents = x.settings
    above, below = [], []
    for base, exponent in zip(x.operands, exponents, strict=True):
        side = above if exponent > 0 else below
        side.append(_power(base, abs(exponent), names))
    sign = "-" if factor == -1 else ""
    if factor not in (1, -1):
        above.append(plain(factor))
    top = sign + (" * ".join(above) or "1")
    if not below:
        return top, PRODUCT if len(above) > 1 else ATOM
    bottom = " * ".join(below)
    if len(below) > 1:
        bottom = f"({bottom})"
    return f"{top} / {bottom}", PRODUCT


def _power(base: Expression, exponent: float, names: Names) -> str:
    if exponent == 1:
        return _text(base, names, POWER)
    if exponent == 0.5:
        return f"sqrt({_text(base, names, SUM)})"
    return f"{_text(base, names, ATOM)}**{plain(exponent)}"


def _call(x: Expression, names: Names) -> str:
    if x.operation in ("slice", "moved", "other"):
        suffix = f"[{_bounds(x.settings)}]" if x.operation == "slice" else "'"
        return _text(x.operands[0], names, ATOM) + suffix
    inner = [_text(operand, names, SUM) for operand in x.operands]
    shown = ", ".join(inner + _settings(x))
    return f"{_function(x)}({shown})"


def _function(x: Expression) -> str:
    # Which function these are is their setting.
    if x.operation in ("order", "cast"):
        return str(x.settings[0])
    return "sum" if x.operation == "sum_over" else x.operation


def _settings(x: Expression) -> list[str]:
    if x.operation in ("order", "cast"):
        return []
    if x.operation in ("sum_over", "amax", "softmax", "logsumexp"):
        sizes = x.settings[0]
        return [f"over {plain(sizes)}"]
    return [_setting(setting) for setting in x.settings]


def _setting(setting: Any) -> str:
    pair = isinstance(setting, tuple) and len(setting) == 2
    if not pair or not isinstance(setting[0], str):
        return plain(setting)
    name, value = setting
    return f"over {plain(value)}" if name == "over" else f"{name}={plain(value)}"


def _bounds(bounds: tuple) -> str:
    shown = []
    for size, start, stop, step in bounds:
        by = f":{step}" if step != 1 else ""
        shown.append(f"{start}:{stop}{by} of {size}")
    return ", ".join(shown)


def plain(value: Any) -> str:
    """Return a number, or a few of them, as it is written.

    Example:
        >>> plain(1.0), plain(1e-06), plain((24,)), plain((2, 3))
        ('1', '1e-06', '24', '(2, 3)')
    """
    if isinstance(value, tuple):
        shown = [plain(inner) for inner in value]
        return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)

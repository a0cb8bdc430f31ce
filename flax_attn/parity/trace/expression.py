"""Expressions over values that both runs have, in one normal form for both frameworks.

Layout is left out of it: a transposition, a reshape or a broadcast is its operand. Sums are sets of
terms with factors, products are sets of bases with exponents, so that `x * rsqrt(v + e)` and
`x / sqrt(v + e)` are one expression, and a softmax is found in `exp(x - max(x)) / sum(...)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flax_attn.parity.trace.program import Node

LAYOUT = frozenset(
    {"transpose", "reshape", "broadcast", "squeeze", "expand_dims", "view", "detach"}
    | {"stop_gradient"}
)
# Arrays of one number, whatever they take their shape from.
FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
SWAPPED = {"gt": "lt", "ge": "le"}
# Numbers of a result that are rounded alike are one number.
DIGITS = 12
# Operations inside one another that are read.
DEEPEST = 120
# The numbers of a constant that are written out.
FEW = 4


@dataclass(frozen=True, eq=False)
class Expression:
    """An operation in normal form.

    Args:
        operation: its name; `"leaf"` is a value that both runs have, `"number"` a constant.
        operands: expressions that it is computed from.
        settings: what it depends on beside them.
        origin: node that computes it; None where the normal form made it.

    Attributes:
        key: digest of all but the origin, by which expressions are equal and sorted.
    """

    operation: str
    operands: tuple[Expression, ...] = ()
    settings: tuple[Any, ...] = ()
    origin: Node | None = field(default=None, repr=False)
    key: str = field(init=False, repr=False)

    def __post_init__(self):
        # Of the digests of the operands: an operand that occurs often is read once.
        inner = [operand.key for operand in self.operands]
        content = repr((self.operation, self.settings, inner))
        digest = hashlib.blake2b(content.encode(), digest_size=12).hexdigest()
        object.__setattr__(self, "key", digest)

    def __eq__(self, other: object) -> bool:
        """Whether both compute the same of the same values."""
        return isinstance(other, Expression) and self.key == other.key

    def __hash__(self) -> int:
        """Return a number that equal expressions share."""
        return hash(self.key)

    @property
    def number(self) -> float | None:
        """The number that a constant is; None for anything else."""
        return self.settings[0] if self.operation == "number" else None


def number(value: float, origin: Node | None = None) -> Expression:
    """Return a constant."""
    rounded = float(f"{value:.{DIGITS}g}")
    return Expression("number", (), (rounded,), origin)


ZERO, ONE = number(0.0), number(1.0)


def negated(term: Expression) -> Expression:
    """Return a term with the opposite sign."""
    return total([(-1.0, term)], term.origin)


def split(term: Expression) -> tuple[float, Expression]:
    """Return the factor of a term, and the term without it."""
    if term.number is not None:
        return term.number, ONE
    if term.operation != "product":
        return 1.0, term
    factor = term.settings[0]
    exponents = term.settings[1:]
    if len(term.operands) == 1 and exponents == (1.0,):
        return factor, term.operands[0]
    return factor, Expression("product", term.operands, (1.0, *exponents), term.origin)


def scaled(factor: float, term: Expression, origin: Node | None = None) -> Expression:
    """Return a term times a number."""
    own, base = split(term)
    factor = float(f"{factor * own:.{DIGITS}g}")
    if base == ONE:
        return number(factor, origin)
    if factor == 0:
        return ZERO
    if factor == 1:
        return base
    if base.operation == "product":
        return Expression("product", base.operands, (factor, *base.settings[1:]), origin)
    return Expression("product", (base,), (factor, 1.0), origin)


def total(terms: Sequence[tuple[float, Expression]], origin: Node | None = None) -> Expression:
    """Return the sum of terms with factors."""
    factors: dict[Expression, float] = {}
    for factor, term in terms:
        flat = [(1.0, term)]
        if term.operation == "sum":
            flat = list(zip(term.settings, term.operands, strict=True))
        for inner_factor, inner in flat:
            own, base = split(inner)
            factors[base] = factors.get(base, 0.0) + factor * inner_factor * own
    kept = {base: factor for base, factor in factors.items() if factor}
    if not kept:
        return ZERO
    if len(kept) == 1:
        ((base, factor),) = kept.items()
        return scaled(factor, base, origin)
    bases = sorted(kept, key=order)
    rounded = tuple(float(f"{kept[base]:.{DIGITS}g}") for base in bases)
    return Expression("sum", tuple(bases), rounded, origin)


def product(factors: Sequence[tuple[Expression, float]], origin: Node | None = None) -> Expression:
    """Return the product of bases with exponents."""
    coefficient = 1.0
    exponents: dict[Expression, float] = {}
    for base, exponent in factors:
        factor, rest = split(base)
        if factor < 0 and exponent != int(exponent):
            factor, rest = 1.0, base
        with np.errstate(all="ignore"):
            coefficient *= float(np.float64(factor) ** exponent)
        inner = [(rest, 1.0)]
        if rest.operation == "product":
            inner = list(zip(rest.operands, rest.settings[1:], strict=True))
        for own, power in inner:
            if own != ONE:
                exponents[own] = exponents.get(own, 0.0) + power * exponent
    kept = {base: exponent for base, exponent in exponents.items() if exponent}
    if not kept or not np.isfinite(coefficient) or coefficient == 0:
        return number(coefficient, origin)
    bases = sorted(kept, key=order)
    coefficient = float(f"{coefficient:.{DIGITS}g}")
    if len(bases) == 1 and kept[bases[0]] == 1:
        return scaled(coefficient, bases[0], origin)
    powers = tuple(kept[base] for base in bases)
    return _softmax(Expression("product", tuple(bases), (coefficient, *powers), origin))


def _softmax(whole: Expression) -> Expression:
    """Return `y exp(x) / sum(exp(x))` with a softmax, and anything else as it is."""
    powers = dict(zip(whole.operands, whole.settings[1:], strict=True))
    for summed, power in powers.items():
        (base,) = summed.operands if summed.operation == "sum_over" else (None,)
        if base is None or base.operation != "exp" or (powers.get(base), power) != (1, -1):
            continue
        made = Expression("softmax", base.operands, summed.settings, summed.origin)
        rest = [(one, p) for one, p in powers.items() if one not in (base, summed)]
        return scaled(whole.settings[0], product([(made, 1.0), *rest], whole.origin))
    return whole


def parts(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all inside it, each once, from the outside in."""
    seen: set[Expression] = set()
    waiting = [expression]
    while waiting:
        one = waiting.pop(0)
        if one in seen:
            continue
        seen.add(one)
        waiting += one.operands
        yield one


def order(expression: Expression) -> tuple[str, str]:
    """Return what expressions are sorted by: the same on both sides."""
    return expression.operation, expression.key


class Builder:
    """Makes expressions of the nodes of one run.

    Args:
        leaves: the number of each node that both runs have: the same for both of them.
        varying: nodes that depend on what the run is given, which are no numbers.
    """

    def __init__(self, leaves: Mapping[Node, int], varying: Collection[Node]):
        self.leaves, self.varying = leaves, varying
        self._depth = 0
        self._made: dict[Node, Expression] = {}
        self._first: dict[int, Node] = {}
        for node in sorted(leaves, key=lambda node: node.order):
            if node in varying:
                self._first.setdefault(leaves[node], node)

    def leaf(self, node: Node) -> Expression:
        """Return the expression of a node as a value that both have."""
        return Expression("leaf", (), (self.leaves[node],), node)

    def makers(self, expression: Expression) -> list[Node]:
        """Return the nodes that first compute the shared values in an expression."""
        leaves = [one for one in parts(expression) if one.operation == "leaf"]
        return [self._first[one.settings[0]] for one in leaves if one.settings[0] in self._first]

    def scaling(self, top: Node, base: Expression) -> list[Node]:
        """Return the operations that multiply an expression by a number, inside of a node."""
        found: list[Node] = []
        for node in self._inside(top):
            if node.operation in ("mul", "div", "neg") and split(self(node))[1] == base:
                found.append(node)
        return found

    def _inside(self, top: Node) -> Iterator[Node]:
        """Yield the nodes between a node and the shared values that it is computed from."""
        seen = {top}
        waiting = [top]
        while waiting:
            node = waiting.pop()
            yield node
            if node in self.leaves and node is not top:
                continue
            waiting += [operand for operand in node.operands if operand not in seen]
            seen.update(node.operands)

    def __call__(self, node: Node) -> Expression:
        """Return the expression of a node over shared values, which stand for themselves."""
        if node.constant and node not in self.varying and node.value.size:
            return number(float(node.value.reshape(-1)[0]), node)
        if node in self.leaves:
            return self.leaf(node)
        return self.written(node)

    def written(self, node: Node) -> Expression:
        """Return the operation of a node, also where its value is shared."""
        if node not in self._made:
            # What is far from any shared value is a value by itself.
            if self._depth == DEEPEST:
                return Expression("value", (), (node.order,), node)
            self._depth += 1
            try:
                self._made[node] = self._of(node)
            finally:
                self._depth -= 1
        return self._made[node]

    def _of(self, node: Node) -> Expression:
        if node.operation in ("source", "constant"):
            return Expression(node.operation, (), (node.name or _contents(node.value),), node)
        for name, sum_of in (("logsumexp", logsumexp_of), ("softmax", softmax_of)):
            summed = sum_of(node)
            if summed is not None:
                sizes = _sizes(summed, summed.parameters["axes"])
                return Expression(name, (self(_exponent(summed)),), (sizes,), summed)
        operands = [self(operand) for operand in node.operands]
        if node.operation in ("add", "add_any", "sub", "mul", "div") and _moved(node, operands):
            operands[1] = Expression("moved", (operands[1],), (), node.operands[1])
        elif node.operation in ("add", "add_any") and _coincide(node, operands):
            factor, base = split(operands[1])
            operands[1] = scaled(factor, Expression("other", (base,), (), base.origin))
        for operand, inner in zip(node.operands, operands, strict=True):
            # A choice that chooses one side everywhere is that side.
            if node.operation == "where" and _is_same(operand.value, node.value):
                return inner
        rule = RULES.get(node.operation)
        if rule is not None:
            return rule(node, operands)
        name = SWAPPED.get(node.operation)
        if name:
            return Expression(name, tuple(reversed(operands)), (), node)
        return _contained(node, operands)


def logsumexp_of(node: Node) -> Node | None:
    """Return the sum of a `logsumexp`, which adds what its exponents lack; else None."""
    if node.operation != "add" or len(node.operands) != 2:
        return None
    for log, shift in (node.operands, node.operands[::-1]):
        summed = summed_in(moved_from(log))
        if summed is None:
            continue
        difference = moved_from(moved_from(summed.operands[0]).operands[0])
        if difference.operation == "sub" and _shifts_by(difference, shift):
            return summed
    return None


def summed_in(log: Node) -> Node | None:
    """Return the sum of exponentials of which a node is the logarithm; None if it is not."""
    if log.operation != "log":
        return None
    summed = moved_from(log.operands[0])
    is_sum = summed.operation == "sum" and moved_from(summed.operands[0]).operation == "exp"
    return summed if is_sum else None


def _shifts_by(difference: Node, shift: Node) -> bool:
    return moved_from(difference.operands[1]) is moved_from(shift)


def softmax_of(node: Node) -> Node | None:
    """Return the sum of a softmax, which divides exponentials by it; None if a node is none."""
    if node.operation != "div":
        return None
    exponential, summed = map(moved_from, node.operands)
    divides = exponential.operation == "exp" and summed.operation == "sum"
    return summed if divides and moved_from(summed.operands[0]) is exponential else None


def _exponent(summed: Node) -> Node:
    """Return the argument of a softmax or `logsumexp`, without the maximum that is taken off."""
    x = moved_from(summed.operands[0]).operands[0]
    difference = moved_from(x)
    if difference.operation != "sub":
        return x
    largest = moved_from(difference.operands[1])
    return difference.operands[0] if largest.operation == "amax" else x


def _contents(value: np.ndarray) -> str:
    """Return an array in words: its shape, and its numbers if they are few."""
    distinct = np.unique(value) if value.dtype.kind in "biuf" else np.zeros(0)
    shape = "x".join(map(str, value.shape))
    if len(distinct) > FEW:
        low, high = distinct[0], distinct[-1]
        return f"array {shape} from {low:.6g} to {high:.6g}"
    return f"array {shape} of {' and '.join(f'{float(x):.6g}' for x in distinct)}"


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())


def _moved(node: Node, operands: list[Expression]) -> bool:
    """Whether both operands hold the same numbers in another layout, as `x` and its transpose."""
    if split(operands[0])[1] != split(operands[1])[1] or operands[0].number is not None:
        return False
    first, second = (operand.value for operand in node.operands[:2])
    if first.shape != second.shape:
        return True
    # The same array, perhaps times a number.
    factor = split(operands[1])[0] / split(operands[0])[0]
    return not np.allclose(first * factor, second, rtol=1e-9, atol=1e-300)


def _coincide(node: Node, operands: list[Expression]) -> bool:
    """Whether the terms of a sum are two values that happen to be equal, as two losses are."""
    first, second = split(operands[0])[1], split(operands[1])[1]
    if first.operation != "leaf" or first != second:
        return False
    assert first.origin is not None
    assert second.origin is not None
    return moved_from(first.origin) is not moved_from(second.origin)


def moved_from(node: Node) -> Node:
    """Return what a node lays out otherwise, rounds, or returns unchanged."""
    while node.operands:
        first = node.operands[0]
        moves = node.operation in LAYOUT or node.operation == "cast"
        same = [x for x in node.operands if (moves and x is first) or _is_same(x.value, node.value)]
        if not same:
            break
        node = same[0]
    return node


def _settings(node: Node) -> tuple[Any, ...]:
    """Return the parameters of an operation, axes by their sizes: these have one layout."""
    found = []
    for name, value in sorted(node.parameters.items()):
        if name in ("axes", "axis") and node.operands:
            found.append(("over", _sizes(node, value)))
        elif value is not None:
            found.append((name, value))
    return tuple(found)


def _sizes(node: Node, axes: Any) -> tuple[int, ...]:
    # What is joined has the size of all together, whichever of them comes first.
    shape = (node if node.operation == "concat" else node.operands[0]).value.shape
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(sorted(shape[axis] for axis in axes)) if shape else ()


Rule = Callable[[Node, list[Expression]], Expression]


def _first(node: Node, x: list[Expression]) -> Expression:
    return x[0]


def _add(node: Node, x: list[Expression]) -> Expression:
    second = product([(x[1], 1.0), (x[2], 1.0)]) if len(x) > 2 else x[1]
    return total([(1.0, x[0]), (1.0, second)], node)


def _sub(node: Node, x: list[Expression]) -> Expression:
    second = product([(x[1], 1.0), (x[2], 1.0)]) if len(x) > 2 else x[1]
    return total([(1.0, x[0]), (-1.0, second)], node)


def _mul(node: Node, x: list[Expression]) -> Expression:
    return product([(x[0], 1.0), (x[1], 1.0)], node)


def _div(node: Node, x: list[Expression]) -> Expression:
    return product([(x[0], 1.0), (x[1], -1.0)], node)


def _power_of(exponent: float) -> Rule:
    return lambda node, x: product([(x[0], exponent)], node)


def _pow(node: Node, x: list[Expression]) -> Expression:
    exponent = node.parameters.get("exponent")
    if exponent is None:
        exponent = x[1].number
    if exponent is None:
        factor, rest = split(x[1])
        if factor < 0:
            inverse = Expression("pow", (x[0], scaled(-factor, rest)), (), node)
            return product([(inverse, -1.0)], node)
        return Expression("pow", tuple(x), (), node)
    return product([(x[0], float(exponent))], node)


def _sum(node: Node, x: list[Expression]) -> Expression:
    factor, inner = split(x[0])
    sizes = _sizes(node, node.parameters["axes"])
    return scaled(factor, Expression("sum_over", (inner,), (sizes,), node), node)


def _vector_norm(node: Node, x: list[Expression]) -> Expression:
    if node.parameters.get("ord", 2) != 2 or "axes" not in node.parameters:
        return _contained(node, x)
    squares = product([(x[0], 2.0)])
    summed = Expression("sum_over", (squares,), (_sizes(node, node.parameters["axes"]),), node)
    return product([(summed, 0.5)], node)


def _mean(node: Node, x: list[Expression]) -> Expression:
    sizes = _sizes(node, node.parameters["axes"])
    return scaled(1 / np.prod(sizes), _sum(node, x), node)


def _amax(node: Node, x: list[Expression]) -> Expression:
    return Expression("amax", (x[0],), (_sizes(node, node.parameters["axes"]),), node)


def _max(node: Node, x: list[Expression]) -> Expression:
    numbers = [operand.number for operand in x]
    if -np.inf in numbers:
        return x[1 - numbers.index(-np.inf)]
    if 0.0 in numbers:
        return Expression("relu", (x[1 - numbers.index(0.0)],), (), node)
    return Expression("max", tuple(sorted(x, key=order)), (), node)


def _erf(node: Node, x: list[Expression]) -> Expression:
    factor, _ = split(x[0])
    sign = -1.0 if factor < 0 else 1.0
    return scaled(sign, Expression("erf", (scaled(sign, x[0]),), (), node), node)


def _erfc(node: Node, x: list[Expression]) -> Expression:
    return total([(1.0, ONE), (-1.0, _erf(node, x))], node)


def _dot(node: Node, x: list[Expression]) -> Expression:
    left, right = split(x[0]), split(x[1])
    inner = tuple(sorted((left[1], right[1]), key=order))
    return scaled(left[0] * right[0], Expression("dot", inner, (), node), node)


def _where(node: Node, x: list[Expression]) -> Expression:
    # JAX has the case for False first.
    if node.parameters.get("false_first"):
        return _chosen(node, x[0], (x[2], x[1]))
    return _chosen(node, x[0], (x[1], x[2]))


def _scattered(node: Node, x: list[Expression]) -> Expression:
    return Expression("scatter-add", (ZERO, x[1], x[0]), (), node)


def _masked(node: Node, x: list[Expression]) -> Expression:
    return _chosen(node, x[1], (x[2], x[0]))


def _chosen(node: Node, condition: Expression, cases: tuple[Expression, Expression]) -> Expression:
    """Return the first case where a condition holds, and the second elsewhere."""
    if condition.operation == "not":
        condition, cases = condition.operands[0], (cases[1], cases[0])
    if condition.number is not None:
        return cases[0] if condition.number else cases[1]
    numbers = cases[0].number, cases[1].number
    if node.value.dtype == bool and numbers == (1.0, 0.0):
        return condition
    if node.value.dtype == bool and numbers == (0.0, 1.0):
        return Expression("not", (condition,), (), node)
    return Expression("where", (condition, *cases), (), node)


def _filled(node: Node, x: list[Expression]) -> Expression:
    return number(float(node.value.flat[0]), node) if node.value.size else _contained(node, x)


def _contained(node: Node, x: list[Expression]) -> Expression:
    return Expression(node.operation, tuple(x), _settings(node), node)


def _not(node: Node, x: list[Expression]) -> Expression:
    return x[0].operands[0] if x[0].operation == "not" else Expression("not", (x[0],), (), node)


def _cast(node: Node, x: list[Expression]) -> Expression:
    dtype = str(node.parameters.get("dtype"))
    wider = dtype == "float64" or not node.operands[0].floating
    return x[0] if wider else Expression("cast", (x[0],), (dtype,), node)


def _slice(node: Node, x: list[Expression]) -> Expression:
    bounds = _bounds(node)
    return Expression("slice", (x[0],), bounds, node) if bounds else x[0]


def _bounds(node: Node) -> tuple[tuple[int, int, int, int], ...]:
    """Return what is taken of each axis that is not taken whole: size, start, stop, step."""
    shape, given = node.operands[0].value.shape, node.parameters
    if "index" in given:
        (axis,) = given.get("axes", (0,))
        start = given["index"] % shape[axis]
        return ((shape[axis], start, start + 1, 1),)
    if "result" in given or "split_size" in given or "split_sizes" in given:
        return _piece(node)
    starts = given.get("start")
    if isinstance(starts, tuple):
        steps = given["step"] or (1,) * len(starts)
        every = zip(shape, starts, given["stop"], steps, strict=True)
        return tuple(bound for bound in every if bound[1:] != (0, bound[0], 1))
    if "axes" not in given:
        return ()
    (axis,) = given["axes"]
    start, stop, step = slice(given.get("start"), given.get("end"), given.get("step")).indices(
        shape[axis]
    )
    return ((shape[axis], start, stop, step),) if (start, stop, step) != (0, shape[axis], 1) else ()


def _piece(node: Node) -> tuple[tuple[int, int, int, int], ...]:
    """Return what one result of a split takes."""
    shape, given = node.operands[0].value.shape, node.parameters
    axis = given.get("axis", given.get("axes", (0,)))
    axis = axis[0] if isinstance(axis, tuple) else axis
    index = given.get("result", 0)
    sizes = given.get("sizes", given.get("split_sizes"))
    if sizes is None:
        each = given.get("split_size", 1)
        start = index * each
        stop = min(start + each, shape[axis])
    else:
        start = sum(sizes[:index])
        stop = start + sizes[index]
    return ((shape[axis], start, stop, 1),)


def _stack(node: Node, x: list[Expression]) -> Expression:
    # Where the new axis stands is a matter of layout.
    return Expression("stack", tuple(x), (), node)


def _topk(node: Node, x: list[Expression]) -> Expression:
    given = node.parameters
    settings = [("k", given["k"]), ("result", given["result"])]
    if not given.get("largest", True):
        settings.append(("largest", False))
    return Expression("topk", (x[0],), tuple(settings), node)


def _pad(node: Node, x: list[Expression]) -> Expression:
    """Return a padding by the axes that it makes longer: size, before, after."""
    shape = node.operands[0].value.shape
    around = _around(node)
    if not any(map(any, around)):
        return x[0]
    longer = [(size, *pads) for size, pads in zip(shape, around, strict=True) if any(pads)]
    return Expression("pad", tuple(x), (("around", tuple(sorted(longer))),), node)


def _around(node: Node) -> list[tuple[int, ...]]:
    """Return what a padding puts before and after each axis, and between elements if it does."""
    if "padding" in node.parameters:
        pads = node.parameters["padding"]
        return [tuple(pad) if pad[2] else tuple(pad[:2]) for pad in pads]
    # PyTorch names the last axis first.
    flat = node.parameters["pad"]
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (node.operands[0].value.ndim - len(pairs)) + pairs[::-1]


def _iota(node: Node, x: list[Expression]) -> Expression:
    """Return numbers at equal distances as whole ones from 0, times a step, and a start."""
    numbers = np.unique(node.value)
    if len(numbers) < 2:
        return number(float(node.value.flat[0]), node) if node.value.size else _contained(node, x)
    start = float(node.value.flat[0])
    step = float(node.value.flat[-1] - start) / (len(numbers) - 1)
    counted = Expression("iota", (), (("size", len(numbers)),), node)
    return total([(step, counted), (start, ONE)], node)


def _fft(node: Node, x: list[Expression]) -> Expression:
    """Return a Fourier transform by its lengths; an inverse one is divided by them in JAX."""
    given = node.parameters
    real = node.value if node.operation == "fft_c2r" else node.operands[0].value
    inverse = given.get("inverse", not given.get("forward", node.operation != "fft_c2r"))
    lengths = given.get("lengths", ())
    if "axes" in given:
        lengths = tuple(real.shape[axis] for axis in given["axes"])
    scaling = given.get("normalization", 2 if inverse else 0)
    settings = (("lengths", lengths), ("inverse", inverse), ("normalization", scaling))
    return Expression(node.operation, tuple(x), settings, node)


def _spatial(node: Node) -> Sequence[int]:
    """Return the axes of the image along which a convolution runs, in the order of its settings."""
    # An operation of PyTorch has no equation, and its channels come first.
    if node.equation is None:
        return range(2, node.operands[0].value.ndim)
    return node.equation.params["dimension_numbers"].lhs_spec[2:]


def _conv(node: Node, x: list[Expression]) -> Expression:
    given = node.parameters
    padding = tuple(
        tuple(pad) if isinstance(pad, tuple) else (pad, pad) for pad in given["padding"]
    )
    image = node.operands[0]
    # Zeros that are put around the image before, and by the convolution itself, are one thing.
    if x[0].operation == "pad" and x[0].origin is image and x[0].operands[1] == ZERO:
        around = _around(image)
        spatial = _spatial(node)
        others = [pads for axis, pads in enumerate(around) if axis not in spatial]
        pairs = [around[axis] for axis in spatial]
        if all(len(pads) == 2 for pads in pairs) and not any(map(any, others)):
            joined = zip(padding, pairs, strict=True)
            padding = tuple((a + low, b + high) for (a, b), (low, high) in joined)
            x = [x[0].operands[0], *x[1:]]
    settings = [("stride", tuple(given["stride"])), ("padding", padding)]
    settings += [("dilation", tuple(given["dilation"])), ("groups", given["groups"])]
    return Expression("conv", tuple(x), tuple(settings), node)


RULES: dict[str, Rule] = {
    **dict.fromkeys(LAYOUT, _first),
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda node, x: total([(-1.0, x[0])], node),
    "square": _power_of(2.0),
    "sqrt": _power_of(0.5),
    "rsqrt": _power_of(-0.5),
    "reciprocal": _power_of(-1.0),
    "pow": _pow,
    "sum": _sum,
    "mean": _mean,
    "norm": _vector_norm,
    "amax": _amax,
    "max": _max,
    "erf": _erf,
    "erfc": _erfc,
    "dot": _dot,
    "where": _where,
    "masked_fill": _masked,
    "embedding_dense_backward": _scattered,
    **dict.fromkeys(FILLED, _filled),
    "not": _not,
    "cast": _cast,
    "slice": _slice,
    "element": _slice,
    "split": _slice,
    "conv": _conv,
    "pad": _pad,
    "stack": _stack,
    "topk": _topk,
    "iota": _iota,
    **dict.fromkeys(("fft_r2c", "fft_c2r", "fft_c2c"), _fft),
}

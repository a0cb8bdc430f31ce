"""Expressions over values that both runs have, in one normal form for both frameworks.

Layout is left out of it: a transposition, a reshape or a broadcast is its operand. Sums are sets of
terms with factors, products are sets of bases with exponents, so that `x * rsqrt(v + e)` and
`x / sqrt(v + e)` are one expression, and a softmax is found in `exp(x - max(x)) / sum(...)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flax_attn.parity.trace.program import Node

# Numbers of a result that are rounded alike are one number.
DIGITS = 12
# Terms with their factors, and bases with their exponents.
Terms = Sequence[tuple[float, "Expression"]]
Bases = Sequence[tuple["Expression", float]]


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


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def number(value: float, origin: Node | None = None) -> Expression:
    """Return a constant."""
    return Expression("number", (), (_rounded(value),), origin)


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
    factor, *exponents = term.settings
    # A factor of a single base is no product any more once the factor is taken off.
    if exponents == [1.0]:
        return factor, term.operands[0]
    return factor, Expression("product", term.operands, (1.0, *exponents), term.origin)


def scaled(factor: float, term: Expression, origin: Node | None = None) -> Expression:
    """Return a term times a number."""
    own, base = split(term)
    factor = _rounded(factor * own)
    if base == ONE:
        return number(factor, origin)
    if factor == 0:
        return ZERO
    if factor == 1:
        return base
    if base.operation == "product":
        exponents = base.settings[1:]
        return Expression("product", base.operands, (factor, *exponents), origin)
    return Expression("product", (base,), (factor, 1.0), origin)


def total(terms: Terms, origin: Node | None = None) -> Expression:
    """Return the sum of terms with factors."""
    factors: dict[Expression, float] = {}
    for outer, term in terms:
        # The terms of a sum within a sum are its own.
        flat = [(1.0, term)]
        if term.operation == "sum":
            flat = list(zip(term.settings, term.operands, strict=True))
        for factor, inner in flat:
            own, base = split(inner)
            factors[base] = factors.get(base, 0.0) + outer * factor * own
    # A term whose factors cancel is gone.
    kept = {base: factor for base, factor in factors.items() if factor}
    if not kept:
        return ZERO
    bases = sorted(kept, key=order)
    if len(bases) == 1:
        return scaled(kept[bases[0]], bases[0], origin)
    rounded = [_rounded(kept[base]) for base in bases]
    return Expression("sum", tuple(bases), tuple(rounded), origin)


def product(factors: Bases, origin: Node | None = None) -> Expression:
    """Return the product of bases with exponents."""
    coefficient = 1.0
    exponents: dict[Expression, float] = {}
    for base, outer in factors:
        factor, rest = split(base)
        # The root of a negative number is none: it stays inside.
        if factor < 0 and outer != int(outer):
            factor, rest = 1.0, base
        with np.errstate(all="ignore"):
            coefficient *= float(np.float64(factor) ** outer)
        flat = [(rest, 1.0)]
        if rest.operation == "product":
            flat = list(zip(rest.operands, rest.settings[1:], strict=True))
        for inner, exponent in flat:
            if inner != ONE:
                exponents[inner] = exponents.get(inner, 0.0) + exponent * outer
    kept = {base: exponent for base, exponent in exponents.items() if exponent}
    if not kept or not np.isfinite(coefficient) or coefficient == 0:
        return number(coefficient, origin)
    coefficient = _rounded(coefficient)
    bases = sorted(kept, key=order)
    powers = [kept[base] for base in bases]
    if powers == [1]:
        return scaled(coefficient, bases[0], origin)
    return _softmax(Expression("product", tuple(bases), (coefficient, *powers), origin))


def _softmax(whole: Expression) -> Expression:
    """Return `y exp(x) / sum(exp(x))` with a softmax, and anything else as it is."""
    coefficient, *exponents = whole.settings
    powers = dict(zip(whole.operands, exponents, strict=True))
    for summed, power in powers.items():
        if summed.operation != "sum_over" or power != -1:
            continue
        (exponential,) = summed.operands
        if exponential.operation == "exp" and powers.get(exponential) == 1:
            made = Expression("softmax", exponential.operands, summed.settings, summed.origin)
            del powers[exponential], powers[summed]
            return scaled(coefficient, product([(made, 1.0), *powers.items()], whole.origin))
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


def leaves_of(expression: Expression) -> list[Expression]:
    """Return the values that both runs have in an expression."""
    return [one for one in parts(expression) if one.operation == "leaf"]


def common(here: Iterable[Any], there: Iterable[Any]) -> float:
    """Return the share of two collections together that is in both."""
    ours, theirs = set(here), set(there)
    return len(ours & theirs) / max(len(ours | theirs), 1)


def order(expression: Expression) -> tuple[str, str]:
    """Return what expressions are sorted by: the same on both sides."""
    return expression.operation, expression.key

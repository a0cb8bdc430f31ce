"""Expressions over values that both runs have, in one normal form for both frameworks.

Layout is left out of it: a transposition, a reshape or a broadcast is its operand. Sums are sets of
terms with factors, products are sets of bases with exponents, so that `x * rsqrt(v + e)` and
`x / sqrt(v + e)` are one expression, and a softmax is found in `exp(x - max(x)) / sum(...)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flax_attn.parity.trace.program import Node

# Numbers of a result that are rounded alike are one number.
DIGITS = 12


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

"""The smallest parts in which two expressions differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from flax_attn.parity.trace.choices import hidden_by_a_term, same_cases
from flax_attn.parity.trace.expression import (
    Expression,
    common,
    leaves_of,
    negated,
    number,
    parts,
    product,
    scaled,
)
from flax_attn.parity.trace.program import Node

# What JAX has and what PyTorch has at one place; None where a side has nothing.
Pair = tuple[Expression | None, Expression | None]
# The factors of terms, or the exponents of bases.
Weights = Mapping[Expression, float]

# What one exponent says beside the share of values that two expressions have in common.
WEIGHT = 0.5
# The operations that read as they are written, in either order.
COMPARING = ("lt", "le")
# The operations whose operands have no order.
UNORDERED = ("sum", "product", "dot", "max", "min", "eq", "and", "or")


@dataclass(frozen=True)
class Gap:
    """One difference.

    Args:
        operation: operation in which the two sides differ.
        parameter: what differs: `"factor"`, `"exponent"`, a setting such as `"padding"`, or
            `"operand"`.
        flax: what JAX has there; None if nothing.
        torch: what PyTorch has there; None if nothing.
        flax_at: node of JAX in which it stands, or would.
        torch_at: node of PyTorch in which it stands, or would.
        scaled: what a factor multiplies; None where it is no factor of a term.
    """

    operation: str
    parameter: str
    flax: Expression | None
    torch: Expression | None
    flax_at: Node | None = None
    torch_at: Node | None = None
    scaled: Expression | None = None


def gaps(flax: Expression, torch: Expression) -> Iterator[Gap]:
    """Yield the smallest parts in which two expressions differ; none if they are equal.

    Example:
        >>> x = Expression("leaf", (), (1,))
        >>> [gap] = gaps(scaled(0.5, x), scaled(0.25, x))
        >>> gap.operation, gap.parameter, gap.flax.number, gap.torch.number
        ('product', 'factor', 0.5, 0.25)
    """
    if flax == torch:
        return
    torch = same_cases(flax, torch)
    if flax == negated(torch):
        yield Gap(flax.operation, "sign", flax, torch)
        return
    if flax.number is not None and torch.number is not None:
        yield Gap("number", "value", flax, torch)
        return
    # Whether 0 itself is meant makes no difference in numbers that are never 0.
    if _compare_alike(flax, torch) and any(_is_floating(leaf) for leaf in leaves_of(flax)):
        return
    flax, torch = _in_one_form(flax, torch)
    if flax.operation != torch.operation or "leaf" in (flax.operation, torch.operation):
        yield Gap(flax.operation, "operation", flax, torch)
    elif flax.operation == "sum":
        yield from _sums(flax, torch)
    elif flax.operation == "product":
        yield from _products(flax, torch)
    else:
        yield from _settings(flax, torch)
        yield from _operands(flax, torch)


def _compare_alike(flax: Expression, torch: Expression) -> bool:
    """Whether both compare the same values, one of them with equal ones among the smaller."""
    operations = {flax.operation, torch.operation}
    return operations == set(COMPARING) and flax.operands == torch.operands


def _is_floating(leaf: Expression) -> bool:
    return leaf.origin is not None and leaf.origin.floating


def _in_one_form(flax: Expression, torch: Expression) -> tuple[Expression, Expression]:
    """Return both as sums or as products if one can be written like the other."""
    for written_like in (_as_sum, _as_product):
        there = written_like(torch, flax)
        if there is not None:
            return flax, there
        here = written_like(flax, torch)
        if here is not None:
            return here, torch
    return flax, torch


def _as_sum(one: Expression, other: Expression) -> Expression | None:
    """Return an expression as a sum if it is a term of another, or both hide scores."""
    if other.operation != "sum" or one.operation == "sum":
        return None
    added = hidden_by_a_term(one) if one.operation == "where" else None
    if added is not None:
        return added
    factor, base = _apart(one)
    return Expression("sum", (base,), (factor,), one.origin) if base in other.operands else None


def _as_product(one: Expression, other: Expression) -> Expression | None:
    """Return an expression as a product if it is a base of another, or takes the only base."""
    if other.operation != "product" or one.operation == "product":
        return None
    operations = [base.operation for base in other.operands]
    if one in other.operands or operations == [one.operation]:
        return Expression("product", (one,), (1.0, 1.0), one.origin)
    return None


def _apart(term: Expression) -> tuple[float, Expression]:
    if term.operation == "product" and term.settings[0] != 1:
        return term.settings[0], scaled(1 / term.settings[0], term)
    return 1.0, term


def _sums(flax: Expression, torch: Expression) -> Iterator[Gap]:
    """Yield the gaps of two sums."""
    here, there = _weights(flax), _weights(torch)
    for base, own, other in _pop_shared(here, there):
        if own == other:
            continue
        factors = _numbers(own, other, flax, torch)
        if base.number is not None:
            yield Gap("sum", "constant", *factors)
        else:
            yield Gap("sum", "factor", *factors, scaled=base)
    for base, other in _paired(list(here), list(there), here, there):
        if base is None or other is None:
            terms = _term(base, here), _term(other, there)
            yield Gap("sum", "term", *terms, flax.origin, torch.origin)
            continue
        own, its = here[base], there[other]
        if base.number is not None and other.number is not None:
            ours, theirs = _numbers(own, its, flax, torch)
        else:
            ours, theirs = scaled(own, base), scaled(its, other)
        # A constant has no smaller parts.
        if ours.number is not None:
            yield Gap("sum", "term", ours, theirs)
        else:
            yield from gaps(ours, theirs)


def _products(flax: Expression, torch: Expression) -> Iterator[Gap]:
    """Yield the gaps of two products."""
    first, second = flax.settings[0], torch.settings[0]
    here, there = _weights(flax), _weights(torch)
    shared = _pop_shared(here, there)
    if first != second and not _average_alike(flax, torch, here, there):
        if here or there:
            # What is left on each side is one difference: a factor says nothing without its bases.
            rest = _rest(first, here, flax), _rest(second, there, torch)
            yield Gap("product", "operand", *rest, flax.origin, torch.origin)
            return
        yield Gap("product", "factor", *_numbers(first, second, flax, torch))
    for _, own, other in shared:
        if own != other:
            yield Gap("product", "exponent", *_numbers(own, other, flax, torch))
    for base, other in _paired(list(here), list(there), here, there):
        if base is None or other is None or _nothing_common(base, here, other, there):
            bases = _power(base, here), _power(other, there)
            yield Gap("product", "base", *bases, flax.origin, torch.origin)
            continue
        own, its = here[base], there[other]
        if own != its:
            yield Gap("product", "exponent", *_numbers(own, its, flax, torch))
        yield from gaps(base, other)


def _average_alike(flax: Expression, torch: Expression, here: Weights, there: Weights) -> bool:
    """Whether both average over axes of other sizes: their factors say no more than the sizes."""
    counts = []
    for whole, bases in ((flax, here), (torch, there)):
        sums = [base for base in bases if base.operation == "sum_over"]
        if len(bases) != 1 or len(sums) != 1 or bases[sums[0]] != 1:
            return False
        counts.append(whole.settings[0] * math.prod(sums[0].settings[0]))
    return math.isclose(*counts, rel_tol=1e-9)


def _nothing_common(base: Expression, here: Weights, other: Expression, there: Weights) -> bool:
    """Whether neither exponents nor operations are the same: an exponent says nothing then."""
    return here[base] != there[other] and base.operation != other.operation


def _weights(whole: Expression) -> dict[Expression, float]:
    """Return the factors of the terms of a sum, or the exponents of the bases of a product."""
    weights = whole.settings if whole.operation == "sum" else whole.settings[1:]
    return dict(zip(whole.operands, weights, strict=True))


def _numbers(
    own: float, other: float, flax: Expression, torch: Expression
) -> tuple[Expression, Expression]:
    return number(own, flax.origin), number(other, torch.origin)


def _pop_shared(
    here: dict[Expression, float], there: dict[Expression, float]
) -> list[tuple[Expression, float, float]]:
    """Take what both sides have out of their weights, and return it with the weight of each."""
    shared = [base for base in here if base in there]
    return [(base, here.pop(base), there.pop(base)) for base in shared]


def _rest(factor: float, bases: Weights, whole: Expression) -> Expression:
    """Return the part of a product that the other side does not have."""
    return product([(number(factor), 1.0), *bases.items()], whole.origin)


def _term(base: Expression | None, factors: Weights) -> Expression | None:
    return None if base is None else scaled(factors[base], base, base.origin)


def _power(base: Expression | None, exponents: Weights) -> Expression | None:
    if base is None or exponents[base] == 1:
        return base
    return Expression("product", (base,), (1.0, exponents[base]), base.origin)


def _settings(flax: Expression, torch: Expression) -> Iterator[Gap]:
    if flax.settings == torch.settings:
        return
    if flax.operation == "slice":
        yield Gap("slice", "bounds", flax, torch)
        return
    ours, theirs = _named(flax.settings), _named(torch.settings)
    for name in sorted({*ours, *theirs}):
        own, other = ours.get(name), theirs.get(name)
        if own != other:
            here = Expression("setting", (), (own,), flax.origin)
            there = Expression("setting", (), (other,), torch.origin)
            yield Gap(flax.operation, name, here, there)


def _named(settings: Sequence) -> dict[str, object]:
    named = [pair for pair in settings if isinstance(pair, tuple) and len(pair) == 2]
    strings = [pair for pair in named if isinstance(pair[0], str)]
    if len(strings) == len(settings):
        return dict(strings)
    return {"over": tuple(settings)}


def _operands(one: Expression, other: Expression) -> Iterator[Gap]:
    operation, flax, torch = one.operation, one.operands, other.operands
    if operation not in UNORDERED and len(flax) == len(torch):
        pairs: list[Pair] = list(zip(flax, torch, strict=True))
        same = sorted(map(hash, flax)) == sorted(map(hash, torch))
        # The same operands in another order are one gap, not one for each place.
        if same and flax != torch and operation in COMPARING:
            yield Gap(operation, "operation", one, other)
            return
        if same and flax != torch:
            here = Expression("order", flax, (operation,), one.origin)
            there = Expression("order", torch, (operation,), other.origin)
            yield Gap(operation, "order", here, there)
            return
    else:
        left, right = list(flax), list(torch)
        for operand in flax:
            if operand in right:
                left.remove(operand)
                right.remove(operand)
        pairs = _paired(left, right)
        unpaired = [pair for pair in pairs if None in pair]
        if len(unpaired) > 1 and len(left) == len(right):
            # Nothing says which operand is which.
            yield Gap(operation, "operation", one, other)
            return
    for ours, theirs in pairs:
        if ours is None or theirs is None:
            yield Gap(operation, "operand", ours, theirs)
        else:
            yield from gaps(ours, theirs)


def _paired(
    flax: Sequence[Expression],
    torch: Sequence[Expression],
    here: Weights = MappingProxyType({}),
    there: Weights = MappingProxyType({}),
) -> list[Pair]:
    """Return expressions in pairs, those first that have most in common; then what is left.

    Args:
        flax: expressions of JAX.
        torch: expressions of PyTorch.
        here: their factors or exponents in JAX, if they have any.
        there: those in PyTorch.
    """
    fits = []
    for i, one in enumerate(flax):
        for j, other in enumerate(torch):
            same_weight = one in here and here[one] == there[other]
            score = _alike(one, other) + WEIGHT * same_weight
            if score:
                fits.append((-score, i, j))
    pairs: list[Pair] = []
    left, right = dict(enumerate(flax)), dict(enumerate(torch))
    for _, i, j in sorted(fits):
        if i in left and j in right:
            pairs.append((left.pop(i), right.pop(j)))
    # One of each that are left stand at the same place.
    if len(left) == 1 and len(right) == 1:
        pairs += zip(left.values(), right.values(), strict=True)
        return pairs
    pairs += [(one, None) for one in left.values()]
    pairs += [(None, other) for other in right.values()]
    return pairs


def _alike(one: Expression, other: Expression) -> float:
    """Return how much two expressions have in common: shared values, then the operations."""
    same = one.operation == other.operation
    values = common(leaves_of(one), leaves_of(other))
    operations = common(_operations_of(one), _operations_of(other))
    return values + 0.1 * same + 0.1 * operations


def _operations_of(expression: Expression) -> list[str]:
    return [one.operation for one in parts(expression) if one.operation != "leaf"]

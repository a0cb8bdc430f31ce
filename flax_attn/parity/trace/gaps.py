"""The smallest parts in which two expressions differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from flax_attn.parity.trace.choices import hidden_by_a_term, same_cases
from flax_attn.parity.trace.expression import (
    Expression,
    negated,
    number,
    parts,
    product,
    scaled,
)
from flax_attn.parity.trace.program import Node

# What one exponent says beside the share of values that two expressions have in common.
WEIGHT = 0.5
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
    pair = _as_sums(flax, torch) or _as_products(flax, torch) or (flax, torch)
    flax, torch = pair
    if flax.operation != torch.operation or "leaf" in (flax.operation, torch.operation):
        yield Gap(flax.operation, "operation", flax, torch)
    elif flax.operation in ("sum", "product"):
        yield from _weighted(flax, torch)
    else:
        yield from _settings(flax, torch)
        yield from _operands(flax, torch)


def _as_sums(flax: Expression, torch: Expression) -> tuple[Expression, Expression] | None:
    """Return both as sums if one is a sum that has the other as a term, or both hide scores."""
    for one, other in ((flax, torch), (torch, flax)):
        if one.operation == "sum" and other.operation == "where":
            added = hidden_by_a_term(other)
            if added is not None:
                return (flax, added) if one is flax else (added, torch)
        if one.operation == "sum" and other.operation != "sum":
            factor, base = _apart(other)
            if base in one.operands:
                single = Expression("sum", (base,), (factor,), other.origin)
                return (flax, single) if one is flax else (single, torch)
    return None


def _as_products(flax: Expression, torch: Expression) -> tuple[Expression, Expression] | None:
    """Return both as products if one is a product that has the other as a base."""
    for one, other in ((flax, torch), (torch, flax)):
        if one.operation == "product" and other.operation != "product":
            alone = len(one.operands) == 1 and one.operands[0].operation == other.operation
            if other in one.operands or alone:
                single = Expression("product", (other,), (1.0, 1.0), other.origin)
                return (flax, single) if one is flax else (single, torch)
    return None


def _apart(term: Expression) -> tuple[float, Expression]:
    if term.operation == "product" and term.settings[0] != 1:
        return term.settings[0], scaled(1 / term.settings[0], term)
    return 1.0, term


def _weighted(flax: Expression, torch: Expression) -> Iterator[Gap]:
    """Yield the gaps of two sums or of two products."""
    operation = flax.operation
    word = "factor" if operation == "sum" else "exponent"
    ours, theirs = list(flax.settings), list(torch.settings)
    first = second = 1.0
    if operation == "product":
        first, second = ours.pop(0), theirs.pop(0)
    here = dict(zip(flax.operands, ours, strict=True))
    there = dict(zip(torch.operands, theirs, strict=True))
    shared = [base for base in here if base in there]
    weights = [(base, here.pop(base), there.pop(base)) for base in shared]
    if first != second and (here or there):
        # What is left on each side is one difference: a factor says nothing without its bases.
        rest = _rest(first, here, flax), _rest(second, there, torch)
        yield Gap(operation, "operand", *rest, flax.origin, torch.origin)
        return
    if first != second:
        yield Gap(operation, "factor", number(first, flax.origin), number(second, torch.origin))
    for base, own, other in weights:
        if own != other:
            kind = "constant" if base.number is not None else word
            ours, theirs = number(own, flax.origin), number(other, torch.origin)
            yield Gap(operation, kind, ours, theirs, scaled=base if kind == "factor" else None)
    # Constants pair with one another, and terms with those that have most in common with them.
    for base, other in _paired(list(here), list(there), here, there):
        if base is not None and other is not None:
            own, its = here[base], there[other]
            if operation == "sum":
                if base.number is not None and other.number is not None:
                    base, other = number(own, flax.origin), number(its, torch.origin)
                else:
                    base, other = scaled(own, base), scaled(its, other)
                whole = [Gap("sum", "term", base, other)] if base.number is not None else []
                yield from whole or gaps(base, other)
                continue
            if own != its and base.operation != other.operation:
                # Nothing in common: an exponent says nothing without its base.
                whole = _weighed(operation, own, base), _weighed(operation, its, other)
                yield Gap(operation, "base", *whole, flax.origin, torch.origin)
                continue
            if own != its:
                yield Gap(operation, word, number(own, flax.origin), number(its, torch.origin))
            yield from gaps(base, other)
            continue
        yield Gap(
            operation,
            "term" if operation == "sum" else "base",
            None if base is None else _weighed(operation, here[base], base),
            None if other is None else _weighed(operation, there[other], other),
            flax.origin,
            torch.origin,
        )


def _rest(factor: float, bases: dict[Expression, float], whole: Expression) -> Expression:
    """Return the part of a product that the other side does not have."""
    return product([(number(factor), 1.0), *bases.items()], whole.origin)


def _weighed(operation: str, weight: float, base: Expression) -> Expression:
    if operation == "sum":
        return scaled(weight, base, base.origin)
    return base if weight == 1 else Expression("product", (base,), (1.0, weight), base.origin)


def _settings(flax: Expression, torch: Expression) -> Iterator[Gap]:
    if flax.settings == torch.settings:
        return
    if flax.operation == "slice":
        yield Gap("slice", "bounds", flax, torch)
        return
    ours, theirs = _named(flax.settings), _named(torch.settings)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) == theirs.get(name):
            continue
        here = Expression("setting", (), (ours.get(name),), flax.origin)
        there = Expression("setting", (), (theirs.get(name),), torch.origin)
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
        pairs: list = list(zip(flax, torch, strict=True))
        # The same operands in another order are one gap, not one for each place.
        if sorted(map(hash, flax)) == sorted(map(hash, torch)) and tuple(flax) != tuple(torch):
            both = (one, other)
            here, there = (Expression("order", x.operands, (operation,), x.origin) for x in both)
            yield Gap(operation, "order", here, there)
            return
    else:
        here, there = list(flax), list(torch)
        for x in list(here):
            if x in there:
                here.remove(x)
                there.remove(x)
        pairs = _paired(here, there)
        lacking = [pair for pair in pairs if None in pair]
        if len(lacking) > 1 and len(here) == len(there):
            # Nothing says which operand is which.
            yield Gap(operation, "operation", one, other)
            return
    for ours, theirs in pairs:
        if ours is None or theirs is None:
            yield Gap(operation, "operand", ours, theirs)
        else:
            yield from gaps(ours, theirs)


def _paired(
    flax: list[Expression],
    torch: list[Expression],
    here: Mapping[Expression, float] = MappingProxyType({}),
    there: Mapping[Expression, float] = MappingProxyType({}),
) -> list[tuple[Expression | None, Expression | None]]:
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
            same = one in here and here[one] == there[other]
            fits.append((-_alike(one, other) - WEIGHT * same, i, j))
    found: list[tuple[Expression | None, Expression | None]] = []
    used_here: set[int] = set()
    used_there: set[int] = set()
    for score, i, j in sorted(fits):
        if i in used_here or j in used_there or score == 0:
            continue
        used_here.add(i)
        used_there.add(j)
        found.append((flax[i], torch[j]))
    left = [one for i, one in enumerate(flax) if i not in used_here]
    right = [other for j, other in enumerate(torch) if j not in used_there]
    # One of each that are left stand at the same place.
    if len(left) == 1 and len(right) == 1:
        return [*found, (left[0], right[0])]
    return [*found, *((one, None) for one in left), *((None, other) for other in right)]


def _alike(one: Expression, other: Expression) -> float:
    """Return how much two expressions have in common: shared values, then the operations."""
    same = one.operation == other.operation
    operations = _share(_operations_of(one), _operations_of(other))
    return _share(_leaves(one), _leaves(other)) + 0.1 * same + 0.1 * operations


def _share(here: frozenset, there: frozenset) -> float:
    return len(here & there) / max(len(here | there), 1)


def _leaves(expression: Expression) -> frozenset[Expression]:
    """Return the values that both sides have from which an expression is computed."""
    return frozenset(one for one in parts(expression) if one.operation == "leaf")


def _operations_of(expression: Expression) -> frozenset[str]:
    operations = (one.operation for one in parts(expression))
    return frozenset(name for name in operations if name != "leaf")

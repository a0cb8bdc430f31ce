"""Choices between two cases by a condition, such as what a mask hides."""

from __future__ import annotations

import numpy as np

from flax_attn.parity.trace.expression import Expression, number, total
from flax_attn.parity.trace.numbers import HIDING
from flax_attn.parity.trace.program import Node


def same_cases(flax: Expression, torch: Expression) -> Expression:
    """Return a choice with the cases in the order of the other side, by the opposite condition."""
    if flax.operation != "where" or torch.operation != "where":
        return torch
    _, our_first, our_second = flax.operands
    condition, first, second = torch.operands
    crossed = (our_first, second), (our_second, first)
    equal = [one for one, other in crossed if one == other or both_hide(one, other)]
    # What the other choice is may differ, as scores may beside the number that hides them.
    same_number = any(one.number is not None for one in equal)
    if first == second or not (same_number or len(equal) == 2):
        return torch
    opposite = _opposite(condition, torch.origin)
    return Expression("where", (opposite, second, first), torch.settings, torch.origin)


def both_hide(one: Expression, other: Expression) -> bool:
    """Whether two expressions are numbers that hide what is in their place."""
    return _is_hiding(one) and _is_hiding(other)


def _opposite(condition: Expression, choice: Node | None) -> Expression:
    """Return the opposite of the condition of a choice."""
    if condition.operation == "not":
        return condition.operands[0]
    made = condition.origin
    if made is not None and made.value.dtype == bool:
        # Its line is where the choice is made: no line computes the opposite.
        place = made.place if choice is None else choice.place
        made = Node("not", (made,), ~made.value, place=place)
    return Expression("not", (condition,), (), made)


def hidden_by_a_term(choice: Expression) -> Expression | None:
    """Return `where(hidden, -inf, scores)` as `scores + where(hidden, -inf, 0)`."""
    condition, *cases = choice.operands
    for i, case in enumerate(cases):
        if not _is_hiding(case):
            continue
        shown = cases[1 - i]
        cases[1 - i] = number(0.0)
        term = Expression("where", (condition, *cases), (), choice.origin)
        return total([(1.0, shown), (1.0, term)], choice.origin)
    return None


def without_hiding(whole: Expression) -> Expression:
    """Return what an expression is where it hides nothing.

    Example:
        >>> shown = Expression("leaf", (), (1,))
        >>> mask = Expression("leaf", (), (2,))
        >>> without_hiding(Expression("where", (mask, shown, number(-1e30)))) == shown
        True
    """
    if whole.operation == "where":
        _, *cases = whole.operands
        shown = [case for case in cases if not _is_hiding(case)]
        return without_hiding(shown[0]) if len(shown) == 1 else whole
    if whole.operation == "sum":
        terms = zip(whole.settings, whole.operands, strict=True)
        kept = [(factor, term) for factor, term in terms if not _only_hides(factor, term)]
        return total([(factor, without_hiding(term)) for factor, term in kept], whole.origin)
    return whole


def _is_hiding(case: Expression) -> bool:
    return case.number is not None and case.number <= -HIDING


def _only_hides(factor: float, term: Expression) -> bool:
    """Whether a term of a sum hides some of what it is added to, and changes nothing else."""
    if term.origin is None:
        return factor <= -HIDING
    own = np.asarray(term.origin.value, float)
    # The node of a term may be that of the term times its factor.
    with np.errstate(all="ignore"):
        values = own, factor * own
    return any(_hides_or_is_0(value) for value in values)


def _hides_or_is_0(value: np.ndarray) -> bool:
    hidden = value <= -HIDING
    return bool(hidden.any() and (hidden | (value == 0)).all())

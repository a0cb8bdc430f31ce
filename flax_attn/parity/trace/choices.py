"""Choices between two cases by a condition, such as what a mask hides."""

from __future__ import annotations

from flax_attn.parity.trace.expression import Expression, number, total
from flax_attn.parity.trace.numbers import HIDING
from flax_attn.parity.trace.program import Node


def same_cases(flax: Expression, torch: Expression) -> Expression:
    """Return a choice with the cases in the order of the other side, by the opposite condition."""
    if flax.operation != "where" or torch.operation != "where":
        return torch
    _, our_first, our_second = flax.operands
    condition, first, second = torch.operands
    # What the other choice is may differ, as scores may beside the number that hides them.
    crossed = (our_first, second), (our_second, first)
    equal = [one.number for one, other in crossed if one == other]
    same_number = any(value is not None for value in equal)
    if first == second or not (same_number or len(equal) == 2):
        return torch
    made = condition.origin
    if made is not None and made.value.dtype == bool:
        place = made.place if torch.origin is None else torch.origin.place
        made = Node("not", (made,), ~made.value, place=place)
    opposite = Expression("not", (condition,), (), made)
    if condition.operation == "not":
        opposite = condition.operands[0]
    return Expression("where", (opposite, second, first), torch.settings, torch.origin)


def hidden_by_a_term(choice: Expression) -> Expression | None:
    """Return `where(hidden, -inf, scores)` as `scores + where(hidden, -inf, 0)`."""
    condition, *cases = choice.operands
    for i, case in enumerate(cases):
        if case.number is not None and case.number <= -HIDING:
            shown = cases[1 - i]
            cases[1 - i] = number(0.0)
            term = Expression("where", (condition, *cases), (), choice.origin)
            return total([(1.0, shown), (1.0, term)], choice.origin)
    return None

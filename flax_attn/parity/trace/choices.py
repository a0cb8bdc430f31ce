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
    crossed = (our_first, second), (our_second, first)
    equal = [one for one, other in crossed if one == other]
    # What the other choice is may differ, as scores may beside the number that hides them.
    same_number = any(one.number is not None for one in equal)
    if first == second or not (same_number or len(equal) == 2):
        return torch
    opposite = _opposite(condition, torch.origin)
    return Expression("where", (opposite, second, first), torch.settings, torch.origin)


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
        hides = case.number is not None and case.number <= -HIDING
        if not hides:
            continue
        shown = cases[1 - i]
        cases[1 - i] = number(0.0)
        term = Expression("where", (condition, *cases), (), choice.origin)
        return total([(1.0, shown), (1.0, term)], choice.origin)
    return None

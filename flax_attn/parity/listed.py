"""Names in a sentence: the first of them, and how many are left."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first names, and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], 2), listed(["a", "b"], 2)
        ('a, b and 1 more', 'a, b')
    """
    shown = between.join(names[:most])
    left = len(names) - most
    return f"{shown} and {left} more" if left > 0 else shown

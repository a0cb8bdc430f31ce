"""Trees of arrays, of which some leaves are traced and others known."""

from collections.abc import Callable
from typing import Any

import jax


def split(tree: Any, kind: type) -> tuple[list, Callable[[list], Any]]:
    """Return the leaves of a kind, and the function that puts others in their place.

    Example:
        >>> found, rebuild = split({"a": 1, "b": 2.5}, float)
        >>> found, rebuild([7.5])
        ([2.5], {'a': 1, 'b': 7.5})
    """
    leaves, structure = jax.tree.flatten(tree)

    def rebuild(found: list) -> Any:
        remaining = iter(found)
        return structure.unflatten(
            next(remaining) if isinstance(leaf, kind) else leaf for leaf in leaves
        )

    return [leaf for leaf in leaves if isinstance(leaf, kind)], rebuild

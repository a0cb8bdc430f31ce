"""Why gradients differ where all outputs agree: what one side leaves without a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.hooks import spoken

ROWS = 3  # that are named


def gradient_causes(flax: Arrays, torch: Arrays) -> list[str]:
    """Return a sentence for each parameter without a gradient, in all or some rows, on one side.

    Args:
        flax: gradients of the shared parameters on the Flax side.
        torch: gradients of the shared parameters on the PyTorch side.

    Example:
        >>> gradient = np.ones((3, 2))
        >>> torch = {"embed.weight": np.array([[0.0, 0], [1, 1], [1, 1]])}
        >>> gradient_causes({"embed.weight": gradient}, torch)
        ['embed.weight: torch has no gradient in row 0, as of padding_idx, flax has one']
    """
    errors = tolerance.gradient_errors(flax, torch)
    wrong = [
        name
        for name in torch
        if errors[name] > tolerance.GRADIENT and flax[name].shape == torch[name].shape
    ]
    return [
        f"{name}: {cause}"
        for name in wrong
        for cause in _causes({"flax": flax[name], "torch": torch[name]})
    ]


def detached(name: str, flax: Arrays, torch: Arrays) -> list[str]:
    """Return a sentence if no gradient arrives at the output of a node on one side alone.

    Args:
        name: name of the node.
        flax: cotangents on the Flax side, by name of the node.
        torch: cotangents on the PyTorch side, by name of the node.

    Example:
        >>> detached("embed", {"embed": np.zeros(3)}, {"embed": np.ones(3)})
        ['embed: flax has no gradient at its output, as of stop_gradient or detach, torch has one']
    """
    silent = {"flax": not flax[name].any(), "torch": not torch[name].any()}
    if silent["flax"] == silent["torch"]:
        return []
    side, other = ("flax", "torch") if silent["flax"] else ("torch", "flax")
    return [
        f"{spoken(name)}: {side} has no gradient at its output, as of stop_gradient or detach,"
        f" {other} has one"
    ]


def _causes(gradients: Mapping[str, np.ndarray]) -> Iterator[str]:
    for side, other in (("flax", "torch"), ("torch", "flax")):
        mine, yours = gradients[side], gradients[other]
        if not mine.any():
            yield f"{side} has no gradient, {other} has one"
        elif mine.ndim == 2 and (rows := _empty_rows(mine, yours)):
            named = ", ".join(map(str, rows[:ROWS])) + (", ..." if len(rows) > ROWS else "")
            yield f"{side} has no gradient in row {named}, as of padding_idx, {other} has one"


def _empty_rows(mine: np.ndarray, yours: np.ndarray) -> list[int]:
    """Return the rows that are 0 on one side alone, if all other rows agree."""
    empty = ~mine.any(1) & yours.any(1)
    rest = tolerance.relative({"": mine[~empty]}, {"": yours[~empty]})[""]
    return np.flatnonzero(empty).tolist() if rest <= tolerance.GRADIENT else []

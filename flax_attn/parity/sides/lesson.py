"""A training run, described for both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flax_attn.parity.recipe import Recipe
from flax_attn.parity.sides.side import Arrays


@dataclass(frozen=True)
class Lesson:
    """Fit one output to a target by its mean square.

    Args:
        name: of the run; an export files the result under it.
        recipe: the optimizer.
        inputs: of every step.
        extras: what every call is given beside them.
        output: name of the output that is fitted.
        target: of that output.
        cotangents: one for each output, for their shapes.
        keys: `(steps, 2)`, the dropout key of every step.
        train: whether in train mode.
    """

    name: str
    recipe: Recipe
    inputs: Arrays
    extras: Mapping[str, np.ndarray]
    output: str
    target: np.ndarray
    cotangents: Arrays
    keys: np.ndarray
    train: bool

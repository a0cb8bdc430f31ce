"""Functions of scores, as a call gets them and as the formula does."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

SLOPES = (0.5, 0.25, 0.125, 0.0625, 1, 2)  # of heads


@dataclass(frozen=True)
class Score:
    """One function.

    Args:
        name: name in printed output.
        traced: function of a score and its indices.
        plain: function from all scores, `(b, n, t, s)`, to the new ones and their derivative.
    """

    name: str
    traced: Callable
    plain: Callable


def _slopes(score, b, n, i, j):
    slope = jnp.asarray(SLOPES, score.dtype)[n]
    return score - slope * abs(i - j).astype(score.dtype)


def _plain_slopes(scores: np.ndarray):
    _, n, i, j = _indices(scores)
    slope = np.array(SLOPES)[n]
    return (scores - slope * abs(i - j)).astype(scores.dtype), 1


def _hide(score, b, n, i, j):
    return jnp.where((i + j + b) % 4 == 0, jnp.asarray(-jnp.inf, score.dtype), score)


def _plain_hide(scores: np.ndarray):
    b, _, i, j = _indices(scores)
    hidden = np.broadcast_to((i + j + b) % 4 == 0, scores.shape)
    return np.where(hidden, -np.inf, scores).astype(scores.dtype), np.where(hidden, 0, 1)


def _bent(score, b, n, i, j):
    return 2 * jnp.tanh(score)


def _plain_bent(scores: np.ndarray):
    bent = np.tanh(scores)
    return 2 * bent, 2 * (1 - bent * bent)


def _indices(scores: np.ndarray) -> list[np.ndarray]:
    return np.ogrid[tuple(slice(size) for size in scores.shape)]


SCORES = (
    Score("slopes", _slopes, _plain_slopes),
    Score("hide", _hide, _plain_hide),
    Score("bent", _bent, _plain_bent),
)

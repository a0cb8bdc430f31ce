"""How errors are drawn: lengths and colours on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flax_attn.parity import tolerance

# A logarithm shows no 0: what is equal to the last bit stands here.
FLOOR = 1e-18
# The error over the rule, at both ends of a bar.
LOWEST, HIGHEST = 1e-6, 1e12

# Blue holds and turns to orange at the rule: readers who cannot tell red from green can tell these.
_COLORS = (
    (FLOOR, "#1f4e79"),
    (tolerance.FORWARD, "#a9cbe8"),
    (tolerance.FORWARD, "#fdc98a"),
    (1.0, "#a11d07"),
)
COLORS = [[float(1 - np.log10(error) / np.log10(FLOOR)), color] for error, color in _COLORS]


def share(times: float) -> float:
    """Return how long the bar of an error is that is some times its rule, in percent.

    Example:
        >>> [round(share(times), 1) for times in (0.0, 1e-6, 1.0, 1e3, float("inf"))]
        [0.0, 0.0, 33.3, 50.0, 100.0]
    """
    inside = np.clip(times, LOWEST, HIGHEST)
    return float(100 * np.log10(inside / LOWEST) / np.log10(HIGHEST / LOWEST))


def legend() -> Sequence[tuple[str, str]]:
    """Return the colours of errors and where they stand, for a scale in CSS.

    Example:
        >>> legend()[0]
        ('0.0%', '#1f4e79')
    """
    return [(f"{100 * place:.1f}%", color) for place, color in COLORS]

"""Wrong results of JAX that are known, each with a check of this installation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import numpy as np

from flax_attn.parity.adapters.quick_jit import optimized
from flax_attn.parity.cpu import on_cpu


@dataclass(frozen=True)
class KnownFault:
    """A computation that some versions of JAX get wrong without an error.

    Args:
        name: issue in which it was reported.
        platform: platform on which results are wrong.
        versions: versions of JAX in which it was seen, and the first that was seen to be right.
        effect: computation that is wrong, and the way around it.
        has: function that returns whether this installation has the fault.
    """

    name: str
    platform: str
    versions: str
    effect: str
    has: Callable[[], bool]

    def __str__(self) -> str:
        """Return everything in a line."""
        return f"{self.name} ({self.platform}; {self.versions}): {self.effect}"


def _sums_of_squares_are_wrong() -> bool:
    """Whether the squares of many short products are summed wrongly."""
    rows = np.arange(3 * 16385).reshape(-1, 3) % 7 - 3.0
    matrix = np.arange(12.0).reshape(4, 3) - 5
    with on_cpu():
        found = optimized(lambda m, r: jnp.sum(jnp.square(m @ r.T), 0))(matrix, rows)
    return not np.allclose(found, np.square(rows @ matrix.T).sum(1))


KNOWN_FAULTS = (
    KnownFault(
        "jax#39103",
        "cpu",
        "seen in 0.10.2, not in 0.12.0.1",
        "compiled sums of squares of products with rows of width 3, 5 or 6 are wrong, from 16,385"
        " rows on in float64 and from 32,769 in float32, such as vmap(lambda r: sum((M @ r) ** 2));"
        " XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= is a way around it",
        _sums_of_squares_are_wrong,
    ),
)


@cache
def found_here() -> tuple[KnownFault, ...]:
    """Return the known faults that this installation has; they are looked for once.

    Example:
        >>> set(found_here()) <= set(KNOWN_FAULTS)
        True
    """
    return tuple(fault for fault in KNOWN_FAULTS if fault.has())


def summary() -> str:
    """Return the known faults that this installation has, in a line."""
    found = "; ".join(map(str, found_here()))
    absent = ", ".join(fault.name for fault in KNOWN_FAULTS if fault not in found_here())
    return found or f"none of {absent}"

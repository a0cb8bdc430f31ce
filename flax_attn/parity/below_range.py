"""Arrays that lie below the range of float16, in which no rounding error says anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from flax_attn.parity.adapters.adapter import RunSpec
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.equations import evaluated, flattened

# Lines that a sentence names.
NAMED = 5


def arrays_below_range(pair: Pair, dtype: str) -> str:
    """Return where all numbers of an array lie below the range of a dtype; empty if none does.

    Below its smallest normal number a dtype has fewer digits the smaller a number is, and none
    below the smallest one. Two right programs that multiply in another order lose other numbers.
    The arrays are those of JAX in float64, with its gradients.

    Args:
        pair: both sides.
        dtype: dtype of which the range is meant, such as `"float16"`.
    """
    if not isinstance(pair.flax, JaxAdapter):
        return ""
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    found = _places_below(pair.flax, pair.float64, smallest)
    places = dict.fromkeys(found)
    if not places:
        return ""
    # What a library computes has no line of the user's.
    lines = [place for place in places if place]
    shown = ", ".join(lines[:NAMED])
    where = f" at {shown}" if shown else ""
    return f"arrays{where} hold no number as large as the smallest normal one, {smallest:.2g}"


def _places_below(flax: JaxAdapter, spec: RunSpec, smallest: float) -> Iterator[str]:
    """Yield the line of each array whose largest number is below this, and not 0."""
    program = flattened(*flax.traced(spec))
    values = evaluated(program.equations, program.given)
    for equation in program.equations:
        for result in equation.results:
            if _lies_below(values[result], smallest):
                yield str(equation.place or "")


def _lies_below(value: Any, smallest: float) -> bool:
    array = np.asarray(value)
    if array.dtype.kind != "f" or not array.size:
        return False
    largest = float(np.max(np.abs(array)))
    return 0 < largest < smallest

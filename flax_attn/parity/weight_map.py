"""Which parameter of one module is which of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from flax import nnx

from flax_attn.convert.api import axes_of
from flax_attn.convert.entry import Entry
from flax_attn.convert.planning import no_axes, plan
from flax_attn.convert.problems import problems
from flax_attn.convert.rules import ConversionError, Layout
from flax_attn.parity.adapters.adapter import PairingError


def weight_map(
    flax: Any,
    shapes: Mapping[str, Any],
    theirs: Mapping[str, Any],
    layout: Layout,
    statistics: Sequence[str] = (),
) -> list[Entry]:
    """Return which parameter is which.

    Args:
        flax: the JAX module, for the widths of its heads.
        shapes: shapes of the parameters of the JAX module, as its own variables have them.
        theirs: shapes of the parameters of the PyTorch module.
        layout: layout between both modules.
        statistics: the names among `shapes` that are running statistics.

    Raises:
        PairingError: with a line for every parameter that is missing, unexpected or mis-shaped, or
            claimed twice.
    """
    try:
        # What is no NNX module cannot be asked for the widths of heads.
        axes = axes_of(flax, layout) if isinstance(flax, nnx.Module) else no_axes
        entries = plan(shapes, layout, axes, statistics)
        # What is stored in pieces is compared piece by piece.
        apart = list(chain.from_iterable(entry.apart() for entry in entries))
    except ConversionError as error:
        raise PairingError(f"the parameters of the two modules do not pair: {error}") from error
    wrong = problems(entries, theirs, layout)
    if wrong:
        heading = "the parameters of the two modules do not pair in this layout:"
        raise PairingError("\n  ".join([heading, *wrong]))
    return apart

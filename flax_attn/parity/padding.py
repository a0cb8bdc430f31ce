"""What padding that is not finite reaches in PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from flax_attn.parity.adapters.adapter import Result

# What stands before the name of a gradient.
GRADIENT_OF = "gradient of "


def padding_in_torch(
    reference: Result, lengths: np.ndarray, parameters: Collection[str]
) -> Iterator[str]:
    """Yield what the padding reaches in PyTorch: a port that agrees lets it through as well.

    Args:
        reference: results of PyTorch, gradients by `GRADIENT_OF` and their names.
        lengths: number of real tokens of each row.
        parameters: names of the parameters; gradients of inputs are those of padding, too.
    """
    bad = []
    for name, output in sorted(reference.outputs.items()):
        if _reached(output, lengths):
            bad.append(name)
    for name, gradient in sorted(reference.gradients.items()):
        parameter = name.removeprefix(GRADIENT_OF)
        if parameter in parameters and not np.isfinite(gradient).all():
            bad.append(name)
    if bad:
        yield f"PyTorch lets padding reach real tokens of {', '.join(bad)}"


def _reached(output: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether padding reaches a real token of an output, or what is pooled of a row with some."""
    finite = np.isfinite(output)
    if not output.ndim or len(output) != len(lengths):
        # What is computed of all rows together is computed of their padding, if that is no number.
        return not finite.all()
    if output.ndim == 1:
        return not finite[lengths > 0].all()
    rows = zip(finite, lengths, strict=True)
    return not all(row[:length].all() for row, length in rows)

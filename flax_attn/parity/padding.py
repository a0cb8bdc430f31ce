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
    outputs, gradients = reference.outputs, reference.gradients
    bad = [name for name in sorted(outputs) if _reached(outputs[name], lengths)]
    for name in sorted(gradients):
        parameter = name.removeprefix(GRADIENT_OF)
        finite = np.isfinite(gradients[name]).all()
        if parameter in parameters and not finite:
            bad.append(name)
    if bad:
        yield f"PyTorch lets padding reach real tokens of {', '.join(bad)}"


def _reached(output: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether padding reaches a real token of an output, or what is pooled of a row with some."""
    finite = np.isfinite(output)
    # What is computed of all rows together is computed of their padding, if that is no number.
    if not output.ndim or len(output) != len(lengths):
        return not finite.all()
    if output.ndim == 1:
        return not finite[lengths > 0].all()
    return not all(row[:length].all() for row, length in zip(finite, lengths, strict=True))

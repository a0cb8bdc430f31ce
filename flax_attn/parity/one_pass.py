"""Norms that take the variance in one pass, which the outputs of a whole model need not show."""

from typing import Any

from flax import nnx

# Those that have the argument `use_fast_variance`.
NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.LayerNorm)


def note_on_variance(module: Any) -> list[str]:
    """Return a note on the norms of an NNX module that compute `mean(x^2) - mean(x)^2`, if any.

    Where the mean is large beside the deviation this loses the digits of the variance; PyTorch
    subtracts the mean first. The check `mean offset` judges each such norm by itself; the note says
    it also where that check is not run.

    Example:
        >>> note_on_variance(nnx.LayerNorm(3, rngs=nnx.Rngs(0)))[0][:44]
        '1 norm takes the variance in one pass (as it'
    """
    if not isinstance(module, nnx.Module):
        return []
    found = []
    for path, node in nnx.iter_graph(module):
        if isinstance(node, NORMS) and node.use_fast_variance:
            found.append(path)
    if not found:
        return []
    first = ".".join(map(str, found[0])) or "it"
    count = "1 norm takes" if len(found) == 1 else f"{len(found)} norms take"
    return [
        f"{count} the variance in one pass (as {first} does), which loses its digits where the mean"
        " is large beside the deviation, and PyTorch does not: pass use_fast_variance=False"
    ]

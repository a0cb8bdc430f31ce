"""Norms of Flax that take the variance in one pass, `mean(x^2) - mean(x)^2`."""

from __future__ import annotations

from typing import Any

from flax import nnx

from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import Pair

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
    found = _names(module)
    if not found:
        return []
    count = "1 norm takes" if len(found) == 1 else f"{len(found)} norms take"
    return [
        f"{count} the variance in one pass (as {found[0]} does), which loses its digits where the"
        " mean is large beside the deviation, and PyTorch does not: pass use_fast_variance=False"
    ]


def in_two_passes(pair: Pair) -> Pair | None:
    """Return the pair with `use_fast_variance=False` in all norms of Flax; None if all have it."""
    adapter = pair.flax
    if not isinstance(adapter, JaxAdapter):
        return None
    if not _names(adapter.module):
        return None
    # The module of the caller stays as it is.
    module = nnx.clone(adapter.module)
    for _, norm in _one_pass(module):
        norm.use_fast_variance = False
    return pair.with_flax(adapter.calling(module))


def _names(module: Any) -> list[str]:
    return [".".join(map(str, path)) or "it" for path, _ in _one_pass(module)]


def _one_pass(module: Any) -> list[tuple[Any, Any]]:
    """Return the norms of an NNX module that take the variance in one pass, with their paths."""
    if not isinstance(module, nnx.Module):
        return []
    nodes = nnx.iter_graph(module)
    norms = [(path, node) for path, node in nodes if isinstance(node, NORMS)]
    return [(path, norm) for path, norm in norms if norm.use_fast_variance]

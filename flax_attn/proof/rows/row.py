"""What the rows of several files share."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from flax_attn.proof.variant import TableSizes, Variant

DOCUMENTS = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
# Tokens attend to later ones, so there is no cache.
OPEN: dict[str, Any] = {"causal": False}


def layer(sizes: TableSizes, name: str, module: str, **arguments: Any) -> Variant:
    """Return the row of a module of one input, 4 wide."""
    inputs = ((sizes.b, sizes.t, 4),)
    drops = bool(arguments.get("dropout"))
    return Variant(name, module, lambda p: getattr(p, module)(**arguments), inputs, dropout=drops)


def divided(sizes: TableSizes, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of attention with heads that devices divide; their width is unchanged."""
    heads = arguments["num_heads"]
    if sizes.times(heads) == 1:
        return dict(arguments)
    width = arguments.get("head_dim", arguments["d_out"] // heads)
    return {**arguments, "num_heads": heads * sizes.times(heads), "head_dim": width}


def rms_norm(p: Any) -> Any:
    """Return a norm of tokens that are 6 wide."""
    return p.RMSNorm(6)


def head_norms(
    p: Any, of_query: int, of_key: int | None = None, eps: float = 1e-3
) -> dict[str, Any]:
    """Return norms of queries and keys of these widths."""
    of_key = of_query if of_key is None else of_key
    return {"q_norm": p.RMSNorm(of_query, eps), "k_norm": p.RMSNorm(of_key, eps)}


def fitted(sizes: TableSizes, ids: np.ndarray) -> np.ndarray:
    """Return ids of 3 rows and 5 tokens for other sizes.

    Rows begin again, and the last token is repeated.
    """
    rows = np.arange(sizes.b) % len(ids)
    tokens = np.minimum(np.arange(sizes.t), ids.shape[1] - 1)
    return ids[rows][:, tokens]


def of_rows(sizes: TableSizes, *counts: int) -> tuple[int, ...]:
    """Return a number for each row: counts, and again from the first."""
    return tuple(np.resize(counts, sizes.b).tolist())

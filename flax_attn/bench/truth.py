"""Agreement before time: a rival is timed only if it computes the same function.

The truth is the formula in float64. The error against it may be at most that of the formula in the dtype of the work,
times the factors of `flax_attn.parity.tolerance`. Attention is judged at one head of one row of the batch, each of
which has numbers of its own: the truth of all of them would take longer than the measurement.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from flax_attn.attention import dot_product_attention
from flax_attn.bench.work import Work, inputs, with_gradients
from flax_attn.parity import tolerance

Arrays = dict[str, np.ndarray]

NAMES = ("output", "query", "key", "value")  # the output, and the gradients of the inputs
ROWS = 512


def probe(work: Work) -> tuple[int, int]:
    """Return the row of the batch and the head that are judged: in the middle, where no flip leaves them in place."""
    return work.b // 2, work.n // 2


def excess(found: Arrays, truth: Arrays, plain: Arrays, dtype: str) -> float:
    """Return the largest error over the allowed one: at most 1 agrees, and NaN does not.

    Args:
        found: outputs and gradients of a rival.
        truth: the same in float64.
        plain: the same by the formula, in the dtype.
        dtype: of the work.
    """
    gradients = {name: array for name, array in truth.items() if name != "output"}
    felt = {name: array for name, array in gradients.items() if name not in tolerance.null_directions(gradients)}
    eps = float(jnp.finfo(dtype).eps)
    errors = tolerance.lower_dtype(found, [plain], {"output": truth["output"]}, tolerance.LOW_FORWARD, eps)
    errors |= tolerance.lower_dtype(found, [plain], felt, tolerance.LOW_GRADIENT, eps)
    return float(np.max(list(errors.values())))


@lru_cache(maxsize=4)
def attention_truth(work: Work) -> tuple[Arrays, Arrays]:
    """Return output and gradients at the probe by the formula: in float64, and in the dtype of the work."""
    with jax.enable_x64(True):
        truth = _formula(work, "float64")
    return truth, _formula(work, work.dtype)


def _formula(work: Work, dtype: str) -> Arrays:
    row, head = probe(work)
    arrays = [jnp.asarray(x[row : row + 1, :, head : head + 1].astype(dtype)) for x in inputs(work)]
    # In blocks of rows, so that a long head fits; not in lower dtypes, where gradients summed over blocks would be
    # rounded each time, and the rule would be too kind.
    rows = ROWS if jnp.finfo(dtype).bits >= 32 else work.t
    found = jax.jit(with_gradients(lambda *x: _by_rows(work, rows, *x), work.backward))(*arrays)
    return {name: np.asarray(x[0, :, 0], np.float64) for name, x in zip(NAMES, found, strict=False)}


def _by_rows(work: Work, rows: int, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    def block(start_and_query):
        start, query = start_and_query
        return dot_product_attention(query, key, value, mask=work.mask(start), backend="reference")

    count = -(-work.t // rows)
    padded = jnp.pad(query, ((0, 0), (0, count * rows - work.t), (0, 0), (0, 0)))
    blocks = rearrange(padded, "b (i r) n h -> i b r n h", i=count)
    output = jax.lax.map(jax.checkpoint(block), (rows * jnp.arange(count, dtype=jnp.int32), blocks))
    return rearrange(output, "i b r n h -> b (i r) n h")[:, : work.t]

"""Compiled against eager execution at a size of real use, once for each kind of module."""

import math
from collections.abc import Mapping

import jax
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, is_floating
from flax_attn.parity.check import THE_CALL, Check, worst_of
from flax_attn.parity.pair import Pair
from flax_attn.proof.variant import Variant
from flax_attn.proof.variants import VARIANTS

# XLA takes other ways for large arrays: JAX 0.10.2 is wrong from 32,769 rows on in float32.
ROWS = 40_000


def takes_many_rows(variant: Variant) -> bool:
    """Whether a row of the table is the first of its class, on one device."""
    # The others of a class compile the same operations; on a mesh each device has few rows.
    kind = [row.name for row in VARIANTS if row.module == variant.module]
    return kind[:1] == [variant.name] and jax.sharding.get_mesh().empty


def many_rows(pair: Pair) -> Check:
    """Outputs of more than 40,000 tokens in float64, compiled as users do, against eager ones.

    Args:
        pair: pair whose inputs are repeated along the batch, floating ones with other numbers.
    """
    many = pair.with_inputs(_repeated(pair.inputs, pair.seed), pair.extras)
    try:
        reference = many.run("flax", many.uncompiled).outputs
        compiled = many.run("flax", many.as_users_compile).outputs
    except AdapterError as error:
        return Check("many rows", np.inf, 0.0, worst=THE_CALL, note=str(error))
    errors = tolerance.relative(compiled, reference)
    return worst_of("many rows", errors, tolerance.FORWARD, reference=reference)


def _repeated(inputs: Mapping[str, np.ndarray], seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    tokens = min(math.prod(array.shape[:2]) for array in inputs.values())
    found = {}
    for name, array in inputs.items():
        repeated = np.concatenate([array] * (ROWS // tokens + 1))
        # Rows that repeat would hide one that is written over another.
        scale = random.normal(size=repeated.shape) if is_floating(array) else 1
        found[name] = repeated * scale
    return found

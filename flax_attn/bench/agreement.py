"""Agreement before time: an implementation is timed only if it computes the same function.

The reference is the formula in float64. The error against it may be at most that of the formula in
the dtype of the workload, times the factors of `flax_attn.parity.tolerance`.

The error of a single token is that of a few hundred numbers, and depends on the order in which
thousands of keys are summed: of the formula it is that of XLA, which sums one row in many parts and
errs by a half or a third of what PyTorch does. For a step in float32 plain PyTorch is therefore
asked too, with the keys in several orders, and the largest error counts, as in the rule for lower
dtypes of the parity harness.
"""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.bench import functions, layers
from flax_attn.bench.implementation import Arrays
from flax_attn.bench.workload import Workload
from flax_attn.parity import tolerance


@lru_cache(maxsize=4)
def reference(work: Workload) -> tuple[Arrays, list[Arrays]]:
    """Return output and gradients by the formula, in float64 and a few times in the given dtype."""
    formula = layers.formula if work.layer else functions.formula
    with jax.enable_x64(True):
        exact = formula(work, "float64")
    by_torch = work.step and work.dtype == "float32" and importlib.util.find_spec("torch")
    return exact, [formula(work, work.dtype), *(functions.torch_steps(work) if by_torch else ())]


def excess_error(found: Arrays, exact: Arrays, plain: Sequence[Arrays], dtype: str) -> float:
    """Return the largest error over the allowed one; results agree if it is at most 1.

    It is NaN where a result is NaN.

    Args:
        found: outputs and gradients of an implementation.
        exact: outputs and gradients by the formula in float64.
        plain: outputs and gradients by the formula in the dtype, of which the largest error counts.
        dtype: dtype of the workload.
    """
    output, gradients = {"output": exact["output"]}, _nonzero_gradients(exact)
    eps = float(jnp.finfo(dtype).eps)
    errors = tolerance.lower_dtype(found, plain, output, tolerance.LOW_FORWARD, eps)
    errors |= tolerance.lower_dtype(found, plain, gradients, tolerance.LOW_GRADIENT, eps)
    return float(np.max(list(errors.values())))


def _nonzero_gradients(exact: Arrays) -> Arrays:
    """Return the gradients that are not zero in exact arithmetic: nothing is relative to zero."""
    gradients = {name: array for name, array in exact.items() if name != "output"}
    for name in tolerance.null_directions(gradients):
        del gradients[name]
    return gradients

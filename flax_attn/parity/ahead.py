"""What checks run in JAX, compiled beside what runs until they need it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from flax_attn.parity.adapters.adapter import RunSpec
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import LOWER, Pair

# The run of a check that takes longest to compile, in the order in which they run.
RUNS: dict[str, Callable[[Pair], RunSpec]] = {
    "gradients": lambda pair: pair.float64,
    "second": lambda pair: pair.second,
    **{dtype: lambda pair, dtype=dtype: pair.lower[dtype] for dtype in LOWER},
    "jit = eager": lambda pair: pair.as_users_compile,
}


def compile_ahead(pair: Pair, names: Collection[str]) -> None:
    """Begin to compile the runs of the checks of these names, in another thread."""
    flax = pair.flax
    if not isinstance(flax, JaxAdapter):
        return
    for name, spec in RUNS.items():
        if name in names:
            # What cannot be traced or has no gradient is told by the check itself.
            with suppress(Exception):
                flax.begin(spec(pair))

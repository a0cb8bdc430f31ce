"""Other weights in both modules of a pair, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.adapters.recording import Recording
from flax_attn.parity.pair import Pair


@contextmanager
def loaded(pair: Pair, weights: Arrays) -> Iterator[None]:
    """Run both modules with other weights; runs inside need names of their own.

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> from flax_attn.parity import compare
        >>> layers = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2)
        >>> pair = compare(*layers, [(4, 3)], checks=["forward"]).pair
        >>> with loaded(pair, {name: 0 * array for name, array in pair.weights.items()}):
        ...     float(abs(pair.run("torch", pair.run_spec("zeros")).outputs["output"]).max())
        0.0
    """
    # A recording was made with these weights, and replays what they gave.
    sides = [side for side in (pair.flax, pair.torch) if not isinstance(side, Recording)]
    for side in sides:
        side.load(weights)
    try:
        yield
    finally:
        for side in sides:
            side.load(pair.weights)

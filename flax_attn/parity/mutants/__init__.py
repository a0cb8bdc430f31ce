"""The faults that ports are known for, each planted into the PyTorch side alone.

Every one changes the function or its training, and every one must be caught: `kill.py` plants them. A fault is a
function that breaks what it is given; its docstring says what goes wrong.
"""

from flax_attn.parity.mutants import (
    blocks,
    cache,
    dropout,
    gates,
    head_norms,
    heads,
    masks,
    norms,
    positions,
    scores,
    training,
)
from flax_attn.parity.mutants.planting import Mutant

_THEMES = (scores, masks, heads, head_norms, positions, cache, norms, gates, blocks, dropout, training)

MUTANTS = tuple(value for theme in _THEMES for value in vars(theme).values() if isinstance(value, Mutant))

__all__ = ["MUTANTS", "Mutant"]

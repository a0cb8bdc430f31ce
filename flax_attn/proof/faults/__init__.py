"""The faults that ports are known for, each planted into the PyTorch side alone.

Every one changes the function or its training, and every one must be caught: `kill.py` plants them. A fault is a
function that breaks what it is given; its docstring says what goes wrong.
"""

from flax_attn.proof.faults import (
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
from flax_attn.proof.faults.fault import Fault

_THEMES = (scores, masks, heads, head_norms, positions, cache, norms, gates, blocks, dropout, training)

FAULTS = tuple(value for theme in _THEMES for value in vars(theme).values() if isinstance(value, Fault))

__all__ = ["FAULTS", "Fault"]

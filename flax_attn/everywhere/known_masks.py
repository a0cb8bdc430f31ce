"""Masks that are causal whatever the inputs are, found in the operations that made them.

Other libraries pass a causal mask as an array of all queries and keys. A kernel that is told that a
mask is causal skips the half that nobody sees, and reads no array.
"""

from typing import Any

from jax.core import Tracer
from jax.sharding import AbstractMesh, use_abstract_mesh
from jaxtyping import Array

from flax_attn.everywhere.mask_programs import lowered, makes_causal
from flax_attn.functional.mask_parts import Dense
from flax_attn.functional.masks import Mask

# A causal mask takes about ten operations; more are those of a model, which end in its inputs.
_MOST_OPERATIONS = 64
_NO_MESH = AbstractMesh((), ())


def with_known(mask: Mask, t: int, s: int) -> Mask:
    """Return a mask whose arrays are replaced where they are causal.

    An array counts as causal if it is a constant, or is computed inside a function that JAX traces
    from constants and shapes only, and equals the causal mask.

    Args:
        mask: mask.
        t: number of queries.
        s: number of keys.
    """
    found = Mask()
    for part in mask.parts:
        # One that is broadcast along queries or keys is no causal one.
        if isinstance(part, Dense) and part.array.shape[-2:] == (t, s):
            found = found & _simpler(part.array)
        else:
            found = found & Mask((part,))
    return found


def _simpler(array: Array) -> Mask:
    """Return the mask of an array, with its causal part as one that needs no array."""
    if _depends_on_no_input(array):
        # On no mesh: it may be one of devices that are only described.
        with use_abstract_mesh(_NO_MESH):
            if makes_causal(array):
                return Mask.causal(0)
    made = _made_by(array)
    # Padding depends on an input, and libraries combine it with the causal mask in one array.
    if made is not None and made.primitive.name == "and":
        first, second = (_simpler(half) for half in made.in_tracers)
        both = first & second
        if not all(isinstance(part, Dense) for part in both.parts):
            return both
    return Mask.dense(array)


def _made_by(x: Any) -> Any:
    """Return the operation of a function in tracing that made an array; None for all others."""
    return getattr(x, "parent", None)


def _depends_on_no_input(array: Any) -> bool:
    # By identity: operations of a function in tracing need not have a hash.
    seen, left = set(), [lowered(array)]
    while left:
        x = left.pop()
        if not isinstance(x, Tracer):
            continue
        made = _made_by(x)
        if id(made) in seen:
            continue
        # An input is a tracer that no operation has made.
        if made is None or made.effects or len(seen) == _MOST_OPERATIONS:
            return False
        seen.add(id(made))
        left += [lowered(operand) for operand in made.in_tracers]
    return True

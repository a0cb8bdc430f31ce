"""Masks that are causal whatever the inputs are, found in the operations that made them.

Other libraries pass a causal mask as an array of all queries and keys. A kernel that is told that a
mask is causal skips the half that nobody sees, and reads no array.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from flax_attn.functional.mask_parts import Dense
from flax_attn.functional.masks import Mask

# A causal mask takes about ten operations; more are those of a model, which end in its inputs.
_MOST = 64


def with_known(mask: Mask, t: int, s: int) -> Mask:
    """Return a mask whose arrays are replaced where they are causal.

    An array counts as causal if it is a constant, or is computed inside a function that JAX traces
    from constants and shapes only, and equals the causal mask.

    Args:
        mask: mask.
        t: number of queries.
        s: number of keys.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        # A constant of a mesh would have to be computed on that mesh.
        return mask
    found = Mask()
    for part in mask.parts:
        if isinstance(part, Dense) and part.array.shape[-2:] == (t, s):
            found = found & _simpler(part.array)
        else:
            found = found & Mask((part,))
    return found


def _simpler(array: Array) -> Mask:
    if _depends_on_no_input(array) and _is_causal(array):
        return Mask.causal(0)
    made = _made_by(array)
    if made is not None and made.primitive.name == "and":
        halves = [_simpler(half) for half in made.in_tracers]
        if any(not isinstance(part, Dense) for half in halves for part in half.parts):
            return halves[0] & halves[1]
    return Mask.dense(array)


def _lowered(x: Any) -> Any:
    """Return the constant that a tracer stands for, or the tracer."""
    return x.full_lower() if isinstance(x, Tracer) else x


def _made_by(x: Any) -> Any:
    """Return the operation of a function in tracing that made an array; None for all others."""
    return getattr(x, "parent", None)


def _depends_on_no_input(array: Any) -> bool:
    seen, left = set(), [_lowered(array)]
    while left:
        x = left.pop()
        made = _made_by(x)
        if not isinstance(x, Tracer) or id(made) in seen:
            continue
        if made is None or made.effects or len(seen) == _MOST:
            return False
        seen.add(id(made))
        left += [_lowered(operand) for operand in made.in_tracers]
    return True


def _is_causal(array: Any) -> bool:
    """Return whether an array that depends on no input is the causal mask."""
    with jax.ensure_compile_time_eval():
        if not isinstance(_lowered(array), Tracer):
            return bool(_equals_causal(_lowered(array)))
        # One loop of XLA, which keeps no array of all queries and keys.
        return bool(jax.jit(lambda: _equals_causal(_value(array, {})))())


@jax.jit
def _equals_causal(values: Array) -> Array:
    # Indices of the rank of the mask: a caller may have forbidden others.
    rows, columns = (jax.lax.broadcasted_iota(int, values.shape, values.ndim - i) for i in (2, 1))
    return jnp.all(values == (columns <= rows))


def _value(x: Any, done: dict[int, Any]) -> Any:
    """Return an array from the operations that made it; `done` holds their results."""
    x = _lowered(x)
    if not isinstance(x, Tracer):
        return x
    made = _made_by(x)
    if id(made) not in done:
        operands = [_value(operand, done) for operand in made.in_tracers]
        options = made.primitive.get_bind_params(made.params)
        results = made.primitive.bind(*operands, **options)
        done[id(made)] = results if made.primitive.multiple_results else [results]
    return done[id(made)][made.outvars.index(x.val)]

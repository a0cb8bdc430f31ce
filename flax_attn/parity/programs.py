"""What a compiled run of JAX does beside its arithmetic: calls of the host, wider dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from flax_attn.parity.adapters.adapter import RunSpec
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.jaxprs import frames_of, opened, programs_in
from flax_attn.parity.pair import LOWER, Pair
from flax_attn.parity.trace.program import place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flax_attn.parity.check import Check

# Those that return nothing to the program, such as that of `jax.debug.print`, change nothing in it.
CALLBACKS = ("pure_callback", "io_callback")


def callbacks(pair: Pair, checks: Sequence[Check]) -> Iterator[str]:
    """Yield a sentence if JAX calls back into the host, which the program is no part of."""
    compiled = any(check.ran and check.name in ("forward", "gradients") for check in checks)
    spec = pair.float64 if compiled else pair.uncompiled
    found = _places(pair, spec, _is_callback)
    if found:
        yield f"JAX calls back into Python{_listed(found)}; what that computes is no port"


def wider_dtypes(pair: Pair, checks: Sequence[Check]) -> Iterator[str]:
    """Yield sentences on lower dtypes in which JAX computed more precisely than PyTorch.

    A NumPy array of float64 makes all that it meets float64: the check of the lower dtype then
    measures another one.
    """
    ran = [check.name for check in checks if check.name in LOWER and check.ran and not check.raised]
    in_float64: defaultdict[str, list[str]] = defaultdict(list)
    for dtype in ran:
        spec = pair.lower[dtype]
        found = _places(pair, spec, _is_widened)
        if not found:
            yield from _wider_outputs(pair, dtype)
        # A port that widens where PyTorch does is right.
        elif not _torch_widens(pair, spec):
            in_float64[_listed(found)].append(dtype)
    for places, dtypes in in_float64.items():
        yield (
            f"{', '.join(dtypes)}: JAX computes in float64{places}, as an array of NumPy makes it,"
            " or one of jnp.arange that is divided. Cast that to the dtype of what it meets"
        )


def _places(pair: Pair, spec: RunSpec, chosen: Callable[[Any], bool]) -> set[str]:
    return {_place(eqn) for eqn in _equations(pair, spec) if chosen(eqn)}


def _wider_outputs(pair: Pair, dtype: str) -> Iterator[str]:
    spec = pair.lower[dtype]
    # The check has run both: nothing is computed again.
    ours = pair.run("flax", spec).dtypes
    theirs = pair.run("torch", spec).dtypes
    for name in sorted(ours.keys() & theirs.keys()):
        if _bytes(ours[name]) > _bytes(theirs[name]):
            yield f"{dtype}: JAX returns {name} in {ours[name]}, PyTorch in {theirs[name]}"


def _bytes(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def _equations(pair: Pair, spec: RunSpec) -> Iterator[Any]:
    if not isinstance(pair.flax, JaxAdapter):
        return
    try:
        program = pair.flax.program(spec)
    # What a module raises is the result of a check.
    except Exception:
        return
    yield from _inside(program)


def _inside(program: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr, with those of the jaxprs in it."""
    jaxpr, _ = opened(program)
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in programs_in(eqn):
            yield from _inside(inner)


def _is_callback(eqn: Any) -> bool:
    return eqn.primitive.name in CALLBACKS


def _is_widened(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type" or eqn.params["new_dtype"] != np.float64:
        return False
    kind = str(eqn.invars[0].aval.dtype)
    return kind in LOWER


def _place(eqn: Any) -> str:
    """Return file and line of an equation in the user's code; empty where they are not known."""
    return str(place_of(frames_of(eqn)) or "")


def _listed(places: set[str]) -> str:
    known = sorted(place for place in places if place)
    return f" at {', '.join(known)}" if known else ""


def _torch_widens(pair: Pair, spec: RunSpec) -> bool:
    torch = pair.own_torch
    if torch is None:
        return False
    from flax_attn.parity.adapters.torch_dtypes import Widenings

    with Widenings() as found:
        torch.run(spec)
    return bool(found.operations)

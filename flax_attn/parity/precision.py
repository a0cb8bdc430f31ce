"""Functions that PyTorch computes in float32 for bfloat16, and JAX in bfloat16.

A softmax in bfloat16 may stay within the rule of that dtype, which allows twice what all other
operations lose. It shows in the two programs, where no tolerance is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from flax_attn.parity.adapters.adapter import NotRun
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.recording import Recording, RecordingAdapter
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.jaxprs import frames_of, opened
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.program import place_of

LOW = "bfloat16"
# Primitives of JAX by the function that they take.
FUNCTIONS = {
    "exp": "exp",
    "exp2": "exp",
    "log": "log",
    "log1p": "log",
    "rsqrt": "sqrt",
    "sqrt": "sqrt",
    "sin": "sin",
    "cos": "cos",
    "tanh": "tanh",
    "logistic": "sigmoid",
}
# What these take, or how often, is not seen.
OPAQUE = ("ffi_call", "io_callback", "pallas_call", "pure_callback", "while")
# A function and whether it is taken in bfloat16, beside the lines that take it.
Taken = tuple[str, bool, str]


def precision(pair: Pair) -> Check:
    """Dtypes in which functions such as exp are taken, where PyTorch widens bfloat16 for them."""
    torch = pair.torch.adapter if isinstance(pair.torch, RecordingAdapter) else pair.torch
    if isinstance(torch, Recording) or not isinstance(pair.flax, JaxAdapter):
        raise NotRun("a recording holds no operations")
    from flax_attn.parity.adapters.torch_dtypes import FunctionDtypes

    spec = pair.run_spec("precision", dtype=LOW)
    with FunctionDtypes(LOW) as seen:
        torch.run(spec)
    wide = {name for name, low, _ in seen.taken if not low}
    wide -= {name for name, low, _ in seen.taken if low}
    if not wide:
        raise NotRun("PyTorch widens bfloat16 for no function")
    ours = list(_taken(pair.flax.program(spec), 1))
    theirs = Counter(name for name, _, _ in seen.taken)
    enough = Counter(name for name, low, _ in ours if not low)
    errors = {}
    for name in sorted(wide):
        low_places = _places(ours, name, low=True)
        differs = bool(low_places) and enough[name] < theirs[name]
        there = ", ".join(_places(seen.taken, name, low=False))
        here = f"bfloat16 at {', '.join(low_places)}" if differs else "float32"
        errors[f"{name}: flax {here}, torch float32 at {there}"] = float(differs)
    return worst_of("precision", errors, 0.0)


def _places(taken: list[Taken], name: str, low: bool) -> list[str]:
    found = {place for function, is_low, place in taken if function == name and is_low == low}
    return sorted(found)


def _taken(program: Any, times: int) -> Iterator[Taken]:
    """Yield the functions that a jaxpr takes, as often as it does."""
    jaxpr, _ = opened(program)
    for eqn in getattr(jaxpr, "eqns", ()):
        kind = eqn.primitive.name
        if kind in OPAQUE:
            raise NotRun(f"what {kind} takes in JAX is not seen")
        if kind in FUNCTIONS:
            dtype = str(eqn.outvars[0].aval.dtype)
            place = str(place_of(frames_of(eqn)) or "a line that is not known")
            yield from [(FUNCTIONS[kind], dtype == LOW, place)] * times
        repeats = times * eqn.params["length"] if kind == "scan" else times
        for parameter in eqn.params.values():
            inner = parameter if isinstance(parameter, tuple | list) else (parameter,)
            for one in inner:
                yield from _taken(one, repeats)

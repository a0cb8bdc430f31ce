"""Functions that PyTorch computes in float32 for bfloat16, and JAX in bfloat16.

A softmax in bfloat16 may stay within the rule of that dtype, which allows twice what all other
operations lose. It shows in the two programs, where no tolerance is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    try:
        with FunctionDtypes(LOW) as seen:
            torch.run(spec)
    # PyTorch's operations refuse what they do not have in bfloat16, complex numbers among it.
    except RuntimeError as error:
        raise NotRun(f"PyTorch computes none of it in {LOW}: {error}") from error
    theirs = seen.taken
    widened = {name for name, low, _ in theirs if not low}
    widened -= {name for name, low, _ in theirs if low}
    if not widened:
        raise NotRun("PyTorch widens bfloat16 for no function")
    ours = list(_taken(pair.flax.program(spec), 1))
    errors = {}
    for name in sorted(widened):
        text, differs = _compared(name, ours, theirs)
        errors[text] = float(differs)
    return worst_of("precision", errors, 0.0)


def _compared(name: str, ours: Sequence[Taken], theirs: Sequence[Taken]) -> tuple[str, bool]:
    """Return where each side takes a function, and whether that is a fault of JAX."""
    low = _places(ours, name, low=True)
    wide = [taken for taken in ours if taken[:2] == (name, False)]
    needed = [taken for taken in theirs if taken[0] == name]
    # What PyTorch computes within one operation, such as a GELU, JAX may compute in bfloat16.
    differs = bool(low) and len(wide) < len(needed)
    here = f"bfloat16 at {', '.join(low)}" if differs else "float32"
    there = ", ".join(_places(theirs, name, low=False))
    return f"{name}: flax {here}, torch float32 at {there}", differs


def _places(taken: Sequence[Taken], name: str, low: bool) -> list[str]:
    return sorted({one[2] for one in taken if one[:2] == (name, low)})


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
            # A branch holds several programs.
            inner = parameter if isinstance(parameter, tuple | list) else (parameter,)
            for one in inner:
                yield from _taken(one, repeats)

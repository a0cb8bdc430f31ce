"""Functions that PyTorch computes in float32 for bfloat16, and JAX in bfloat16.

A softmax in bfloat16 may stay within the rule of that dtype, which allows twice what all other
operations lose. It shows in the two programs, where no tolerance is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flax_attn.parity.adapters.adapter import NotRun, RunSpec, error_text
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.jaxprs import frames_of, opened, programs_in
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
    torch = pair.own_torch
    if torch is None or not isinstance(pair.flax, JaxAdapter):
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
    widened = _never_low(theirs)
    if not widened:
        raise NotRun("PyTorch widens bfloat16 for no function")
    ours = list(_taken(_program(pair.flax, spec), 1))
    errors = {}
    for name in sorted(widened):
        text, differs = _compared(name, ours, theirs)
        errors[text] = float(differs)
    return worst_of("precision", errors, 0.0)


def _program(flax: JaxAdapter, spec: RunSpec) -> Any:
    """Return the program of a run.

    Raises:
        NotRun: if the call raises: the check of the dtype fails then, and says it.
    """
    try:
        return flax.program(spec)
    except Exception as error:
        raise NotRun(f"JAX does not run in {LOW}: {error_text(error)}") from error


def _never_low(taken: Sequence[Taken]) -> set[str]:
    # What PyTorch also takes in bfloat16 asks nothing of JAX.
    low = {name for name, in_low, _ in taken if in_low}
    return {name for name, *_ in taken} - low


def _compared(name: str, ours: Sequence[Taken], theirs: Sequence[Taken]) -> tuple[str, bool]:
    """Return where each side takes a function, and whether that is a fault of JAX."""
    low = _places(ours, name, low=True)
    wide = _places(ours, name, low=False)
    needed = _places(theirs, name, low=False)
    # What PyTorch computes within one operation, such as a GELU, JAX may compute in bfloat16.
    differs = bool(low) and len(wide) < len(needed)
    here = f"bfloat16 at {_listed(low)}" if differs else "float32"
    return f"{name}: flax {here}, torch float32 at {_listed(needed)}", differs


def _places(taken: Sequence[Taken], name: str, low: bool) -> list[str]:
    """Return the line of each time that a function is taken, in bfloat16 or wider."""
    return [place for function, in_low, place in taken if (function, in_low) == (name, low)]


def _listed(places: Sequence[str]) -> str:
    return ", ".join(sorted(set(places)))


def _taken(program: Any, times: int) -> Iterator[Taken]:
    """Yield the functions that a jaxpr takes, as often as it does."""
    jaxpr, _ = opened(program)
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind in OPAQUE:
            raise NotRun(f"what {kind} takes in JAX is not seen")
        if kind in FUNCTIONS:
            dtype = str(eqn.outvars[0].aval.dtype)
            place = str(place_of(frames_of(eqn)) or "a line that is not known")
            taken = FUNCTIONS[kind], dtype == LOW, place
            yield from [taken] * times
        # The body of a scan is one program, which PyTorch runs step by step.
        repeats = times * eqn.params["length"] if kind == "scan" else times
        for inner in programs_in(eqn):
            yield from _taken(inner, repeats)

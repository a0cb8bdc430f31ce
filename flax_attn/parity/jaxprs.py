"""Jaxprs: their inner programs, their lines, and running one with an operation changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

# Operations that only call another program, by the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
}


def called(eqn: Any) -> Any:
    """Return the program that an operation only calls; None for any other operation."""
    name = eqn.primitive.name
    return eqn.params[CALLS[name]] if name in CALLS else None


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a jaxpr and its constants, from a closed or an open one."""
    # A ClosedJaxpr holds a Jaxpr and its constants.
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def programs_in(eqn: Any) -> Iterator[Any]:
    """Yield the programs in the parameters of an operation, such as the branches of a condition."""
    for parameter in eqn.params.values():
        values = parameter if isinstance(parameter, tuple | list) else (parameter,)
        for value in values:
            jaxpr, _ = opened(value)
            if hasattr(jaxpr, "eqns"):
                yield value


def frames_of(eqn: Any) -> list[tuple[str, int]]:
    """Return the files and lines from which an operation was traced, the innermost first."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    return [(frame.file_name, frame.line_num) for frame in frames]


def bind(eqn: Any, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """Return the results of an operation, with changed parameters."""
    primitive = eqn.primitive
    parameters = primitive.get_bind_params({**eqn.params, **changes})
    with eqn.ctx.manager:
        found = primitive.bind(*operands, **parameters)
    return list(found) if primitive.multiple_results else [found]


def interpreted(
    program: Any,
    arguments: Sequence[Any],
    apply: Callable[[int, Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Return the results of a program, each of whose operations is run by a function.

    Args:
        program: closed or open jaxpr.
        arguments: its arguments.
        apply: function of the number of an operation, the operation and its operands that returns
            its results.
    """
    jaxpr, consts = opened(program)
    variables = [*jaxpr.constvars, *jaxpr.invars]
    known = dict(zip(variables, [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        # A literal holds its number itself.
        return atom.val if isinstance(atom, Literal) else known[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in eqn.invars]
        results = apply(i, eqn, operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

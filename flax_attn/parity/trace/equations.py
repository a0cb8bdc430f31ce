"""A jaxpr as one list of equations, any part of which runs compiled or one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from flax_attn.parity import jaxprs
from flax_attn.parity.trace.program import Place, place_of

# A variable of the list is a number; a constant that stands in an equation is an array.
Variable = int
Values = Mapping[Variable, Any]


@dataclass(frozen=True, eq=False)
class Equation:
    """One operation.

    Args:
        source: equation of the jaxpr.
        operands: variables, or arrays for constants.
        results: variables that it defines.
    """

    source: Any
    operands: tuple[Variable | np.ndarray, ...]
    results: tuple[Variable, ...]

    @property
    def variables(self) -> Iterator[Variable]:
        """The operands that are variables."""
        for operand in self.operands:
            if not isinstance(operand, np.ndarray):
                yield operand

    @property
    def parameters(self) -> dict[str, Any]:
        """What the primitive is bound with beside its operands."""
        return self.source.primitive.get_bind_params(self.source.params)

    @property
    def place(self) -> Place | None:
        """The line of source; None where only libraries have it."""
        return place_of(jaxprs.frames_of(self.source))

    def bind(self, operands: Sequence[Any], single: bool) -> Sequence[Any]:
        """Return the results; `single` computes in float32 what says float64."""
        if not single:
            return jaxprs.bind(self.source, operands)
        operands = [in_single(operand) for operand in operands]
        parameters = {name: _single(value) for name, value in self.source.params.items()}
        return jaxprs.bind(self.source, operands, **parameters)


@dataclass
class Flattened:
    """A jaxpr without the programs that only group operations.

    Args:
        equations: operations in order; a loop is one.
        given: values of the variables that no equation defines.
        outputs: variables of the results.
    """

    equations: list[Equation] = field(default_factory=list)
    given: dict[Variable, Any] = field(default_factory=dict)
    outputs: list[Variable] = field(default_factory=list)
    _count: int = 0

    def new(self, value: Any = None) -> Variable:
        """Return a new variable, which has a value if one is given."""
        self._count += 1
        if value is not None:
            self.given[self._count] = value
        return self._count

    def add(self, program: Any, operands: Sequence[Any]) -> list[Any]:
        """Append the equations of a jaxpr, and return its results."""
        jaxpr, consts = jaxprs.opened(program)
        known = dict(zip(jaxpr.invars, operands, strict=True))
        known.update(zip(jaxpr.constvars, map(self.new, consts), strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return np.asarray(atom.val, atom.aval.dtype)  # pyright: ignore
            return known[atom]

        for equation in jaxpr.eqns:
            given = tuple(read(atom) for atom in equation.invars)
            inner = jaxprs.called(equation)
            # What only groups operations adds these in its place.
            if inner is not None:
                results = self.add(inner, given)
            else:
                results = [self.new() for _ in equation.outvars]
                self.equations.append(Equation(equation, given, tuple(results)))
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def flattened(closed: Any, arguments: Sequence[Any]) -> Flattened:
    """Return a jaxpr as one list of equations, with the values of its arguments."""
    found = Flattened()
    operands = [found.new(value) for value in arguments]
    results = found.add(closed, operands)
    found.outputs = [result for result in results if not isinstance(result, np.ndarray)]
    return found


def evaluated(equations: Iterable[Equation], given: Values, single: bool = False) -> dict[int, Any]:
    """Return the values of all variables: one by one, or as one program inside `jax.jit`."""
    known = dict(given)
    for equation in equations:
        operands = [x if isinstance(x, np.ndarray) else known[x] for x in equation.operands]
        results = equation.bind(operands, single)
        known.update(zip(equation.results, results, strict=True))
    return known


def needed(equations: Sequence[Equation], wanted: Iterable[Variable]) -> list[Equation]:
    """Return those of some equations that variables depend on, in order."""
    missing = set(wanted)
    kept = []
    # From the end, what an equation needs is known before the equations that make it.
    for equation in reversed(equations):
        if not missing.isdisjoint(equation.results):
            kept.append(equation)
            missing.update(equation.variables)
    kept.reverse()
    return kept


def inputs_of(equations: Sequence[Equation]) -> list[Variable]:
    """Return the variables that equations use and do not define, in the order of their use."""
    defined: set[Variable] = set()
    found: dict[Variable, None] = {}
    for equation in equations:
        used = [variable for variable in equation.variables if variable not in defined]
        found.update(dict.fromkeys(used))
        defined.update(equation.results)
    return list(found)


def in_single(value: Any) -> Any:
    """Return an array in float32 if it is in float64."""
    return value.astype(np.float32) if value.dtype == np.float64 else value


def _single(value: Any) -> Any:
    # Of the parameters of an operation only dtypes say how exactly it computes.
    is_double = isinstance(value, np.dtype) and value == np.float64
    return np.dtype(np.float32) if is_double else value


def is_floating(value: Any) -> bool:
    """Whether an array is real and floating."""
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.floating))

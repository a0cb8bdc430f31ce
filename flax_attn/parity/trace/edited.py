"""Jaxprs evaluated with one operation edited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from flax_attn.parity.jaxprs import CALLS, bind, called, interpreted, opened
from flax_attn.parity.trace.edits import CATALOGUE
from flax_attn.parity.trace.jax_program import Scope, scope_of
from flax_attn.parity.trace.operation import Compute, Operation
from flax_attn.parity.trace.program import Place, in_library

# The name of the scope around the call of a module; outside of it are operations that build it.
CALLED = "called"
# The parameters of operations that repeat or choose a program, as a tuple of them or as one.
BODIES = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}
# Equation and inner program, from the outermost inwards.
Path = tuple[tuple[int, int], ...]
Found = tuple[Path, Operation, Place]


@dataclass(frozen=True)
class OperationName:
    """An operation of a program, whatever shapes and dtypes it is traced with.

    Args:
        primitive: name of the operation in JAX.
        place: line of source.
        ordinal: number among the operations of this name at this line.
    """

    primitive: str
    place: Place
    ordinal: int


@dataclass(frozen=True)
class Edit:
    """An edit of one operation.

    Args:
        kind: kind, from `CATALOGUE`.
        key: the operation.
        sentence: what is edited; it tells variants of one kind apart.
    """

    kind: str
    key: OperationName
    sentence: str


@dataclass
class Trace:
    """A jaxpr, and where its operations are.

    Args:
        closed: jaxpr with its constants.
        tree: structure of its results.
    """

    closed: Any
    tree: Any

    @cached_property
    def operations(self) -> dict[OperationName, tuple[Path, Operation]]:
        """The operations of a line of the user's."""
        found = {}
        counts: Counter[tuple[str, Place]] = Counter()
        for path, operation, place in _walk(self.closed.jaxpr, (), Scope(), False):
            primitive = operation.primitive
            # A line may hold several operations of one name.
            ordinal = counts[primitive, place]
            counts[primitive, place] += 1
            found[OperationName(primitive, place, ordinal)] = path, operation
        return found

    def edits(self) -> Iterator[Edit]:
        """Yield every edit of every operation."""
        for key, (_, operation) in self.operations.items():
            for kind, variants in CATALOGUE.items():
                for sentence, _ in variants(operation):
                    yield Edit(kind, key, sentence)

    def fits(self, edit: Edit) -> bool:
        """Whether an edit keeps the shape and the dtype of the result."""
        _, operation = self.operations[edit.key]
        compute = dict(CATALOGUE[edit.kind](operation))[edit.sentence]
        wanted = operation.equation.outvars[0].aval
        given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operation.given]
        found = jax.eval_shape(compute, given)
        return (found.shape, found.dtype) == (wanted.shape, wanted.dtype)

    def run(self, arguments: Sequence[Any], edit: Edit | None) -> Any:
        """Return the results with an edit; without it where the program has no such operation."""
        path, compute = self._at(edit)
        if compute is None:
            found = jaxpr_as_fun(self.closed)(*arguments)
        else:
            found = _edited(self.closed, path, compute, *arguments)
        return jax.tree.unflatten(self.tree, found)

    def _at(self, edit: Edit | None) -> tuple[Path, Compute | None]:
        if edit is None or edit.key not in self.operations:
            return (), None
        path, operation = self.operations[edit.key]
        return path, dict(CATALOGUE[edit.kind](operation)).get(edit.sentence)


def traced(function: Callable[..., Any], arguments: Sequence[Any]) -> Trace:
    """Return the trace of a function, which calls what may be edited in the scope `CALLED`."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return Trace(closed, jax.tree.structure(shape))


def _inner(equation: Any) -> Sequence[Any]:
    """Return the programs inside an operation that can be edited."""
    name = equation.primitive.name
    inner = called(equation)
    # A backward pass that is written by hand is not that of an edited program.
    if inner is not None and not name.startswith("custom_vjp"):
        return [inner]
    if name in BODIES:
        body = equation.params[BODIES[name]]
        return body if isinstance(body, tuple) else [body]
    return []


def _walk(jaxpr: Any, path: Path, outer: Scope, called: bool) -> Iterator[Found]:
    """Yield the operations of the user's lines, and inside of what can be edited."""
    makers = {}
    for i, equation in enumerate(jaxpr.eqns):
        makers |= dict.fromkeys(equation.outvars, equation)
        inside = called or CALLED in str(equation.source_info.name_stack)
        scope = scope_of(equation, outer)
        place = scope.place
        is_own = inside and place is not None and not in_library(place.file)
        # Edits change a result, which is to be the only one.
        if place and is_own and len(equation.outvars) == 1:
            yield (*path, (i, 0)), Operation(equation, makers), place
        for j, program in enumerate(_inner(equation)):
            body, _ = opened(program)
            deeper = (*path, (i, j))
            yield from _walk(body, deeper, scope, inside)


def _edited(program: Any, path: Path, compute: Compute, *arguments: Any) -> list[Any]:
    """Return the results of a jaxpr whose operation at a path is edited."""
    (index, inner), *deeper = path

    def apply(i: int, equation: Any, given: list[Any]) -> Sequence[Any]:
        if i != index:
            # What is not edited runs as a whole, with its own gradient.
            return bind(equation, given)
        if deeper:
            return _edited_within(equation, inner, tuple(deeper), compute, given)
        return [compute(given)]

    return interpreted(program, arguments, apply)


def _edited_within(
    equation: Any, inner: int, path: Path, compute: Compute, given: Sequence[Any]
) -> list[Any]:
    name = equation.primitive.name
    programs = list(_inner(equation))
    run = partial(_edited, programs[inner], path, compute)
    # What only groups operations runs without the group.
    if name in CALLS:
        return run(*given)
    jaxpr, _ = opened(programs[inner])
    avals = [atom.aval for atom in jaxpr.invars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    programs[inner] = jax.make_jaxpr(run)(*shapes)
    parameter = BODIES[name]
    is_tuple = isinstance(equation.params[parameter], tuple)
    changed = tuple(programs) if is_tuple else programs[0]
    return bind(equation, given, **{parameter: changed})

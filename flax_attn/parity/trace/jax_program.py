"""The JAX side as a program: its jaxpr, evaluated operation by operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from flax_attn.parity.jaxprs import bind, called, frames_of, interpreted, opened
from flax_attn.parity.trace import jax_names, jax_numpy, scopes
from flax_attn.parity.trace.program import Node, Place, Program, place_of

Compute = Callable[[Sequence[np.ndarray]], np.ndarray]
MODULE = re.compile(r"@([^@]*)@")


@dataclass
class Scope:
    """Where the operations of an inner program stand.

    Args:
        stack: names of the scopes around it.
        place: place of the operation that calls it.
    """

    stack: str = ""
    place: Place | None = None


@dataclass
class _Builder:
    """Evaluates jaxprs and keeps every value."""

    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node) -> Node:
        """Append a node."""
        self.nodes.append(node)
        return node

    def constant(self, value: Any) -> Node:
        """Append a constant."""
        return self.add(Node("constant", (), np.asarray(value)))

    def source(self, name: str, value: Any) -> Node:
        """Append what the run is given by a name."""
        return self.add(Node("source", (), np.asarray(value), name=name))

    def computed(
        self, name: str, operands: Sequence[Node], compute: Compute, scope: Scope, **parameters: Any
    ) -> Node:
        """Append what a function computes of some values."""
        value = compute([operand.value for operand in operands])
        given = tuple(operands)
        return self.add(Node(name, given, value, parameters, scope.place, compute=compute))

    def run(self, program: Any, operands: Sequence[Node], scope: Scope) -> list[Node]:
        """Return the nodes of the results of a jaxpr."""
        jaxpr, consts = opened(program)
        known = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = self.constant(value)

        def read(atom: Any) -> Node:
            return self.constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            given = [read(atom) for atom in eqn.invars]
            here = scope_of(eqn, scope)
            _place_constants(given, here)
            found = self.evaluate(eqn, given, here)
            known.update(zip(eqn.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def evaluate(self, eqn: Any, given: list[Node], here: Scope) -> list[Node]:
        """Return the nodes of the results of one operation."""
        name = eqn.primitive.name
        inner = called(eqn)
        if inner is not None:
            return self.run(inner, given, here)
        if name == "scan":
            return self.scan(eqn, given, here)
        if name == "while":
            return self.loop(eqn, given, here)
        if name == "cond":
            return self.branch(eqn, given, here)
        if name in ("name", "copy", "copy_p", "optimization_barrier"):
            return given
        return self.primitive(eqn, given, here)

    def branch(self, eqn: Any, given: list[Node], scope: Scope) -> list[Node]:
        """Return the results of the branch that a condition chooses."""
        index, *operands = given
        branches = eqn.params["branches"]
        # An index out of bounds is the nearest one, as in JAX.
        chosen = int(np.clip(index.value, 0, len(branches) - 1))
        return self.run(branches[chosen], operands, scope)

    def primitive(self, eqn: Any, given: list[Node], scope: Scope) -> list[Node]:
        """Return the nodes of an operation that calls no other program."""
        function = jax_numpy.function_of(eqn)
        found = function([node.value for node in given])
        parameters = jax_names.parameters_of(eqn)
        made = []
        for i, value in enumerate(found):
            index = {"result": i} if len(found) > 1 else {}
            node = Node(
                jax_names.name_of(eqn),
                tuple(given),
                value,
                {**parameters, **index},
                scope.place,
                equation=eqn,
                compute=_result(function, i),
            )
            made.append(self.add(node))
        return made

    def scan(self, eqn: Any, given: list[Node], scope: Scope) -> list[Node]:
        """Return the results of a scan, whose steps are evaluated one by one."""
        params = eqn.params
        carried = params["num_carry"]
        consts, carry, sequences = _parted(given, params["num_consts"], carried)
        steps = range(params["length"])
        found: dict[int, list[Node]] = {}
        for step in reversed(steps) if params["reverse"] else steps:
            elements = [self.element(sequence, step, scope) for sequence in sequences]
            results = self.run(params["jaxpr"], [*consts, *carry, *elements], scope)
            carry, found[step] = results[:carried], results[carried:]
        stacked = []
        for i, variable in enumerate(eqn.outvars[carried:]):
            rows = [found[step][i] for step in steps]
            stacked.append(self.stack(rows, variable.aval, scope))
        return [*carry, *stacked]

    def element(self, sequence: Node, step: int, scope: Scope) -> Node:
        """Append one element of the first axis."""

        def compute(operands: Sequence[np.ndarray]) -> np.ndarray:
            return operands[0][step]

        return self.computed("element", [sequence], compute, scope, index=step)

    def stack(self, rows: Sequence[Node], whole: Any, scope: Scope) -> Node:
        """Append what the steps of a scan return, stacked to an array of a known shape."""
        # A scan of no steps returns an empty array.
        if not rows:
            return self.constant(np.zeros(whole.shape, whole.dtype))
        return self.computed("stack", rows, np.stack, scope, axis=0)

    def loop(self, eqn: Any, given: list[Node], scope: Scope) -> list[Node]:
        """Return the results of a while loop, whose turns are evaluated one by one."""
        params = eqn.params
        sizes = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body, state = _parted(given, *sizes)
        while True:
            (going,) = self.run(params["cond_jaxpr"], [*of_test, *state], scope)
            if not going.value.any():
                return state
            state = self.run(params["body_jaxpr"], [*of_body, *state], scope)


def _place_constants(given: Sequence[Node], here: Scope) -> None:
    # A number stands where it is used first.
    for node in given:
        if node.operation == "constant" and node.place is None:
            node.place = here.place


def _parted(nodes: list[Node], *sizes: int) -> list[list[Node]]:
    """Return the first nodes in parts of some sizes, and the others."""
    parts = []
    for size in sizes:
        parts.append(nodes[:size])
        nodes = nodes[size:]
    return [*parts, nodes]


def _result(function: Callable, i: int) -> Compute:
    return lambda operands: function(operands)[i]


def scope_of(eqn: Any, outer: Scope) -> Scope:
    """Return where an operation stands, within an outer program."""
    stack = f"{outer.stack}/{eqn.source_info.name_stack}"
    modules = MODULE.findall(stack)
    module = modules[-1] if modules else ""
    # Submodules are called through the scope that names them.
    frames = [frame for frame in frames_of(eqn) if frame[0] != scopes.__file__]
    return Scope(stack, place_of(frames, module) or outer.place)


def jax_program(function: Callable[..., Any], sources: Mapping[str, Any]) -> Program:
    """Return the run of a function of a mapping of arrays that returns one.

    Args:
        function: function of a mapping like `sources`.
        sources: parameters and inputs, by name.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(dict(sources))
    return run_of(closed, sorted(shape), sources)


def run_of(closed: Any, outputs: Sequence[str], sources: Mapping[str, Any]) -> Program:
    """Return the run of a jaxpr of a mapping of arrays.

    Args:
        closed: jaxpr with its constants.
        outputs: names of its results, in order.
        sources: parameters and inputs, by name.
    """
    builder = _Builder()
    # A mapping is flattened in the order of its keys.
    operands = [builder.source(name, sources[name]) for name in sorted(sources)]
    results = builder.run(closed, operands, Scope())
    return Program(builder.nodes, dict(zip(outputs, results, strict=True)))


def evaluated(
    program: Any, arguments: Sequence[Any], stopped: Collection[tuple[int, int]]
) -> list[Any]:
    """Return the results of a jaxpr that stops other gradients than it says, to differentiate.

    Args:
        program: jaxpr whose own `stop_gradient` operations are left out.
        arguments: its arguments.
        stopped: operands to which no gradient flows: the identity of the operation, and the index.
    """

    def apply(_: int, eqn: Any, given: list[Any]) -> Sequence[Any]:
        for i, value in enumerate(given):
            if (id(eqn), i) in stopped:
                given[i] = jax.lax.stop_gradient(value)
        # What the program stops itself is not stopped here.
        if eqn.primitive.name == "stop_gradient":
            return given
        inner = called(eqn)
        return bind(eqn, given) if inner is None else evaluated(inner, given, stopped)

    return interpreted(program, arguments, apply)

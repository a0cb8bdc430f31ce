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

# Operands of a jaxpr: the identity of the operation, and the index.
Operands = Collection[tuple[int, int]]
Compute = Callable[[Sequence[np.ndarray]], np.ndarray]
MODULE = re.compile(r"@([^@]*)@")


@dataclass
class Scope:
    """Where the operations of an inner program stand.

    Args:
        stack: names of the scopes around it.
        place: place of the operation that calls it.
        frames: files and lines from which that operation was traced, the innermost first.
    """

    stack: str = ""
    place: Place | None = None
    frames: tuple[tuple[str, int], ...] = ()


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
        known.update(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        for eqn in jaxpr.eqns:
            self.step(eqn, known, scope)
        return self.read(jaxpr.outvars, known)

    def step(self, eqn: Any, known: dict[Any, Node], scope: Scope) -> None:
        """Append the nodes of one operation, and add its results to what is known."""
        given = self.read(eqn.invars, known)
        here = scope_of(eqn, scope)
        _place_constants(given, here)
        results = self.evaluate(eqn, given, here)
        known.update(zip(eqn.outvars, results, strict=True))

    def read(self, atoms: Sequence[Any], known: Mapping[Any, Node]) -> list[Node]:
        """Return the nodes of variables, and append those of numbers that stand among them."""
        found = []
        for atom in atoms:
            number = isinstance(atom, Literal)
            found.append(self.constant(atom.val) if number else known[atom])
        return found

    def evaluate(self, eqn: Any, given: list[Node], here: Scope) -> list[Node]:
        """Return the nodes of the results of one operation."""
        inner = called(eqn)
        if inner is not None:
            return self.run(inner, given, here)
        match eqn.primitive.name:
            case "scan":
                return self.scan(eqn, given, here)
            case "while":
                return self.loop(eqn, given, here)
            case "cond":
                return self.branch(eqn, given, here)
            case "name" | "copy" | "copy_p" | "optimization_barrier":
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
        found: list[list[Node]] = []
        for step in _order_of_steps(params):
            elements = [self.element(sequence, step, scope) for sequence in sequences]
            operands = [*consts, *carry, *elements]
            results = self.run(params["jaxpr"], operands, scope)
            carry, others = _parted(results, carried)
            found.append(others)
        # What the last step returns stands first where the scan runs backward.
        if params["reverse"]:
            found.reverse()
        stacked = []
        for i, variable in enumerate(eqn.outvars[carried:]):
            rows = [others[i] for others in found]
            stacked.append(self.stack(rows, variable.aval, scope))
        return [*carry, *stacked]

    def element(self, sequence: Node, step: int, scope: Scope) -> Node:
        """Append one element of the first axis."""

        def compute(operands: Sequence[np.ndarray]) -> np.ndarray:
            # Of numbers in one axis it is a scalar of NumPy.
            return np.asarray(operands[0][step])

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
        of_test, of_body, state = _parted(given, params["cond_nconsts"], params["body_nconsts"])
        while self.holds(params["cond_jaxpr"], [*of_test, *state], scope):
            state = self.run(params["body_jaxpr"], [*of_body, *state], scope)
        return state

    def holds(self, test: Any, operands: Sequence[Node], scope: Scope) -> bool:
        """Whether the condition of a while loop holds."""
        (going,) = self.run(test, operands, scope)
        return bool(going.value.any())


def _place_constants(given: Sequence[Node], here: Scope) -> None:
    # A number stands where it is used first.
    for node in given:
        if node.operation == "constant" and node.place is None:
            node.place = here.place


def _order_of_steps(params: Mapping[str, Any]) -> Sequence[int]:
    steps = range(params["length"])
    return steps[::-1] if params["reverse"] else steps


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
    frames = tuple(frame for frame in frames_of(eqn) if frame[0] != scopes.__file__)
    # JAX forgets what is around an inner program, such as a step of a scan.
    if frames[-1:] != outer.frames[-1:]:
        frames += outer.frames
    return Scope(stack, place_of(frames, module) or outer.place, frames)


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


def _stop_gradients(eqn: Any, given: Sequence[Any], stopped: Operands) -> list[Any]:
    found = []
    for i, value in enumerate(given):
        stops = (id(eqn), i) in stopped
        found.append(jax.lax.stop_gradient(value) if stops else value)
    return found


def evaluated(program: Any, arguments: Sequence[Any], stopped: Operands) -> list[Any]:
    """Return the results of a jaxpr that stops other gradients than it says, to differentiate.

    Args:
        program: jaxpr whose own `stop_gradient` operations are left out.
        arguments: its arguments.
        stopped: operands to which no gradient flows.
    """

    def apply(_: int, eqn: Any, given: list[Any]) -> Sequence[Any]:
        return _results(eqn, _stop_gradients(eqn, given, stopped), stopped)

    return interpreted(program, arguments, apply)


def _results(eqn: Any, given: list[Any], stopped: Operands) -> Sequence[Any]:
    # What the program stops itself is not stopped here.
    if eqn.primitive.name == "stop_gradient":
        return given
    inner = called(eqn)
    return bind(eqn, given) if inner is None else evaluated(inner, given, stopped)

"""The JAX side as a program: its jaxpr, evaluated operation by operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from flax_attn.parity.trace import jax_numpy, scopes
from flax_attn.parity.trace.program import Node, Place, Program, place_of

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
MODULE = re.compile(r"@([^@]*)@")


@dataclass
class _Scope:
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

    def run(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Node], scope: _Scope):
        """Return the nodes of the results of a jaxpr."""
        known = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = value if isinstance(value, Node) else self.constant(value)

        def read(atom: Any) -> Node:
            return self.constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            given = [read(atom) for atom in eqn.invars]
            # A number stands where it is used.
            for node in given:
                if node.operation == "constant" and node.place is None:
                    node.place = _scope_of(eqn, scope).place
            found = self.evaluate(eqn, given, scope)
            known.update(zip(eqn.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def evaluate(self, eqn: Any, given: list[Node], scope: _Scope) -> list[Node]:
        """Return the nodes of the results of one operation."""
        name = eqn.primitive.name
        here = _scope_of(eqn, scope)
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            jaxpr, consts = _opened(inner)
            return self.run(jaxpr, consts, given, here)
        if name == "scan":
            return self.scan(eqn, given, here)
        if name == "while":
            return self.loop(eqn, given, here)
        if name == "cond":
            branches = eqn.params["branches"]
            chosen = int(np.clip(given[0].value, 0, len(branches) - 1))
            jaxpr, consts = _opened(branches[chosen])
            return self.run(jaxpr, consts, given[1:], here)
        if name in ("name", "copy", "copy_p", "optimization_barrier"):
            return given
        return self.primitive(eqn, given, here)

    def primitive(self, eqn: Any, given: list[Node], scope: _Scope) -> list[Node]:
        """Return the nodes of an operation that calls no other program."""
        function = jax_numpy.function_of(eqn)
        found = function([node.value for node in given])
        parameters = jax_numpy.parameters_of(eqn)
        made = []
        for i, value in enumerate(found):
            index = {"result": i} if len(found) > 1 else {}
            node = Node(
                jax_numpy.name_of(eqn),
                tuple(given),
                value,
                {**parameters, **index},
                scope.place,
                equation=eqn,
                compute=_result(function, i),
            )
            made.append(self.add(node))
        return made

    def scan(self, eqn: Any, given: list[Node], scope: _Scope) -> list[Node]:
        """Return the results of a scan, whose steps are evaluated one by one."""
        params = eqn.params
        fixed, carried = params["num_consts"], params["num_carry"]
        consts, carry = given[:fixed], given[fixed : fixed + carried]
        sequences = given[fixed + carried :]
        steps = range(params["length"])
        if params["reverse"]:
            steps = reversed(steps)
        jaxpr, inner_consts = _opened(params["jaxpr"])
        stacked: dict[int, list[Node]] = {}
        for step in steps:
            sliced = [self.element(sequence, step, scope) for sequence in sequences]
            found = self.run(jaxpr, inner_consts, [*consts, *carry, *sliced], scope)
            carry = found[:carried]
            stacked[step] = found[carried:]
        count = len(eqn.outvars) - carried
        return [*carry, *(self.stack(eqn, stacked, i, scope) for i in range(count))]

    def element(self, sequence: Node, step: int, scope: _Scope) -> Node:
        """Append one element of the first axis."""

        def compute(operands: Sequence[np.ndarray]) -> np.ndarray:
            return operands[0][step]

        value = compute([sequence.value])
        parameters = {"index": step}
        node = Node("element", (sequence,), value, parameters, scope.place, compute=compute)
        return self.add(node)

    def stack(self, eqn: Any, steps: Mapping[int, list[Node]], i: int, scope: _Scope) -> Node:
        """Append what the steps of a scan return, stacked."""
        operands = tuple(steps[step][i] for step in sorted(steps))
        if not operands:
            empty = eqn.outvars[eqn.params["num_carry"] + i].aval
            return self.constant(np.zeros(empty.shape, empty.dtype))

        def compute(operands: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack(operands)

        value = compute([node.value for node in operands])
        return self.add(Node("stack", operands, value, {"axis": 0}, scope.place, compute=compute))

    def loop(self, eqn: Any, given: list[Node], scope: _Scope) -> list[Node]:
        """Return the results of a while loop, whose turns are evaluated one by one."""
        params = eqn.params
        tested, fixed = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body = given[:tested], given[tested : tested + fixed]
        state = given[tested + fixed :]
        test, test_consts = _opened(params["cond_jaxpr"])
        body, body_consts = _opened(params["body_jaxpr"])
        while True:
            (going,) = self.run(test, test_consts, [*of_test, *state], scope)
            if not going.value.any():
                return state
            state = self.run(body, body_consts, [*of_body, *state], scope)


def _opened(inner: Any) -> tuple[Any, Sequence[Any]]:
    # A ClosedJaxpr holds a Jaxpr and its constants.
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def _result(function: Callable, i: int) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    return lambda operands: function(operands)[i]


def _scope_of(eqn: Any, outer: _Scope) -> _Scope:
    stack = f"{outer.stack}/{eqn.source_info.name_stack}"
    modules = MODULE.findall(stack)
    module = modules[-1] if modules else ""
    traceback = eqn.source_info.traceback
    frames = []
    for frame in traceback.frames if traceback else ():
        # Submodules are called through the scope that names them.
        if frame.file_name != scopes.__file__:
            frames.append((frame.file_name, frame.line_num))
    return _Scope(stack, place_of(frames, module) or outer.place)


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
    operands = []
    # A mapping is flattened in the order of its keys.
    for name in sorted(sources):
        value = np.asarray(sources[name])
        operands.append(builder.add(Node("source", (), value, name=name)))
    results = builder.run(closed.jaxpr, closed.consts, operands, _Scope())
    return Program(builder.nodes, dict(zip(outputs, results, strict=True)))


def evaluated(
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    stopped: Collection[tuple[int, int]],
) -> list[Any]:
    """Return the results of a jaxpr that stops other gradients than it says, to differentiate.

    Args:
        jaxpr: jaxpr whose own `stop_gradient` operations are left out.
        consts: its constants.
        arguments: its arguments.
        stopped: operands to which no gradient flows: the identity of the operation, and the index.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        for i, value in enumerate(given):
            if (id(eqn), i) in stopped:
                given[i] = jax.lax.stop_gradient(value)
        name = eqn.primitive.name
        if name == "stop_gradient":
            found = given
        elif name in CALLS:
            found = evaluated(*_opened(eqn.params[CALLS[name]]), given, stopped)
        else:
            with eqn.ctx.manager:
                result = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
            found = result if eqn.primitive.multiple_results else [result]
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

"""The operations that made an array from constants, as a program that is compiled once.

Each layer of a model makes its mask anew. Two masks that are made by the same operations are one
program, which is asked once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding
from jaxtyping import Array

# What the operations of a program read: a constant by its number, or a result of a step.
Place = tuple[int, int]
_CONSTANT = -1
# Operations that are others, compiled together; and those that only say where an array lies.
_COMPILED, _PLACED = {"jit", "pjit"}, {"sharding_constraint", "reshard"}


@dataclass(frozen=True)
class MaskStep:
    """An operation.

    Args:
        primitive: primitive of JAX.
        options: its parameters.
        operands: places of what it reads.
    """

    primitive: Any
    options: tuple[tuple[str, Any], ...]
    operands: tuple[Place, ...]

    def run(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the results."""
        # Functions among the parameters are stored in another form than `bind` takes.
        options = self.primitive.get_bind_params(dict(self.options))
        results = self.primitive.bind(*operands, **options)
        return results if self.primitive.multiple_results else [results]


@dataclass(frozen=True)
class MaskProgram:
    """Operations that make an array. Programs of the same operations are equal.

    Args:
        steps: operations, each after those whose results it reads.
        result: place of the array.
        kinds: what each constant is: the number where it is one, else shape and dtype.
        numbers: the constants that are numbers, by their place among all.
    """

    steps: tuple[MaskStep, ...]
    result: Place
    kinds: tuple[Any, ...]
    numbers: dict[int, Any] = field(compare=False)

    def __call__(self, arrays: dict[int, Array]) -> Any:
        """Return the array; `arrays` are the constants that are no numbers."""
        constants = self.numbers | arrays
        values: dict[Place, Any] = {(_CONSTANT, i): x for i, x in constants.items()}
        for i, step in enumerate(self.steps):
            operands = [values[place] for place in step.operands]
            results = step.run(operands)
            values |= {(i, j): x for j, x in enumerate(results)}
        return values[self.result]


def makes_causal(array: Any) -> bool:
    """Return whether an array that depends on no input, in tracing or not, is the causal mask."""
    recorder = _MaskRecorder()
    result = recorder.place_of(array)
    constants = recorder.constants
    if not all(map(_is_at_hand, constants)):
        return False
    # Numbers are built into a program, which XLA simplifies then. Arrays are given at each run, so
    # that a program does not keep them.
    numbers, arrays = {}, {}
    for i, x in enumerate(constants):
        if jnp.ndim(x) == 0:
            numbers[i] = x
        else:
            arrays[i] = np.asarray(x)
    kinds = tuple(map(_kind, constants))
    program = MaskProgram(tuple(recorder.steps), result, kinds, numbers)
    try:
        hash(program)
    # A parameter of an operation has no hash: the program is not found again.
    except TypeError:
        return bool(_compiled.__wrapped__(program)(arrays))
    if not arrays:
        return _answer(program)
    return bool(_compiled(program)(arrays))


def _is_at_hand(x: Any) -> bool:
    # NumPy has no keys of random numbers, nor the parts of an array that other processes hold.
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _kind(x: Any) -> Any:
    kind = jnp.shape(x), jnp.result_type(x)
    if jnp.ndim(x) > 0:
        return kind
    # Its bytes: NaN is not equal to itself, and -0 is equal to 0.
    return (*kind, np.asarray(x).tobytes())


@lru_cache(maxsize=256)
def _answer(program: MaskProgram) -> bool:
    return bool(_compiled(program)({}))


@lru_cache(maxsize=256)
def _compiled(program: MaskProgram) -> Any:
    """Return a program that says whether the array is the causal mask.

    It is one loop of XLA, which keeps no array of all queries and keys, and is compiled ahead: so
    it runs at once, also where JAX is tracing.
    """
    shapes = {}
    for i, kind in enumerate(program.kinds):
        if i not in program.numbers:
            shapes[i] = jax.ShapeDtypeStruct(*kind)
    is_causal = jax.jit(lambda arrays: _equals_causal(program(arrays)))
    return is_causal.lower(shapes).compile()


def _equals_causal(values: Array) -> Array:
    # Indices of the rank of the mask: a caller may have forbidden others.
    rows, columns = (jax.lax.broadcasted_iota(int, values.shape, values.ndim - i) for i in (2, 1))
    return jnp.all(values == (columns <= rows))


def lowered(x: Any) -> Any:
    """Return the constant that a tracer stands for, or the tracer."""
    return x.full_lower() if isinstance(x, Tracer) else x


class _MaskRecorder:
    """Writes down the operations that made an array, without where it lies on a mesh."""

    def __init__(self):
        self.constants: list[Any] = []
        self.steps: list[MaskStep] = []
        self._made: dict[int, list[Place]] = {}

    def place_of(self, x: Any) -> Place:
        """Return the place of an array after writing down what made it."""
        x = lowered(x)
        if not isinstance(x, Tracer):
            return self._constant(x)
        made: Any = x.parent
        # Written down once, though several may read its results.
        if id(made) not in self._made:
            operands = [self.place_of(operand) for operand in made.in_tracers]
            self._made[id(made)] = self._record(made, operands)
        results = self._made[id(made)]
        return results[made.outvars.index(x.val)]

    def _constant(self, x: Any) -> Place:
        self.constants.append(x)
        return _CONSTANT, len(self.constants) - 1

    def _record(self, made: Any, operands: list[Place]) -> list[Place]:
        """Return the places of the results of an operation."""
        name = made.primitive.name
        if name in _COMPILED:
            return self._inside(made.params["jaxpr"], operands)
        if name in _PLACED:
            return operands
        options = dict(made.params)
        for option, value in made.params.items():
            # Where an array lies is no part of its values, and a mesh need not be of this machine.
            if isinstance(value, Sharding):
                options[option] = None
        step = MaskStep(made.primitive, tuple(sorted(options.items())), tuple(operands))
        self.steps.append(step)
        number = len(self.steps) - 1
        return [(number, j) for j in range(len(made.outvars))]

    def _inside(self, function: Any, operands: list[Place]) -> list[Place]:
        """Return the places of the results of a function that is compiled as a part."""
        jaxpr = function.jaxpr
        constants = [self._constant(x) for x in function.consts]
        inputs = [*jaxpr.invars, *jaxpr.constvars]
        places = dict(zip(inputs, operands + constants, strict=True))

        def place(x: Any) -> Place:
            # A literal has its value with it, and a variable does not.
            return self._constant(x.val) if hasattr(x, "val") else places[x]

        for equation in jaxpr.eqns:
            given = [place(x) for x in equation.invars]
            found = self._record(equation, given)
            places |= dict(zip(equation.outvars, found, strict=True))
        return [place(x) for x in jaxpr.outvars]

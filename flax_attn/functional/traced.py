"""Functions of indices as data: traced once on scalars, with captured arrays as pytree leaves.

Captured arrays are then seen by every transform: gradients flow through them, `jax.vmap` maps them,
`jax.jit` takes them as arguments, and a function with derivatives of its own gets them as inputs.

Only in flax_attn: PyTorch calls a function on tensors of indices.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array

from attn_spec.function_checks import check_function, check_single, needs_values

INDEX = jax.ShapeDtypeStruct((), jnp.int32)
# Arrays that stand in operations with their values; a tracer has none.
_CONSTANTS = (np.ndarray, np.generic, Array)
_NO_MESH = jax.sharding.AbstractMesh((), ())


@dataclass(frozen=True)
class FunctionProgram:
    """The operations of a function, without the arrays that it captures.

    Args:
        jaxpr: jaxpr of the function.
        name: name of the function, to print.
        operations: what the function computes; programs of the same operations are equal, so that a
            function that is made anew in every step is not compiled anew.
        reads: for each argument, whether the result depends on it.
        tables: for each axis of an array that an argument reads by itself, the place of the
            argument and the size of the axis.
    """

    jaxpr: Any = field(compare=False, repr=False)
    name: str = field(compare=False)
    operations: tuple = field(repr=False)
    reads: tuple[bool, ...]
    tables: tuple[tuple[int, int], ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexFunction:
    """A traced function of scalars.

    Args:
        arrays: arrays that the function captures.
        program: operations of the function on them.
    """

    arrays: Any
    program: FunctionProgram = field(metadata={"static": True})

    @property
    def __name__(self) -> str:
        return self.program.name

    def __call__(self, *scalars: Array) -> Array:
        """Return the result for scalars."""
        closed = ClosedJaxpr(self.program.jaxpr, list(self.arrays))
        (result,) = jaxpr_as_fun(closed)(*scalars)
        return result

    def over(self, x: tuple[Array, ...], b: Array, n: Array, i: Array, j: Array) -> Array:
        """Return the results `(b, n, t, s)` over all indices.

        The indices are `b` `(b,)`, `n` `(n,)`, `i` `(#b, t)` and `j` `(#b, s)`. `x` is what the
        function takes before them: nothing, or an array `(b, n, t, s)`.
        """
        i, i_axis = _of_rows(i, len(b))
        j, j_axis = _of_rows(j, len(b))
        over_heads = self._over_heads(len(x))
        over_rows = _mapped(over_heads, len(x), b=0, i=i_axis, j=j_axis)
        return over_rows(*x, b, n, i, j)

    def _over_heads(self, count: int) -> Callable:
        """Return a function of one row of the batch that returns `(n, t, s)`."""
        over_keys = _mapped(self, count, j=0)
        over_queries = _mapped(over_keys, count, i=0)
        return _mapped(over_queries, count, n=0)

    def check_tables(self, what: str, arguments: Sequence[str], counts: dict[str, int]) -> None:
        """Raise if an array that is read at an argument is too short for its count of values."""
        for place, size in self.program.tables:
            name = arguments[place]
            # Without a count it is not known how far the argument goes.
            _check_table(what, name, size, counts.get(name, 0) - 1)

    @property
    def floats(self) -> tuple[Array, ...]:
        """The captured arrays that have gradients."""
        return tuple(x for x in self.arrays if _has_gradient(x))

    def with_floats(self, floats: Sequence[Any], rest: Any = ...) -> IndexFunction:
        """Return the function with other values for the arrays that have gradients.

        If `rest` is given, it replaces all other arrays.
        """
        arrays, new = [], iter(floats)
        for x in self.arrays:
            other = x if rest is ... else rest
            arrays.append(next(new) if _has_gradient(x) else other)
        return IndexFunction(tuple(arrays), self.program)


def _mapped(
    function: Callable,
    count: int,
    *,
    b: int | None = None,
    n: int | None = None,
    i: int | None = None,
    j: int | None = None,
) -> Callable:
    """Return a function mapped over these axes of its indices, and over the first of `count` x."""
    # The last to be mapped takes the outermost axis of x: what is left stands first in its turn.
    return jax.vmap(function, (*(0,) * count, b, n, i, j))


def _has_gradient(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _of_rows(index: Array, b: int) -> tuple[Array, int | None]:
    """Return the indices and their axis of the batch, which is None where one row serves all."""
    if len(index) == 1:
        return index[0], None
    return jnp.broadcast_to(index, (b, index.shape[1])), 0


def trace(
    what: str, function: Callable, arguments: Sequence[str], first: tuple[Any, ...] = ()
) -> tuple:
    """Return an `IndexFunction` and the dtype and shape of its result.

    Args:
        what: `"mask"` or `"score"`, for messages.
        function: function to trace; it takes `first` and the four indices.
        arguments: names of the arguments.
        first: shape and dtype of what the function takes before the indices.

    Raises:
        ValueError: if it takes other arguments, returns other than an array, or needs the values of
            its indices.

    Example:
        >>> table = jnp.arange(5)
        >>> found, result = trace("mask", lambda b, n, i, j: table[i] > j, ("b", "n", "i", "j"))
        >>> len(found.arrays), found.program.reads, result.dtype
        (1, (False, False, True, True), dtype('bool'))
    """
    check_function(what, function, arguments)
    closed, result = _traced(what, function, (*first, INDEX, INDEX, INDEX, INDEX))
    check_single(what, result, isinstance(result, jax.ShapeDtypeStruct))
    needed = _read(closed.jaxpr)
    program = FunctionProgram(
        jaxpr=closed.jaxpr,
        name=getattr(function, "__name__", type(function).__name__),
        operations=_operations(closed.jaxpr, _reference(function)),
        reads=tuple(x in needed for x in closed.jaxpr.invars),
        tables=tuple(_tables(closed.jaxpr)),
    )
    arrays = tuple(map(jnp.asarray, closed.consts))
    return IndexFunction(arrays, program), result


def _traced(what: str, function: Callable, scalars: Sequence[Any]) -> tuple:
    """Return the jaxpr of a function, and the dtype and shape of its result."""
    # Wrapped anew: JAX keeps the trace of a function that it knows, and with it arrays that were
    # captured then.
    wrapped = jax.make_jaxpr(lambda *scalars: function(*scalars), return_shape=True)
    try:
        # Scalars lie on no mesh, and each device evaluates its own.
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return wrapped(*scalars)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        raise needs_values(what, error) from error


def _read(jaxpr: Any) -> set:
    """Return the variables that the result depends on."""
    # An operation that is needed needs all that it takes.
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return needed


def _tables(jaxpr: Any) -> Iterator[tuple[int, int]]:
    """Yield `FunctionProgram.tables`."""
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    for size, start in _slices(jaxpr):
        index = _index(start, made_by)
        for place, x in enumerate(jaxpr.invars):
            if x is index:
                yield place, size


def _check_table(what: str, name: str, size: int, last: int) -> None:
    if last >= size:
        raise ValueError(
            f"the function of a {what} reads an axis of {size} entries at {name}, which goes from 0"
            f" to {last}: JAX takes the last entry for all beyond it. Make the array larger, or"
            f" write jnp.minimum({name}, {size - 1})"
        )


def _slices(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """Yield the size of each axis that is read, and where."""
    for eqn in jaxpr.eqns:
        # Other ways to read an array say what is taken beyond its end.
        if eqn.primitive.name == "dynamic_slice":
            table, *starts = eqn.invars
            yield from zip(table.aval.shape, starts, strict=True)


def _index(start: Any, made_by: dict[Any, Any]) -> Any:
    """Return the index that a slice starts at, before a negative one is counted from the end."""
    selected = _made(start, "select_n", made_by)
    if selected is None:
        return start
    # `select(index < 0, index, index + size)`
    _, index, other = selected.invars
    counted = _made(other, "add", made_by)
    return index if counted is not None and counted.invars[0] is index else start


def _made(x: Any, primitive: str, made_by: dict[Any, Any]) -> Any:
    """Return the equation that makes a variable, if it is of this operation."""
    # A number has none, and cannot be looked up.
    eqn = None if isinstance(x, Literal) else made_by.get(x)
    return eqn if eqn is not None and eqn.primitive.name == primitive else None


def _reference(function: Callable) -> Any:
    """Return what is equal for the same function, and keeps alive neither it nor its arrays."""
    try:
        return weakref.WeakMethod(function) if inspect.ismethod(function) else weakref.ref(function)
    except TypeError:
        return function


def _operations(jaxpr: Any, origin: Any) -> tuple:
    """Return what a jaxpr computes, in a form that can be compared.

    Variables are compared by their number, arrays by their content. Rules for derivatives are
    traced anew each time: they are equal if the whole function, `origin`, is the same.
    """
    # Filled in the order in which variables are met.
    atoms = partial(_atoms, numbers={}, origin=origin)
    inputs = atoms((*jaxpr.constvars, *jaxpr.invars))
    equations = [_equation(eqn, atoms, origin) for eqn in jaxpr.eqns]
    return inputs, tuple(equations), atoms(jaxpr.outvars)


def _equation(eqn: Any, atoms: Callable, origin: Any) -> tuple:
    taken = atoms(eqn.invars)
    parameters = _parameters(eqn, origin)
    return eqn.primitive, taken, parameters, atoms(eqn.outvars)


def _atoms(variables: Sequence[Any], numbers: dict[Any, int], origin: Any) -> tuple:
    return tuple(_atom(x, numbers, origin) for x in variables)


def _atom(x: Any, numbers: dict[Any, int], origin: Any) -> tuple:
    kind = str(x.aval)
    if isinstance(x, Literal):
        return kind, _comparable(x.val, origin)
    return kind, numbers.setdefault(x, len(numbers))


def _parameters(eqn: Any, origin: Any) -> Any:
    if not eqn.primitive.name.startswith("custom_"):
        return _comparable(eqn.params, origin)
    # The rest are rules for derivatives.
    known = {name: x for name, x in eqn.params.items() if _is_known(x)}
    return _comparable(known, origin), origin


def _is_known(parameter: Any) -> bool:
    return isinstance(parameter, int | str | tuple | None) or hasattr(parameter, "eqns")


def _comparable(value: Any, origin: Any) -> Any:
    if isinstance(value, dict):
        value = sorted(value.items())
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(_comparable(x, origin) for x in value)
    is_jaxpr = hasattr(value, "eqns")
    return _comparable_jaxpr(value, origin) if is_jaxpr else _comparable_leaf(value)


def _comparable_jaxpr(value: Any, origin: Any) -> tuple:
    constants = [*getattr(value, "consts", ())]
    jaxpr = getattr(value, "jaxpr", value)
    return _operations(jaxpr, origin), _comparable(constants, origin)


def _comparable_leaf(value: Any) -> tuple:
    is_known = isinstance(value, _CONSTANTS) and not isinstance(value, Tracer)
    if is_known:
        array = np.asarray(value)
        return str(array.dtype), array.shape, array.tobytes()
    # 1, 1.0 and True are equal; their types are not.
    kind = type(value).__name__
    try:
        hash(value)
    except TypeError:
        # The jaxpr keeps it alive, so that no other value gets its id.
        return kind, id(value)
    return kind, value

"""Functions of indices as data: traced once on scalars, with captured arrays as pytree leaves.

Captured arrays are then seen by every transform: gradients flow through them, `jax.vmap` maps them,
`jax.jit` takes them as arguments, and a function with derivatives of its own gets them as inputs.

Only in flax_attn: PyTorch calls a function on tensors of indices.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array

from attn_spec.function_checks import check_function, check_single, needs_values

INDEX = jax.ShapeDtypeStruct((), jnp.int32)
_NO_MESH = jax.sharding.AbstractMesh((), ())


@dataclass(frozen=True)
class Program:
    """The operations of a function, without the arrays that it captures.

    Args:
        jaxpr: jaxpr of the function.
        name: name of the function, to print.
        operations: what the function computes; programs of the same operations are equal, so that a
            function that is made anew in every step is not compiled anew.
        reads: for each argument, whether the result depends on it.
    """

    jaxpr: Any = field(compare=False, repr=False)
    name: str = field(compare=False)
    operations: tuple = field(repr=False)
    reads: tuple[bool, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexFunction:
    """A traced function of scalars.

    Args:
        arrays: arrays that the function captures.
        program: operations of the function on them.
    """

    arrays: Any
    program: Program = field(metadata={"static": True})

    @property
    def __name__(self) -> str:
        return self.program.name

    def __call__(self, *scalars: Array) -> Array:
        """Return the result for scalars."""
        (result,) = jaxpr_as_fun(ClosedJaxpr(self.program.jaxpr, list(self.arrays)))(*scalars)
        return result

    def over(self, x: tuple[Array, ...], b: Array, n: Array, i: Array, j: Array) -> Array:
        """Return the results `(b, n, t, s)` over all indices.

        The indices are `b` `(b,)`, `n` `(n,)`, `i` `(#b, t)` and `j` `(#b, s)`. `x` is what the
        function takes before them: nothing, or an array `(b, n, t, s)`.
        """
        lead = (0,) * len(x)
        i, j = (
            index[0] if len(index) == 1 else jnp.broadcast_to(index, (len(b), index.shape[1]))
            for index in (i, j)
        )
        function: Callable = jax.vmap(self, (*lead, None, None, None, 0))
        function = jax.vmap(function, (*lead, None, None, 0, None))
        function = jax.vmap(function, (*lead, None, 0, None, None))
        rows = (0 if index.ndim == 2 else None for index in (i, j))
        return jax.vmap(function, (*lead, 0, None, *rows))(*x, b, n, i, j)

    @property
    def _floats(self) -> list[bool]:
        return [jnp.issubdtype(x.dtype, jnp.inexact) for x in self.arrays]

    @property
    def floats(self) -> tuple[Array, ...]:
        """The captured arrays that have gradients."""
        return tuple(x for x, has in zip(self.arrays, self._floats, strict=True) if has)

    def with_floats(self, floats: Sequence[Any], rest: Any = ...) -> IndexFunction:
        """Return the function with other values for the arrays that have gradients.

        If `rest` is given, it replaces all other arrays.
        """
        new = iter(floats)
        arrays = zip(self.arrays, self._floats, strict=True)
        return IndexFunction(
            tuple(next(new) if has else x if rest is ... else rest for x, has in arrays),
            self.program,
        )


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
    try:
        # Scalars lie on no mesh, and each device evaluates its own.
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            # Wrapped anew: JAX keeps the trace of a function that it knows, and with it arrays that
            # were captured then.
            wrapped = jax.make_jaxpr(lambda *scalars: function(*scalars), return_shape=True)
            closed, result = wrapped(*first, *(INDEX,) * 4)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        raise needs_values(what, error) from error
    check_single(what, result, isinstance(result, jax.ShapeDtypeStruct))
    jaxpr = closed.jaxpr
    name = getattr(function, "__name__", type(function).__name__)
    reads = _read(jaxpr)
    program = Program(
        jaxpr,
        name,
        _operations(jaxpr, _reference(function)),
        tuple(x in reads for x in jaxpr.invars),
    )
    return IndexFunction(tuple(map(jnp.asarray, closed.consts)), program), result


def _read(jaxpr: Any) -> set:
    # What the result depends on; an operation that is needed needs all that it takes.
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return needed


def _reference(function: Callable) -> Any:
    # Equal for the same function, which it does not keep alive, nor what the function captures.
    try:
        return weakref.WeakMethod(function) if inspect.ismethod(function) else weakref.ref(function)
    except TypeError:
        return function


def _operations(jaxpr: Any, origin: Any) -> tuple:
    """Return what a jaxpr computes, in a form that can be compared.

    Variables are compared by their number, arrays by their content. Rules for derivatives are
    traced anew each time: they are equal if the whole function, `origin`, is the same.
    """
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> tuple:
        kind = str(x.aval)
        value = (
            _comparable(x.val, origin)
            if isinstance(x, Literal)
            else numbers.setdefault(x, len(numbers))
        )
        return kind, value

    inputs = tuple(atom(x) for x in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            eqn.primitive,
            tuple(map(atom, eqn.invars)),
            _parameters(eqn, origin),
            tuple(map(atom, eqn.outvars)),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, equations, tuple(map(atom, jaxpr.outvars))


def _parameters(eqn: Any, origin: Any) -> Any:
    if not eqn.primitive.name.startswith("custom_"):
        return _comparable(eqn.params, origin)
    plain = int | str | tuple | None
    known = {
        name: x for name, x in eqn.params.items() if isinstance(x, plain) or hasattr(x, "eqns")
    }
    return _comparable(known, origin), origin


def _comparable(value: Any, origin: Any) -> Any:
    if hasattr(value, "eqns"):
        return _operations(getattr(value, "jaxpr", value), origin), _comparable(
            [*getattr(value, "consts", ())], origin
        )
    if isinstance(value, dict):
        return tuple((key, _comparable(x, origin)) for key, x in sorted(value.items()))
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(_comparable(x, origin) for x in value)
    if isinstance(value, np.ndarray | np.generic | Array) and not isinstance(value, Tracer):
        array = np.asarray(value)
        return str(array.dtype), array.shape, array.tobytes()
    try:
        hash(value)
    except TypeError:
        return type(value).__name__, id(value)  # which the jaxpr keeps alive
    return type(value).__name__, value  # 1, 1.0 and True are equal

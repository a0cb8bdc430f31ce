"""A function of indices in two halves, of which a kernel computes the second.

What follows from the query alone, or from the key alone, is computed before, with gathers and
whatever else it takes: `slopes[n]`, `documents[i]` and `documents[j]` are arrays of `(b, n, t, 1)`
or `(b, n, 1, s)`. What needs both is arithmetic of such numbers, which a kernel does tile by tile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array

from flax_attn.functional.traced import IndexFunction

# What Pallas has for a tile on every chip; all else is refused.
_ARITHMETIC = {
    "add", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "pow", "integer_pow",
    "square", "exp", "exp2", "log", "log1p", "tanh", "logistic", "sqrt", "rsqrt", "floor",
    "select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "clamp", "copy",
    "convert_element_type", "stop_gradient", "shift_left", "shift_right_logical",
    "shift_right_arithmetic", "sin", "cos",
}  # fmt: skip
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}
_INDICES = "bnij"


@dataclass(frozen=True)
class Halves:
    """A function in two halves.

    Args:
        function: function of `first` arguments and the four indices.
        first: number of arguments before the indices: 1 for a function of scores, else 0.
    """

    function: IndexFunction
    first: int

    @property
    def _jaxpr(self) -> Any:
        return self.function.program.jaxpr

    @cached_property
    def _depends(self) -> dict[Any, frozenset[str]]:
        # On which arguments each number of the function depends.
        names = [("score",)] * self.first + [(name,) for name in _INDICES]
        found = dict(zip(self._jaxpr.invars, map(frozenset, names), strict=True))
        for eqn in self._jaxpr.eqns:
            taken = [found.get(x, frozenset()) for x in _variables(eqn.invars)]
            found |= dict.fromkeys(eqn.outvars, frozenset().union(*taken))
        return found

    def _is_outside(self, x: Any) -> bool:
        depends = self._depends.get(x, frozenset())
        return "score" not in depends and not depends >= {"i", "j"}

    @property
    def _inside(self) -> list[Any]:
        return [eqn for eqn in self._jaxpr.eqns if not self._is_outside(eqn.outvars[0])]

    @cached_property
    def between(self) -> list[Any]:
        """The numbers that the first half hands to the second."""
        taken = [*chain(*(eqn.invars for eqn in self._inside)), *self._jaxpr.outvars]
        outside = [x for x in _variables(taken) if self._is_outside(x)]
        return list(dict.fromkeys(outside))

    @property
    def refused(self) -> str | None:
        """The first operation of the second half that a kernel cannot compute, or None."""
        if any(x.aval.shape for x in self.between):
            return "an array that is indexed by both a query and a key"
        return next(_refused(self._inside), None)

    @property
    def wide(self) -> str | None:
        """The dtype of a number of 64 bits that a kernel would compute, or None."""
        own = [x for eqn in _flat(self._inside) for x in eqn.outvars]
        dtypes = [x.aval.dtype for x in (*self.between, *own)]
        return next((dtype.name for dtype in dtypes if dtype.itemsize > 4), None)

    def arrays(self, b: Array, n: Array, i: Array, j: Array) -> list[Array]:
        """Return the numbers of the first half, each as an array that broadcasts over all indices.

        The indices are `b` `(b,)`, `n` `(n,)`, `i` `(#b, t)` and `j` `(#b, s)`.
        """
        return [self._array(x, b, n, i, j) for x in self.between]

    def _array(self, x: Any, b: Array, n: Array, i: Array, j: Array) -> Array:
        depends = self._depends.get(x, frozenset())
        # An index that it does not depend on is taken once.
        i = i if "i" in depends else i[:1, :1]
        j = j if "j" in depends else j[:1, :1]
        b = b if "b" in depends or max(len(i), len(j)) > 1 else b[:1]
        n = n if "n" in depends else n[:1]
        return _over_indices(self._outside_function(x), b, n, i, j)

    def _outside_function(self, x: Any) -> Callable[..., Array]:
        # The function of the indices to one number of the first half, which depends on no score.
        own = _needed(self._jaxpr.eqns, x)
        part = self._jaxpr.replace(eqns=own, outvars=[x])
        scores = (jnp.float32(0),) * self.first
        return partial(_run, part, self.function.arrays, *scores)

    def apply(self, scores: Sequence[Array], between: Sequence[Array]) -> Array:
        """Return the results of a tile `(t, s)`, given scores and the tiles of the first half."""
        arrays = *scores, *between
        shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
        dtypes = [x.dtype for x in scores] + [x.aval.dtype for x in self.between]
        typed = map(_as, arrays, dtypes)
        tiles = [jnp.broadcast_to(x, shape) for x in typed]
        return jax.vmap(jax.vmap(self._inside_function()))(*tiles)

    def _inside_function(self) -> Callable[..., Array]:
        # What is between stands in the place of the captured arrays, unless it is an index itself.
        indices = self._jaxpr.invars[self.first :]
        captured = [x for x in self.between if x not in indices]
        # As arguments: from JAX 0.11 on a program that is changed has no constants.
        invars = [*captured, *self._jaxpr.invars]
        part = self._jaxpr.replace(constvars=(), invars=invars, eqns=self._inside)
        return partial(self._run_inside, part, captured, indices)

    def _run_inside(
        self, part: Any, captured: Sequence[Any], indices: Sequence[Any], *numbers: Array
    ) -> Array:
        scores, between = numbers[: self.first], numbers[self.first :]
        found = dict(zip(self.between, between, strict=True))
        given = [found[x] if x in found else jnp.int32(0) for x in indices]
        return _run(part, [], *(found[x] for x in captured), *scores, *given)


def in_memory(x: Array) -> Array:
    """Return numbers in a dtype of 32 bits, which every chip reads."""
    if x.dtype.itemsize >= 4:
        return x
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float32 if is_float else jnp.int32)


def _over_indices(function: Callable[..., Array], b: Array, n: Array, i: Array, j: Array) -> Array:
    over_keys = jax.vmap(function, (None, None, None, 0))
    over_queries = jax.vmap(over_keys, (None, None, 0, None))
    over_heads = jax.vmap(over_queries, (None, 0, None, None))
    (i, i_axis), (j, j_axis) = _rows(i), _rows(j)
    return jax.vmap(over_heads, (0, None, i_axis, j_axis))(b, n, i, j)


def _rows(index: Array) -> tuple[Array, int | None]:
    # An index of one row of the batch serves all.
    return (index[0], None) if len(index) == 1 else (index, 0)


def _as(x: Array, dtype: Any) -> Array:
    # Booleans are in memory as integers.
    return x != 0 if jnp.issubdtype(dtype, jnp.bool_) else x.astype(dtype)


def _refused(eqns: Sequence[Any]) -> Iterator[str]:
    for eqn in _flat(eqns):
        name = eqn.primitive.name
        if name not in _ARITHMETIC or _has_arrays(eqn):
            yield name


def _flat(eqns: Sequence[Any]) -> Iterator[Any]:
    # With those of called functions in the place of the calls.
    for eqn in eqns:
        if eqn.primitive.name in _CALLS:
            yield from _flat(_called(eqn))
        else:
            yield eqn


def _called(eqn: Any) -> Sequence[Any]:
    called = eqn.params[_CALLS[eqn.primitive.name]]
    return getattr(called, "jaxpr", called).eqns


def _has_arrays(eqn: Any) -> bool:
    return any(x.aval.shape for x in (*eqn.invars, *eqn.outvars))


def _needed(eqns: Sequence[Any], x: Any) -> list[Any]:
    needed, found = {x}, []
    for eqn in reversed(eqns):
        if needed.intersection(eqn.outvars):
            needed.update(_variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


def _variables(values: Sequence[Any]) -> list[Any]:
    return [x for x in values if not isinstance(x, Literal)]


def _run(jaxpr: Any, constants: Sequence[Array], *arguments: Array) -> Array:
    (result,) = jaxpr_as_fun(ClosedJaxpr(jaxpr, list(constants)))(*arguments)
    return result

"""A JAX program in which what JAX itself loses, in sums mostly, is rounded once, as in PyTorch.

`jnp.sum` adds up half precision in float32, and so does a product of matrices. Three sums do not,
and round at every step: those that JAX makes of a broadcast and of a lookup when it differentiates
them, such as that of a bias over all tokens, and that of the windows of a pool. In float32 every
sum does, and that of the gradient of a convolution, where PyTorch adds up in pairs, and so does a
product of XLA on a CPU: one of inner width 512 errs twice as much as that of MKL. XLA errs more in
functions, too: in tanh by several roundings. JAX's own functions, such as softmax and GELU, round
half precision at each of their steps, where PyTorch rounds their results. No port can write these
otherwise. A sum in half precision that a program itself asks for is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import jax
from jax.lax import DotAlgorithm, DotAlgorithmPreset

from flax_attn.parity.adapters.quick_jit import runs_on_cpu
from flax_attn.parity.jaxprs import bind, called, frames_of, interpreted
from flax_attn.parity.trace.program import in_library

# Operations that hold programs; kernels, which do too, are left as they are.
_LOOPS = ("scan", "while", "cond")
# Functions that XLA approximates in float32 on a CPU, by other polynomials than PyTorch.
_APPROXIMATED = {
    "tanh",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "erf",
    "erfc",
    "erf_inv",
    "logistic",
}
_APPROXIMATED |= {"sin", "cos", "tan", "pow"}
# Where JAX has its functions of several steps.
_FUNCTIONS = ("/jax/_src/nn/functions.py", "/jax/_src/ops/special.py", "/jax/_src/lax/other.py")
_HALF = ("bfloat16", "float16")
_WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}


def with_rounded_sums(function: Callable) -> Callable:
    """Return a function of arrays, and of static keywords, with each sum of JAX's rounded once.

    Example:
        >>> import jax.numpy as jnp
        >>> def shift(x):
        ...     return jax.vjp(lambda bias: bias[None] + jnp.zeros((1000, 1), bias.dtype), x)[1]
        >>> ones = jnp.ones((1000, 1), jnp.bfloat16)
        >>> gradient = lambda ones: shift(jnp.zeros((1,), jnp.bfloat16))(ones)[0]
        >>> float(with_rounded_sums(gradient)(ones)[0])
        1000.0
    """

    def rounded(*arguments: Any, **static: Any) -> Any:
        traced = jax.make_jaxpr(partial(function, **static), return_shape=True)
        program, shapes = traced(*arguments)
        found = _evaluated(program, jax.tree.leaves(arguments), backward=False)
        results = _narrowed(found, program.out_avals)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rounded


def _evaluated(program: Any, arguments: Sequence[Any], backward: bool) -> list[Any]:
    """Return the outputs of a jaxpr; `backward` says that it is part of a backward pass.

    Those of a function of JAX are not rounded yet: what takes them does that.
    """
    return interpreted(program, arguments, lambda _, eqn, given: _result(eqn, given, backward))


def _result(eqn: Any, values: list[Any], backward: bool) -> Sequence[Any]:
    inside = _in_backward_pass(eqn, backward)
    inner = called(eqn)
    if inner is not None:
        return _evaluated(inner, values, inside)
    name = eqn.primitive.name
    if name not in _LOOPS and _is_of_jax(eqn):
        return _unrounded(eqn, values)
    avals = [atom.aval for atom in eqn.invars]
    operands = _narrowed(values, avals)
    if name in _LOOPS:
        # The sums are in the programs that it repeats.
        changes = {key: _rewritten(value, inside) for key, value in eqn.params.items()}
        return bind(eqn, operands, **changes)
    return _computed(eqn, operands, inside)


def _computed(eqn: Any, operands: list[Any], backward: bool) -> Sequence[Any]:
    own = str(eqn.outvars[0].aval.dtype)
    if own in _WIDER and _is_own_sum(eqn, backward):
        return [_rounded_once(eqn, operands, own)]
    return bind(eqn, operands)


def _narrowed(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Return values in the dtypes that a program says."""
    found = []
    for value, aval in zip(values, avals, strict=True):
        half = str(getattr(aval, "dtype", "")) in _HALF
        found.append(jax.numpy.asarray(value, aval.dtype) if half else value)
    return found


def _is_of_jax(eqn: Any) -> bool:
    """Whether an operation in half precision is a step of one of JAX's own functions."""
    dtypes = {str(atom.aval.dtype) for atom in [*eqn.invars, *eqn.outvars]}
    if dtypes.isdisjoint(_HALF):
        return False
    inside = takewhile(lambda frame: in_library(frame[0]), frames_of(eqn))
    return any(file.endswith(_FUNCTIONS) for file, _ in inside)


def _unrounded(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Return the results of an operation in float32 where it computes in half precision."""
    wider = jax.numpy.dtype("float32")
    operands = [_wide(value) for value in values]
    if eqn.primitive.name == "convert_element_type":
        to_half = str(eqn.params["new_dtype"]) in _HALF
        return [operands[0].astype(wider)] if to_half else bind(eqn, operands)
    return bind(eqn, operands, **_widened(eqn, wider))


def _wide(value: Any) -> Any:
    array = jax.numpy.asarray(value)
    return array.astype("float32") if str(array.dtype) in _HALF else array


def _rounded_once(eqn: Any, values: list[Any], own: str) -> Any:
    """Return a sum that is added up in a wider dtype."""
    wider = jax.numpy.dtype(_WIDER[own])
    # The indices of a lookup are left as they are.
    operands = [value.astype(wider) if value.dtype == own else value for value in values]
    (found,) = bind(eqn, operands, **_widened(eqn, wider))
    return found.astype(own)


def _widened(eqn: Any, wider: Any) -> dict[str, Any]:
    """Return the parameters of a sum that name its dtype, for a wider one."""
    # It holds a program of its own for the addition, in its dtype.
    if eqn.primitive.name == "scatter-add":
        return {"update_jaxpr": _addition(wider), "update_consts": ()}
    if "preferred_element_type" in eqn.params:
        return {"preferred_element_type": wider}
    return {}


def _addition(dtype: Any) -> Any:
    number = jax.ShapeDtypeStruct((), dtype)
    return jax.make_jaxpr(jax.lax.add)(number, number).jaxpr


def _in_backward_pass(eqn: Any, backward: bool) -> bool:
    names = str(eqn.source_info.name_stack)
    # What is computed once more for a backward pass is a part of the forward pass.
    return (backward or "transpose(" in names) and "rematted_computation" not in names


def _is_own_sum(eqn: Any, backward: bool) -> bool:
    name = eqn.primitive.name
    single = eqn.outvars[0].aval.dtype == "float32"
    if name == "reduce_sum":
        return backward or single
    if name == "scatter-add":
        return backward
    if name == "conv_general_dilated":
        return backward and single
    if name == "dot_general":
        return _is_plain_product(eqn)
    if name in _APPROXIMATED:
        return single and runs_on_cpu()
    return name == "reduce_window_sum"


def _is_plain_product(eqn: Any) -> bool:
    """Return whether a product is one of XLA's own in float32, on a CPU."""
    chosen = isinstance(eqn.params["precision"], DotAlgorithm | DotAlgorithmPreset)
    dtypes = {str(variable.aval.dtype) for variable in [*eqn.invars, *eqn.outvars]}
    return dtypes == {"float32"} and not chosen and runs_on_cpu()


def _rewritten(value: Any, backward: bool) -> Any:
    """Return the programs in a parameter, such as the body of a scan, with their sums rounded."""
    if _is_program(value):

        def evaluate(*values: Any) -> list[Any]:
            return _narrowed(_evaluated(value, values, backward), value.out_avals)

        return jax.make_jaxpr(evaluate)(*value.in_avals)
    # Of the other tuples some have a class of their own.
    if isinstance(value, tuple) and any(map(_is_program, value)):
        return tuple(_rewritten(one, backward) for one in value)
    return value


def _is_program(value: Any) -> bool:
    return hasattr(value, "in_avals")

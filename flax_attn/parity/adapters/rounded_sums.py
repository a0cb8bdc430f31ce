"""A JAX program in which the sums of JAX itself are rounded once, much as PyTorch's are.

`jnp.sum` adds up half precision in float32, and so does a product of matrices. Two sums do not, and
round at every step: the one that JAX makes of a broadcast when it differentiates it, such as that
of a bias over all tokens, and that of the windows of a pool. In float32 every sum does, where
PyTorch adds up in pairs. No port can write these otherwise. A sum in half precision that a program
itself asks for is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

# Operations that are one call of another program, with its parameters unchanged.
_CALLS = (
    "jit",
    "pjit",
    "remat2",
    "checkpoint",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
)
_PROGRAMS = ("jaxpr", "call_jaxpr")
# Operations that hold programs; kernels, which do too, are left as they are.
_LOOPS = ("scan", "while", "cond")
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
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return rounded


def _evaluated(program: Any, arguments: Sequence[Any], backward: bool) -> list[Any]:
    """Return the outputs of a jaxpr; `backward` says that it is part of a backward pass."""
    # A ClosedJaxpr holds a Jaxpr and its constants.
    jaxpr = getattr(program, "jaxpr", program)
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*getattr(program, "consts", ()), *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
        found = _result(eqn, [read(atom) for atom in eqn.invars], backward)
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _result(eqn: Any, values: list[Any], backward: bool) -> Sequence[Any]:
    inside = _in_backward_pass(eqn, backward)
    inner = [eqn.params[name] for name in _PROGRAMS if name in eqn.params]
    if inner and eqn.primitive.name in _CALLS:
        return _evaluated(inner[0], values, inside)
    params = dict(eqn.params)
    if eqn.primitive.name in _LOOPS:
        params = {name: _rewritten(value, inside) for name, value in params.items()}
    wider = _WIDER.get(str(eqn.outvars[0].aval.dtype)) if _is_own_sum(eqn, inside) else None
    if wider:
        values = [value.astype(wider) for value in values]
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    if wider:
        found = found.astype(eqn.outvars[0].aval.dtype)
    return found if eqn.primitive.multiple_results else [found]


def _in_backward_pass(eqn: Any, backward: bool) -> bool:
    names = str(eqn.source_info.name_stack)
    # What is computed once more for a backward pass is a part of the forward pass.
    return (backward or "transpose(" in names) and "rematted_computation" not in names


def _is_own_sum(eqn: Any, backward: bool) -> bool:
    if eqn.primitive.name == "reduce_sum":
        return backward or eqn.outvars[0].aval.dtype == "float32"
    return eqn.primitive.name == "reduce_window_sum"


def _rewritten(value: Any, backward: bool) -> Any:
    """Return the programs in a parameter, such as the body of a scan, with their sums rounded."""
    if _is_program(value):
        return jax.make_jaxpr(lambda *values: _evaluated(value, values, backward))(*value.in_avals)
    # Of the other tuples some have a class of their own.
    if isinstance(value, tuple) and any(map(_is_program, value)):
        return tuple(_rewritten(one, backward) for one in value)
    return value


def _is_program(value: Any) -> bool:
    return hasattr(value, "in_avals")

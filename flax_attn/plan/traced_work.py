"""The operations of a function, read off its traced program."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import jax

from flax_attn.backends.counted import COUNTED, counting
from flax_attn.modules.work import Work


def traced_work(function: Callable, *arguments: Any) -> Work:
    """Return the operations of the matrix products and attention calls of a function.

    A loop of unknown length counts as one turn, and of the branches of a condition the last.

    Args:
        function: function that is traced, and not run.
        arguments: its arguments; of arrays only the shapes are read.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import Mask, dot_product_attention
        >>> def layer(x):
        ...     return dot_product_attention(x, x, x, mask=Mask.causal()) @ jnp.ones((2, 7))
        >>> traced_work(layer, jnp.ones((1, 3, 1, 2)))
        Work(parameters=84, attention=48)
    """
    with counting():
        program = jax.make_jaxpr(function)(*arguments)
    return _work(program.jaxpr)


def _work(jaxpr: Any) -> Work:
    return sum(map(_work_of, jaxpr.eqns), Work())


def _work_of(eqn: Any) -> Work:
    """Return the operations of an equation, and of the programs that it runs."""
    name = eqn.primitive.name
    if eqn.primitive is COUNTED:
        return Work(attention=eqn.params["flops"])
    if name in _PRODUCTS:
        count = _PRODUCTS[name]
        return Work(count(eqn))
    if name == "cond":
        *_, last = eqn.params["branches"]
        return _work(last.jaxpr)
    turns = eqn.params["length"] if name == "scan" else 1
    inner = map(_work, _programs(eqn))
    return turns * sum(inner, Work())


def _programs(eqn: Any) -> Iterator[Any]:
    """Yield the programs that an equation runs."""
    for name, value in eqn.params.items():
        inner = getattr(value, "jaxpr", value)
        # Rules of derivatives are functions; the condition of a loop computes nothing to speak of.
        if hasattr(inner, "eqns") and name != "cond_jaxpr":
            yield inner


def _of_dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2 * prod(eqn.outvars[0].aval.shape) * prod(left[i] for i in contracted)


def _of_convolution(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    # Each result is a sum over the inputs of its kernel.
    return 2 * prod(eqn.outvars[0].aval.shape) * prod(kernel) // outputs


def _of_rows(eqn: Any) -> int:
    # Each row is multiplied by one matrix, whose width its result has.
    return 2 * prod(eqn.invars[0].aval.shape) * eqn.outvars[0].aval.shape[-1]


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
    "ragged_dot_general": _of_rows,
    "native_product": _of_rows,
    "native_grouped_product": _of_rows,
    "native_quantized_product": _of_rows,
}

"""Parameters of low precision with an optimizer that works in float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from attn_spec.checks import kind_of
from flax_attn.functional.dtypes import accumulation_dtype


class Float32State(NamedTuple):
    """The state of `float32_state`.

    Args:
        master: float32 copy of each parameter of less than float32, in the order of the parameters.
        inner: state of the optimizer itself.
    """

    master: tuple[Array | nnx.Variable, ...]
    inner: optax.OptState


def float32_state(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that updates a float32 copy of low-precision parameters.

        master = master + update(float32(gradient), master);  parameter = bfloat16(master)

    In bfloat16 a weight of 1 is not changed by a step of less than 0.002. The copy is, and the
    parameter follows: after `optax.apply_updates` it is the rounded copy. Parameters of float32 or
    more have no copy.

    What chooses between an update and none has to go inside, such as `optax.apply_if_finite`: its
    other choice is an update of the dtype of the gradients, and those of this optimizer are of
    float32.

        float32_state(optax.apply_if_finite(optax.adamw(1e-3), max_consecutive_errors=5))

    Args:
        optimizer: any optimizer, with schedule, clipping or weight decay. It works in float32.

    Raises:
        ValueError: if the optimizer is none of optax, or `update` is called without parameters.

    Example:
        >>> optimizer = float32_state(optax.sgd(2.0**-10))
        >>> parameters = jnp.ones(2, jnp.bfloat16)
        >>> state = optimizer.init(parameters)
        >>> with jax.numpy_dtype_promotion("standard"):  # JAX's default: updates are float32
        ...     for _ in range(5):
        ...         updates, state = optimizer.update(jnp.ones(2, jnp.bfloat16), state, parameters)
        ...         parameters = optax.apply_updates(parameters, updates)
        >>> parameters, state.master[0]
        (Array([0.996094, 0.996094], dtype=bfloat16), Array([0.9951172, 0.9951172], dtype=float32))

    References:
        Micikevicius et al. 2017 (arXiv:1710.03740).
    """
    # Not by its class: MultiSteps of optax is of another.
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            "float32_state takes an optimizer of optax, with init and update; got"
            f" {kind_of(optimizer)}. Write nnx.Optimizer(model, float32_state(optax.adamw(1e-3)),"
            " wrt=nnx.Param)"
        )
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> Float32State:
        # Of Flax's parameters the copies are such too, so that they lie on a mesh as the parameters
        # do.
        leaves = jax.tree.leaves(params, is_leaf=lambda p: isinstance(p, nnx.Variable))
        master = tuple(jax.tree.map(_widen, p) for p in leaves if _is_low(p))
        return Float32State(master, inner.init(_with_master(params, master)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ):
        if params is None:
            raise ValueError(
                "float32_state needs the parameters, to move them to where their float32 copies"
                " are; got params=None. Call update(gradients, state, params)"
            )
        wide = _with_master(params, state.master)
        gradients = jax.tree.map(_widen, updates)
        wide_updates, new_inner = inner.update(gradients, state.inner, wide, **extra)
        moved = optax.apply_updates(wide, wide_updates)
        leaves, tree = jax.tree.flatten(params)
        copies = jax.tree.leaves(moved)
        steps = jax.tree.leaves(wide_updates)
        master = []
        for i, p in enumerate(leaves):
            # A parameter of float32 or more takes the step as it is.
            if _is_low(p):
                steps[i], copy = _follow(p, copies[i])
                master.append(copy)
        new_state = Float32State(tuple(master), new_inner)
        return tree.unflatten(steps), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _follow(p: Array, new: Array) -> tuple[Array, Array]:
    """Return the step that takes a parameter to the rounded copy, and the copy."""
    rounded = _round(new, p.dtype)
    step = rounded - _widen(p)
    # A parameter that shrinks 2**16-fold at once may lie between what float32 can add up to: the
    # copy then yields.
    reached = _round(_widen(p) + step, p.dtype)
    return step, jnp.where(reached == rounded, new, reached)


def _round(x: Array, dtype: Any) -> Array:
    # Without the barrier XLA may remove the rounding to the lower precision and back.
    return _widen(jax.lax.optimization_barrier(x.astype(dtype)))


def _is_low(p: Array | nnx.Variable) -> bool:
    return accumulation_dtype(p.dtype) != p.dtype


def _widen(x: Array) -> Array:
    return x.astype(accumulation_dtype(x.dtype))


def _with_master(params: Any, master: tuple[Array | nnx.Variable, ...]) -> Any:
    """Return the parameters, those of low precision replaced by their copies."""
    copies = iter(jax.tree.leaves(master))
    return jax.tree.map(lambda p: next(copies) if _is_low(p) else p, params)

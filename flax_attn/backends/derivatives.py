"""Derivatives of every mode and order around a kernel that has only a backward pass.

`jax.custom_vjp` refuses forward mode. Here the derivative of the output is a linear primitive: its
transpose is the backward pass of the kernel, and where it is evaluated, in forward mode, it is the
derivative of the formula, which holds all scores. So are all derivatives beyond the first.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from flax_attn.backends.backend import Backend
from flax_attn.backends.call import ARRAY_SCALE, Call, Floats
from flax_attn.backends.reference import with_weights

# The axis of each array that a `jax.vmap` is over, for every one of them, the innermost first.
Levels = tuple[tuple[int | None, ...], ...]


def attend(backend: Backend, call: Call) -> Array:
    """Return what a backend computes for a call, differentiable in reverse and in forward mode."""
    call = call if backend.any_sinks else call.without_nonfinite_sinks()
    return backend.attend(call) if backend.every_mode else _attend(backend, call)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(backend: Backend, call: Call) -> Array:
    return backend.attend(call)


@_attend.defjvp
def _differentiate(backend, primals, tangents):
    (call,), (changes,) = primals, tangents
    # Loops of a kernel are not differentiated again: a second derivative is the formula's.
    still = jax.lax.stop_gradient(call)
    output, pullback = jax.vjp(lambda floats: backend.attend(_with(still, floats)), _floats(still))
    output = _attached(backend, output, call)
    leaves, structure = jax.tree.flatten((output, pullback, call, _floats(changes)))
    return output, _tangent.bind(*leaves, structure=structure, levels=())


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attached(backend: Backend, output: Array, call: Call) -> Array:
    """Return the output of a call, which was computed without derivatives, with them."""
    return output


@_attached.defjvp
def _differentiate_attached(backend, primals, tangents):
    (output, call), (_, changes) = primals, tangents
    _, change = _differentiate(backend, (call,), (changes,))
    # Attached again, for the derivatives beyond this one.
    return _attached(backend, output, call), change


@jax.custom_jvp
def _gradients(call: Call, pullback: Any, cotangent: Array) -> Floats:
    """Return the gradients of a call by the backward pass of the kernel."""
    return pullback(cotangent)[0]


@_gradients.defjvp
def _differentiate_gradients(primals, tangents):
    call, _, cotangent = primals
    changes, _, change = tangents
    given = _floats(call), cotangent
    moves = _floats(changes), change
    # The kernel's gradients, so that they are the same bits under every transformation.
    return _gradients(*primals), jax.jvp(partial(_pulled_back, call), given, moves)[1]


def _pulled_back(call: Call, floats: Floats, cotangent: Array) -> Floats:
    """Return the gradients as the formula gives them."""
    _, pullback = jax.vjp(partial(_formula, call), floats)
    (found,) = pullback(cotangent)
    return found


def _floats(call: Call) -> Floats:
    """Return the arrays that have gradients; a scale that is a number has none."""
    found = call.floats
    return found if ARRAY_SCALE in call.options else found._replace(scale=None)


def _with(call: Call, floats: Floats) -> Call:
    arrays = floats._asdict()
    captured = arrays.pop("captured")
    if floats.scale is None:
        del arrays["scale"]
    score = None if call.score is None else call.score.with_floats(captured)
    return replace(call, **arrays, score=score)


def _formula(call: Call, floats: Floats) -> Array:
    return with_weights(_with(call, floats))[0]


def _by_formula(*leaves: Any, structure: Any) -> Array:
    _, _, call, changes = structure.unflatten(leaves)
    return jax.jvp(partial(_formula, call), (_floats(call),), (changes,))[1]


def _backward(*leaves: Any, structure: Any) -> list[Array]:
    """Return the gradients; in the place of the changes stands the cotangent."""
    *given, cotangent = leaves
    count = structure.num_leaves - len(given)
    _, pullback, call, _ = structure.unflatten([*given, *[None] * count])
    return jax.tree.leaves(_gradients(call, pullback, cotangent))


def _over(levels: Levels, function: Any) -> Any:
    for dims in levels:
        function = jax.vmap(function, dims)
    return function


def _evaluate(*leaves: Any, structure: Any, levels: Levels) -> Array:
    return _over(levels, partial(_by_formula, structure=structure))(*leaves)


def _transpose(cotangent, *leaves, structure, levels):
    first = _first_change(structure)
    # Changes have the axis of `jax.vmap` first, as the cotangent does.
    levels = tuple((*dims[:first], 0) for dims in levels)
    backward = _over(levels, partial(_backward, structure=structure))
    found = backward(*leaves[:first], ad.instantiate_zeros(cotangent))
    # A change that is known, as one that is zero, asks for no gradient.
    pairs = zip(found, leaves[first:], strict=True)
    return [None] * first + [x if ad.is_undefined_primal(change) else None for x, change in pairs]


def _first_change(structure: Any) -> int:
    """Return the place of the changes among the arrays of the primitive: they come last."""
    *_, changes = jax.tree_util.treedef_children(structure)
    return structure.num_leaves - changes.num_leaves


def _jvp(primals, tangents, **options):
    moves = [i for i, tangent in enumerate(tangents) if _moves(tangent)]

    def moved(*floats):
        leaves = list(primals)
        for i, x in zip(moves, floats, strict=True):
            leaves[i] = x
        return _evaluate(*leaves, **options)

    given = [primals[i] for i in moves]
    changes = [tangents[i] for i in moves]
    output = _tangent.bind(*primals, **options)
    return output, jax.jvp(moved, given, changes)[1]


def _moves(tangent: Any) -> bool:
    return type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0


def _batch(leaves: Sequence[Array], dims: Sequence[Any], *, structure: Any, levels: Levels):
    size = next(x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None)
    leaves, dims = list(leaves), list(dims)
    for i in range(_first_change(structure), len(leaves)):
        leaves[i] = batching.bdim_at_front(leaves[i], dims[i], size)
        dims[i] = 0
    return _tangent.bind(*leaves, structure=structure, levels=(*levels, tuple(dims))), 0


def _abstract(*avals: Any, structure: Any, levels: Levels) -> Any:
    # The change of the output is as the output itself, the first of all.
    output = jax.eval_shape(_over(levels, lambda output, *_: output), *avals)
    return jax.typeof(output)


_tangent = Primitive("attention_tangent")
_tangent.def_impl(jax.jit(_evaluate, static_argnames=("structure", "levels")))
_tangent.def_abstract_eval(_abstract)
mlir.register_lowering(_tangent, mlir.lower_fun(_evaluate, multiple_results=False))
ad.primitive_transposes[_tangent] = _transpose
ad.primitive_jvps[_tangent] = _jvp
batching.primitive_batchers[_tangent] = _batch

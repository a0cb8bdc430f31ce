"""Primitives that run a function of the library on CPUs, and plain JAX on every other platform."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def primitive(
    name: str,
    call: Callable,
    plain: Callable,
    static: tuple[str, ...],
    *,
    shapes: Callable | None = None,
    multiple_results: bool = False,
) -> Primitive:
    """Return a primitive that is `call` on CPUs and `plain` elsewhere.

    It is one function of arrays and static options.

    Which of them a program holds is decided when it is lowered, by the platforms that it is lowered
    for: one that is exported for another platform holds no call of the library. Derivatives and
    batching are left to add.

    Args:
        name: name of the primitive.
        call: function that calls the library.
        plain: the same function in plain JAX.
        static: names of the static options.
        shapes: function with results of the same shapes and dtypes, for arrays that all vary over
            the same axes of a mesh inside `jax.shard_map`, as the results do; None is `plain`.
        multiple_results: whether the functions return several arrays.
    """
    made = Primitive(name)
    made.multiple_results = multiple_results

    def abstract(*avals: Any, **options: Any) -> Any:
        results = jax.eval_shape(partial(shapes or plain, **options), *avals)
        types = [jax.typeof(x) for x in jax.tree.leaves(results)]
        # A call of the library says nothing of a mesh.
        if shapes is not None:
            axes = avals[0].manual_axis_type
            types = [one.update_manual_axis_type(axes) for one in types]
        return types if multiple_results else types[0]

    made.def_impl(jax.jit(call, static_argnames=static))
    made.def_abstract_eval(abstract)
    everywhere = mlir.lower_fun(plain, multiple_results)
    on_cpu = mlir.lower_fun(call, multiple_results)
    mlir.register_lowering(made, everywhere)
    mlir.register_lowering(made, on_cpu, platform="cpu")
    return made


def batch_by_broadcasting(made: Primitive) -> None:
    """Let `jax.vmap` put its axis before all others of every operand and result."""

    def batch(args: Any, dims: Any, **options: Any) -> tuple[Any, Any]:
        size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
        moved = [batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True)]
        results = made.bind(*moved, **options)
        return results, (0,) * len(results) if made.multiple_results else 0

    batching.primitive_batchers[made] = batch


def batch_by_mapping(made: Primitive, plain: Callable) -> None:
    """Let `jax.vmap` map the plain function: the library takes no further axis."""

    def batch(args: Any, dims: Any, **options: Any) -> tuple[Any, int]:
        mapped = jax.vmap(partial(plain, **options), dims)
        return mapped(*args), 0

    batching.primitive_batchers[made] = batch

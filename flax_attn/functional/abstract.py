"""Arrays that are known by shape and dtype alone, as arguments of constructors.

Only in flax_attn: `explain` asks about them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jaxtyping import Array

from flax_attn.functional.shapes import ArrayLike

ArrayOrShape = ArrayLike | jax.ShapeDtypeStruct

P = ParamSpec("P")
R = TypeVar("R")


def or_abstract(make: Callable[P, R]) -> Callable[P, R]:
    """Let a constructor take `jax.ShapeDtypeStruct`: what it makes then has shapes for arrays.

    Example:
        >>> or_abstract(jax.numpy.negative)(jax.ShapeDtypeStruct((3,), jax.numpy.int32))
        ShapeDtypeStruct(shape=(3,), dtype=int32)
    """

    @wraps(make)
    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        given: dict[Any, Any] = dict(enumerate(arguments)) | keywords
        abstract = {}
        for at, argument in given.items():
            if isinstance(argument, jax.ShapeDtypeStruct):
                abstract[at] = argument
        if not abstract:
            return make(*arguments, **keywords)

        # All else keeps its values, which are checked.
        def trace(abstract: dict[Any, Array]) -> R:
            found = given | abstract
            positional = [found.pop(i) for i in range(len(arguments))]
            return make(*positional, **found)  # pyright: ignore[reportCallIssue]

        return jax.eval_shape(trace, abstract)

    return run


def check_has_values(name: str, tree: object) -> None:
    """Raise for `jax.ShapeDtypeStruct` in the place of an array.

    Raises:
        ValueError: if there is one.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"a call computes with arrays; got a {name} of a shape alone, {leaf}. Pass an"
                " array, or ask flax_attn.explain, which takes shapes"
            )

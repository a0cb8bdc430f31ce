"""The named intermediates of a module with their shapes, read from its jaxpr."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx

STEPS = {
    "query": ("b t n h", "queries, split into heads: x W_query"),
    "key": ("b s k h", "keys, split into heads: x W_key"),
    "value": ("b s k v", "values, split into heads: x W_value"),
    "scores": ("b n t s", "every query against every key: query . key / sqrt(h)"),
    "weights": ("b n t s", "masked, softmax over s, dropout: each row sums to 1 before dropout"),
    "context": ("b t n v", "the weighted sum of the values"),
    "output": ("b t d", "heads joined and projected: context W_out"),
}


class Intermediate(NamedTuple):
    """One intermediate: its name, the letters of its axes, its shape and its meaning."""

    name: str
    axes: str
    shape: tuple[int, ...]
    meaning: str


def steps(module: nnx.Module, *inputs: Any, **options: Any) -> list[Intermediate]:
    """Return the named intermediates of `module(*inputs, **options)` in order.

    The module is traced, not computed, with the reference backend whatever its own: other backends
    never hold scores or weights.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import CausalAttention
        >>> layer = CausalAttention(3, 2, context_length=6, dropout=0.0, rngs=nnx.Rngs(0))
        >>> [(step.name, step.shape) for step in steps(layer, jnp.ones((4, 6, 3)))][:2]
        [('query', (4, 6, 1, 2)), ('key', (4, 6, 1, 2))]
    """
    graph, state = nnx.split(module)

    def call(state: Any, inputs: Any) -> Any:
        traced = nnx.merge(graph, state)
        traced.set_attributes(backend="reference", raise_if_not_found=False)
        return traced(*inputs, **options)

    trace = jax.make_jaxpr(call)(state, inputs)
    found = []
    for name, shape in _named(trace.jaxpr):
        # Modules name other arrays as well, for rematerialisation.
        if name in STEPS:
            axes, meaning = STEPS[name]
            found.append(Intermediate(name, axes, shape, meaning))
    return found


def _named(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"], equation.outvars[0].aval.shape
        # Loops, branches and compiled functions hold theirs among their parameters.
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _named(inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")

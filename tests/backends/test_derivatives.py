"""Derivatives of `blocked` in every mode and order are those of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import KeyedDropout, Mask, dot_product_attention
from flax_attn.parity import tolerance

pytestmark = pytest.mark.usefixtures("x64", "no_shape_checks")

B, T, S, N, K, H, V = 2, 70, 90, 4, 2, 8, 6


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


SHAPES = {
    "query": (B, T, N, H),
    "key": (B, S, K, H),
    "value": (B, S, K, V),
    "bias": (1, N, T, S),
    "sinks": (N,),
    "scale": (),
    "captured": (N,),
}
ARRAYS = {name: draw(i, *shape) / 2 for i, (name, shape) in enumerate(SHAPES.items())}
CHANGES = {name: draw(10 + i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
CALLS = {
    "bias": (("bias",), {"mask": Mask.causal(20)}),
    "sinks and scale": (("sinks", "scale"), {"mask": Mask.lengths(key=np.array([0, 60]))}),
    "score": (("captured",), {"mask": Mask.where(lambda b, n, i, j: j <= i + 3)}),
    "dropout": ((), {"mask": draw(20, B, 1, T, S) < 0.7}),
}


def call(backend, name):
    """Return a call as a function of its arrays, and the arrays with a change of each."""
    more, options = CALLS[name]
    names = ("query", "key", "value", *more)

    def attend(*arrays):
        given = dict(zip(names, arrays, strict=True))
        if "captured" in given:
            slopes = given.pop("captured")
            given["score"] = lambda score, b, n, i, j: score * slopes[n]
        if name == "dropout":
            given["dropout"] = KeyedDropout(0.3, jnp.arange(2, dtype=jnp.uint32))
        return dot_product_attention(**given, **options, backend=backend)

    # Made here, where float64 is on.
    given, changes = ([jnp.asarray(of[x]) for x in names] for of in (ARRAYS, CHANGES))
    return attend, tuple(given), tuple(changes)


def squared(attend):
    return lambda *arrays: (attend(*arrays) ** 2).sum()


def forward(attend, arrays, changes):
    return jax.jvp(attend, arrays, changes)


def forward_by_one(attend, arrays, changes):
    return jax.jvp(lambda query: attend(query, *arrays[1:]), arrays[:1], changes[:1])


def reverse(attend, arrays, changes):
    return jax.grad(squared(attend), tuple(range(len(arrays))))(*arrays)


def forward_over_reverse(attend, arrays, changes):
    return jax.jvp(jax.grad(squared(attend)), arrays, changes)


def reverse_over_reverse(attend, arrays, changes):
    slopes = jax.grad(squared(attend), tuple(range(len(arrays))))

    def size(*arrays):
        # All gradients, and the output: each is differentiated again.
        return sum((x**2).sum() for x in slopes(*arrays)) + squared(attend)(*arrays)

    return jax.grad(size, tuple(range(len(arrays))))(*arrays)


def thrice(attend, arrays, changes):
    def slope(*arrays):
        return (jax.grad(squared(attend))(*arrays) ** 2).sum()

    return jax.jvp(jax.grad(slope, 1), arrays, changes)


def reverse_over_forward(attend, arrays, changes):
    return jax.grad(lambda *x: (jax.jvp(attend, x, changes)[1] ** 2).sum())(*arrays)


def forward_over_forward(attend, arrays, changes):
    return jax.jvp(lambda *x: jax.jvp(attend, x, changes)[1], arrays, changes)


def linearized(attend, arrays, changes):
    output, change = jax.linearize(jax.jit(attend), *arrays)
    return output, jax.vmap(change)(*(jnp.stack([x, 2 * x]) for x in changes))


def mapped(attend, arrays, changes):
    query, *rest = arrays

    def one(query):
        run = squared(lambda query, key: attend(query, key, *rest[1:]))
        gradients = jax.grad(run, (0, 1))(query, rest[0])
        return gradients, jax.jvp(run, (query, rest[0]), (changes[0], 0 * rest[0]))

    return jax.vmap(one)(jnp.stack([query, 2 * query]))


def rematerialised(attend, arrays, changes):
    return jax.jit(jax.grad(squared(jax.checkpoint(attend))))(*arrays)


MODES = (
    forward,
    forward_by_one,
    reverse,
    forward_over_reverse,
    reverse_over_reverse,
    thrice,
    reverse_over_forward,
    forward_over_forward,
    linearized,
    mapped,
    rematerialised,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_are_those_of_the_formula(mode, name):
    sides = []
    for backend in ("blocked", "reference"):
        leaves = jax.tree.leaves(mode(*call(backend, name)))
        sides.append({str(i): np.asarray(x) for i, x in enumerate(leaves)})
    errors = tolerance.gradient_errors(*sides)
    assert max(errors.values()) <= tolerance.GRADIENT, errors

"""No tokens, or no rows: an output of that size and gradients of 0, or a refusal in words."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_attn import (
    Experts,
    GatedDeltaNet,
    GatedFeedForward,
    KimiDeltaAttention,
    MixtureOfExperts,
    MultiHeadAttention,
    Router,
)

D = 6


def mixture(form):
    rngs = nnx.Rngs(0)
    router, experts = Router(D, 4, top_k=2, rngs=rngs), Experts(4, D, 5, form=form, rngs=rngs)
    return MixtureOfExperts(router, experts, GatedFeedForward(D, 8, rngs=rngs))


def heads():
    return MultiHeadAttention(D, 8, None, 0.0, num_heads=4, rngs=nnx.Rngs(0))


def recurrent(kind):
    return kind(D, D, num_heads=4, head_dim=3, rngs=nnx.Rngs(0))


EMPTY = {
    "auto": (lambda: mixture("auto"), ((0, D), (3, 0, D), (0, 5, D))),
    "dense": (lambda: mixture("dense"), ((0, D), (3, 0, D), (0, 5, D))),
    "sorted": (lambda: mixture("sorted"), ((0, D), (3, 0, D), (0, 5, D))),
    "heads": (heads, ((0, 5, D),)),
    "GatedDeltaNet": (lambda: recurrent(GatedDeltaNet), ((0, 5, D), (0, 1, D))),
    "KimiDeltaAttention": (lambda: recurrent(KimiDeltaAttention), ((0, 5, D), (0, 1, D))),
}


@pytest.mark.parametrize(("make", "shapes"), EMPTY.values(), ids=EMPTY)
def test_nothing_comes_of_nothing(make, shapes):
    module = make()
    for shape in shapes:
        loss = lambda module, x: jnp.square(module(x)).sum()  # noqa: E731
        value, gradients = nnx.jit(nnx.value_and_grad(loss))(module, jnp.zeros(shape))
        assert module(jnp.zeros(shape)).shape[:-1] == shape[:-1]
        assert value == 0
        assert all((x == 0).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("make", [heads, lambda: recurrent(GatedDeltaNet)])
def test_attention_needs_a_token(make):
    with pytest.raises(ValueError, match=r"at least one (key )?token"):
        make()(jnp.zeros((3, 0, D)))

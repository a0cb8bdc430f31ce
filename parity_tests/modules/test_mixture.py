"""Mixtures of experts: two forms of one function, tokens that meet no expert of a kind.

The load of the experts, too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import torch_ref
from flax_attn import ClampedSwiGLU, Experts, MixtureOfExperts, Router, convert
from flax_attn.proof.build import drawn
from parity_tests.asserts import assert_near, assert_results_near

D, EXPERTS, K = 5, 7, 3
X = np.random.default_rng(0).normal(size=(2, 9, D))


def mixture(form, **router):
    """Return a mixture with every part that a form computes.

    These are biases, and an activation of both branches.
    """

    def make():
        numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        experts = Experts(EXPERTS, D, 6, ClampedSwiGLU(0.4), bias=True, form=form, **numerics)
        return MixtureOfExperts(Router(D, EXPERTS, K, **router, **numerics), experts)

    return drawn(make)


def both(model, x):
    """Return the output, and all gradients under a random cotangent."""
    gradients, y = nnx.jit(nnx.grad(weighed, argnums=(0, 1), has_aux=True))(model, x)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {"output": np.asarray(y)}, {str(path): np.asarray(leaf) for path, leaf in leaves}


def weighed(model, x):
    cotangent = np.random.default_rng(1).normal(size=x.shape)
    y = model(x)
    return (y * cotangent).sum(), y


@pytest.mark.parametrize("t", [1, 9])
def test_sorted_experts_equal_dense_ones(t):
    # Of one token most experts get none.
    x = jnp.asarray(X[:, :t])
    assert_results_near(*(both(mixture(form), x) for form in ("sorted", "dense")))


@pytest.mark.parametrize("form", ["dense", "sorted"])
def test_no_token_is_dropped_where_all_choose_the_same_experts(form):
    model = mixture_of_the_first(form)
    one_by_one = np.stack([model(jnp.asarray(x)[None])[0] for x in X[0]])
    together = model(jnp.asarray(X[0]))
    assert_near({"output": np.asarray(together)}, {"output": one_by_one})


def mixture_of_the_first(form):
    """Return a mixture whose router is indifferent, so that all tokens go to the first experts."""
    model = mixture(form)
    model.router.W_router.kernel.set_value(jnp.zeros((D, EXPERTS)))
    return model


# Sorting has no rule for batches.
def test_dense_experts_can_be_mapped():
    model = mixture_of_the_first("dense")
    mapped = jax.vmap(lambda x: model(x[None])[0])(jnp.asarray(X[0]))
    one_by_one = np.stack([model(jnp.asarray(x)[None])[0] for x in X[0]])
    assert_near({"output": np.asarray(mapped)}, {"output": one_by_one})


def test_a_selection_bias_is_no_parameter():
    model = mixture("dense", selection_bias=True)
    assert "router.selection_bias" in convert.statistics(model)
    assert "router.selection_bias" not in convert.parameters(model)
    reference = torch_ref.Router(D, EXPERTS, K, selection_bias=True)
    assert [name for name, _ in reference.named_buffers()] == ["selection_bias"]


def routings(sides):
    """Return for each side the routings of two layers."""


# Of two layers.
LOGITS = np.random.default_rng(2).normal(size=(2, 2, 9, EXPERTS))
CHOSEN = np.argsort(-LOGITS, axis=-1)[..., :K].copy()
MASK = np.arange(9) < np.array([9, 4])[:, None]


def loss_of(side, logits, mask):
    """Return the loss of the load, for the logits of two layers."""
    pairs = zip(logits, CHOSEN, strict=True)
    layers = [side.Routing(one[..., :K], side.array(chosen), one) for one, chosen in pairs]
    return side.load_balancing_loss(layers, None if mask is None else side.array(mask))


@pytest.mark.parametrize("mask", [None, MASK], ids=["open", "padded"])
def test_the_loss_of_the_load_is_that_of_transformers(side, mask):
    found = side.numpy(loss_of(side, [side.array(one) for one in LOGITS], mask))
    flat = tuple(torch.tensor(one).reshape(-1, EXPERTS) for one in LOGITS)
    given = None if mask is None else torch.from_numpy(mask)
    theirs = load_balancing_loss_func(flat, EXPERTS, K, given).item()
    # Theirs sums in float32.
    assert abs(found - theirs) < 1e-6 * theirs


def test_the_loss_of_the_load_and_its_gradient_are_equal_on_both_sides(sides):
    assert_results_near(*(loss_and_gradients(side) for side in sides))


def loss_and_gradients(side):
    logits = [side.array(one) for one in LOGITS]
    gradients = side.gradients(lambda *logits: loss_of(side, logits, MASK), *logits)
    loss = {"loss": side.numpy(loss_of(side, logits, MASK))}
    return loss, {str(i): gradient for i, gradient in enumerate(gradients)}


def test_an_even_load_has_the_least_loss():
    weights, experts = torch.ones(EXPERTS, 1), torch.arange(EXPERTS)[:, None]
    # Each token chooses another expert, and the router prefers none.
    even = torch_ref.Routing(weights, experts, torch.zeros(EXPERTS, EXPERTS))
    assert torch_ref.load_balancing_loss([even]).item() == pytest.approx(1.0)

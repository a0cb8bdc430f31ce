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
from flax_attn import ClampedSwiGLU, Experts, MixtureOfExperts, Router, convert, load_balancing_loss
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn

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
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=x.shape))

    def weighed(model, x):
        y = model(x)
        return (y * cotangent).sum(), y

    gradients, y = nnx.jit(nnx.grad(weighed, argnums=(0, 1), has_aux=True))(model, x)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {"output": np.asarray(y)}, {str(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("t", [1, 9])
def test_sorted_experts_equal_dense_ones(t):
    x = jnp.asarray(X[:, :t])  # of one token most experts get none
    (dense, of_dense), (ragged, of_ragged) = (
        both(mixture(form), x) for form in ("dense", "sorted")
    )
    errors = tolerance.relative(ragged, dense)
    assert max(errors.values()) <= tolerance.FORWARD, errors
    errors = tolerance.gradient_errors(of_ragged, of_dense)
    assert max(errors.values()) <= tolerance.GRADIENT, errors


@pytest.mark.parametrize("form", ["dense", "sorted"])
def test_no_token_is_dropped_where_all_choose_the_same_experts(form):
    model = mixture(form)
    model.router.W_router.kernel.set_value(jnp.zeros((D, EXPERTS)))  # ties: the first experts
    every = jax.vmap(lambda x: model(x[None])[0])(jnp.asarray(X[0])) if form == "dense" else None
    one_by_one = jnp.stack([model(jnp.asarray(x)[None])[0] for x in X[0]])
    found = {"together": model(jnp.asarray(X[0]))} | ({} if every is None else {"vmap": every})
    found = {name: np.asarray(y) for name, y in found.items()}
    errors = tolerance.relative(found, dict.fromkeys(found, np.asarray(one_by_one)))
    assert max(errors.values()) <= tolerance.FORWARD, errors


def test_a_selection_bias_is_no_parameter():
    model = mixture("dense", selection_bias=True)
    assert "router.selection_bias" in convert.statistics(model)
    assert "router.selection_bias" not in convert.parameters(model)
    reference = torch_ref.Router(D, EXPERTS, K, selection_bias=True)
    assert [name for name, _ in reference.named_buffers()] == ["selection_bias"]


def routings(sides):
    """Return for each side the routings of two layers."""
    random = np.random.default_rng(2)
    logits = [random.normal(size=(2, 9, EXPERTS)) for _ in range(2)]
    for side in sides:
        arrays = [side.array(one) for one in logits]
        chosen = [side.array(np.argsort(-one, axis=-1)[..., :K].copy()) for one in logits]
        pairs = zip(arrays, chosen, strict=True)
        yield side, arrays, [side.Routing(one[..., :K], experts, one) for one, experts in pairs]


@pytest.mark.parametrize("lengths", [None, (9, 4)])
def test_the_loss_of_the_load_is_that_of_transformers(sides, lengths):
    mask = None if lengths is None else np.arange(9) < np.array(lengths)[:, None]
    for side, logits, layers in routings(sides):
        found = side.numpy(
            side.load_balancing_loss(layers, None if mask is None else side.array(mask))
        )
        flat = tuple(torch.tensor(side.numpy(one)).reshape(-1, EXPERTS) for one in logits)
        theirs = load_balancing_loss_func(
            flat, EXPERTS, K, None if mask is None else torch.from_numpy(mask)
        )
        assert abs(found - theirs.item()) < 1e-6 * theirs.item()  # theirs sums in float32


def test_the_loss_of_the_load_and_its_gradient_are_equal_on_both_sides(sides):
    mask = np.arange(9) < np.array([9, 4])[:, None]
    (ours, our_logits, our_layers), (_, their_logits, their_layers) = routings(sides)

    def loss(logits):
        layers = [layer._replace(logits=one) for layer, one in zip(our_layers, logits, strict=True)]
        return load_balancing_loss(layers, jnp.asarray(mask))

    value, gradients = jax.value_and_grad(loss)(our_logits)
    leaves = [one.requires_grad_() for one in their_logits]
    layers = [layer._replace(logits=one) for layer, one in zip(their_layers, leaves, strict=True)]
    reference = torch_ref.load_balancing_loss(layers, torch.from_numpy(mask))
    reference.backward()
    assert abs(float(value) - reference.item()) <= tolerance.FORWARD * reference.item()
    pairs = zip(gradients, leaves, strict=True)
    errors = [
        float(np.abs(ours.numpy(a) - b.grad.numpy()).max() / np.abs(b.grad.numpy()).max())
        for a, b in pairs
    ]
    assert max(errors) <= tolerance.GRADIENT, errors


def test_an_even_load_has_the_least_loss():
    even = torch_ref.Routing(
        torch.ones(EXPERTS, 1), torch.arange(EXPERTS)[:, None], torch.zeros(EXPERTS, EXPERTS)
    )
    assert torch_ref.load_balancing_loss([even]).item() == pytest.approx(1.0)

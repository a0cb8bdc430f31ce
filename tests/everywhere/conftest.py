"""How a target is compared with its original: outputs, and gradients under a random cotangent."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import everywhere
from flax_attn.everywhere import dropout
from flax_attn.parity import tolerance


def with_gradients(function: Callable, *arrays: jax.Array) -> tuple[dict, dict]:
    """Return the outputs of a function and its gradients, by the index of the argument."""
    outputs, pullback = jax.vjp(function, *arrays)
    leaves, structure = jax.tree.flatten(outputs)
    draw = np.random.default_rng(3).normal
    cotangents = [jnp.asarray(draw(size=leaf.shape), leaf.dtype) for leaf in leaves]
    gradients = pullback(structure.unflatten(cotangents))
    return named(leaves), named(gradients)


def named(arrays) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(array) for i, array in enumerate(jax.tree.leaves(arrays))}


def assert_equal(ours, reference, forward=tolerance.FORWARD, gradient=tolerance.GRADIENT):
    """Compare outputs and gradients of two functions."""
    outputs = tolerance.relative(ours[0], reference[0])
    assert max(outputs.values()) <= forward, outputs
    gradients = tolerance.gradient_errors(ours[1], reference[1])
    assert max(gradients.values()) <= gradient, gradients


@pytest.fixture(autouse=True)
def promotion(usual_promotion):
    """Promote dtypes and ranks as JAX does by default, on which the originals rely."""


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """Leave out what is said once in a program; the set of what was said."""
    found = {dropout._OTHER_WEIGHTS}
    monkeypatch.setattr(dropout, "_SAID", found)
    return found


@pytest.fixture
def same():
    """Compare a function under `everywhere` with a reference, and return the report."""

    def compare(function, *arrays, reference=None, **rules):
        expected = with_gradients(reference or function, *arrays)
        with everywhere(strict=True) as report:
            found = with_gradients(function, *arrays)
        assert report.taken
        assert not report.left_alone
        assert_equal(found, expected, **rules)
        return report

    return compare

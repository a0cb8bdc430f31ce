"""Tables that several layers take, and values that are taken for one another, are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flax_attn.parity.trace import constants
from flax_attn.parity.trace.program import Node

pytestmark = pytest.mark.usefixtures("as_a_user_has_jax")
T, D = 6, 4


def scanned(a, b, c):
    """Linear attention, token by token."""

    def step(state, now):
        a, b, c = now
        state = state + b[..., :, None] * a[..., None, :]
        return state, jnp.einsum("nk,nkv->nv", c, state)

    first = jnp.zeros((a.shape[0], b.shape[-1], a.shape[-1]), a.dtype)
    moved = [jnp.moveaxis(x, 1, 0) for x in (a, b, c)]
    return jnp.moveaxis(jax.lax.scan(step, first, moved)[1], 0, 1)


def all_at_once(a, b, c):
    scores = (c @ b.mT).tril()
    return scores @ a


def projected(x, w):
    return (x @ w).chunk(3, -1)


def test_two_values_that_are_exchanged_before_a_scan(differ):
    def flax(x, w):
        for _ in range(2):
            a, c, b = jnp.split(x @ w, 3, -1)  # planted
            x = x + scanned(jnp.tanh(a), jnp.sin(b), jnp.cos(c) * 0.1)
        return x

    def theirs(x, w):
        for _ in range(2):
            a, b, c = projected(x, w)
            x = x + all_at_once(a.tanh(), b.sin(), c.cos() * 0.1)
        return x

    def right(x, w):
        for _ in range(2):
            a, b, c = jnp.split(x @ w, 3, -1)
            x = x + scanned(jnp.tanh(a), jnp.sin(b), jnp.cos(c) * 0.1)
        return x

    shapes = (2, T, D), (D, 3 * D)
    assert not differ(right, theirs, *shapes).hypotheses
    found = differ(flax, theirs, *shapes)
    assert found.repaired, str(found)
    (cause,) = found.causes
    assert "and the other way round" in cause
    assert "# planted" in {place.source[-9:] for place in found.hypotheses[0].flax.places}


def test_the_order_of_what_is_repeated_before_a_scan(differ):
    groups = np.array([0, 1, 0, 1])  # planted

    def flax(a, b):
        pairs = b.reshape(*b.shape[:2], 2, 2)
        parts = jnp.sin(pairs)[:, :, groups].reshape(a.shape)
        keys = jnp.repeat(jnp.cos(pairs), 2, axis=2).reshape(a.shape)
        return scanned(a * parts, parts, keys)

    def theirs(a, b):
        pairs = b.reshape(*b.shape[:2], 2, 2)
        parts = pairs.sin().repeat_interleave(2, 2).reshape(a.shape)
        keys = pairs.cos().repeat_interleave(2, 2).reshape(a.shape)
        return all_at_once(a * parts, parts, keys)

    found = differ(flax, theirs, (2, T, 2 * D), (2, T, D))
    assert found.repaired, str(found)
    (one,) = found.hypotheses
    assert one.parameter in ("layout", "operation", "indices"), str(found)
    assert "groups" in one.flax.places[0].source
    (made,) = one.flax.definitions
    assert made.source.endswith("# planted")


@pytest.mark.parametrize("layers", [1, 3])
def test_an_index_table_that_is_taken_as_it_is_and_transposed(layers, differ):
    apart = np.arange(T)[:, None] - np.arange(T)
    wrong = np.clip(apart + 2, 0, 4)  # planted
    right = torch.tensor(np.clip(apart + 3, 0, 5))

    def flax(x, table):
        for _ in range(layers):
            rows = x @ table.T
            one = jnp.take_along_axis(rows, wrong[None], axis=-1)
            other = jnp.take_along_axis(jnp.sin(rows), wrong.T[None], axis=-1)
            x = x + jnp.tanh(one + other.swapaxes(-1, -2)) @ x
        return x

    def theirs(x, table):
        for _ in range(layers):
            rows = x @ table.T
            index = right.expand(len(x), T, T)
            one = rows.gather(-1, index)
            other = rows.sin().gather(-1, index.mT)
            x = x + (one + other.mT).tanh() @ x
        return x

    found = differ(flax, theirs, (2, T, D), (6, D))
    assert found.repaired, str(found)
    assert 1 <= len(found.hypotheses) <= 2, str(found)
    for one in found.hypotheses:
        assert "6x6" in one.flax.value
        assert "wrong" in one.flax.places[0].source


def test_a_mask_that_says_what_is_hidden_and_lies_transposed(differ):
    edges = np.roll(np.eye(T, dtype=bool), 1, axis=1) | np.eye(T, dtype=bool)
    hidden = torch.tensor(~edges)

    def flax(x):
        # Another formulation, so that a row of weights is no value of both sides.
        for _ in range(2):
            scores = jnp.where(edges.T, jnp.exp(x @ x.swapaxes(1, 2)), 0)
            x = x + (scores @ x) / scores.sum(-1, keepdims=True)
        return x

    def theirs(x):
        for _ in range(2):
            scores = (x @ x.mT).masked_fill(hidden, float("-inf"))
            x = x + scores.softmax(-1) @ x
        return x

    found = differ(flax, theirs, (2, T, D))
    assert found.repaired, str(found)
    (one,) = found.hypotheses
    assert "edges.T" in one.flax.places[0].source


def test_a_factor_at_another_place_is_one_difference(differ):
    def flax(x, w):
        for _ in range(2):
            q, k = jnp.tanh(x @ w), jnp.sin(x @ w)
            x = x + jax.nn.softmax(q @ k.swapaxes(1, 2) * 0.25) @ x  # planted
        return x

    def theirs(x, w):
        for _ in range(2):
            q, k = (x @ w).tanh() * 0.5, (x @ w).sin()
            x = x + (q @ k.mT).softmax(-1) @ x
        return x

    found = differ(flax, theirs, (2, T, D), (D, D))
    assert found.repaired, str(found)
    assert found.causes == ["the whole module: flax multiplies by 0.25, torch by 0.5"]
    (one,) = found.hypotheses
    assert one.flax.places[0].source.endswith("# planted")
    assert "* 0.5" in one.torch.places[0].source


def test_two_factors_of_other_values_are_two_differences(differ):
    def flax(x, w):
        q = jnp.tanh(x @ w)
        return jax.nn.softmax(q @ x.swapaxes(1, 2)) @ (jnp.sin(x) * 0.25)

    def theirs(x, w):
        q = (x @ w).tanh() * 0.5
        return (q @ x.mT).softmax(-1) @ x.sin()

    found = differ(flax, theirs, (2, T, D), (D, D))
    assert found.repaired, str(found)
    assert len(found.hypotheses) == 2, str(found)


class Looped:
    """A loop over tokens in PyTorch whose steps depend on one another in the end alone."""

    @staticmethod
    def torch(x, w):
        state = torch.zeros_like(x[:, 0])
        states = []
        for i in range(x.shape[1]):
            hidden = torch.tanh(x[:, i] @ w)
            hidden = hidden + hidden.softmax(-1) * 0.5
            hidden = F.layer_norm(hidden, hidden.shape[-1:])
            state = torch.sigmoid(state @ w) * state + hidden
            states.append(state)
        return torch.stack(states, 1)

    @staticmethod
    def flax(x, w, factor=0.5, axis=-1):
        hidden = jnp.tanh(x @ w)
        hidden = hidden + jax.nn.softmax(hidden, axis) * factor
        hidden = jax.nn.standardize(hidden, epsilon=1e-5)

        def step(state, now):
            state = jax.nn.sigmoid(state @ w) * state + now
            return state, state

        first = jnp.zeros_like(x[:, 0])
        return jax.lax.scan(step, first, hidden.swapaxes(0, 1))[1].swapaxes(0, 1)


def test_a_loop_beside_a_batch(differ):
    shapes = (2, T, D), (D, D)
    assert not differ(Looped.flax, Looped.torch, *shapes).hypotheses
    found = differ(lambda x, w: Looped.flax(x, w, factor=0.25), Looped.torch, *shapes)
    assert found.repaired, str(found)
    assert found.causes == ["the whole module: flax multiplies by 0.25, torch by 0.5"]
    (one,) = found.hypotheses
    assert "* factor" in one.flax.places[0].source
    assert "* 0.5" in one.torch.places[0].source


def test_an_axis_in_a_loop_is_that_of_the_batch(differ):
    shapes = (2, T, D), (D, D)
    found = differ(lambda x, w: Looped.flax(x, w, axis=0), Looped.torch, *shapes)
    assert found.repaired, str(found)
    (one,) = found.hypotheses
    assert one.flax.value == "2", str(found)
    assert one.torch.value == str(D)


def test_of_two_masks_either_may_say_what_is_hidden():
    visible = np.tril(np.ones((4, 4), bool))
    hidden = ~visible
    # One more key is seen in the port.
    wrong = visible.copy()
    wrong[0, 1] = True
    table = Node("constant", (), hidden[None])
    near = constants._nearest(wrong, [[table]])
    assert near is not None
    node, value = near
    assert node is table
    np.testing.assert_array_equal(value, visible, "the mask of PyTorch, as the port means it")
    assert constants._nearest(wrong, [[table]], exact=True) is None
    assert constants._nearest(visible, [[table]], exact=True) is not None

"""One projection of queries, keys and values, taken apart in another order, is a cause."""

import jax
import jax.numpy as jnp
import pytest
import torch
from einops import rearrange

from flax_attn.parity.trace.localise import localise
from flax_attn.parity.trace.projected_forms import SPLITS, projected_scores

HEADS, WIDTH = 2, 4


def attend(framework_softmax, einsum, q, k, v):
    weights = framework_softmax(einsum("btnh,bsnh->bnts", q, k) / WIDTH**0.5)
    return einsum("bnts,bsnh->btnh", weights, v)


def torch_side(x):
    q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
    return attend(lambda scores: scores.softmax(-1), torch.einsum, q, k, v)


def flax_side(pattern, order):
    def call(x):
        parts = rearrange(x, pattern, c=3, n=HEADS)
        return attend(jax.nn.softmax, jnp.einsum, *(parts[i] for i in order))

    return call


def causes(paired, pattern, order=(0, 1, 2)):
    return localise(paired(flax_side(pattern, order), torch_side, (3, 5, 3 * HEADS * WIDTH))).causes


@pytest.mark.parametrize("split", [split for split in SPLITS if split != "(3, heads, width)"])
def test_a_projection_that_is_split_otherwise_is_a_cause(paired, split):
    theirs = "query . key / sqrt(h) of input split as (3, heads, width)"
    assert causes(paired, SPLITS[split]) == (
        f"./masked: flax has query . key / sqrt(h) of input split as {split}, torch has {theirs}",
    )


def test_parts_that_are_taken_in_another_order_are_a_cause(paired):
    (cause,) = causes(paired, SPLITS["(3, heads, width)"], order=(0, 2, 1))
    assert "flax has query . key / sqrt(h) of input split as (3, heads, width) in the order query, value, key" in cause


def test_the_same_split_is_none(paired):
    assert causes(paired, SPLITS["(3, heads, width)"]) == ()


def test_scores_between_two_sequences_have_no_common_projection():
    value, x = torch.zeros(1, HEADS, 3, 4).numpy(), torch.zeros(1, 3, 3 * HEADS * WIDTH).numpy()
    assert not list(projected_scores(value, value, {"qkv": x}))

"""One projection of queries, keys and values, taken apart in another order, is a cause."""

import jax
import jax.numpy as jnp
import pytest
import torch
from einops import rearrange
from flax import nnx

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
    assert (
        "flax has query . key / sqrt(h) of input split as (3, heads, width) in the order query,"
        " value, key" in cause
    )


def test_the_same_split_is_none(paired):
    assert causes(paired, SPLITS["(3, heads, width)"]) == ()


def test_scores_between_two_sequences_have_no_common_projection():
    value, x = torch.zeros(1, HEADS, 3, 4).numpy(), torch.zeros(1, 3, 3 * HEADS * WIDTH).numpy()
    assert not list(projected_scores(value, value, {"qkv": x}))


# One projection of keys and values, two query heads to each of their heads.

PAIR = "key of input 2 split as {}"
FAULTS = {
    "": (),
    "heads": (PAIR.format("(heads, 2, width)"), "value of input 2 split as (heads, 2, width)"),
    "order": (
        PAIR.format("(2, heads, width) in the order value, key"),
        "value of input 2 split as (2, heads, width) in the order value, key",
    ),
    "tiled": (
        PAIR.format("(2, heads, width), its heads tiled, not repeated,"),
        "value of input 2 split as (2, heads, width) with its heads tiled, not repeated",
    ),
}


class TorchPair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4 * WIDTH, 3)

    def forward(self, q, kv):
        k, v = (x.repeat_interleave(2, 2) for x in kv.unflatten(-1, (2, HEADS, WIDTH)).unbind(2))
        context = attend(
            lambda scores: scores.softmax(-1), torch.einsum, q.unflatten(-1, (4, WIDTH)), k, v
        )
        return self.out(context.flatten(2))


class FlaxPair(nnx.Module):
    def __init__(self, fault):
        self.out, self.fault = nnx.Linear(4 * WIDTH, 3, rngs=nnx.Rngs(0)), fault

    def __call__(self, q, kv):
        pattern = (
            "b s (k c h) -> c b s k h" if self.fault == "heads" else "b s (c k h) -> c b s k h"
        )
        k, v = rearrange(kv, pattern, c=2, k=HEADS)[:: -1 if self.fault == "order" else 1]
        k, v = (
            jnp.tile(x, (1, 1, 2, 1)) if self.fault == "tiled" else jnp.repeat(x, 2, axis=2)
            for x in (k, v)
        )
        context = attend(jax.nn.softmax, jnp.einsum, q.reshape(*q.shape[:2], 4, WIDTH), k, v)
        return self.out(context.reshape(*q.shape))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_projection_of_keys_and_values_that_is_split_otherwise_is_a_cause(paired, fault):
    shapes = (2, 5, 4 * WIDTH), (2, 6, 2 * HEADS * WIDTH)
    found = localise(paired(FlaxPair(fault), TorchPair(), *shapes, layout="torch")).causes
    key, value = (
        "key of input 2 split as (2, heads, width)",
        "value of input 2 split as (2, heads, width)",
    )
    wanted = [
        (f"input . {ours} / sqrt(h)", f"input . {key} / sqrt(h)") for ours in FAULTS[fault][:1]
    ]
    wanted += [
        (f"weights . {ours}, heads side by side", f"weights . {value}, heads side by side")
        for ours in FAULTS[fault][1:]
    ]
    assert [cause.partition(": ")[2] for cause in found] == [
        f"flax has {ours}, torch has {theirs}" for ours, theirs in wanted
    ]


def test_queries_and_keys_that_are_both_split_otherwise_are_a_cause(paired):
    def theirs(q, k):
        return attend(
            lambda scores: scores.softmax(-1),
            torch.einsum,
            *(x.unflatten(-1, (2, WIDTH)) for x in (q, k, k)),
        )

    def ours(q, k):
        heads = (rearrange(x, "b t (h n) -> b t n h", h=WIDTH) for x in (q, k))
        return attend(jax.nn.softmax, jnp.einsum, *heads, k.reshape(*k.shape[:2], 2, WIDTH))

    found = localise(paired(ours, theirs, *[(3, 5, 2 * WIDTH)] * 2)).causes
    right = "input . input 2 / sqrt(h)"
    assert found == (f"./masked: flax has {right}, both with heads interleaved, torch has {right}",)

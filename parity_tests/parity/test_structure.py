"""Heads that are counted otherwise, and axes that could be read in two ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional as F

from flax_attn.convert import Layout, Rule
from flax_attn.parity import compare
from flax_attn.parity.trace.activations import record
from flax_attn.parity.trace.localise import localise

WIDTH = 12


class FlaxHeads(nnx.Module):
    """Attention whose scores may have their heads before the examples."""

    def __init__(self, heads, heads_first=False, causal=True):
        self.q, self.k, self.v, self.out = (
            nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(4)
        )
        self.heads, self.heads_first, self.causal = heads, heads_first, causal

    def __call__(self, x):
        q, k, v = (
            layer(x).reshape(*x.shape[:2], self.heads, -1) for layer in (self.q, self.k, self.v)
        )
        axes = "nbts" if self.heads_first else "bnts"
        scores = jnp.einsum(f"btnh,bsnh->{axes}", q, k) / q.shape[-1] ** 0.5
        seen = np.tril(np.ones((1, 1, *scores.shape[2:]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf) if self.causal else scores)
        return self.out(jnp.einsum(f"{axes},bsnh->btnh", weights, v).reshape(x.shape))


class TorchHeads(torch.nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = heads

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


def judged(ours, theirs, batch, **options):
    return compare(ours, theirs, [(batch, 5, WIDTH)], checks=["forward"], **options)


@pytest.mark.parametrize("batch", [2, 4, 5])
def test_another_number_of_heads_is_a_cause(batch):
    report = judged(FlaxHeads(2), TorchHeads(4), batch)
    assert report.causes == ["the whole module: flax has 2 heads, torch has 4"]
    assert judged(FlaxHeads(4), TorchHeads(4), batch).passed


def test_another_number_of_heads_than_a_folded_attention_is_a_cause():
    theirs = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    names = ("q", "k", "v")
    rules = (
        Rule(tuple(f"{name}.kernel" for name in names), "in_proj_weight", "i o -> o i"),
        Rule(tuple(f"{name}.bias" for name in names), "in_proj_bias"),
        Rule(("out.kernel",), "out_proj.weight", "i o -> o i"),
        Rule(("out.bias",), "out_proj.bias"),
    )

    def call(module, x):
        return module(x, x, x, need_weights=True)[0]

    report = judged(
        FlaxHeads(2, causal=False), theirs.eval(), 3, layout=Layout(rules), torch_call=call
    )
    assert report.causes[0] == "the whole module: flax has 2 heads, torch has 4"


def test_query_and_key_exchanged_by_the_rules_is_a_cause():
    pairs = {"q": "k", "k": "q", "v": "v", "out": "out"}
    rules = [Rule((f"{x}.kernel",), f"{y}.weight", "i o -> o i") for x, y in pairs.items()]
    rules += [Rule((f"{x}.bias",), f"{y}.bias") for x, y in pairs.items()]
    report = judged(FlaxHeads(3), TorchHeads(3), 2, layout=Layout(tuple(rules)))
    assert report.causes == [
        "./masked: flax has key . query, the two swapped, / sqrt(h), torch has query . key /"
        " sqrt(h)"
    ]


@pytest.mark.parametrize("heads_first", [False, True])
def test_scores_of_as_many_examples_as_heads_are_read_in_both_ways(heads_first):
    report = judged(FlaxHeads(2, heads_first, causal=False), TorchHeads(2), 2)
    assert report.causes == [
        "./masked: flax has no mask, torch has a causal mask, query i sees keys up to i"
    ]
    assert record(report.pair).ambiguous == ("./masked", "./weights")
    assert [node.shape[0] for node in report.divergence.nodes] == [3] * len(report.divergence.nodes)


def test_a_module_of_one_batch_is_located_in_it():
    class OneBatch(TorchHeads):
        def forward(self, x):
            assert len(x) == 2
            return super().forward(x)

    report = judged(FlaxHeads(2, causal=False), OneBatch(2), 2)
    assert report.causes == [
        "./masked: flax has no mask, torch has a causal mask, query i sees keys up to i"
    ]
    assert {node.shape[0] for node in report.divergence.nodes} == {2}


def test_of_two_attentions_in_one_call_each_has_its_own_query(paired):
    def twice(attend):
        return lambda q, k, v: attend(attend(q, k, v), k, v)

    def ours(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(
            1, 2
        )

    found = localise(paired(twice(ours), twice(theirs), *[(2, 5, 3, 4)] * 3))
    assert found.causes == tuple(
        f"./{step}: flax has query . key without a scale, torch has query . key / sqrt(h)"
        for step in ("masked", "masked#2")
    )

"""Modules of other libraries are observed: attention of PyTorch and of JAX, Linen, Equinox."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import flax_attn
from flax_attn.parity.trace.localise import localise


def names(nodes):
    return [node.name for node in nodes]


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_attention_of_pytorch_itself_is_observed(need_weights, paired):
    ours = flax_attn.MultiHeadAttention(8, 8, None, 0.0, 4, True, causal=False, rngs=nnx.Rngs(0))
    theirs = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    pair = paired(
        ours,
        theirs,
        (3, 5, 8),
        layout="torch_mha",
        torch_call=lambda m, x: m(x, x, x, need_weights=need_weights)[0],
    )
    steps = (
        ["masked", "weights"]
        if need_weights
        else ["query", "key", "value", "masked", "weights", "context"]
    )
    divergence = localise(pair)
    assert names(divergence.nodes) == [*(f"./{step}" for step in steps), "."]
    assert divergence.first is None
    assert divergence.locally_wrong == ()


@pytest.mark.parametrize(("scale", "wrong"), [(0.5, []), (0.25, ["./masked"])])
def test_the_softmax_of_jax_itself_is_observed(scale, wrong, paired):
    visible = np.tril(np.ones((5, 5), bool))

    def ours(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
        masked = jnp.where(
            jnp.asarray(visible)[None, None], scores, -1e30
        )  # hidden by one number or by another
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(masked), v)

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
            1, 2
        )

    divergence = localise(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert names(divergence.nodes) == ["./masked", "./weights", "."]
    assert names(divergence.locally_wrong) == wrong


def test_hidden_is_hidden_whatever_number_hides_it(paired):
    def ours(q, k, v):
        return flax_attn.dot_product_attention(q, k, v, mask=flax_attn.Mask.causal())

    def theirs(q, k, v):
        hidden = torch.ones(5, 5, dtype=bool).triu(1)
        scores = torch.einsum("btnh,bsnh->bnts", q, k) / 2
        weights = scores.masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1)
        return torch.einsum("bnts,bsnh->btnh", weights, v)

    divergence = localise(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert names(divergence.nodes) == ["./masked", "./weights", "."]
    assert divergence.first is None


def test_the_attention_of_jax_itself_is_observed(paired):
    def ours(q, k, v):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, k, v)

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    divergence = localise(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert names(divergence.nodes) == ["./masked", "./weights", "."]
    assert names(divergence.locally_wrong) == ["./masked"]  # what follows is given rounded scores
    assert divergence.causes == (
        "the whole module: flax has the softmax in float32, torch in float64",
    )


class LinenPair(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.sin(linen.Dense(6, param_dtype=jnp.float64)(x))
        return linen.Dense(5, param_dtype=jnp.float64)(x)


def test_a_linen_module_is_observed(paired):
    x = jnp.ones((3, 4))
    module = LinenPair()
    bound = module.bind(module.init(jax.random.key(0), x))
    theirs = torch.nn.ModuleDict(
        {"Dense_0": torch.nn.Linear(4, 6), "Dense_1": torch.nn.Linear(6, 5)}
    )

    def call(m, x):
        return m["Dense_1"](torch.cos(m["Dense_0"](x)))

    divergence = localise(paired(bound, theirs, (3, 4), layout="torch", torch_call=call))
    assert names(divergence.nodes) == ["Dense_0", "Dense_1", "."]
    assert names(divergence.locally_wrong) == ["."]


class EquinoxPair(equinox.Module):
    first: equinox.nn.Linear
    second: equinox.nn.Linear

    def __call__(self, x):
        return self.second(jnp.sin(self.first(x)))


@pytest.mark.parametrize("mapped", [False, True])
def test_an_equinox_module_is_observed_also_where_it_is_mapped(mapped, paired):
    keys = jax.random.split(jax.random.key(0))
    ours = EquinoxPair(equinox.nn.Linear(4, 6, key=keys[0]), equinox.nn.Linear(6, 5, key=keys[1]))
    theirs = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 6), "second": torch.nn.Linear(6, 5)})
    flax_call = (lambda m, x: jax.vmap(m)(x)) if mapped else None

    def call(m, x):
        return m["second"](torch.cos(m["first"](x)))

    shape = (7, 4) if mapped else (4,)
    before = dict(vars(equinox.nn.Linear))
    pair = paired(ours, theirs, shape, layout="torch_ref", flax_call=flax_call, torch_call=call)
    divergence = localise(pair)
    assert names(divergence.nodes) == ["first", "second", "."]
    assert names(divergence.locally_wrong) == ["."]
    assert dict(vars(equinox.nn.Linear)) == before

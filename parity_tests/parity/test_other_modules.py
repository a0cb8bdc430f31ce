"""Modules of other libraries are traced: attention of PyTorch and of JAX, Linen, Equinox."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch.nn import functional as F

import flax_attn
from flax_attn.parity.trace.difference import difference

VISIBLE = np.tril(np.ones((5, 5), bool))


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_attention_of_pytorch_itself_is_traced(need_weights, paired):
    ours = flax_attn.MultiHeadAttention(8, 8, None, 0.0, 4, True, causal=False, rngs=nnx.Rngs(0))
    theirs = torch.nn.MultiheadAttention(8, 4, batch_first=True)

    def call(m, x):
        return m(x, x, x, need_weights=need_weights)[0]

    pair = paired(ours, theirs, (3, 5, 8), layout="torch_mha", torch_call=call)
    found = difference(pair)
    assert found.hypotheses == found.remaining == ()
    assert not any(step.differs for step in found.steps)
    (maps,) = found.attention.values()
    assert [weights.shape for weights in maps] == [(3, 4, 5, 5)] * 2


def scaled(scale):
    def ours(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
        # Hidden by one number here, and by another in PyTorch.
        masked = jnp.where(jnp.asarray(VISIBLE)[None, None], scores, -1e30)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(masked), v)

    return ours


def unmasked(q, k, v):
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("ours", "causal", "said"),
    [
        (scaled(0.5), True, []),
        (scaled(0.25), True, ["multiplies by 0.25, torch by 0.5"]),
        (unmasked, False, ["float32("]),
    ],
)
def test_fused_attention_is_traced_step_by_step(ours, causal, said, paired):
    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    found = difference(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert found.repaired == bool(said)
    assert len(found.causes) == len(said)
    for cause, words in zip(found.causes, said, strict=True):
        assert words in cause


def test_hidden_is_hidden_whatever_number_hides_it(paired):
    def ours(q, k, v):
        return flax_attn.dot_product_attention(q, k, v, mask=flax_attn.Mask.causal())

    def theirs(q, k, v):
        scores = torch.einsum("btnh,bsnh->bnts", q, k) / 2
        hidden = torch.tensor(~VISIBLE)
        weights = scores.masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1)
        return torch.einsum("bnts,bsnh->btnh", weights, v)

    found = difference(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert found.hypotheses == found.remaining == ()


class LinenPair(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.sin(linen.Dense(6, param_dtype=jnp.float64)(x))
        return linen.Dense(5, param_dtype=jnp.float64)(x)


class EquinoxPair(equinox.Module):
    first: equinox.nn.Linear
    second: equinox.nn.Linear

    def __call__(self, x):
        return self.second(jnp.sin(self.first(x)))


def linen_pair():
    module = LinenPair()
    return module.bind(module.init(jax.random.key(0), jnp.ones((3, 4))))


def equinox_pair():
    first, second = jax.random.split(jax.random.key(0))
    layers = equinox.nn.Linear(4, 6, key=first), equinox.nn.Linear(6, 5, key=second)
    return EquinoxPair(*layers)


@pytest.mark.parametrize(
    ("make", "names", "shape", "layout", "flax_call"),
    [
        (linen_pair, ("Dense_0", "Dense_1"), (3, 4), "torch", None),
        (equinox_pair, ("first", "second"), (4,), "torch_ref", None),
        (equinox_pair, ("first", "second"), (7, 4), "torch_ref", lambda m, x: jax.vmap(m)(x)),
    ],
)
def test_modules_of_other_libraries_are_traced(make, names, shape, layout, flax_call, paired):
    first, second = names
    layers = {first: torch.nn.Linear(4, 6), second: torch.nn.Linear(6, 5)}

    def call(m, x):
        return m[second](torch.cos(m[first](x)))

    before = dict(vars(equinox.nn.Linear))
    theirs = torch.nn.ModuleDict(layers)
    pair = paired(make(), theirs, shape, layout=layout, flax_call=flax_call, torch_call=call)
    found = difference(pair)
    (one,) = found.hypotheses
    assert found.repaired
    assert (one.flax.value, one.torch.value) == (f"sin({first})", f"cos({first})")
    assert "jnp.sin(" in one.flax.places[0].source
    assert one.torch.places[0].source == "return m[second](torch.cos(m[first](x)))"
    assert {step.name for step in found.steps} >= {f"{first}/dot"}
    assert dict(vars(equinox.nn.Linear)) == before

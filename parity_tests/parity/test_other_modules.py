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
    # With and without weights PyTorch runs two programs, of which one is fused.
    def call(m, x):
        return m(x, x, x, need_weights=need_weights)[0]

    options = {"causal": False, "rngs": nnx.Rngs(0)}
    ours = flax_attn.MultiHeadAttention(8, 8, None, 0.0, 4, True, **options)
    theirs = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    found = difference(paired(ours, theirs, (3, 5, 8), layout="torch_mha", torch_call=call))
    assert found.hypotheses == found.remaining == ()
    assert not any(step.differs for step in found.steps)
    ((first, second),) = found.attention.values()
    assert first.shape == second.shape == (3, 4, 5, 5)


def scaled(scale):
    def ours(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
        # Hidden by one number here, and by another in PyTorch.
        masked = jnp.where(jnp.asarray(VISIBLE)[None, None], scores, -1e30)
        weights = jax.nn.softmax(masked)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return ours


def unmasked(q, k, v):
    # JAX takes the softmax in float32 itself, and mixes the dtypes.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v)


def fused(causal):
    def theirs(*inputs):
        # PyTorch has the heads before the tokens.
        q, k, v = (x.transpose(1, 2) for x in inputs)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return output.transpose(1, 2)

    return theirs


QUERY_KEY_VALUE = [(2, 5, 3, 4)] * 3


@pytest.mark.parametrize(
    ("ours", "causal", "said"),
    [
        (scaled(0.5), True, []),
        (scaled(0.25), True, ["multiplies by 0.25, torch by 0.5"]),
        (unmasked, False, ["float32("]),
    ],
)
def test_fused_attention_is_traced_step_by_step(ours, causal, said, paired):
    found = difference(paired(ours, fused(causal), *QUERY_KEY_VALUE))
    assert found.repaired == bool(said)
    assert len(found.causes) == len(said)
    for cause, words in zip(found.causes, said, strict=True):
        assert words in cause


def test_hidden_is_hidden_whatever_number_hides_it(paired):
    def ours(q, k, v):
        return flax_attn.dot_product_attention(q, k, v, mask=flax_attn.Mask.causal())

    # The least number in place of minus infinity.
    def theirs(q, k, v):
        scores = torch.einsum("btnh,bsnh->bnts", q, k) / 2
        least = torch.finfo(q.dtype).min
        masked = scores.masked_fill(torch.tensor(~VISIBLE), least)
        return torch.einsum("bnts,bsnh->btnh", masked.softmax(-1), v)

    found = difference(paired(ours, theirs, *QUERY_KEY_VALUE))
    assert found.hypotheses == found.remaining == ()


class LinenPair(linen.Module):
    @linen.compact
    def __call__(self, x):
        first = linen.Dense(6, param_dtype=jnp.float64)
        second = linen.Dense(5, param_dtype=jnp.float64)
        return second(jnp.sin(first(x)))


class EquinoxPair(equinox.Module):
    first: equinox.nn.Linear
    second: equinox.nn.Linear

    def __call__(self, x):
        return self.second(jnp.sin(self.first(x)))


def linen_pair():
    module = LinenPair()
    variables = module.init(jax.random.key(0), jnp.ones((3, 4)))
    return module.bind(variables)


def equinox_pair():
    keys = jax.random.split(jax.random.key(0))
    first = equinox.nn.Linear(4, 6, key=keys[0])
    second = equinox.nn.Linear(6, 5, key=keys[1])
    return EquinoxPair(first, second)


class TorchPair(torch.nn.ModuleDict):
    def __init__(self, first, second):
        super().__init__({first: torch.nn.Linear(4, 6), second: torch.nn.Linear(6, 5)})

    def forward(self, x):
        # A cosine where the others have a sine.
        first, second = self.values()
        return second(torch.cos(first(x)))


def mapped(module, x):
    return jax.vmap(module)(x)


# How to make a module, the names of its layers, the shape of the input, the layout, the call.
OTHERS = [
    (linen_pair, ("Dense_0", "Dense_1"), (3, 4), "torch", None),
    (equinox_pair, ("first", "second"), (4,), "torch_ref", None),
    (equinox_pair, ("first", "second"), (7, 4), "torch_ref", mapped),
]


@pytest.mark.parametrize(("make", "names", "shape", "layout", "flax_call"), OTHERS)
def test_modules_of_other_libraries_are_traced(make, names, shape, layout, flax_call, paired):
    # Layers of Equinox are patched while they are traced.
    before = dict(vars(equinox.nn.Linear))
    pair = paired(make(), TorchPair(*names), shape, layout=layout, flax_call=flax_call)
    found = difference(pair)
    assert dict(vars(equinox.nn.Linear)) == before
    assert found.repaired
    assert f"{names[0]}/dot" in {step.name for step in found.steps}
    names_its_cosine(found, names[0])


def names_its_cosine(found, first):
    (one,) = found.hypotheses
    assert (one.flax.value, one.torch.value) == (f"sin({first})", f"cos({first})")
    assert "jnp.sin(" in one.flax.places[0].source
    assert one.torch.places[0].source == "return second(torch.cos(first(x)))"

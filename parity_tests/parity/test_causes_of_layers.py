"""Causes in layers of other libraries.

Gated activations, group norms, rows that see no key, grouped heads.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.convert import Rule
from flax_attn.convert.rules import Layout
from flax_attn.parity.trace.causes import causes_of
from flax_attn.parity.trace.localise import localise
from flax_attn.parity.trace.substitute import Evidence, Target


class FlaxGated(nnx.Module):
    def __init__(self, gate_first):
        self.proj = nnx.Linear(6, 10, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        self.gate_first = gate_first

    def __call__(self, x):
        first, second = jnp.split(self.proj(x), 2, axis=-1)
        return nnx.gelu(first) * second if self.gate_first else first * nnx.gelu(second)


class TorchGated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(6, 10)

    def forward(self, x):
        first, second = self.proj(x).chunk(2, dim=-1)
        return first * torch.nn.functional.gelu(second)


@pytest.mark.parametrize(
    ("gate_first", "gate", "other"), [(False, "second", "first"), (True, "first", "second")]
)
def test_what_a_gate_computes_is_a_cause(gate_first, gate, other, paired):
    with jax.numpy_dtype_promotion("standard"):
        found = localise(
            paired(FlaxGated(gate_first), TorchGated(), (3, 4, 6), layout="torch")
        ).causes
    assert found == (
        (
            f"the whole module: flax has tanh GELU of the {gate} half of proj times the {other}"
            " half of proj, torch has exact GELU of the second half of proj times the first half"
            " of proj"
        ),
    )


def channels_first(layer, x):
    return layer(x.movedim(-1, 1)).movedim(1, -1)


@pytest.mark.parametrize(
    ("groups", "epsilon", "causes"),
    [
        (3, 1e-5, ()),
        (3, 1e-3, ("the whole module: flax has eps=0.001, torch 1e-05",)),
        (
            2,
            1e-5,
            (
                (
                    "the whole module: flax has group norm of 2 groups with eps=1e-05, torch has"
                    " group norm of 3 "
                ),
            ),
        ),
    ],
)
def test_the_epsilon_and_the_groups_of_a_group_norm_are_a_cause(groups, epsilon, causes, paired):
    ours = nnx.GroupNorm(12, groups, epsilon=epsilon, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    pair = paired(
        ours, torch.nn.GroupNorm(3, 12), (2, 4, 5, 12), layout="torch", torch_call=channels_first
    )
    with jax.numpy_dtype_promotion("standard"):
        found = localise(pair).causes
    assert len(found) == len(causes)
    assert all(text.startswith(start) for text, start in zip(found, causes, strict=True))


@pytest.mark.parametrize("groups", [3, 12])
def test_group_norms_with_the_channels_first(groups):
    random = np.random.default_rng(0)
    x, scale, shift = (torch.tensor(random.normal(size=size)) for size in ((2, 12, 4, 5), 12, 12))
    ours, theirs = (
        torch.nn.functional.group_norm(x, groups, scale, shift, eps).numpy() for eps in (1e-5, 1e-6)
    )
    found = Evidence("norm", "module", [Target("output", ours, theirs)], {"input": x.numpy()})
    weights = {"norm.weight": scale.numpy(), "norm.bias": shift.numpy()}
    assert causes_of(found, weights) == ["norm: flax has eps=1e-05, torch 1e-06"]


@pytest.mark.parametrize("name", ["embeddings", "model.embeddings"])
def test_rows_of_a_table_that_one_side_adds_are_a_cause(name):
    random = np.random.default_rng(0)
    word, table = random.normal(size=(2, 5, 4)), random.normal(size=(9, 4))
    target = Target("input of norm", word + table[:5], word)
    lines = causes_of(
        Evidence(name, "module", [target], {"word": word}), {f"{name}.position.weight": table}
    )
    text = (
        f"{name}, input of norm: flax has the first rows of position.weight + word, torch has word"
        " alone"
    )
    assert lines == [text]


def attention_of_torch(q, k, v, visible):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible > 0
    ).transpose(1, 2)


@pytest.mark.parametrize("fill", [-1e30, -np.inf])
def test_a_row_that_sees_no_key_and_attends_to_all_is_a_cause(fill, paired):
    def ours(q, k, v, visible):
        scores = jnp.where(visible > 0, jnp.einsum("btnh,bsnh->bnts", q, k) / 2, fill)
        weights = jax.nn.softmax(scores)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(jnp.isnan(weights), 0, weights), v)

    pair = paired(ours, attention_of_torch, *[(2, 5, 3, 4)] * 3, (2, 1, 5, 5))
    visible = np.ones((2, 1, 5, 5))
    visible[0, :, :, 3:], visible[1, :, 2] = 0, 0  # a row of the second example sees nothing
    pair.inputs["input 3"] = visible
    found = localise(pair)
    assert [node.name for node in found.locally_wrong] == ([] if fill == -np.inf else ["./masked"])
    text = (
        "./masked: flax has -1e+30 throughout rows that see no key, which then attend to all alike,"
        " torch has -inf "
    )
    assert found.causes == (() if fill == -np.inf else (f"{text}throughout rows that see no key",))


def test_grouped_heads_of_jax_itself_are_aligned(paired):
    def ours(q, k, v):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, k, v)

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(
            1, 2
        )

    found = localise(paired(ours, theirs, (2, 6, 4, 5), (2, 6, 2, 5), (2, 6, 2, 5)))
    assert max(node.error for node in found.nodes) < 1e-6
    assert found.causes == ("the whole module: flax has the softmax in float32, torch in float64",)


def test_a_function_of_parameters_is_a_module(paired):
    def apply(params, x):
        return x @ params["linear"]["w"] + params["linear"]["b"][None]

    ours = jax.tree_util.Partial(apply, {"linear": {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}})
    rules = (Rule(("linear.w",), "weight", "i o -> o i"), Rule(("linear.b",), "bias"))
    pair = paired(ours, torch.nn.Linear(3, 2), (4, 3), layout=Layout(rules))
    assert pair.flax.shapes == {"linear.b": (2,), "linear.w": (3, 2)}
    assert localise(pair).first is None
    assert np.abs(pair.plain.outputs["output"]).min() > 0

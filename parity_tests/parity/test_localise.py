"""Faults planted on one side are found where they are, and nowhere else."""

import dataclasses
import json
from copy import deepcopy
from functools import cache
from types import SimpleNamespace

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from einops import rearrange
from flax import linen, nnx
from jax.extend.core.primitives import name_p

import flax_attn
import torch_ref
from flax_attn.convert import LAYOUTS, Rule
from flax_attn.convert.rules import Layout, plan
from flax_attn.functional import reference
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.pair import NotRun, Pair, weight_map
from flax_attn.parity.trace import jax_hooks
from flax_attn.parity.trace.activations import record
from flax_attn.parity.trace.hooks import Listener, Recorder
from flax_attn.parity.trace.localise import localise
from flax_attn.parity.trace.names import pair_paths
from flax_attn.proof.build import build
from flax_attn.proof.prove import pair_of
from flax_attn.proof.variants import select
from torch_ref.functional.masks import Causal

REFERENCE = torch_ref.functional.reference
BLOCK = {"d_model": 6, "context_length": 9, "dropout": 0.0, "num_heads": 2}
STEPS = ["query", "key", "value", "scores", "masked", "weights", "context", "output"]


class FlaxStack(nnx.Module):
    def __init__(self, depth):
        numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        self.blocks = nnx.List([build(flax_attn, "TransformerBlock", numerics=numerics, **BLOCK) for _ in range(depth)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class TorchStack(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = torch.nn.ModuleList([build(torch_ref, "TransformerBlock", **BLOCK) for _ in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def paired(flax, theirs, *shapes, layout="torch_ref", flax_call=None, torch_call=None):
    ours, theirs = JaxAdapter(flax, flax_call), TorchAdapter(theirs, torch_call)
    if ours.shapes:
        ours.entries = weight_map(flax, ours.shapes, theirs.shapes, LAYOUTS[layout])
    random = np.random.default_rng(0)
    return Pair(ours, theirs, {f"input {i}": random.normal(size=s) for i, s in enumerate(shapes)}, ours.entries)


@cache
def row(name):
    return pair_of(*select([name]))


def planted(pair, fault=lambda module: None):
    """Return the pair with a fault in a copy of its PyTorch side."""
    side = deepcopy(pair.torch)
    fault(side.module)
    return pair.with_torch(side)


def forward(function):
    """Return the fault of another forward pass."""

    def fault(module):
        module.__class__ = type("Planted", (type(module),), {"forward": function})

    return fault


def names(nodes):
    return [node.name for node in nodes]


def test_two_faults_in_a_deep_stack_are_found_and_named():
    def fault(stack):
        stack.blocks[4].norm1.eps = 1e-6
        stack.blocks[8].ff.layers[1] = torch.nn.GELU()

    divergence = localise(planted(paired(FlaxStack(12), TorchStack(12), (3, 5, 6)), fault))
    assert divergence.first.name == "blocks.4.norm1"
    assert names(divergence.guilty) == ["blocks.4.norm1", "blocks.8.ff"]
    norm, gelu = divergence.diagnoses
    assert norm.startswith("blocks.4.norm1: torch is layer norm with eps=1e-06 (fits ")
    assert ", flax is layer norm with eps=1e-05 (fits " in norm
    assert gelu.startswith("blocks.8.ff, input of layers.2: torch is exact GELU of layers.0 (fits ")
    assert ", flax is tanh GELU of layers.0 (fits " in gelu
    inherited = [node for node in divergence.nodes if node.diverges and not node.guilty]
    assert "blocks.11" in names(inherited)
    assert all(node.own <= tolerance.FORWARD for node in inherited)


@pytest.mark.parametrize("name", ["multi_head_gqa", "block_gpt2", "block_bert", "multi_head_wrapper"])
def test_a_healthy_pair_has_no_guilty_node(name):
    divergence = localise(row(name))
    assert divergence.first is None
    assert divergence.guilty == ()
    assert divergence.backward is None
    assert divergence.diagnoses == ()
    assert all(node.own <= tolerance.FORWARD for node in divergence.nodes)
    assert all(node.backward <= tolerance.GRADIENT for node in divergence.nodes)
    assert str(divergence) == f"none of {len(divergence.nodes)} nodes differs"


def wrong_scale(module, monkeypatch):
    module.scale = module.d_out**-0.5


def tiled_heads(module, monkeypatch):
    def tiled(x, pattern, **axes):
        return rearrange(x, pattern.replace("(k g)", "(g k)"), **axes)

    monkeypatch.setattr(REFERENCE, "rearrange", tiled)


def softmax_over_queries(module, monkeypatch):
    def masked_softmax(scores, visible, sinks=None):
        masked = REFERENCE.checkpoint_name(torch.where(visible, scores, -torch.inf), "masked")
        return torch.exp(masked) / torch.exp(masked).sum(dim=-2, keepdim=True)

    monkeypatch.setattr(REFERENCE, "masked_softmax", masked_softmax)


def mask_off_by_one(module, monkeypatch):
    monkeypatch.setattr(Causal, "allow", lambda self, rows, cols: cols < self.position(rows))


def heads_joined_wrongly(module, monkeypatch):
    def join(x, pattern, **axes):
        return rearrange(x, "b t n h -> b t (h n)" if pattern == "... t n h -> ... t (n h)" else pattern, **axes)

    monkeypatch.setattr(torch_ref.modules.multi_head, "rearrange", join)


@pytest.mark.parametrize(
    ("fault", "guilty"),
    [
        (wrong_scale, ["./scores"]),
        (tiled_heads, ["./scores", "./context"]),
        (softmax_over_queries, ["./weights"]),
        (mask_off_by_one, ["./masked"]),
        (heads_joined_wrongly, ["."]),
    ],
)
def test_a_fault_inside_attention_is_found_at_its_step(fault, guilty, monkeypatch):
    divergence = localise(planted(row("multi_head_gqa"), lambda module: fault(module, monkeypatch)))
    assert names(divergence.guilty) == guilty
    assert len(divergence.diagnoses) == len(guilty)
    if guilty != ["."]:
        assert divergence.first.name == guilty[0]


@forward
def residual_dropped(block, x, **options):
    attended = block.att(block.norm1(x), **options)
    return attended + block.ff(block.norm2(attended))


@forward
def residual_dropped_before_the_norm(block, x, **options):
    x = block.norm1(block.att(x, **options))
    return block.norm2(x + block.ff(x))


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        (
            "block_gpt2",
            residual_dropped,
            "the whole module: torch is att + ff (fits exactly), flax is input + att + ff",
        ),
        (
            "block_bert",  # where the norms of both sides are handed PyTorch's sum, and only that differs
            residual_dropped_before_the_norm,
            "the whole module, input of norm1: torch is att alone (fits exactly), flax is input + att (fits exactly)",
        ),
    ],
)
def test_a_dropped_residual_is_the_fault_of_the_container(name, fault, words):
    divergence = localise(planted(row(name), fault))
    assert names(divergence.guilty) == ["."]
    assert words in str(divergence)


@forward
def attention_detached(block, x, **options):
    x = x + block.att(block.norm1(x), **options).detach()
    return x + block.ff(block.norm2(x))


@forward
def norm_detached(block, x, **options):
    x = x + block.att(block.norm1(x), **options)
    return x + block.ff(block.norm2(x).detach())


def detached_inside(block):
    def plain(attention, *inputs, **options):
        output, weights = torch_ref.MultiHeadAttention.forward(attention, *inputs, **options | {"return_weights": True})
        return (output.detach(), weights) if options["return_weights"] else output.detach()

    forward(plain)(block.att)


@pytest.mark.parametrize(
    ("fault", "where"), [(attention_detached, "att"), (norm_detached, "norm2"), (detached_inside, "att/output")]
)
def test_a_fault_of_the_backward_pass_is_found_by_the_cotangents(fault, where):
    divergence = localise(planted(row("block_gpt2"), fault))
    assert divergence.first is None
    assert divergence.guilty == ()
    assert divergence.backward.name == where
    assert str(divergence).startswith(f"all outputs agree; the backward pass goes wrong after {where}, ")


class FlaxNothing(nnx.Module):
    def __call__(self, x):
        return x


class FlaxSkip(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(4, 6, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        self.drop = FlaxNothing()

    def __call__(self, x):
        x = self.fc(x)
        return x + jnp.sin(self.drop(x))


class TorchSkip(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = torch.nn.Linear(4, 6), torch.nn.Identity()

    def forward(self, x):
        x = self.fc(x)
        return x + torch.sin(self.drop(x))


def test_a_module_that_returns_what_it_is_given_has_a_cotangent_of_its_own():
    divergence = localise(paired(FlaxSkip(), TorchSkip(), (3, 4), layout="torch"))
    assert names(divergence.nodes) == ["fc", "drop", "."]
    assert all(node.backward <= tolerance.GRADIENT for node in divergence.nodes)


def test_every_step_of_attention_is_recorded_on_both_sides():
    taps = record(row("multi_head_gqa"))
    assert [name for name in taps.shared if "/" in name] == [f"./{step}" for step in STEPS]
    assert taps.shared == list(taps.flax) == list(taps.torch)
    assert set(taps.dtypes.values()) == {("float64", "float64")}
    flax, theirs = taps.attention["./weights"]
    assert flax.shape == theirs.shape == (3, 4, 5, 5)
    hidden = np.triu(np.ones((5, 5), bool), 1)
    assert (np.isneginf(taps.torch["./masked"]) == hidden).all()


def test_another_backend_is_heard_as_the_reference():
    arguments = {"d_in": 6, "d_out": 8, "context_length": 9, "dropout": 0.0, "num_heads": 4}
    ours = flax_attn.MultiHeadAttention(**arguments, backend="blocked", rngs=nnx.Rngs(0))
    taps = record(paired(ours, torch_ref.MultiHeadAttention(**arguments), (3, 5, 6)))
    assert {f"./{step}" for step in STEPS} <= set(taps.shared)
    assert ours.backend == "blocked"


# What is heard changes nothing.


def eagerly(side, inputs):
    module = side.built()
    jax_hooks._use_reference(module)
    return side.call(module, side.arrays(inputs), {})


@pytest.mark.parametrize("name", ["multi_head_gqa", "block_gpt2", "multi_head_rope"])
@pytest.mark.parametrize("listener", [Listener, Recorder])
def test_listening_leaves_every_bit_as_it_is(name, listener):
    pair = row(name)
    plain = eagerly(pair.flax, pair.inputs)
    heard = jax_hooks.run(pair, listener("flax", {}))
    assert plain.keys() == heard.keys()
    assert all((plain[key] == heard[key]).all() for key in plain)


def swapped_things(module):
    classes = {type(inner) for _, inner in nnx.iter_modules(module)}
    owners = [*classes, name_p, reference, jax.nn]
    return [(owner, dict(vars(owner))) for owner in owners]


class Breaks(Listener):
    def stepped(self, name, value):
        raise RuntimeError("broken on purpose")


def test_classes_are_restored_also_after_an_exception():
    pair = row("block_gpt2")
    before = swapped_things(pair.flax.module)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        jax_hooks.run(pair, Breaks("flax", {}))
    assert all(dict(vars(owner)) == attributes for owner, attributes in before)


def test_what_runs_inside_jit_is_not_heard_and_not_broken():
    call = nnx.jit(lambda module, x: module(x))
    pair = paired(FlaxStack(1), TorchStack(1), (3, 5, 6), flax_call=lambda module, x: call(module, x))
    divergence = localise(pair)
    assert names(divergence.nodes) == ["."]
    assert divergence.first is None
    assert "torch:blocks.0.norm1" in divergence.unpaired


# Names.


def test_projections_that_are_fused_pair_at_their_parent_alone():
    shapes = {"att.W_query": (3, 4), "att.W_key": (3, 4), "att.out_proj": (4, 3)}
    rules = (
        Rule(("W_query.kernel", "W_key.kernel"), "c_attn.weight", axis=1),
        Rule(("out_proj.kernel",), "c_proj.weight"),
    )
    entries = [
        dataclasses.replace(entry, theirs=entry.theirs.replace("att.", "attn."))
        for entry in plan({f"{path}.kernel": shape for path, shape in shapes.items()}, Layout(rules))
    ]
    assert pair_paths(entries, ["att", *shapes], ["attn", "attn.c_attn", "attn.c_proj"]) == {
        ".": ".",
        "att": "attn",
        "att.out_proj": "attn.c_proj",
    }


HELD = plan(
    {"a.fc.kernel": (3, 4), "b.kernel": (4, 5)},
    Layout((Rule(("a.fc.kernel",), "x.lin.weight"), Rule(("b.kernel",), "y.weight"))),
)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (["a", "a.fc"], ["x", "x.lin"], {"a": "x", "a.fc": "x.lin"}),  # each within the other
        (["a.fc"], ["x", "x.lin"], {"a.fc": "x.lin"}),  # from the inside out
        (["a.fc", "a.act"], ["x.lin", "x.act"], {"a.fc": "x.lin"}),  # no counterpart above: no name
        (["a", "a.fc", "a.act"], ["x", "x.lin", "x.act"], {"a": "x", "a.fc": "x.lin", "a.act": "x.act"}),
    ],
)
def test_modules_pair_by_the_weights_they_hold(ours, theirs, expected):
    assert pair_paths(HELD, ours, theirs) == {".": ".", **expected}


def test_without_weights_modules_pair_by_equal_paths():
    assert pair_paths([], ["act", "drop"], ["act", "norm"]) == {".": ".", "act": "act"}


class FlaxTwice(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.fc(jnp.sin(self.fc(x)))


class TorchTwice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(torch.cos(self.fc(x)))


def test_repeated_calls_are_numbered():
    divergence = localise(paired(FlaxTwice(), TorchTwice(), (3, 4), layout="torch"))
    assert names(divergence.nodes) == ["fc", "fc#2", "."]
    assert names(divergence.guilty) == ["."]
    assert [node.diverges for node in divergence.nodes] == [False, True, True]


class FlatTokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 6)

    def forward(self, x):
        return self.fc(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Tokens(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(4, 6, param_dtype=jnp.float64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.fc(x)


def test_a_node_that_is_laid_out_in_another_way_is_not_compared():
    divergence = localise(paired(Tokens(), FlatTokens(), (3, 5, 4), layout="torch"))
    assert names(divergence.nodes) == ["."]
    assert divergence.unpaired == ("fc: flax (3, 5, 6), torch (15, 6)",)


class FlaxTransposed(nnx.Module):
    def __init__(self):
        self.inner = Tokens()

    def __call__(self, x):
        return self.inner(x)


class TorchInner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 6)

    def forward(self, x):
        return self.fc(x.transpose(1, 2))


class TorchTransposed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = TorchInner()

    def forward(self, x):
        return self.inner(x.transpose(1, 2))


def test_a_node_that_is_given_something_else_has_no_error_of_its_own():
    divergence = localise(paired(FlaxTransposed(), TorchTransposed(), (3, 5, 4), layout="torch"))
    assert names(divergence.nodes) == ["inner.fc", "inner", "."]
    assert [np.isnan(node.own) for node in divergence.nodes] == [False, True, False]
    assert divergence.guilty == ()


# Other kinds of modules.


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_attention_of_pytorch_itself_is_heard(need_weights):
    ours = flax_attn.MultiHeadAttention(8, 8, None, 0.0, 4, True, causal=False, rngs=nnx.Rngs(0))
    theirs = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    pair = paired(
        ours, theirs, (3, 5, 8), layout="torch_mha", torch_call=lambda m, x: m(x, x, x, need_weights=need_weights)[0]
    )
    heard = ["masked", "weights"] if need_weights else ["query", "key", "value", "masked", "weights", "context"]
    divergence = localise(pair)
    assert names(divergence.nodes) == [*(f"./{step}" for step in heard), "."]
    assert divergence.first is None
    assert divergence.guilty == ()


@pytest.mark.parametrize(("scale", "guilty"), [(0.5, []), (0.25, ["./masked"])])
def test_the_softmax_of_jax_itself_is_heard(scale, guilty):
    visible = np.tril(np.ones((5, 5), bool))

    def ours(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
        masked = jnp.where(jnp.asarray(visible)[None, None], scores, -1e30)  # hidden by one number or by another
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(masked), v)

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    divergence = localise(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert names(divergence.nodes) == ["./masked", "./weights", "."]
    assert names(divergence.guilty) == guilty


def test_hidden_is_hidden_whatever_number_hides_it():
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


def test_the_attention_of_jax_itself_is_heard():
    def ours(q, k, v):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, k, v)

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    divergence = localise(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert names(divergence.nodes) == ["./query", "./key", "./value", "./context", "."]
    assert names(divergence.guilty) == ["./context"]  # its softmax is in float32


class LinenPair(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.sin(linen.Dense(6, param_dtype=jnp.float64)(x))
        return linen.Dense(5, param_dtype=jnp.float64)(x)


def test_a_linen_module_is_heard():
    x = jnp.ones((3, 4))
    module = LinenPair()
    bound = module.bind(module.init(jax.random.key(0), x))
    theirs = torch.nn.ModuleDict({"Dense_0": torch.nn.Linear(4, 6), "Dense_1": torch.nn.Linear(6, 5)})

    def call(m, x):
        return m["Dense_1"](torch.cos(m["Dense_0"](x)))

    divergence = localise(paired(bound, theirs, (3, 4), layout="torch", torch_call=call))
    assert names(divergence.nodes) == ["Dense_0", "Dense_1", "."]
    assert names(divergence.guilty) == ["."]


class EquinoxPair(equinox.Module):
    first: equinox.nn.Linear
    second: equinox.nn.Linear

    def __call__(self, x):
        return self.second(jnp.sin(self.first(x)))


def test_an_equinox_module_is_heard_where_it_is_not_mapped():
    keys = jax.random.split(jax.random.key(0))
    ours = EquinoxPair(equinox.nn.Linear(4, 6, key=keys[0]), equinox.nn.Linear(6, 5, key=keys[1]))
    theirs = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 6), "second": torch.nn.Linear(6, 5)})

    def call(m, x):
        return m["second"](torch.cos(m["first"](x)))

    before = dict(vars(equinox.nn.Linear))
    divergence = localise(paired(ours, theirs, (4,), layout="torch_ref", torch_call=call))
    assert names(divergence.nodes) == ["first", "second", "."]
    assert names(divergence.guilty) == ["."]
    assert dict(vars(equinox.nn.Linear)) == before


def test_a_record_of_an_earlier_run_cannot_be_heard():
    pair = planted(row("layer_norm"))
    pair.torch = SimpleNamespace(framework="torch")
    with pytest.raises(NotRun, match="one of these is the record of an earlier run"):
        localise(pair)


def test_a_divergence_is_data():
    divergence = localise(planted(row("multi_head_gqa"), lambda module: wrong_scale(module, None)))
    data = json.loads(json.dumps(divergence.as_dict(), allow_nan=False))
    assert data["first"] == "./scores"
    assert data["guilty"] == ["./scores"]
    assert data["backward"] is None
    scores = next(node for node in data["nodes"] if node["name"] == "./scores")
    assert scores["guilty"]
    assert scores["shape"] == [3, 4, 5, 5]
    assert scores["backward"] is None
    assert data["diagnoses"] == list(divergence.diagnoses)

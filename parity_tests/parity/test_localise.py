"""Faults patched into one side are found where they are, and nowhere else."""

import dataclasses
import json
import threading
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
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.pair import NotRun, Pair, weight_map
from flax_attn.parity.trace import jax_hooks
from flax_attn.parity.trace.activations import record
from flax_attn.parity.trace.hooks import ActivationRecorder, Observer
from flax_attn.parity.trace.localise import localise
from flax_attn.parity.trace.pairing import pair_paths
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


def patched(pair, fault=lambda module: None):
    """Return the pair with a fault in a copy of its PyTorch side."""
    side = deepcopy(pair.torch)
    fault(side.module)
    return pair.with_torch(side)


def forward(function):
    """Return the fault of another forward pass."""

    def fault(module):
        module.__class__ = type("Patched", (type(module),), {"forward": function})

    return fault


def names(nodes):
    return [node.name for node in nodes]


def test_two_faults_in_a_deep_stack_are_found_and_named():
    def fault(stack):
        stack.blocks[4].norm1.eps = 1e-6
        stack.blocks[8].ff.layers[1] = torch.nn.GELU()

    divergence = localise(patched(paired(FlaxStack(12), TorchStack(12), (3, 5, 6)), fault))
    assert divergence.first.name == "blocks.4.norm1"
    assert names(divergence.locally_wrong) == ["blocks.4.norm1", "blocks.8.ff"]
    norm, gelu = divergence.causes
    assert norm == "blocks.4.norm1: flax has eps=1e-05, torch 1e-06"
    assert gelu == "blocks.8.ff, input of layers.2: flax has tanh GELU of layers.0, torch has exact GELU of layers.0"
    inherited = [node for node in divergence.nodes if node.differs and not node.locally_wrong]
    assert "blocks.11" in names(inherited)
    assert all(node.local_error <= tolerance.FORWARD for node in inherited)


@pytest.mark.parametrize("name", ["multi_head_gqa", "block_gpt2", "block_bert", "multi_head_wrapper"])
def test_a_healthy_pair_has_no_node_that_is_wrong(name):
    divergence = localise(row(name))
    assert divergence.first is None
    assert divergence.locally_wrong == ()
    assert divergence.backward is None
    assert divergence.causes == ()
    assert all(node.local_error <= tolerance.FORWARD for node in divergence.nodes)
    assert all(node.backward_error <= tolerance.GRADIENT for node in divergence.nodes)
    assert str(divergence) == f"none of {len(divergence.nodes)} nodes differs"


def wrong_scale(module, monkeypatch):
    module.scores = dataclasses.replace(module.scores, scale=module.d_out**-0.5)


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
    ("fault", "wrong"),
    [
        (wrong_scale, ["./scores"]),
        (tiled_heads, ["./scores", "./context"]),
        (softmax_over_queries, ["./weights"]),
        (mask_off_by_one, ["./masked"]),
        (heads_joined_wrongly, ["."]),
    ],
)
def test_a_fault_inside_attention_is_found_at_its_step(fault, wrong, monkeypatch):
    divergence = localise(patched(row("multi_head_gqa"), lambda module: fault(module, monkeypatch)))
    assert names(divergence.locally_wrong) == wrong
    assert len(divergence.causes) == len(wrong)
    if wrong != ["."]:
        assert divergence.first.name == wrong[0]


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
            "the whole module: flax has input + att + ff, torch has att + ff",
        ),
        (
            "block_bert",  # where the norms of both sides are handed PyTorch's sum, and only that differs
            residual_dropped_before_the_norm,
            "the whole module, input of norm1: flax has input + att, torch has att alone",
        ),
    ],
)
def test_a_dropped_residual_is_an_error_of_the_container(name, fault, words):
    divergence = localise(patched(row(name), fault))
    assert names(divergence.locally_wrong) == ["."]
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
    divergence = localise(patched(row("block_gpt2"), fault))
    assert divergence.first is None
    assert divergence.locally_wrong == ()
    assert divergence.backward.name == where
    assert str(divergence).startswith(f"all outputs agree; the backward pass differs after {where}, ")


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
    assert all(node.backward_error <= tolerance.GRADIENT for node in divergence.nodes)


def test_every_step_of_attention_is_recorded_on_both_sides():
    found = record(row("multi_head_gqa"))
    assert [name for name in found.shared if "/" in name] == [f"./{step}" for step in STEPS]
    assert found.shared == list(found.flax) == list(found.torch)
    assert set(found.dtypes.values()) == {("float64", "float64")}
    flax, theirs = found.attention["./weights"]
    assert flax.shape == theirs.shape == (3, 4, 5, 5)
    hidden = np.triu(np.ones((5, 5), bool), 1)
    assert (np.isneginf(found.torch["./masked"]) == hidden).all()


def test_another_backend_is_observed_as_the_reference():
    arguments = {"d_in": 6, "d_out": 8, "context_length": 9, "dropout": 0.0, "num_heads": 4}
    ours = flax_attn.MultiHeadAttention(**arguments, backend="blocked", rngs=nnx.Rngs(0))
    found = record(paired(ours, torch_ref.MultiHeadAttention(**arguments), (3, 5, 6)))
    assert {f"./{step}" for step in STEPS} <= set(found.shared)
    assert ours.backend == "blocked"


# Observation changes nothing.


def eagerly(side, inputs):
    module = side.built()
    for _, inner in nnx.iter_modules(module):
        if hasattr(inner, "backend"):
            inner.backend = "reference"
    return side.call(module, side.arrays(inputs), {})


@pytest.mark.parametrize("name", ["multi_head_gqa", "block_gpt2", "multi_head_rope"])
@pytest.mark.parametrize("observer", [Observer, ActivationRecorder])
def test_observation_leaves_every_bit_as_it_is(name, observer):
    pair = row(name)
    plain = eagerly(pair.flax, pair.inputs)
    observed = jax_hooks.trace(pair).run(observer("flax", {}))
    assert plain.keys() == observed.keys()
    assert all((plain[key] == observed[key]).all() for key in plain)


class Breaks(Observer):
    def stepped(self, name, value):
        raise RuntimeError("broken on purpose")


def test_nothing_is_patched_while_another_thread_runs_the_same_classes():
    """Neither classes nor modules of either framework are others while a comparison runs, nor after one that breaks."""
    pair, seen, ready, done = row("block_gpt2"), [], threading.Event(), threading.Event()
    flax_classes = {type(inner) for _, inner in nnx.iter_modules(pair.flax.module)}
    torch_classes = {type(inner) for inner in pair.torch.module.modules()}
    owners = [*flax_classes, *torch_classes, jax.nn, name_p, torch.nn.functional, flax_attn.functional.reference]
    before = [dict(vars(owner)) for owner in owners]
    x = torch.from_numpy(pair.inputs["input 0"])

    def other():
        with on_cpu(), torch.no_grad():
            flax, theirs = pair.flax.built(), deepcopy(pair.torch.module).eval()
            expected = flax(jnp.asarray(x.numpy())), theirs(x)
            ready.set()
            while not done.is_set():
                flax_same, torch_same = (
                    (flax(jnp.asarray(x.numpy())) == expected[0]).all(),
                    (theirs(x) == expected[1]).all(),
                )
                unpatched = [dict(vars(owner)) for owner in owners] == before
                seen.append((bool(flax_same), bool(torch_same), unpatched, torch.backends.cuda.flash_sdp_enabled()))

    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(300)
    try:
        assert localise(pair).first is None
        with pytest.raises(RuntimeError, match="broken on purpose"):
            jax_hooks.trace(pair).run(Breaks("flax", {}))
    finally:
        done.set()
        thread.join()
    assert len(seen) > 1
    assert set(seen) == {(True, True, True, True)}
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_what_runs_inside_a_transform_is_observed(transform):
    call = transform(lambda module, x: module(x))
    pair = paired(FlaxStack(1), TorchStack(1), (3, 5, 6), flax_call=lambda module, x: call(module, x))
    divergence = localise(pair)
    assert "blocks.0.att/weights" in names(divergence.nodes)
    assert divergence.first is None


def test_what_runs_inside_scan_is_not_observed_and_not_broken():
    def call(module, x):
        return jax.lax.scan(lambda x, _: (module(x), None), x, None, length=1)[0]

    divergence = localise(paired(FlaxStack(1), TorchStack(1), (3, 5, 6), flax_call=call))
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
    assert names(divergence.locally_wrong) == ["."]
    assert [node.differs for node in divergence.nodes] == [False, True, True]


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
    assert [np.isnan(node.local_error) for node in divergence.nodes] == [False, True, False]
    assert divergence.locally_wrong == ()


# Other kinds of modules.


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_attention_of_pytorch_itself_is_observed(need_weights):
    ours = flax_attn.MultiHeadAttention(8, 8, None, 0.0, 4, True, causal=False, rngs=nnx.Rngs(0))
    theirs = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    pair = paired(
        ours, theirs, (3, 5, 8), layout="torch_mha", torch_call=lambda m, x: m(x, x, x, need_weights=need_weights)[0]
    )
    steps = ["masked", "weights"] if need_weights else ["query", "key", "value", "masked", "weights", "context"]
    divergence = localise(pair)
    assert names(divergence.nodes) == [*(f"./{step}" for step in steps), "."]
    assert divergence.first is None
    assert divergence.locally_wrong == ()


@pytest.mark.parametrize(("scale", "wrong"), [(0.5, []), (0.25, ["./masked"])])
def test_the_softmax_of_jax_itself_is_observed(scale, wrong):
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
    assert names(divergence.locally_wrong) == wrong


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


def test_the_attention_of_jax_itself_is_observed():
    def ours(q, k, v):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, k, v)

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    divergence = localise(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert names(divergence.nodes) == ["./masked", "./weights", "."]
    assert names(divergence.locally_wrong) == ["./masked"]  # what follows is given rounded scores
    assert divergence.causes == ("the whole module: flax has the softmax in float32, torch in float64",)


class LinenPair(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.sin(linen.Dense(6, param_dtype=jnp.float64)(x))
        return linen.Dense(5, param_dtype=jnp.float64)(x)


def test_a_linen_module_is_observed():
    x = jnp.ones((3, 4))
    module = LinenPair()
    bound = module.bind(module.init(jax.random.key(0), x))
    theirs = torch.nn.ModuleDict({"Dense_0": torch.nn.Linear(4, 6), "Dense_1": torch.nn.Linear(6, 5)})

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
def test_an_equinox_module_is_observed_also_where_it_is_mapped(mapped):
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


def test_a_recording_of_an_earlier_run_cannot_be_located():
    pair = patched(row("layer_norm"))
    pair.torch = SimpleNamespace(framework="torch")
    with pytest.raises(NotRun, match="one of these is the recording of an earlier run"):
        localise(pair)


def test_a_divergence_is_data():
    divergence = localise(patched(row("multi_head_gqa"), lambda module: wrong_scale(module, None)))
    data = json.loads(json.dumps(divergence.as_dict(), allow_nan=False))
    assert data["first"] == "./scores"
    assert data["locally_wrong"] == ["./scores"]
    assert data["backward"] is None
    scores = next(node for node in data["nodes"] if node["name"] == "./scores")
    assert scores["locally_wrong"]
    assert scores["shape"] == [3, 4, 5, 5]
    assert scores["backward_error"] is None
    assert data["causes"] == list(divergence.causes)


# Causes that real layers have.


class FlaxPreNorm(nnx.Module):
    def __init__(self, **norm):
        self.norm = nnx.LayerNorm(8, epsilon=1e-5, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **norm)
        self.att = nnx.MultiHeadAttention(2, 8, decode=False, param_dtype=jnp.float64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.att(self.norm(x))


class TorchPreNorm(torch.nn.Module):
    def __init__(self, attend=torch.nn.functional.scaled_dot_product_attention):
        super().__init__()
        self.norm, self.attend = torch.nn.LayerNorm(8), attend
        self.att = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("query", "key", "value", "out")})

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (self.att[name](x).unflatten(-1, (2, 4)).transpose(1, 2) for name in ("query", "key", "value"))
        return self.att["out"](self.attend(q, k, v).transpose(1, 2).flatten(2))


PRE_NORM = Layout(
    (
        Rule(("norm.scale",), "norm.weight"),
        Rule(("norm.bias",), "norm.bias"),
        Rule(("att.out.kernel",), "att.out.weight", "n d o -> o (n d)"),
        Rule(("att.out.bias",), "att.out.bias"),
        *(
            Rule((f"att.{name}.kernel",), f"att.{name}.weight", "i n d -> (n d) i")
            for name in ("query", "key", "value")
        ),
        *(Rule((f"att.{name}.bias",), f"att.{name}.bias", "n d -> (n d)") for name in ("query", "key", "value")),
    )
)


def pre_norm(flax, theirs, inputs=(3, 5, 8)):
    ours, theirs = JaxAdapter(flax), TorchAdapter(theirs)
    ours.entries = weight_map(flax, ours.shapes, theirs.shapes, PRE_NORM)
    x = np.random.default_rng(0).normal(size=inputs) if isinstance(inputs, tuple) else inputs
    return Pair(ours, theirs, {"input 0": x}, ours.entries)


def located(pair):
    with jax.numpy_dtype_promotion("standard"):  # which the layers of Flax need
        return localise(pair)


def test_the_float32_softmax_of_flax_is_a_cause():
    divergence = located(pre_norm(FlaxPreNorm(), TorchPreNorm()))
    assert 1e-9 < divergence.nodes[-1].error < 1e-6
    assert divergence.causes == ("the whole module: flax has the softmax in float32, torch in float64",)
    assert str(divergence).startswith(divergence.causes[0])


def float32_softmax(q, k, v):
    scores = q @ k.transpose(2, 3) / 2
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def test_the_float32_softmax_of_both_is_a_cause():
    divergence = located(pre_norm(FlaxPreNorm(), TorchPreNorm(float32_softmax)))
    assert divergence.causes in ((), ("the whole module: flax has the softmax in float32, torch in float32",))
    assert bool(divergence.causes) == bool(divergence.locally_wrong)


def test_float32_rotary_angles_are_a_cause():
    angles = np.outer(np.arange(5), 10000.0 ** (-np.arange(4) / 4))[None]

    def rotated(x, cos, sin):
        return x * cos + x[..., ::-1] * sin

    def ours(x):
        return rotated(x, jnp.cos(jnp.asarray(angles)), jnp.sin(jnp.asarray(angles)))

    def theirs(x):
        low = torch.from_numpy(angles).float()
        return x * low.cos().double() + x.flip(-1) * low.sin().double()

    divergence = localise(paired(ours, theirs, (3, 5, 4)))
    assert divergence.causes == ("the whole module: flax has cos and sin (rotary angles) in float64, torch in float32",)


@pytest.mark.parametrize("fast", [True, False])
def test_the_variance_of_flax_in_one_pass_is_a_cause(fast):
    x = 1e3 + np.random.default_rng(0).normal(size=(3, 5, 8))
    flax = nnx.LayerNorm(8, epsilon=1e-5, param_dtype=jnp.float64, use_fast_variance=fast, rngs=nnx.Rngs(0))
    ours, theirs = JaxAdapter(flax), TorchAdapter(torch.nn.LayerNorm(8))
    ours.entries = weight_map(flax, ours.shapes, theirs.shapes, LAYOUTS["torch"])
    divergence = located(Pair(ours, theirs, {"input 0": x}, ours.entries))
    cause = "the whole module: flax has the variance in one pass, mean(x^2) - mean(x)^2, torch in two"
    assert divergence.causes == ((cause,) if fast else ())


def test_a_sliding_window_that_one_side_lacks_is_a_cause():
    def ours(q, k, v):
        return flax_attn.dot_product_attention(q, k, v, mask=flax_attn.Mask.causal())

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        window = torch.ones(5, 5, dtype=bool).tril().triu(-2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=window).transpose(1, 2)

    divergence = localise(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert divergence.causes == (
        "./masked: flax has a causal mask, query i sees keys up to i, "
        "torch has a sliding window, query i sees keys i - 2 to i",
    )

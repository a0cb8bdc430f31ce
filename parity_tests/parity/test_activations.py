"""Both sides' submodules and steps are observed under the same names, without changing anything."""

import threading
from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.extend.core.primitives import name_p

import flax_attn
import torch_ref
from flax_attn.convert import Layout, Rule
from flax_attn.parity import tolerance
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.trace import jax_hooks
from flax_attn.parity.trace.activations import record
from flax_attn.parity.trace.hooks import ActivationRecorder, Observer
from flax_attn.parity.trace.localise import localise
from flax_attn.proof.build import build

BLOCK = {"d_model": 6, "context_length": 9, "dropout": 0.0, "num_heads": 2}
STEPS = ["query", "key", "value", "scores", "masked", "weights", "context", "output"]


def names(nodes):
    return [node.name for node in nodes]


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


def test_a_module_that_returns_what_it_is_given_has_a_cotangent_of_its_own(paired):
    divergence = localise(paired(FlaxSkip(), TorchSkip(), (3, 4), layout="torch"))
    assert names(divergence.nodes) == ["fc", "drop", "."]
    assert all(node.backward_error <= tolerance.GRADIENT for node in divergence.nodes)


def test_every_step_of_attention_is_recorded_on_both_sides(row):
    found = record(row("multi_head_gqa"))
    assert [name for name in found.shared if "/" in name] == [f"./{step}" for step in STEPS]
    assert found.shared == list(found.flax) == list(found.torch)
    assert set(found.dtypes.values()) == {("float64", "float64")}
    flax, theirs = found.attention["./weights"]
    assert flax.shape == theirs.shape == (3, 4, 5, 5)
    hidden = np.triu(np.ones((5, 5), bool), 1)
    assert (np.isneginf(found.torch["./masked"]) == hidden).all()


def test_another_backend_is_observed_as_the_reference(paired):
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
def test_observation_leaves_every_bit_as_it_is(name, row):
    pair = row(name)
    plain = eagerly(pair.flax, pair.inputs)
    for observer in (Observer, ActivationRecorder):
        observed = jax_hooks.trace(pair).run(observer("flax", {}))
        assert plain.keys() == observed.keys()
        assert all((plain[key] == observed[key]).all() for key in plain)


class Breaks(Observer):
    def stepped(self, name, value):
        raise RuntimeError("broken on purpose")


def test_nothing_is_patched_while_another_thread_runs_the_same_classes(row):
    """A comparison changes no class or module of either framework, not even one that fails."""
    pair, seen, ready, done = row("block_gpt2"), [], threading.Event(), threading.Event()
    flax_classes = {type(inner) for _, inner in nnx.iter_modules(pair.flax.module)}
    torch_classes = {type(inner) for inner in pair.torch.module.modules()}
    owners = [
        *flax_classes,
        *torch_classes,
        jax.nn,
        name_p,
        torch.nn.functional,
        flax_attn.functional.reference,
    ]
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
                seen.append(
                    (
                        bool(flax_same),
                        bool(torch_same),
                        unpatched,
                        torch.backends.cuda.flash_sdp_enabled(),
                    )
                )

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


def blocks():
    numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
    return build(flax_attn, "TransformerBlock", numerics=numerics, **BLOCK), build(
        torch_ref, "TransformerBlock", **BLOCK
    )


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_what_runs_inside_a_transform_is_observed(transform, paired):
    call = transform(lambda module, x: module(x))
    pair = paired(*blocks(), (3, 5, 6), flax_call=lambda module, x: call(module, x))
    divergence = localise(pair)
    assert "att/weights" in names(divergence.nodes)
    assert divergence.first is None


def test_what_runs_inside_scan_is_not_observed_and_not_broken(paired):
    def call(module, x):
        return jax.lax.scan(lambda x, _: (module(x), None), x, None, length=1)[0]

    divergence = localise(paired(*blocks(), (3, 5, 6), flax_call=call))
    assert names(divergence.nodes) == ["."]
    assert divergence.first is None
    assert "torch:norm1" in divergence.unpaired


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


def test_repeated_calls_are_numbered(paired):
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


def test_a_node_that_is_laid_out_in_another_way_is_not_compared(paired):
    divergence = localise(paired(Tokens(), FlatTokens(), (3, 5, 4), layout="torch"))
    assert names(divergence.nodes) == ["."]
    assert divergence.unpaired == ("fc: flax (3, 5, 6), torch (15, 6)",)


class FlaxFlattened(nnx.Module):
    def __init__(self):
        self.inner = Tokens()

    def __call__(self, x):
        return self.inner(x)


class TorchInner(torch.nn.Module):
    def __init__(self, undo):
        super().__init__()
        self.fc, self.undo = torch.nn.Linear(4, 6), undo

    def forward(self, x):
        return self.fc(self.undo(x))


class TorchChanged(torch.nn.Module):
    def __init__(self, change, undo):
        super().__init__()
        self.inner, self.change = TorchInner(undo), change

    def forward(self, x):
        return self.inner(self.change(x))


def test_a_node_that_is_given_something_else_has_no_error_of_its_own(paired):
    theirs = TorchChanged(lambda x: x.flatten(0, 1), lambda x: x.unflatten(0, (3, 5)))
    divergence = localise(paired(FlaxFlattened(), theirs, (3, 5, 4), layout="torch"))
    assert names(divergence.nodes) == ["inner.fc", "inner", "."]
    assert [np.isnan(node.local_error) for node in divergence.nodes] == [False, True, False]
    assert divergence.locally_wrong == ()


def test_a_node_that_is_given_its_channels_first_is_judged_with_them_last(paired):
    theirs = TorchChanged(lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2))
    divergence = localise(paired(FlaxFlattened(), theirs, (3, 5, 4), layout="torch"))
    assert [node.local_error <= node.limit for node in divergence.nodes] == [True, True, True]


@pytest.mark.parametrize(
    "size", [(2, 3, 6, 7), (3, 3, 3, 3)], ids=["told by shapes", "told by values"]
)
def test_images_are_aligned_whatever_the_order_of_their_axes(size, paired):
    ours = nnx.Sequential(
        *(nnx.Conv(3, 3, (1, 1), param_dtype=jnp.float64, rngs=nnx.Rngs(0)) for _ in range(2))
    )
    theirs = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 1) for _ in range(2)))
    rules = [
        Rule(("{i}.kernel",), "{i}.weight", "h w i o -> o i h w"),
        Rule(("{i}.bias",), "{i}.bias"),
    ]

    def channels_last(model, x):
        return model(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)

    found = localise(
        paired(ours, theirs, size, layout=Layout(tuple(rules)), flax_call=channels_last)
    )
    assert names(found.nodes) == ["0", "1", "."]
    assert all(node.error <= node.limit and node.local_error <= node.limit for node in found.nodes)

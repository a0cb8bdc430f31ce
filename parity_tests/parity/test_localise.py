"""Faults patched into one side are found where they are, and nowhere else."""

import json
from copy import copy, deepcopy
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn.parity import tolerance
from flax_attn.parity.pair import NotRun
from flax_attn.parity.trace.localise import localise
from flax_attn.proof.build import build
from flax_attn.proof.faults import FAULTS
from flax_attn.proof.faults.fault import Patch, fault, patched

KNOWN = {known.name: known for known in FAULTS}
CAUSAL = "a causal mask, query i sees keys up to i"
SCORES, BIASED, NORM = "query . key / sqrt(h)", "x @ weight.T + bias", "layer norm with eps=0.001"
ROPE = "RoPE of {}, half-split, base 10000"
GPT2 = "input + att + ff"


def between(node, flax, torch):
    return f"{node}: flax has {flax}, torch has {torch}"


def unknown(node, flax):
    return f"{node}: flax has {flax}, torch has none of the known formulas"


def rotated(torch):
    """Return what is said of query and key."""
    return [
        between(f"./{x}", ROPE.format(f"W_{x}"), torch.format(f"W_{x}")) for x in ("query", "key")
    ]


# A fault of the table, the nodes that are locally wrong, and the causes that are named.
LOCATED = [
    (
        "scale_of_the_whole_width",
        ["./scores"],
        [between("./scores", SCORES, "query . key / sqrt(d_out)")],
    ),
    ("no_scale", ["./scores"], [between("./scores", SCORES, "query . key without a scale")]),
    (
        "softmax_over_the_queries",
        ["./weights"],
        [between("./weights", "softmax over the keys", "softmax over the queries")],
    ),
    (
        "softmax_in_float32",
        ["./masked", "./weights"],
        ["the whole module: flax has the softmax in float64, torch in float32"],
    ),
    (
        "hidden_scores_of_minus_10",
        ["./masked"],
        [between("./masked", CAUSAL, "a mask that sets -10 where the other side hides")],
    ),
    ("one_token_ahead_is_seen", ["./masked"], [between("./masked", CAUSAL, f"{CAUSAL} + 1")]),
    ("oneself_is_not_seen", ["./masked"], [between("./masked", CAUSAL, f"{CAUSAL} - 1")]),
    ("no_causal_mask", ["./masked"], [between("./masked", CAUSAL, "no mask")]),
    (
        "no_output_bias",
        ["out_proj"],
        [between("out_proj", BIASED, "x @ weight.T without its bias")],
    ),
    (
        "heads_side_by_side",
        ["."],
        [
            between(
                "the whole module, input of out_proj",
                "context, heads side by side",
                "context, heads interleaved",
            )
        ],
    ),
    (
        "reversed_heads",
        ["."],
        [unknown("the whole module, input of out_proj", "context, heads side by side")],
    ),
    (
        "heads_split_across_tokens",
        ["./query"],
        [
            between(
                "./query",
                "W_query, heads side by side",
                "W_query, heads by reshape without a transpose",
            )
        ],
    ),
    ("transposed_kernel", ["W_value"], [between("W_value", BIASED, "x @ weight + bias")]),
    (
        "swapped_biases",
        ["W_query", "W_key"],
        [
            between("W_query", BIASED, "x @ weight.T + W_key.bias"),
            between("W_key", BIASED, "x @ weight.T + W_query.bias"),
        ],
    ),
    (
        "tiled_heads",
        ["./scores", "./context"],
        [
            between(
                "./scores", SCORES, "query . key with key heads tiled, not repeated, / sqrt(h)"
            ),
            between(
                "./context",
                "weights . value",
                "weights . value with value heads tiled, not repeated",
            ),
        ],
    ),
    (
        "reversed_key_value_heads",
        ["W_key", "W_value"],
        [unknown("W_key", BIASED), unknown("W_value", BIASED)],
    ),
    ("rope_base", ["./query", "./key"], rotated("RoPE of {}, half-split, base 500000")),
    ("rope_order", ["./query", "./key"], rotated("RoPE of {}, interleaved, base 10000")),
    ("rope_sign", ["./query", "./key"], rotated(f"{ROPE}, turned backwards")),
    (
        "rope_of_queries_alone",
        ["./key"],
        [between("./key", ROPE.format("W_key"), "W_key, heads side by side")],
    ),
    ("another_epsilon", ["norm1"], ["norm1: flax has eps=1e-05, torch 1e-06"]),
    (
        "swapped_norms",
        ["norm1", "norm2"],
        [unknown(norm, "layer norm with eps=1e-05") for norm in ("norm1", "norm2")],
    ),
    (
        "no_residual",
        ["."],
        [
            between("the whole module, input of norm2", "input + att", "att alone"),
            between("the whole module", GPT2, "ff alone"),
        ],
    ),
    (
        "residual_of_the_normed",
        ["."],
        [
            between("the whole module, input of norm2", "input + att", "norm1 + att"),
            between("the whole module", GPT2, "norm2 + ff"),
        ],
    ),
    (
        "epsilon_outside_the_root",
        ["."],
        [between("the whole module", NORM, f"{NORM} added to the standard deviation")],
    ),
    (
        "swapped_scale_and_shift",
        ["."],
        [between("the whole module", NORM, f"{NORM}, scale and shift swapped")],
    ),
    (
        "tanh_gelu_for_exact",
        ["."],
        [
            between(
                "the whole module, input of layers.2",
                "exact GELU of layers.0",
                "tanh GELU of layers.0",
            )
        ],
    ),
]


@pytest.mark.parametrize(("name", "wrong", "causes"), LOCATED, ids=[name for name, *_ in LOCATED])
def test_a_fault_is_found_where_it_is_and_named(name, wrong, causes, row):
    divergence = located(row(KNOWN[name].row), KNOWN[name])
    assert names(divergence.locally_wrong) == wrong
    assert divergence.causes == tuple(causes)
    if wrong != ["."]:
        assert divergence.first.name == wrong[0]


def located(pair, known):
    """Return what is found with a fault in a copy of the PyTorch side."""
    side = deepcopy(pair.torch)
    with patched(side.module, known.patches):
        return localise(pair.with_torch(side))


def names(nodes):
    return [node.name for node in nodes]


def replaced(name, target, function):
    """Return the fault of another forward pass."""
    cls = torch_ref.MultiHeadAttention if target else torch_ref.TransformerBlock
    other = type("Patched", (cls,), {"attend": function})
    return fault(
        "replaced", "The forward pass is another one.", name, Patch(target, "__class__", other)
    )


def attention_detached(block, x, **options):
    attended = block.att.attend(block.norm1(x), **options)
    x = x + attended.output.detach()
    return replace(attended, output=x + block.ff(block.norm2(x)))


def norm_detached(block, x, **options):
    attended = block.att.attend(block.norm1(x), **options)
    x = x + attended.output
    return replace(attended, output=x + block.ff(block.norm2(x).detach()))


def detached_inside(attention, *inputs, return_weights, **options):
    options["return_weights"] = return_weights
    attended = torch_ref.MultiHeadAttention.attend(attention, *inputs, **options)
    return replace(attended, output=attended.output.detach())


@pytest.mark.parametrize(
    ("target", "function", "where"),
    [
        ("", attention_detached, "att"),
        ("", norm_detached, "norm2"),
        ("att", detached_inside, "att/output"),
    ],
)
def test_a_fault_of_the_backward_pass_is_found_by_the_cotangents(target, function, where, row):
    divergence = located(row("block_gpt2"), replaced("block_gpt2", target, function))
    assert divergence.first is None
    assert divergence.locally_wrong == ()
    assert divergence.backward.name == where
    assert str(divergence).startswith(
        f"{where}: torch has no gradient at its output, as of stop_gradient or detach, flax has"
        f" one\nall outputs agree; the backward pass differs after {where}, "
    )


def residual_dropped_before_the_norm(block, x, **options):
    attended = block.att.attend(x, **options)
    x = block.norm1(attended.output)
    return replace(attended, output=block.norm2(x + block.ff(x)))


def test_a_dropped_residual_is_an_error_of_the_container(row):
    # The norms of both sides are given PyTorch's sum, and only that differs.
    known = replaced("block_bert", "", residual_dropped_before_the_norm)
    divergence = located(row("block_bert"), known)
    assert names(divergence.locally_wrong) == ["."]
    assert "the whole module, input of norm1: flax has input + att, torch has att alone" in str(
        divergence
    )


BLOCK = {"d_model": 6, "context_length": 9, "dropout": 0.0, "num_heads": 2}


class FlaxStack(nnx.Module):
    def __init__(self, depth):
        numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        self.blocks = nnx.List(
            [build(flax_attn, "TransformerBlock", numerics=numerics, **BLOCK) for _ in range(depth)]
        )

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class TorchStack(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            [build(torch_ref, "TransformerBlock", **BLOCK) for _ in range(depth)]
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_two_faults_in_a_stack_are_found_and_named(paired):
    pair = paired(FlaxStack(4), TorchStack(4), (3, 5, 6))
    pair.torch.module.blocks[1].norm1.eps = 1e-6
    pair.torch.module.blocks[2].ff.layers[1] = torch.nn.GELU()
    divergence = localise(pair)
    assert divergence.first.name == "blocks.1.norm1"
    assert names(divergence.locally_wrong) == ["blocks.1.norm1", "blocks.2.ff"]
    norm, gelu = divergence.causes
    assert norm == "blocks.1.norm1: flax has eps=1e-05, torch 1e-06"
    assert (
        gelu
        == "blocks.2.ff, input of layers.2: flax has tanh GELU of layers.0, torch has exact GELU of"
        " layers.0"
    )
    inherited = [node for node in divergence.nodes if node.differs and not node.locally_wrong]
    assert "blocks.3" in names(inherited)
    assert all(node.local_error <= tolerance.FORWARD for node in inherited)


@pytest.mark.parametrize(
    "name", ["multi_head_gqa", "block_gpt2", "block_bert", "multi_head_wrapper"]
)
def test_a_healthy_pair_has_no_node_that_is_wrong(name, row):
    divergence = localise(row(name))
    assert divergence.first is None
    assert divergence.locally_wrong == ()
    assert divergence.backward is None
    assert divergence.causes == ()
    assert all(node.local_error <= tolerance.FORWARD for node in divergence.nodes)
    assert all(node.backward_error <= tolerance.GRADIENT for node in divergence.nodes)
    assert str(divergence) == f"in float64 none of {len(divergence.nodes)} nodes differs"


def test_a_recording_of_an_earlier_run_cannot_be_located(row):
    pair = copy(row("layer_norm"))
    pair.torch = SimpleNamespace(framework="torch")
    with pytest.raises(NotRun, match="one of these is the recording of an earlier run"):
        localise(pair)


def test_a_divergence_is_data(row):
    divergence = located(row("multi_head_gqa"), KNOWN["tiled_heads"])
    data = json.loads(json.dumps(divergence.as_dict(), allow_nan=False))
    assert data["first"] == "./scores"
    assert data["locally_wrong"] == ["./scores", "./context"]
    assert data["backward"] is None
    scores = next(node for node in data["nodes"] if node["name"] == "./scores")
    assert scores["locally_wrong"]
    assert scores["shape"] == [3, 4, 5, 5]
    assert scores["backward_error"] is None
    assert data["causes"] == list(divergence.causes)

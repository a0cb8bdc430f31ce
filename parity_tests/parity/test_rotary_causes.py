"""Causes in rotary positions: bases, scalings, pairs, tables that end.

They are measured in heads and in scores.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from flax_attn.parity import compare
from flax_attn.parity.trace.causes import causes_of
from flax_attn.parity.trace.hooks import TABLE
from flax_attn.parity.trace.rotary import Rotation
from flax_attn.parity.trace.substitute import Evidence, Target
from torch_ref import LinearScaling, Llama3Scaling, RoPE

B, T, N, H = 2, 7, 4, 8
RANDOM = np.random.default_rng(0)
X, Y = (torch.tensor(RANDOM.normal(size=(B, T, N * H))) for _ in range(2))
ROPE = RoPE()
HALVES = "half-split, base 10000"


class Ended:
    """Look positions up in a table; as in JAX, positions beyond its end get the last row."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, x):
        return ROPE(x, torch.arange(x.shape[1]).clamp(max=self.rows - 1))


def heads(x, n=N):
    return x.unflatten(-1, (n, H))


def scored(rope, causal=True, query=X, key=Y, scale=H**-0.5):
    q, k = (rope(heads(x)) if rope else heads(x) for x in (query, key))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * scale
    return (
        scores.masked_fill(~torch.ones(T, T, dtype=bool).tril(), -torch.inf) if causal else scores
    )


def said(step, theirs, ours, sources, lower=None):
    target = Target("output", ours.numpy(), theirs.numpy())
    evidence = Evidence(
        f"att/{step}", "step", [target], {name: x.numpy() for name, x in sources.items()}
    )
    return causes_of(evidence, {}, lower)


ROPES = [
    (RoPE(500000.0), "half-split, base 500000"),
    (RoPE(500.0), "half-split, base 500"),
    (RoPE(interleaved=True), "interleaved, base 10000"),
    (RoPE(scaling=LinearScaling(2.0)), f"{HALVES}, positions divided by 2"),
    (RoPE(width=4), f"{HALVES}, the first 4 features of each head"),
    (RoPE(width=4, interleaved=True), "interleaved, base 10000, the first 4 features of each head"),
    (
        RoPE(scaling=Llama3Scaling(8.0, original_context_length=2048)),
        f"{HALVES}, slow pairs divided by up to 8 as by llama3 scaling or YaRN",
    ),
    (Ended(4), f"{HALVES}, positions that end at 3, as those of a table of 4 rows"),
]


@pytest.mark.parametrize(("rope", "name"), ROPES, ids=[name for _, name in ROPES])
def test_heads(rope, name):
    lines = said("query", rope(heads(X)), ROPE(heads(X)), {"q": X})
    assert lines == [f"att/query: flax has RoPE of q, {HALVES}, torch has RoPE of q, {name}"]


@pytest.mark.parametrize(("rope", "name"), ROPES, ids=[name for _, name in ROPES])
@pytest.mark.parametrize("causal", [True, False])
def test_scores_alone(rope, name, causal):
    theirs, ours = scored(rope, causal), scored(ROPE, causal)
    lines = said("masked", theirs, ours, {"input": torch.ones(B, T, 3), "q": X, "k": Y})
    text = "q . k / sqrt(h), RoPE "
    assert lines == [f"att/masked: flax has {text}{HALVES}, torch has {text}{name}"]


def test_scores_of_turned_heads_and_of_projections_are_told_in_the_same_words():
    sources = {
        "query": ROPE(heads(X)),
        "key": ROPE(heads(Y)),
        "q": X,
        "k": Y,
    }  # as PyTorch's own attention takes them
    lines = said("masked", scored(ROPE), scored(RoPE(500.0)), sources)
    assert lines == [
        "att/masked: flax has q . k / sqrt(h), RoPE half-split, base 500, torch has q . k /"
        f" sqrt(h), RoPE {HALVES}"
    ]


def test_positions_on_one_side_alone():
    lines = said("masked", scored(ROPE), scored(None), {"q": X, "k": Y})
    assert lines == [
        f"att/masked: flax has q . k / sqrt(h), torch has q . k / sqrt(h), RoPE {HALVES}"
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rope", [RoPE(500.0), RoPE(interleaved=True)], ids=["base", "pairs"])
@pytest.mark.parametrize("alone", ["queries", "keys"])
def test_queries_or_keys_alone(alone, rope, causal):
    q, k = heads(X), heads(Y)
    q, k = (rope(q), k) if alone == "queries" else (q, rope(k))
    ours = scored(None, causal, q.flatten(2), k.flatten(2))
    kind, base = ("interleaved", 10000) if rope.interleaved else ("half-split", 500)
    assert said("masked", scored(ROPE, causal), ours, {"q": X, "k": Y}) == [
        f"att/masked: flax has q . k / sqrt(h), RoPE {kind}, base {base}, of {alone} alone, "
        f"torch has q . k / sqrt(h), RoPE {HALVES}"
    ]


@pytest.mark.parametrize("axes", ["b t h", "b t n h", "b n t h"])
def test_what_a_module_of_rotary_positions_returns(axes):
    given = {"b t h": heads(X)[:, :, :1], "b t n h": heads(X), "b n t h": heads(X)}[axes]

    def as_given(x):
        return {"b t h": x[:, :, 0], "b t n h": x, "b n t h": x.transpose(1, 2)}[axes].numpy()

    target = Target("output", as_given(RoPE(500.0)(given)), as_given(ROPE(given)))
    lines = causes_of(Evidence("rotary", "module", [target], {"input": as_given(given)}), {})
    text = "RoPE of input, half-split, base"
    assert lines == [f"rotary: flax has {text} 500, torch has {text} 10000"]


def test_query_and_key_exchanged_is_a_cause():
    lines = said("masked", scored(ROPE), scored(ROPE, query=Y, key=X), {"q": X, "k": Y})
    assert lines == [
        f"att/masked: flax has k . q / sqrt(h), RoPE {HALVES}, torch has q . k / sqrt(h), RoPE"
        f" {HALVES}"
    ]


def test_grouped_heads_and_frequencies_without_a_base():
    frequencies, key = np.array([0.9, 0.7, 0.2, 0.1]), Y[..., : 2 * H]
    repeated = heads(key, 2).repeat_interleave(2, dim=2)
    rotation = Rotation(frequencies, False, H, H, factor=H**-0.5)
    theirs = rotation.factor * torch.tensor(rotation.scores(heads(X).numpy(), repeated.numpy()))
    ours = torch.einsum("btnh,bsnh->bnts", heads(X), repeated) * H**-0.5
    assert said("scores", theirs, ours, {"q": X, "k": key}) == [
        "att/scores: flax has q . k / sqrt(h), "
        "torch has q . k / sqrt(h), RoPE half-split, frequencies 0.9, 0.7, 0.2, 0.1"
    ]


def test_few_scores_are_tried_with_known_bases():
    theirs, ours = (scored(RoPE(base))[:1, :1, :4, :4] for base in (10000.0, 500000.0))
    q, k = (x[:1, :4, :H] for x in (X, Y))
    text = "q . k / sqrt(h), RoPE half-split, base "
    assert said("masked", theirs, ours, {"q": q, "k": k}) == [
        f"att/masked: flax has {text}500000, torch has {text}10000"
    ]


def test_no_rotation_is_named_where_there_is_none():
    noise = torch.tensor(RANDOM.normal(size=(B, N, T, T)))
    assert said("scores", noise, scored(ROPE, causal=False), {"q": X, "k": Y}) == [
        f"att/scores: flax has q . k / sqrt(h), RoPE {HALVES}, torch has none of the known formulas"
    ]


# Float32: what computes in it is known by its formulas up to its rounding, unless that is the
# difference.


def in_float32(rope):
    scores = scored(rope)
    return scores.float().double()


def test_a_formula_is_known_up_to_the_dtype_that_a_side_computes_in():
    lower = {"flax": {"att": {"cos and sin (rotary angles)": "float32"}}, "torch": {}}
    sources, text = {"q": X, "k": Y}, "q . k / sqrt(h), RoPE half-split, base "
    assert said("masked", scored(ROPE), in_float32(RoPE(500.0)), sources, lower) == [
        f"att/masked: flax has {text}500, torch has {text}10000"
    ]
    assert said("masked", scored(ROPE), in_float32(RoPE(500.0)), sources) == [
        f"att/masked: torch has {text}10000, flax has none of the known formulas"
    ]
    assert said("masked", scored(ROPE), in_float32(ROPE), sources, lower) == [
        "att: flax has cos and sin (rotary angles) in float32, torch in float64"
    ]


ANGLES = np.outer(np.arange(5), 10000.0 ** (-np.arange(3) / 3))[None]


class FlaxTable(nnx.Module):
    def __init__(self, dtype):
        self.fc = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.dtype = dtype

    def __call__(self, x):
        return self.fc(x) * jnp.asarray(np.cos(ANGLES).astype(self.dtype)).astype(jnp.float64)


class TorchTable(torch.nn.Module):
    def __init__(self, dtype, factor=1.0):
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)
        self.register_buffer("table", factor * torch.tensor(np.cos(ANGLES)).to(dtype))

    def forward(self, x):
        return self.fc(x) * self.table


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("float32", torch.float64, f"flax has {TABLE} in float32, torch in float64"),
        ("float64", torch.float32, f"flax has {TABLE} in float64, torch in float32"),
    ],
)
def test_a_table_in_float32_is_a_cause(ours, theirs, said):
    report = compare(FlaxTable(ours), TorchTable(theirs), [(2, 5, 3)], checks=["forward"])
    assert 1e-9 < report.check("forward").error < 1e-7
    assert report.causes == [f"the whole module: {said}"]


def test_a_table_in_float32_does_not_explain_more_than_its_rounding():
    report = compare(
        FlaxTable("float64"), TorchTable(torch.float32, 1.001), [(2, 5, 3)], checks=["forward"]
    )
    assert not report.passed
    assert report.causes == []


def test_parameters_in_float32_are_no_tables():
    theirs = torch.nn.Linear(3, 3)
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(ANGLES[0, :3], dtype=torch.float32))

    class Shifted(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) + 1e-9

    report = compare(
        Shifted(3, 3, rngs=nnx.Rngs(0)), theirs, [(2, 3)], redraw=False, checks=["forward"]
    )
    assert not report.passed
    assert not any("table" in cause for cause in report.causes)


def test_the_formulas_are_those_of_the_reference():
    rotation = Rotation(10000.0 ** (-np.arange(4) / 4), False, H, H)
    assert np.allclose(
        rotation.heads(heads(X).numpy()), torch_ref.RoPE()(heads(X)).numpy(), rtol=0, atol=1e-13
    )

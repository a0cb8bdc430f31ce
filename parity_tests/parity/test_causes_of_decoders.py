"""Causes in what a decoder adds to its layers: embedding scales, tied logits, tables of angles."""

import numpy as np
import pytest
import torch

from flax_attn.parity.trace.causes import causes_of
from flax_attn.parity.trace.substitute import Evidence, Target

B, T, D, V = 2, 7, 8, 11
RANDOM = np.random.default_rng(0)
EMB, TABLE, NORM = (
    torch.tensor(RANDOM.normal(size=size)) for size in ((B, T, D), (V, D), (B, T, D))
)


def said(theirs, ours, sources=None, label="output"):
    target = Target(label, ours.numpy(), theirs.numpy())
    found = Evidence(
        ".", "module", [target], {name: x.numpy() for name, x in (sources or {}).items()}
    )
    return [line.partition(": ")[2] for line in causes_of(found, {"emb.weight": TABLE.numpy()})]


@pytest.mark.parametrize(
    ("factor", "text"), [(1, "emb"), (D**0.5, "emb * sqrt(8)"), (0.3, "emb * 0.3")]
)
def test_the_scale_of_embeddings(factor, text):
    theirs, own = (EMB * 1.7, "emb * 1.7"), (EMB * factor, text)
    assert said(theirs[0], own[0], {"emb": EMB}) == [f"flax has {own[1]}, torch has {theirs[1]}"]


def test_positions_that_one_side_does_not_add():
    positions = NORM[0]
    lines = said(EMB + positions, EMB, {"emb": EMB, "positions": positions})
    assert lines == ["flax has emb alone, torch has emb + positions"]


def capped(cap, x=NORM):
    logits = x @ TABLE.T
    return cap * (logits / cap).tanh() if cap else logits


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        (capped(None), "norm @ emb.weight.T"),
        (capped(50.0), "norm @ emb.weight.T, soft-capped at 50"),
        (capped(2.5), "norm @ emb.weight.T, soft-capped at 2.5"),
        (capped(30.0, EMB), "emb @ emb.weight.T, soft-capped at 30"),
    ],
)
def test_tied_logits(ours, text):
    lines = said(capped(30.0), ours, {"emb": EMB, "norm": NORM})
    assert lines == [f"flax has {text}, torch has norm @ emb.weight.T, soft-capped at 30"]


def test_another_error_of_logits_is_not_called_a_cap():
    lines = said(capped(30.0), capped(30.0) / 30, {"norm": NORM})
    assert lines == [
        "torch has norm @ emb.weight.T, soft-capped at 30, flax has none of the known formulas"
    ]


def angles(base=10000.0, start=0, layout="halves", function=torch.cos):
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    found = (start + torch.arange(T, dtype=torch.float64))[:, None] * frequencies
    wide = {
        "halves": found.repeat(1, 2),
        "neighbours": found.repeat_interleave(2, 1),
        "one column a pair": found,
    }
    return function(wide[layout])


def named(base=10000, start=0, layout="halves", function="cos"):
    return f"{function} of rotary angles of base {base}, {layout}, from position {start}"


@pytest.mark.parametrize("function", ["cos", "sin"])
@pytest.mark.parametrize(
    "changes",
    [
        {"base": 500000},
        {"base": 50},
        {"start": 1},
        {"layout": "neighbours"},
        {"layout": "neighbours", "start": 2},
    ],
    ids=str,
)
def test_tables_of_angles(changes, function):
    ours, theirs = (
        angles(function=getattr(torch, function), **changes),
        angles(function=getattr(torch, function)),
    )
    texts = [named(function=function, **changes), named(function=function)]
    assert said(theirs[None], ours[None], label="input 2 of att") == [
        f"flax has {texts[0]}, torch has {texts[1]}"
    ]


def test_a_table_with_one_column_for_a_pair():
    theirs, ours = (angles(base, layout="one column a pair") for base in (10000.0, 20000.0))
    texts = [named(base, layout="one column a pair") for base in (20000, 10000)]
    assert said(theirs, ours) == [f"flax has {texts[0]}, torch has {texts[1]}"]


def test_another_error_of_a_table_is_not_called_a_base():
    lines = said(angles(), angles() * 1.001)
    assert lines == [f"torch has {named()}, flax has none of the known formulas"]

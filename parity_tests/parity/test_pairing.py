"""Submodules of both sides get one name: by the weights that they hold, else by their paths."""

import dataclasses

import pytest

from flax_attn.convert import Rule
from flax_attn.convert.planning import plan
from flax_attn.convert.rules import Layout
from flax_attn.parity.trace.pairing import pair_paths


def renamed(entry):
    return dataclasses.replace(entry, theirs=entry.theirs.replace("att.", "attn."))


def test_projections_that_are_fused_pair_at_their_parent_alone():
    rules = (
        Rule(("W_query.kernel", "W_key.kernel"), "c_attn.weight", axis=1),
        Rule(("out_proj.kernel",), "c_proj.weight"),
    )
    shapes = {"att.W_query": (3, 4), "att.W_key": (3, 4), "att.out_proj": (4, 3)}
    kernels = {f"{path}.kernel": shape for path, shape in shapes.items()}
    entries = [renamed(entry) for entry in plan(kernels, Layout(rules))]
    # W_query and W_key have one counterpart between them, which is no name for either.
    pairs = {".": ".", "att": "attn", "att.out_proj": "attn.c_proj"}
    theirs = ["attn", "attn.c_attn", "attn.c_proj"]
    assert pair_paths(entries, ["att", *shapes], theirs) == pairs


HELD = plan(
    {"a.fc.kernel": (3, 4), "b.kernel": (4, 5)},
    Layout((Rule(("a.fc.kernel",), "x.lin.weight"), Rule(("b.kernel",), "y.weight"))),
)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        # Each within the other.
        (["a", "a.fc"], ["x", "x.lin"], {"a": "x", "a.fc": "x.lin"}),
        # From the inside out.
        (["a.fc"], ["x", "x.lin"], {"a.fc": "x.lin"}),
        # No counterpart above, hence no name.
        (["a.fc", "a.act"], ["x.lin", "x.act"], {"a.fc": "x.lin"}),
        (
            ["a", "a.fc", "a.act"],
            ["x", "x.lin", "x.act"],
            {"a": "x", "a.fc": "x.lin", "a.act": "x.act"},
        ),
    ],
)
def test_modules_pair_by_the_weights_they_hold(ours, theirs, expected):
    assert pair_paths(HELD, ours, theirs) == {".": ".", **expected}


def test_without_weights_modules_pair_by_equal_paths():
    assert pair_paths([], ["act", "drop"], ["act", "norm"]) == {".": ".", "act": "act"}

"""Submodules of both sides get one name: by the weights that they hold, else by their paths."""

import dataclasses

import pytest

from flax_attn.convert import Rule
from flax_attn.convert.planning import plan
from flax_attn.convert.rules import Layout
from flax_attn.parity.trace.pairing import pair_paths


def test_projections_that_are_fused_pair_at_their_parent_alone():
    shapes = {"att.W_query": (3, 4), "att.W_key": (3, 4), "att.out_proj": (4, 3)}
    rules = (
        Rule(("W_query.kernel", "W_key.kernel"), "c_attn.weight", axis=1),
        Rule(("out_proj.kernel",), "c_proj.weight"),
    )
    entries = [
        dataclasses.replace(entry, theirs=entry.theirs.replace("att.", "attn."))
        for entry in plan(
            {f"{path}.kernel": shape for path, shape in shapes.items()}, Layout(rules)
        )
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

"""A report as JSON follows the schema that stands in the wheel."""

import json
from dataclasses import replace

import jsonschema
import pytest
import torch
from flax import nnx
from rich.console import Console

from flax_attn.convert import Layout, Rule
from flax_attn.parity import CHECKS, Recipe, compare
from flax_attn.parity.check import Check
from flax_attn.parity.report import console, document
from flax_attn.parity.report.state import next_steps
from flax_attn.parity.trace.difference import Difference

# Where it differs is not searched, which these tests do not ask for.
LINEAR = {"inputs": [(4, 5, 3)], "locate": False}


def validated(content):
    """Return a document as it is read again, after it was validated."""
    content = json.loads(document.text(content))
    kind = json.loads(document.SCHEMA.read_text())
    # Of one kind, whose errors say more than that none of several fits.
    kind |= {"$ref": f"#/$defs/{content['kind']}", "oneOf": [{}]}
    jsonschema.validate(content, kind, jsonschema.Draft202012Validator)
    return content


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(json.loads(document.SCHEMA.read_text()))


@pytest.mark.parametrize("name", ["equal", "differing", "unrun"])
def test_reports_follow_the_schema(name, request):
    report = request.getfixturevalue(name)
    found = validated(document.document(report))
    state = {"equal": "equal", "differing": "different", "unrun": "not compared"}[name]
    assert found["state"] == state
    assert found["request"] is None


def test_a_table_of_reports_follows_the_schema(equal, differing):
    found = validated(document.table([equal, differing]))
    assert [each["state"] for each in found["variants"]] == ["equal", "different"]
    assert not found["passed"]


def test_the_result_of_a_check_is_one_of_four(equal, differing):
    raised = Check("second", 0.0, 0.0, nothing="the check raised KeyError: 'x'")
    checks = [*differing.checks, raised]
    found = validated(document.document(replace(equal, checks=checks)))
    results = {check["name"]: check["result"] for check in found["checks"]}
    assert results == {
        "shapes": "holds",
        "forward": "fails",
        "gradients": "fails",
        "dropout": "does not apply",
        "cache = full": "nothing compared",
        "second": "nothing compared",
    }


def test_another_key_does_not_follow_the_schema(equal):
    with pytest.raises(jsonschema.ValidationError, match="'more' was unexpected"):
        validated(document.document(equal) | {"more": 1})


def test_the_next_step_is_the_first_cause(differing, equal):
    assert next_steps(equal) == []
    first, *_ = next_steps(differing)
    assert first == f"mend this first, and compare again: {differing.causes[0]}"
    assert first.startswith("mend this first, and compare again: att (also <b>a</b>")
    assert first.endswith("): torch multiplies by 0.5, flax does not")
    # Without a difference the first check that fails says where to look.
    unlocated = replace(differing, difference=None)
    located, *_ = next_steps(unlocated)
    assert "in the place that no node shows: forward: error 0.0003" in located
    # Where the two agree in float64 no place is named: it may be rounding.
    agreeing = replace(differing, difference=Difference())
    alone, *_ = next_steps(agreeing)
    assert alone.startswith("look at what this check alone shows, as every operation agrees")
    assert alone.endswith(located.partition("shows: ")[2])


def linear(**options):
    ours, theirs = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2)
    return compare(ours, theirs, **LINEAR, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checks": ["shapes"]}, "1 of {n} checks asked for: shapes"),
        ({"layout": None}, "layout=None: weights are neither drawn nor shown to be the same"),
        ({"redraw": False}, "redraw=False: weights that are 0 or 1 may hide a difference"),
        ({"recipe": Recipe(steps=3)}, "training takes 3 steps instead of 100"),
    ],
)
def test_what_the_caller_loosens_stands_in_the_first_line(options, words):
    # Named twice, a check still counts once.
    options = {"checks": ["shapes", "shapes"], **options}
    report = linear(**options)
    words = words.format(n=len(CHECKS))
    assert words in report.loosened
    for text in (str(report), report.explain()):
        verdict, _, _ = text.partition("All ")
        assert words in " ".join(verdict.split())
    content = validated(document.document(report))
    assert words in content["loosened"]


def test_what_a_layout_leaves_out_is_said():
    kernel = Layout((Rule(("kernel",), "weight", "i o -> o i"),), ignored="bias")
    ours = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
    report = compare(ours, torch.nn.Linear(3, 2), layout=kernel, checks=["shapes"], **LINEAR)
    assert report.loosened[1:] == ("the layout leaves out bias",)


def test_nothing_is_loosened_where_every_check_is_asked_for(equal):
    assert equal.loosened == ()
    assert equal.weaker == ""


def test_a_short_report_has_at_most_sixty_lines_and_the_verdict_first(differing):
    # 40 times as many checks, and notes of several lines each.
    names = [f"{check.name} {i}" for check in differing.checks for i in range(40)]
    repeated = [check for check in differing.checks for _ in range(40)]
    checks = [replace(check, name=name) for check, name in zip(repeated, names, strict=True)]
    notes = ["a note " * 60] * 9
    long = replace(differing, checks=checks, notes=notes)
    wide = Console(width=110)
    shown = console.short(long, wide).splitlines()
    assert len(shown) == 60
    assert shown[0].endswith(": DIFFERENT")
    assert shown[-1].endswith(" more lines: --full shows all")
    assert len(console.short(differing, wide).splitlines()) < 60

"""`flax-attn mutants`: the table of edits, and its exit codes."""

import sys

import pytest

from flax_attn.cli import main

SIDES = """
import jax.numpy as jnp
import torch


def flax_side():
    return lambda x: jnp.tanh(x) * 3


def torch_side():
    return lambda x: torch.tanh(x) * 3


def other_side():
    return lambda x: torch.tanh(x) * 4
"""


@pytest.fixture
def sides(tmp_path, monkeypatch):
    """The name of a module with functions for both sides."""
    (tmp_path / "sides_of_mutants.py").write_text(SIDES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "sides_of_mutants"
    sys.modules.pop("sides_of_mutants", None)


def call(sides, theirs, *more):
    targets = [f"{sides}:flax_side", f"{sides}:{theirs}"]
    return main(["mutants", *targets, "--input", "2,3", "--count", "8", *more])


def test_all_edits_are_detected(sides, capsys):
    assert call(sides, "torch_side", "--check", "forward", "--check", "gradients") == 0
    shown = capsys.readouterr().out
    assert "sides_of_mutants.py:7" in shown
    assert "8 of 8 edits are detected (forward" in shown


def test_an_edit_that_no_check_detects_exits_with_1(sides, capsys):
    assert call(sides, "torch_side", "--check", "shapes") == 1
    shown = capsys.readouterr().out
    assert "NO CHECK" in shown
    assert "0 of 8 edits are detected" in shown


def test_modules_that_differ_have_no_mutants(sides, capsys):
    assert call(sides, "other_side", "--check", "forward") == 1
    assert "the two sides differ" in capsys.readouterr().err


def test_bad_targets_are_bad_usage(sides):
    with pytest.raises(SystemExit) as error:
        call(sides, "torch_side", "--count", "0")
    assert error.value.code == 64
    assert call(sides, "no_side") == 64

"""The examples that train on both sides compare them, find a difference, and show the result."""

import importlib
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flax_attn.parity import Recipe, tolerance

pytestmark = pytest.mark.usefixtures("dtype_promotion")
EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = Recipe(
    steps=3, learning_rate=1e-2, weight_decay=0.1, clip_norm=0.1, schedule="cosine", warmup=1
)
FAULTS = {"weight_decay": 0.11, "eps": 1e-7, "clip_norm": None}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """As Python has it when it runs a file in that folder."""
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a file for some steps, as from the command line; return its names and the picture."""

    def run(name, *arguments):
        picture = tmp_path / "picture.png"
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--out", str(picture)])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__"), picture

    return run


@pytest.fixture
def tiny():
    return importlib.import_module("tiny_model")


@pytest.fixture
def small(tiny):
    return tiny.Sizes(vocab_size=11, context_length=6, d_model=8, num_heads=2, num_layers=1)


@pytest.fixture
def batches(tiny, small):
    random = np.random.default_rng(0)
    tokens = random.integers(0, small.vocab_size, (RECIPE.steps, 5, small.context_length + 1))
    keys = random.integers(0, 2**32, (RECIPE.steps, 2))
    # Fewer targets than tokens, as in the copy task.
    inputs, targets = tokens[:, :, :-1], tokens[:, :, -4:]
    return list(map(tiny.Batch, inputs, targets, keys))


def assert_drawn(panel, curves):
    """Assert that a panel shows these numbers under these labels."""
    drawn = {line.get_label(): line.get_ydata() for line in panel.lines}
    for label, numbers in curves.items():
        np.testing.assert_array_equal(drawn[label], numbers)


def assert_png(picture):
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def trajectory():
    return importlib.import_module("trajectory")


@pytest.fixture
def copy_task():
    return importlib.import_module("copy_task")


def test_trajectory(run, capsys):
    names, picture = run("trajectory.py", "--steps", "4")
    found = names["run"]
    assert found.loss.max() <= tolerance.TRAINING
    assert found.parameters.max() <= tolerance.TRAINING
    assert found.reference.shape == found.ours.shape == found.parameters.shape == (4,)
    # A loss that does not move would agree without any training.
    assert len(set(found.reference)) == 4
    printed = capsys.readouterr().out
    assert "4 steps, loss 4." in printed
    assert f"{found.parameters.max():.1e}" in printed
    assert_png(picture)
    losses, errors = names["plot"](found).axes
    assert_drawn(losses, {"JAX": found.ours, "PyTorch": found.reference})
    assert_drawn(errors, {"parameters: the largest of all": found.parameters})


@pytest.mark.parametrize("fault", FAULTS)
def test_trajectory_sees_a_recipe_that_differs(fault, trajectory, small, batches, monkeypatch):
    monkeypatch.setattr(trajectory, "characters", lambda *_: batches)
    changed = replace(RECIPE, **{fault: FAULTS[fault]})
    found = trajectory.train(RECIPE, changed, small)
    assert found.parameters[-1] > tolerance.TRAINING


def test_defaults_are_those_of_the_frameworks(trajectory):
    ours = trajectory.with_default_decay(RECIPE, trajectory.optax.adamw)
    theirs = trajectory.with_default_decay(RECIPE, torch.optim.AdamW)
    assert (ours.weight_decay, theirs.weight_decay) == (1e-4, 1e-2)
    assert replace(ours, weight_decay=RECIPE.weight_decay) == RECIPE


def test_text_becomes_the_characters_that_follow(trajectory, small):
    # In this text every character is followed by the next number.
    first, second = trajectory.characters("abcdefghijk", small, steps=2, b=3)
    for tokens, targets, key in (first, second):
        assert tokens.shape == targets.shape == (3, small.context_length)
        np.testing.assert_array_equal(targets, tokens + 1)
        assert key.shape == (2,)
    assert (first.key != second.key).any()


def losses_of(tiny, sizes, batches):
    """Return the losses of the PyTorch model, trained from the start."""
    _, model = tiny.twins(sizes)
    return [loss for loss, _ in tiny.train_torch(model, RECIPE, batches)]


def test_dropout_is_decided_by_the_key_of_the_batch(tiny, small, batches):
    dropping = replace(small, dropout=0.3)
    other_keys = [batch._replace(key=batch.key[::-1].copy()) for batch in batches]
    losses = losses_of(tiny, dropping, batches)
    assert losses == losses_of(tiny, dropping, batches)
    # The first loss comes before any update, so only dropout can change it.
    assert losses[0] != losses_of(tiny, dropping, other_keys)[0]


def test_copy_task(run, capsys):
    names, picture = run("copy_task.py", "--steps", "3")
    runs = names["runs"]
    assert runs.keys() == {1, 8}
    for found in runs.values():
        assert found.apart <= tolerance.TRAINING
        np.testing.assert_array_equal(*found.accuracies.T)
        assert found.losses.shape == found.accuracies.shape == (3, 2)
    # One head and eight heads are two models.
    assert runs[1].losses[0, 0] != runs[8].losses[0, 0]
    # After three steps no model has learned to copy.
    assert "never" in capsys.readouterr().out
    assert_png(picture)
    losses, accuracies = names["plot"](runs).axes
    assert_compared(losses, runs[1].losses, runs[8].losses)
    assert_compared(accuracies, runs[1].accuracies, runs[8].accuracies)


def assert_compared(panel, one_head, eight_heads):
    """Assert that a panel shows two of its four curves: the columns are JAX and PyTorch."""
    curves = {"1 head, JAX": one_head[:, 0], "8 heads, PyTorch": eight_heads[:, 1]}
    assert_drawn(panel, curves)


def test_copy_task_asks_for_what_stood_before_the_separator(copy_task):
    tokens, targets, _ = next(copy_task.sequences(steps=1, b=7))
    length = copy_task.LENGTH
    before, separator, after = np.split(tokens, [length, length + 1], axis=1)
    assert targets.shape == (7, length)
    np.testing.assert_array_equal(before, targets)
    assert (separator == copy_task.SYMBOLS).all()
    # Behind the separator the answer is fed in, one place late.
    np.testing.assert_array_equal(after, targets[:, :-1])


def test_copy_task_says_when_it_was_learned(copy_task):
    losses = np.array([[1.0, 1.0], [3.0, 2.0], [1.0, 1.0]])
    shares = np.array([[0.1, 0.9], [0.5, 0.9], [0.4, 0.9]])
    curves = copy_task.Curves(losses=losses, accuracies=shares)
    assert (curves.first(0.5), curves.first(0.6), curves.apart) == (2, None, 0.5)

"""The examples that train on both sides compare them, find a difference, and show the result."""

import importlib
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from flax_attn.parity import Recipe, tolerance

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = Recipe(
    steps=3, learning_rate=1e-2, weight_decay=0.1, clip_norm=0.1, schedule="cosine", warmup=1
)
FAULTS = {"weight_decay": 0.11, "eps": 1e-7, "clip_norm": None}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """As Python has it when it runs a file in that folder."""
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
        yield


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
    return [
        tiny.Batch(row[:, :-1], row[:, -4:], key) for row, key in zip(tokens, keys, strict=True)
    ]


def lines(panel):
    return {line.get_label(): np.asarray(line.get_ydata()) for line in panel.lines}


def test_trajectory(run, capsys):
    names, picture = run("trajectory.py", "--steps", "4")
    found = names["run"]
    assert found.loss.max() <= tolerance.TRAINING
    assert found.parameters.max() <= tolerance.TRAINING
    assert found.reference.shape == found.ours.shape == found.parameters.shape == (4,)
    assert len(set(found.reference)) == 4  # it moves
    printed = capsys.readouterr().out
    assert "4 steps, loss 4." in printed
    assert f"{found.parameters.max():.1e}" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    left, right = names["plot"](found).axes
    np.testing.assert_array_equal(lines(left)["JAX"], found.ours)
    np.testing.assert_array_equal(lines(left)["PyTorch"], found.reference)
    np.testing.assert_array_equal(lines(right)["parameters: the largest of all"], found.parameters)


@pytest.mark.parametrize("fault", FAULTS)
def test_trajectory_sees_a_recipe_that_differs(fault, small, batches, monkeypatch):
    trajectory = importlib.import_module("trajectory")
    monkeypatch.setattr(trajectory, "characters", lambda *_: batches)
    found = trajectory.train(RECIPE, replace(RECIPE, **{fault: FAULTS[fault]}), small)
    assert found.parameters[-1] > tolerance.TRAINING


def test_defaults_are_those_of_the_frameworks():
    trajectory = importlib.import_module("trajectory")
    ours = trajectory.with_default_decay(RECIPE, trajectory.optax.adamw)
    theirs = trajectory.with_default_decay(RECIPE, torch.optim.AdamW)
    assert (ours.weight_decay, theirs.weight_decay) == (1e-4, 1e-2)
    assert replace(ours, weight_decay=RECIPE.weight_decay) == RECIPE


def test_text_becomes_the_characters_that_follow(small):
    trajectory = importlib.import_module("trajectory")
    text = "abcdefghijk"
    batches = list(trajectory.characters(text, small, steps=2, b=3))
    for tokens, targets, key in batches:
        assert tokens.shape == targets.shape == (3, small.context_length)
        np.testing.assert_array_equal(targets, tokens + 1)
        assert key.shape == (2,)
    assert (batches[0].key != batches[1].key).any()


def test_dropout_is_decided_by_the_key_of_the_batch(tiny, small, batches):
    def losses(batches):
        return [
            loss
            for loss, _ in tiny.train_torch(
                tiny.twins(replace(small, dropout=0.3))[1], RECIPE, batches
            )
        ]

    other = [batch._replace(key=batch.key[::-1].copy()) for batch in batches]
    assert losses(batches) == losses(batches)
    assert losses(batches)[0] != losses(other)[0]


def test_copy_task(run, capsys):
    names, picture = run("copy_task.py", "--steps", "3")
    runs = names["runs"]
    assert runs.keys() == {1, 8}
    for found in runs.values():
        assert found.apart <= tolerance.TRAINING
        np.testing.assert_array_equal(*found.accuracies.T)
        assert found.losses.shape == found.accuracies.shape == (3, 2)
    assert runs[1].losses[0, 0] != runs[8].losses[0, 0]
    assert "never" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    for panel, kind in zip(names["plot"](runs).axes, ("losses", "accuracies"), strict=True):
        np.testing.assert_array_equal(lines(panel)["1 head, JAX"], getattr(runs[1], kind)[:, 0])
        np.testing.assert_array_equal(
            lines(panel)["8 heads, PyTorch"], getattr(runs[8], kind)[:, 1]
        )


def test_copy_task_asks_for_what_stood_before_the_separator():
    copy_task = importlib.import_module("copy_task")
    tokens, targets, _ = next(copy_task.sequences(steps=1, b=7))
    length = copy_task.LENGTH
    assert targets.shape == (7, length)
    np.testing.assert_array_equal(tokens[:, :length], targets)
    assert (tokens[:, length] == copy_task.SYMBOLS).all()
    np.testing.assert_array_equal(tokens[:, length + 1 :], targets[:, :-1])


def test_copy_task_says_when_it_was_learned():
    copy_task = importlib.import_module("copy_task")
    shares = np.array([[0.1, 0.9], [0.5, 0.9], [0.4, 0.9]])
    curves = copy_task.Curves(
        losses=np.array([[1.0, 1.0], [3.0, 2.0], [1.0, 1.0]]), accuracies=shares
    )
    assert (curves.first(0.5), curves.first(0.6), curves.apart) == (2, None, 0.5)

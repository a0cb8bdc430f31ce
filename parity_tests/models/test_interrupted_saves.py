"""What transformers loads from a folder if saving a model into it was interrupted."""

import itertools
import os
import shutil

import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from flax_attn import GPT2, GPT2Config
from parity_tests.models.folders import read_by_transformers


def build(d_model):
    return GPT2(GPT2Config(d_model, 2, 1, context_length=8, vocab_size=11), rngs=nnx.Rngs(d_model))


def loaded(folder):
    return read_by_transformers(AutoModelForCausalLM, folder)


def same(model, other):
    weights, others = model.state_dict(), other.state_dict()
    if model.config.n_embd != other.config.n_embd:
        return False
    return all(torch.equal(weights[name], others[name]) for name in others)


def until(operation, calls, n):
    """Return an operation that is interrupted in the nth call of several, and in all later ones."""

    def wrapped(*arguments, **options):
        if next(calls) >= n:
            raise KeyboardInterrupt
        return operation(*arguments, **options)

    return wrapped


def save_until(n, model, folder, size, patch):
    """Save a model until the nth operation on files, and return whether it came to an end."""
    calls = itertools.count(1)
    # Each of them changes what a reader finds.
    for name in ("replace", "link", "unlink"):
        patch.setattr(os, name, until(getattr(os, name), calls, n))
    # What it does after an error must not help: a process that is killed does nothing.
    try:
        model.save_pretrained(folder, max_shard_size=size)
    except KeyboardInterrupt:
        return False
    return True


def interrupted_everywhere(old, model, size, monkeypatch):
    """Yield the folders of an old model whose replacement was interrupted, and the last whole."""
    for n in itertools.count(1):
        folder = shutil.copytree(old, old.parent / f"after {n}")
        with monkeypatch.context() as patch:
            ended = save_until(n, model, folder, size, patch)
        yield folder
        if ended:
            return


@pytest.fixture
def folders(sizes, tmp_path):
    """Return the folders of an old model and of a new one, one of which has several files."""
    for d_model, size in zip((6, 8), sizes, strict=True):
        build(d_model).save_pretrained(tmp_path / str(d_model), max_shard_size=size)
    return tmp_path / "6", tmp_path / "8"


@pytest.mark.parametrize("sizes", [(10**9, 2000), (2000, 10**9)], ids=str)
def test_transformers_loads_the_old_model_or_the_new_one(sizes, folders, monkeypatch):
    """Interrupt a save before the nth file is replaced, linked or removed.

    Nothing is done after that.
    """
    interrupted = interrupted_everywhere(folders[0], build(8), sizes[1], monkeypatch)
    replaced = [is_new(folder, *folders) for folder in interrupted]
    # Once it is the new one it stays so.
    assert replaced == sorted(replaced)
    assert set(replaced) == {False, True}


def is_new(folder, before, after):
    """Return whether a folder holds the new model, and assert that it holds one of both."""
    found = loaded(folder)
    if same(found, loaded(after)):
        return True
    assert same(found, loaded(before))
    return False

"""What transformers loads from a folder if saving a model into it was interrupted."""

import itertools
import os
import shutil
from contextlib import suppress

import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from flax_attn import GPT2, GPT2Config


def build(d_model):
    return GPT2(GPT2Config(d_model, 2, 1, context_length=8, vocab_size=11), rngs=nnx.Rngs(d_model))


def loaded(folder):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.config.n_embd, model.state_dict()


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("sizes", [(10**9, 2000), (2000, 10**9)], ids=str)
def test_transformers_loads_the_old_model_or_the_new_one(sizes, tmp_path, monkeypatch):
    """Interrupt a save before the nth file is replaced, linked or removed.

    Nothing is done after that.
    """
    models, expected = [build(6), build(8)], []
    for model, size in zip(models, sizes, strict=True):
        model.save_pretrained(tmp_path / f"{size}", max_shard_size=size)
        expected.append(loaded(tmp_path / f"{size}"))
    seen = []
    for n in itertools.count(1):
        folder, calls = (
            shutil.copytree(tmp_path / f"{sizes[0]}", tmp_path / f"after {n}"),
            itertools.count(1),
        )

        def until(operation, calls=calls, n=n):
            def wrapped(*arguments, **options):
                if next(calls) >= n:
                    raise KeyboardInterrupt
                return operation(*arguments, **options)

            return wrapped

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for name in ("replace", "link", "unlink"):
                patch.setattr(os, name, until(getattr(os, name)))
            models[1].save_pretrained(folder, max_shard_size=sizes[1])
        found = loaded(folder)
        seen.append(next(i for i, model in enumerate(expected) if same(found, model)))
        if next(calls) < n:
            break
    assert seen == sorted(seen)
    assert set(seen) == {0, 1}

"""The example that trains a GPT-2 from the start: data, a run that fails and resumes, results."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import transformers
from flax import nnx

from flax_attn import GPT2, GPT2Config
from flax_attn.cli import main as flax_attn_main
from flax_attn.training import Checkpoints

FILE = str(Path(__file__).parents[2] / "examples" / "train_gpt2.py")
EXAMPLE = SimpleNamespace(**runpy.run_path(FILE))
pytestmark = pytest.mark.usefixtures("as_a_user_has_jax")
CONFIG = GPT2Config(
    d_model=16, num_heads=2, num_layers=1, context_length=64, vocab_size=320, dropout=0.0
)
STEPS = 12


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A little library, so that its documentation is read at once."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "test").mkdir()
    (folder / "test" / "left_out.py").write_text('"""Not part of the library."""')
    for i in range(150):
        text = (
            f'"""Module {i}."""\ndef f{i}(x):\n    """Return the number {i} of x."""\nclass A:\n   '
            ' """Shared."""\n'
        )
        (folder / f"m{i:03}.py").write_text(
            text + "    async def g(self):\n        '''Wait for x.'''\nraise OSError\n"
        )
    return folder


@pytest.fixture
def train(library, monkeypatch):
    jax.config.update(
        "jax_disable_most_optimizations", True
    )  # most of the time is taken by compiling
    monkeypatch.setitem(
        EXAMPLE.main.__globals__, "sysconfig", SimpleNamespace(get_path=lambda name: library)
    )
    return lambda folder, steps=STEPS: EXAMPLE.main(folder, steps, 4, CONFIG)


def weights(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def test_documents_are_read_once_and_not_run(library):
    texts = EXAMPLE.docstrings(library)
    assert texts[:4] == ["Module 0.", "Return the number 0 of x.", "Shared.", "Wait for x."]
    assert len(texts) == len(set(texts)) == 302


def test_rows_are_packed_documents_in_a_new_order():
    documents = [np.full(length, i) for i, length in enumerate((5, 3, 9, 1, 4, 8, 7, 2) * 4)]
    corpus = EXAMPLE.Corpus(documents, t=10)
    assert corpus.rows == 15
    for number in (0, 1):
        tokens, segments = corpus.epoch(number)
        assert tokens.shape == segments.shape == (15, 10)
        np.testing.assert_array_equal(np.diff(tokens, axis=1) != 0, np.diff(segments, axis=1) != 0)
    assert (corpus.epoch(0)[0] != corpus.epoch(1)[0]).any()


def test_batches_go_on_where_they_stopped():
    corpus = EXAMPLE.Corpus([np.arange(1000) % 17], t=10)
    batches = [next_batch for next_batch, _ in zip(corpus.batches(0), range(30), strict=False)]
    reads = [read for read, _, _ in batches]
    assert reads[:13] == [
        8,
        16,
        24,
        32,
        40,
        48,
        56,
        64,
        72,
        80,
        88,
        96,
        108,
    ]  # 4 rows are left of each 100
    for i in (4, 11, 12):
        for ours, theirs in zip(next(corpus.batches(reads[i])), batches[i + 1], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_too_little_text():
    corpus = EXAMPLE.Corpus([np.arange(79)], t=10)
    with pytest.raises(ValueError, match="8 rows of 10 tokens; got 7 in all"):
        next(corpus.batches(0))


def test_a_run_falls_goes_on_and_leaves_a_model(train, tmp_path, capsys):
    model, losses = train(tmp_path / "whole")
    assert len(losses) == STEPS
    assert np.mean(losses[-3:]) < losses[0] - 0.3
    printed = capsys.readouterr().out
    assert "step    12   loss " in printed
    assert printed.count("Return the") == 3

    with pytest.raises(InterruptedError):
        stopped_after(6, train, tmp_path / "broken")
    resumed, rest = train(tmp_path / "broken")
    assert "goes on after step 4" in capsys.readouterr().out
    assert rest == losses[4:]
    jax.tree.map(np.testing.assert_array_equal, weights(resumed), weights(model))

    folder = tmp_path / "whole" / "model"
    jax.tree.map(
        np.testing.assert_array_equal, weights(GPT2.from_pretrained(folder)), weights(model)
    )
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).config.n_embd == CONFIG.d_model
    arguments = [
        "generate",
        "--model",
        str(folder),
        "--prompt",
        "Return the",
        "--max-new-tokens",
        "5",
    ]
    arguments.append("--no-compile-cache")
    assert flax_attn_main(arguments) == 0
    assert capsys.readouterr().out.strip()


def stopped_after(step, train, folder):
    """Run, and break off in the call of a step."""
    names, calls = EXAMPLE.train.__globals__, []
    whole = names["train_step"]

    def broken(*arguments, **options):
        calls.append(whole(*arguments, **options))
        if len(calls) == step:
            raise InterruptedError
        return calls[-1]

    names["train_step"] = broken
    try:
        train(folder)
    finally:
        names["train_step"] = whole


def test_a_run_that_is_over_is_written_again(library, monkeypatch, tmp_path):
    """From the command line; a step of the whole model would take most of a minute to compile."""
    tokenizer = EXAMPLE.make_tokenizer(
        tmp_path / "tokenizer.json", EXAMPLE.docstrings(library), 2048
    )
    model = GPT2(replace(EXAMPLE.CONFIG, vocab_size=tokenizer.get_vocab_size()), rngs=nnx.Rngs(5))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, model, EXAMPLE.make_optimizer(model, 1), rows_read=8)
    monkeypatch.setattr("sysconfig.get_path", lambda name: library)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--folder", str(tmp_path), "--steps", "1"])
    runpy.run_path(FILE, run_name="__main__")
    jax.tree.map(
        np.testing.assert_array_equal,
        weights(GPT2.from_pretrained(tmp_path / "model")),
        weights(model),
    )
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (
        tmp_path / "tokenizer.json"
    ).read_bytes()

"""The example that trains a GPT-2 from the start: data, a run that fails and resumes, results."""

import runpy
import sys
from dataclasses import replace
from itertools import islice
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
# The line that raises shows whether the example runs what it reads.
MODULE = '''"""Module {number}."""
def f{number}(x):
    """Return the number {number} of x."""
class A:
    """Shared."""
    async def g(self):
        \'\'\'Wait for x.\'\'\'
raise OSError
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A little library, so that its documentation is read at once."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "test").mkdir()
    (folder / "test" / "left_out.py").write_text('"""Not part of the library."""')
    for number in range(150):
        (folder / f"m{number:03}.py").write_text(MODULE.format(number=number))
    return folder


@pytest.fixture
def train(library, monkeypatch):
    # Compiling takes most of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    sysconfig = SimpleNamespace(get_path=lambda name: library)
    monkeypatch.setitem(EXAMPLE.main.__globals__, "sysconfig", sysconfig)
    return lambda folder, steps=STEPS: EXAMPLE.main(folder, steps, 4, CONFIG)


def weights(model):
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree.map(np.asarray, state)


def assert_same_weights(found, expected):
    jax.tree.map(np.testing.assert_array_equal, weights(found), weights(expected))


def test_documents_are_read_once_and_not_run(library):
    texts = EXAMPLE.docstrings(library)
    assert texts[:4] == ["Module 0.", "Return the number 0 of x.", "Shared.", "Wait for x."]
    assert len(texts) == len(set(texts)) == 302


def test_rows_are_packed_documents_in_a_new_order():
    lengths = (5, 3, 9, 1, 4, 8, 7, 2) * 4
    # Every token is the number of its document.
    documents = [np.full(length, number) for number, length in enumerate(lengths)]
    corpus = EXAMPLE.Corpus(documents, t=10)
    assert corpus.rows == 15
    first, second = corpus.epoch(0), corpus.epoch(1)
    assert_documents_are_segments(*first)
    assert_documents_are_segments(*second)
    assert (first[0] != second[0]).any()


def assert_documents_are_segments(tokens, segments):
    assert tokens.shape == segments.shape == (15, 10)
    new_document, new_segment = np.diff(tokens) != 0, np.diff(segments) != 0
    np.testing.assert_array_equal(new_document, new_segment)


def test_batches_go_on_where_they_stopped():
    corpus = EXAMPLE.Corpus([np.arange(1000) % 17], t=10)
    batches = list(islice(corpus.batches(0), 30))
    reads = [read for read, _, _ in batches]
    # Twelve batches of 8 rows are in an epoch of 100 rows, and the 4 rows left are skipped.
    assert reads[:13] == [*range(8, 97, 8), 108]
    # Within an epoch, and on both sides of its end.
    for i in (4, 11, 12):
        resumed = next(corpus.batches(reads[i]))
        for found, expected in zip(resumed, batches[i + 1], strict=True):
            np.testing.assert_array_equal(found, expected)


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
    assert_same_weights(resumed, model)
    assert_opened_by_others(tmp_path / "whole" / "model", model)
    assert capsys.readouterr().out.strip()


def assert_opened_by_others(folder, model):
    """Assert that this package, transformers and the command line read the folder."""
    assert_same_weights(GPT2.from_pretrained(folder), model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.config.n_embd == CONFIG.d_model
    command = ["generate", "--max-new-tokens", "5", "--no-compile-cache"]
    assert flax_attn_main([*command, "--model", str(folder), "--prompt", "Return the"]) == 0


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
    file = tmp_path / "tokenizer.json"
    tokenizer = EXAMPLE.make_tokenizer(file, EXAMPLE.docstrings(library), 2048)
    config = replace(EXAMPLE.CONFIG, vocab_size=tokenizer.get_vocab_size())
    model = GPT2(config, rngs=nnx.Rngs(5))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, model, EXAMPLE.make_optimizer(model, 1), rows_read=8)
    monkeypatch.setattr("sysconfig.get_path", lambda name: library)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--folder", str(tmp_path), "--steps", "1"])
    runpy.run_path(FILE, run_name="__main__")
    written = tmp_path / "model"
    assert_same_weights(GPT2.from_pretrained(written), model)
    assert (written / "tokenizer.json").read_bytes() == file.read_bytes()

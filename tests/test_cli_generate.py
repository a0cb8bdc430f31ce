"""`flax-attn generate`: text on stdout, startup cost on stderr, a cache of compiled programs."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, from_pretrained
from flax_attn.cli import main
from flax_attn.cli.startup import Startup
from flax_attn.models.t5 import T5, T5Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    words = {word: i for i, word in enumerate(["a", "b", "c", "d", "e"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    GPT2(GPT2Config(6, 2, 1, context_length=8, vocab_size=5), rngs=nnx.Rngs(0)).save_pretrained(
        folder
    )
    return folder


def test_an_encoder_decoder_answers_the_prompt(folder, tmp_path, capsys):
    T5(T5Config(6, 8, 2, 4, 1, 1, vocab_size=5), rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    options = ["--model", str(tmp_path), "--max-new-tokens", "4", "--no-compile-cache"]
    texts = []
    for prompt in ("a b", "d e c a"):
        assert main(["generate", *options, "--prompt", prompt]) == 0
        texts.append(capsys.readouterr().out.split())
    assert all(len(text) == 4 for text in texts)
    assert from_pretrained(tmp_path).config.start_token == 0


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            ["--model", "nowhere"],
            "no folder nowhere. Nothing is downloaded here: pass a folder on this machine, such as",
        ),
        (
            ["--model", ".", "--max-new-tokens", "1.5"],
            "argument --max-new-tokens: must be an integer; got '1.5'",
        ),
        (["--model", ".", "--seed", "one"], "argument --seed: must be an integer; got 'one'"),
    ],
)
def test_bad_usage_is_said_before_anything_is_read(options, rule, capsys):
    try:
        code = main(["generate", "--prompt", "a", *options])
    except SystemExit as stopped:  # by the parser
        code = stopped.code
    assert code == 64
    assert rule in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[1]", "generation_config.json must hold an object, fields by name; got list. Copy"),
        ("null", "generation_config.json must hold an object, fields by name; got NoneType. Copy"),
        (
            '{"a": 1, "a": 2}',
            "generation_config.json is not JSON: the name 'a' is there twice. Copy",
        ),
        ("[" * 100_000, "generation_config.json is not JSON: it is nested too deeply. Copy"),
        (
            '{"eos_token_id": "b"}',
            'eos_token_id must be one integer or a list of them; got ["b"]. Correct it',
        ),
        (
            '{"eos_token_id": [true]}',
            "eos_token_id must be one integer or a list of them; got [true]. Correct it",
        ),
    ],
)
def test_a_stop_that_cannot_be_read_is_bad_usage(text, rule, folder, tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "generation_config.json").write_text(text)
    assert main(["generate", "--model", str(tmp_path), "--prompt", "a", "--no-compile-cache"]) == 64
    assert rule in capsys.readouterr().err


def test_a_stop_outside_the_vocabulary_ends_nothing(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 5]}')
    options = ["--model", str(tmp_path), "--max-new-tokens", "4", "--no-compile-cache"]
    assert main(["generate", *options, "--prompt", "a"]) == 0
    assert len(capsys.readouterr().out.split()) == 4


def unknown_words(tokenizer):
    """Return the text of a tokenizer that fails where a word is not known."""
    fields = json.loads(tokenizer)
    return json.dumps(fields | {"model": {**fields["model"], "unk_token": "z"}})


DAMAGED = {
    "not there": (lambda text: None, "a", "no tokenizer at"),
    "empty": (lambda text: "", "a", "is not a tokenizer that the tokenizers library reads: EOF"),
    "cut": (
        lambda text: text[:-20],
        "a",
        "is not a tokenizer that the tokenizers library reads: EOF",
    ),
    "another file": (
        lambda text: "[]",
        "a",
        "is not a tokenizer that the tokenizers library reads",
    ),
    "of unknown words": (
        unknown_words,
        "q",
        "does not take the prompt 'q': WordLevel error: Missing",
    ),
    "half a character": (lambda text: text, "\udc80", "--prompt must be text in UTF-8; "),
    "no words": (
        lambda text: text,
        "",
        "a prompt holds at least one token; prompt 0 is empty. Begin",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_tokenizer_that_gives_no_tokens_is_one_line(name, folder, tmp_path, capsys):
    change, prompt, rule = DAMAGED[name]
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    text = change(file.read_text())
    file.unlink()
    if text is not None:
        file.write_text(text)
    options = ["--model", str(tmp_path / "model"), "--no-compile-cache"]
    assert main(["generate", *options, "--prompt", prompt]) == 64
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert rule in said.err


def run(folder, cache, *arguments, **variables):
    """Return the two outputs of a process, and the programs in the user's cache after it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    command = [
        sys.executable,
        "-m",
        "flax_attn",
        "generate",
        "--model",
        str(folder),
        "--prompt",
        "a b",
    ]
    done = subprocess.run(
        [*command, "--max-new-tokens", "4", *arguments],
        env={**environment, "XDG_CACHE_HOME": str(cache), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr, sorted(cache.glob("flax-attn/programs/*/*-cache"))


def test_programs_are_kept_for_the_next_start(folder, tmp_path):
    text, errors, programs = run(folder, tmp_path)
    assert len(text.split()) == 4
    assert [line.split("  ")[0] for line in errors.splitlines()] == [
        "load",
        "compile",
        "first token",
        "rate",
    ]
    assert len(programs) == 5
    assert run(folder, tmp_path)[::2] == (text, programs)


def test_nothing_is_kept_if_it_is_switched_off(folder, tmp_path):
    assert not run(folder, tmp_path, "--no-compile-cache")[2]


def test_the_directory_of_jax_is_kept(folder, tmp_path):
    assert not run(folder, tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))[2]
    assert len(list(tmp_path.glob("own/*-cache"))) == 5


def test_the_rate_leaves_out_the_tokens_that_wait_for_compiling():
    startup = Startup()
    startup.load, startup.compile, startup.tokens = 0.5, 1.25, [3.0, 5.0, 5.5, 6.0]
    assert dict(startup.rows()) == {
        "load": "0.50 s",
        "compile": "1.25 s",
        "first token": "3.00 s after the start",
        "rate": "2.0 tokens/s",
    }
    startup.tokens = [3.0, 5.0]
    assert list(dict(startup.rows())) == ["load", "compile", "first token"]


def test_a_prompt_that_is_no_text_is_bad_usage(folder, capsys):
    arguments = ["generate", "--model", str(folder), "--no-compile-cache", "--prompt"]
    assert main([*arguments, "\udcff"]) == 64
    assert "--prompt must be text in UTF-8; " in capsys.readouterr().err


def test_matrices_in_8_bits(folder, capsys, monkeypatch):
    loaded = []

    def load(*arguments, **options):
        loaded.append(from_pretrained(*arguments, **options))
        return loaded[0]

    monkeypatch.setattr("flax_attn.models.from_pretrained", load)
    options = ["--max-new-tokens", "3", "--no-compile-cache", "--weights", "int8"]
    assert main(["generate", "--model", str(folder), "--prompt", "a b", *options]) == 0
    assert len(capsys.readouterr().out.split()) == 3
    assert type(loaded[0].out_head).__name__ == "QuantizedLinear"

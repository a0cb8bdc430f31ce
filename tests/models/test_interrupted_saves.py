"""A save over another model, interrupted at every step, leaves one of the two whole."""

import errno
import itertools
import json
import os
import shutil
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from flax_attn import GPT2, GPT2Config, convert
from flax_attn.convert.headers import find_weights, read_headers
from flax_attn.models.hugging_face import folder as saving

OPERATIONS = [
    (os, "replace"),
    (os, "rename"),
    (os, "unlink"),
    (os, "link"),
    (shutil, "copyfile"),
    (Path, "write_text"),
    (safetensors.numpy, "save_file"),
]
ONE, SHARDS = 10**9, 2000  # bytes of a file


MODELS = {"narrow": (6, 0), "wide": (8, 0), "other": (6, 1)}


@cache
def model(name):
    d_model, seed = MODELS[name]
    return GPT2(GPT2Config(d_model, 2, 1, context_length=8, vocab_size=11), rngs=nnx.Rngs(seed))


def contents(folder):
    """Return the config of a folder, and the bytes of its weights."""
    config = json.loads((folder / "config.json").read_text())
    entries = read_headers(find_weights(folder, config.pop("transformers_weights", None)))
    return config, {name: entry.read().tobytes() for name, entry in entries.items()}


def files(folder):
    return sorted(file.name for file in folder.iterdir())


class Interrupt:
    """Raise before or after the nth file operation; if fatal, also at all later ones."""

    def __init__(self, monkeypatch, n, error, behind, fatal):
        self.left, self.error, self.behind, self.fatal = n, error, behind, fatal
        for owner, name in OPERATIONS:
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name), name))

    def wrap(self, operation, name):
        def wrapped(*arguments, **options):
            self.left -= 1
            now = self.left == 0
            if (now and not self.behind) or (self.left < 0 and self.fatal):
                self.begin(name, arguments)
                raise self.error
            result = operation(*arguments, **options)
            if now:
                raise self.error
            return result

        return wrapped

    def begin(self, name, arguments):
        """Write half of a file."""
        places = {"write_text": 0, "save_file": 1, "copyfile": 1}
        if name in places:
            path = arguments[places[name]]
            if name == "copyfile" and path.exists():
                raise shutil.SameFileError  # it is a link to the file already
            with open(path, "w") as file:
                file.write("half")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each model, as one file and as shards, with a tokenizer."""
    made = {}
    for name, size in itertools.product(MODELS, (ONE, SHARDS)):
        made[name, size] = tmp_path_factory.mktemp(name)
        (made[name, size] / "tokenizer.json").write_text("kept")
        model(name).save_pretrained(made[name, size], max_shard_size=size)
    return made


CASES = [
    (ONE, ONE, "wide"),
    (ONE, SHARDS, "other"),
    (SHARDS, ONE, "other"),
    (SHARDS, SHARDS, "wide"),
]


@pytest.mark.parametrize("fatal", [True, False])
@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize(("size", "new_size", "new"), CASES)
def test_the_folder_holds_the_old_model_or_the_new_one(
    size, new_size, new, behind, fatal, folders, tmp_path, monkeypatch
):
    old, target = folders["narrow", size], folders[new, new_size]
    expected, seen = [contents(old), contents(target)], []
    if behind == fatal:
        monkeypatch.setattr(os, "link", refuse_links)
    for n in itertools.count(1):
        folder = shutil.copytree(old, tmp_path / str(n))
        error = KeyboardInterrupt() if n % 2 else OSError(errno.ENOSPC, "the disk is full")
        with monkeypatch.context() as patch:
            interrupt = Interrupt(patch, n, error, behind, fatal)
            with suppress(KeyboardInterrupt, OSError):
                model(new).save_pretrained(folder, max_shard_size=new_size)
        found = contents(folder)
        assert found in expected, n
        seen.append(expected.index(found))
        model(new).save_pretrained(folder, max_shard_size=new_size)
        assert contents(folder) == expected[1]
        assert files(folder) == files(target), n
        if interrupt.left > 0:
            break
    assert n > 8
    assert seen == sorted(seen)  # the old one until a moment, the new one from then on
    assert set(seen) == {0, 1}


def refuse_links(*arguments):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def test_a_save_that_fails_before_the_end_leaves_the_files_that_were_there(
    folders, tmp_path, monkeypatch
):
    folder = shutil.copytree(folders["narrow", ONE], tmp_path / "model")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(saving, "write_shards", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model("wide").save_pretrained(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_what_config_names_is_what_is_loaded(folders, tmp_path):
    folder = shutil.copytree(folders["narrow", ONE], tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "mine.safetensors")
    shutil.copy(folders["other", ONE] / "model.safetensors", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "transformers_weights": "mine.safetensors"})
    )
    found, wanted = (
        convert.state_dict(one) for one in (GPT2.from_pretrained(folder), model("narrow"))
    )
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "model.bin", "", 3])
def test_a_name_that_is_none_of_the_folder(name, folders):
    with pytest.raises(
        convert.ConversionError,
        match=r"transformers_weights in .* must be the name of a safetensors",
    ):
        find_weights(folders["narrow", ONE], name)


def test_a_name_of_a_file_that_is_not_there(folders):
    with pytest.raises(FileNotFoundError, match=r"it holds none of mine\.safetensors"):
        find_weights(folders["narrow", ONE], "mine.safetensors")


def test_a_save_leaves_the_files_of_a_living_one(folders, tmp_path, monkeypatch):
    """The second waits until the first has ended, and its model is the last one."""
    folder, write = shutil.copytree(folders["narrow", ONE], tmp_path / "model"), saving.write_shards
    reached, go_on = threading.Event(), threading.Event()

    def slow(*arguments):
        written = write(*arguments)
        reached.set()
        assert go_on.wait(60)
        return written

    monkeypatch.setattr(saving, "write_shards", slow)
    threads = [
        threading.Thread(target=model(name).save_pretrained, args=[folder])
        for name in ("wide", "other")
    ]
    threads[0].start()
    assert reached.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    assert contents(folder) == contents(folders["narrow", ONE])
    go_on.set()
    for thread in threads:
        thread.join()
    assert contents(folder) == contents(folders["other", ONE])
    assert files(folder) == files(folders["other", ONE])


def test_a_model_is_saved_into_the_folder_it_comes_from(folders, tmp_path):
    folder = shutil.copytree(folders["narrow", SHARDS], tmp_path / "model")
    before = contents(folder)
    for size in (ONE, SHARDS, ONE):
        GPT2.from_pretrained(folder).save_pretrained(folder, max_shard_size=size)
        assert contents(folder) == before


def test_a_folder_without_a_model_yet(folders, tmp_path, monkeypatch):
    """What is interrupted there loads as the new model, or is told to be none."""
    for n in itertools.count(1):
        with monkeypatch.context() as patch:
            interrupt = Interrupt(patch, n, KeyboardInterrupt(), True, True)
            with suppress(KeyboardInterrupt):
                model("wide").save_pretrained(tmp_path / str(n))
        if (tmp_path / str(n) / "config.json").exists():
            assert contents(tmp_path / str(n)) == contents(folders["wide", ONE])
        if interrupt.left > 0:
            break

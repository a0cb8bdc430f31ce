"""Checkpoint folders that are shared by objects, left by a killed run, or damaged."""

import asyncio
import fcntl
import gc
import os
import re
import shutil
import sys
import threading
import warnings
from itertools import count
from pathlib import Path

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import nnx

from flax_attn import Linear
from flax_attn.training import Checkpoints


def build(seed=0):
    model = Linear(3, 2, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def saved(folder, *steps):
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, *build(step))
    return folder


def steps(folder):
    return sorted(int(path.name) for path in folder.iterdir())


@pytest.fixture
def held_back(monkeypatch):
    """Two events: a save is in the middle, and it may go on."""
    finalize, reached, go_on = (
        ocp.PyTreeCheckpointHandler.finalize,
        threading.Event(),
        threading.Event(),
    )

    def slow(self, directory):
        reached.set()
        assert go_on.wait(60)
        finalize(self, directory)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", slow)
    yield reached, go_on
    go_on.set()


def test_a_save_in_progress_is_left_alone(tmp_path, held_back):
    reached, go_on = held_back
    with Checkpoints(tmp_path) as writer:
        writer.save(1, *build())
        assert reached.wait(60)
        before = sorted(tmp_path.rglob("*"))
        for _ in range(3):
            with Checkpoints(tmp_path) as reader:
                assert reader.latest is None
        assert sorted(tmp_path.rglob("*")) == before
        go_on.set()
        assert writer.latest == 1
    assert steps(tmp_path) == [1]


def test_saves_of_two_objects_wait_for_one_another(tmp_path, held_back):
    reached, go_on = held_back
    with Checkpoints(tmp_path) as one, Checkpoints(tmp_path) as other:
        one.save(1, *build())
        assert reached.wait(60)
        second = threading.Thread(target=other.save, args=(2, *build()))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        go_on.set()
        second.join()
        assert other.latest == one.latest == 2
    assert steps(tmp_path) == [1, 2]


def test_opening_and_reading_write_nothing(tmp_path):
    saved(tmp_path / "run", 3)
    Path(tmp_path, "run", "4.orbax-checkpoint-tmp").mkdir()
    Path(tmp_path, "run", ".deleted", "2").mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with Checkpoints(tmp_path / "run") as checkpoints, Checkpoints(tmp_path / "new") as new:
        assert checkpoints.restore(*build(1)) == (3, {})
        assert new.latest is None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_next_save_removes_what_a_killed_one_left(tmp_path):
    saved(tmp_path, 3)
    Path(tmp_path, "4.orbax-checkpoint-tmp", "arrays").mkdir(parents=True)
    Path(tmp_path, ".deleted", "2", "arrays").mkdir(parents=True)
    (tmp_path / ".lock").touch()
    saved(tmp_path, 4)
    assert steps(tmp_path) == [3, 4]


def test_what_another_saves_is_seen_and_counts(tmp_path):
    with Checkpoints(tmp_path, keep=2) as one, Checkpoints(tmp_path, keep=2) as other:
        one.save(1, *build(1))
        one.wait()
        assert other.latest == 1
        other.save(2, *build(2))
        other.wait()
        assert one.restore(*build()) == (2, {})
        with pytest.raises(ValueError, match=r"steps of checkpoints must increase; got step=2"):
            one.save(2, *build())
        one.save(3, *build(3))
        one.wait()
        assert steps(tmp_path) == [2, 3]


def test_folders_of_other_names_are_no_checkpoints(tmp_path):
    (tmp_path / "run_12").mkdir()
    (tmp_path / "13.txt").touch()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest is None


def test_a_folder_of_the_user_is_not_taken_for_a_checkpoint_and_deleted(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "5").mkdir()
    rule = (
        rf"^folders with a number for a name are checkpoints here, .*; got {tmp_path}/5, which is"
        rf" none\. Pass another folder, such as {tmp_path}/checkpoints$"
    )
    with pytest.raises(ValueError, match=rule):
        Checkpoints(tmp_path)
    saved(tmp_path / "checkpoints", 1, 2, 3, 4)  # as the error says
    assert (tmp_path / "5").is_dir()


def test_nothing_is_saved_after_the_end(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, *build())
    rule = rf"until they are closed, .*; got step=2 and a closed {tmp_path}\. Make Checkpoints\("
    with pytest.raises(ValueError, match=rule):
        checkpoints.save(2, *build())
    assert steps(tmp_path) == [1]


def test_a_save_that_failed_keeps_no_one_out(tmp_path, monkeypatch):
    def fail(self, directory):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.PyTreeCheckpointHandler, "finalize", fail)
        with pytest.raises(OSError, match="no space left"):
            saved(tmp_path, 1)
    saved(tmp_path, 1)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("at", ["_saved", "_read"])
def test_a_checkpoint_that_is_deleted_while_it_is_read(at, tmp_path, monkeypatch):
    saved(tmp_path, 1)
    before = getattr(Checkpoints, at)

    def late(self, step, *wanted):
        if step == 1:
            saved(tmp_path, 2)
            shutil.rmtree(tmp_path / "1")
        return before(self, step, *wanted)

    monkeypatch.setattr(Checkpoints, at, late)
    model, optimizer = build()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(model, optimizer) == (2, {})
    np.testing.assert_array_equal(model.kernel[...], build(2)[0].kernel[...])


@pytest.mark.parametrize("after", ["exists", "is_dir"])
def test_a_reader_opens_while_a_checkpoint_is_deleted(after, tmp_path, monkeypatch):
    """Orbax lists checkpoints, asks whether each exists and is a folder, then for its date."""
    folder = saved(tmp_path / "run", 1, 2)
    newer = saved(tmp_path / "newer", 3)
    kind = type(epath.Path(folder))
    ask, deleted = getattr(kind, after), []

    def late(path):
        answer = ask(path)
        if sys._getframe(1).f_code.co_name == "_sanitize_metadata_path" and path == folder / "1":
            deleted.append(path)
            (newer / "3").rename(folder / "3")
            shutil.rmtree(path)
        return answer

    monkeypatch.setattr(kind, after, late)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest == 3
    assert len(deleted) == 1


def test_an_error_that_is_not_of_a_deleted_checkpoint_is_raised(tmp_path, monkeypatch):
    tries = count(1)

    def lost(*arguments, **options):
        assert next(tries) < 5, "an error that stays is tried again without end"
        raise FileNotFoundError("the disk is gone")

    monkeypatch.setattr(ocp, "CheckpointManager", lost)
    with pytest.raises(FileNotFoundError, match="the disk is gone"):
        Checkpoints(tmp_path)


def damage(folder, part):
    """Damage the largest file of a kind of a checkpoint in its middle."""
    file = max(folder.glob(part), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_told_in_a_line(tmp_path, monkeypatch, capfd):
    """Orbax raises a long error, and prints another for each abandoned read, even later."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: printed.append(str(event.exc_value)))
    model = Linear(200, 300, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, model, optimizer)
        checkpoints.wait()
        file = max(
            tmp_path.glob("4/arrays/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size
        )
        os.truncate(file, file.stat().st_size // 2)
        found = (
            r"checkpoint of step 4 in .* cannot be read: ValueError: OUT_OF_RANGE: .*\. If it is"
            r" damaged, delete its.*"
        )
        with pytest.raises(ValueError, match=found) as raised:
            checkpoints.restore(model, optimizer)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    for text in ("Event loop is closed", "See full TensorStore details", "of someone else"):
        given_up(text)
    assert printed[-1] == "of someone else"
    assert not any("Event loop" in text or "TensorStore" in text for text in printed)
    assert capfd.readouterr().err.count("\n") < 5


def test_reads_that_were_given_up_are_not_heard_of_later(tmp_path, monkeypatch, caplog):
    """Python warns of them when it collects them, which may be at any time."""

    async def read():
        pass

    def give_up(*_):
        task = asyncio.Future(loop=asyncio.new_event_loop())
        task.set_exception(OSError("read error of a task"))
        task.get_loop().close()
        # It refers to itself, as what a failed read leaves behind: only a collection finds it.
        abandoned = [read(), task]
        abandoned.append(abandoned)
        raise OSError("disk error")

    saved(tmp_path, 1)
    monkeypatch.setattr(Checkpoints, "_read", give_up)
    with Checkpoints(tmp_path) as checkpoints, warnings.catch_warnings(record=True) as heard:
        with pytest.raises(ValueError, match="cannot be read: OSError: disk error"):
            checkpoints.restore(*build())
        gc.collect()
    assert [str(warning.message) for warning in heard] == []
    assert caplog.messages == []


def given_up(text):
    """Raise where nobody can catch it."""

    class GivenUp:
        def __del__(self):
            raise RuntimeError(text)

    GivenUp()


@pytest.mark.parametrize(
    "part", ["arrays/_METADATA", "arrays/manifest.ocdbt", "arrays/d/*", "extra/metadata"]
)
def test_a_damaged_checkpoint_changes_nothing_and_the_one_before_is_there(part, tmp_path):
    damage(saved(tmp_path, 3, 4) / "4", part)
    model, optimizer = build()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(
            ValueError, match=r"checkpoint of step 4 in .* cannot be read: .* delete its folder"
        ):
            checkpoints.restore(model, optimizer)
        np.testing.assert_array_equal(model.kernel[...], build()[0].kernel[...])
        shutil.rmtree(tmp_path / "4")
        assert checkpoints.restore(model, optimizer) == (3, {})


@pytest.mark.parametrize("step", [-1, 1.5, 2.0, True, "3", None], ids=repr)
def test_a_step_is_a_whole_number(step, tmp_path, no_shape_checks):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(
            ValueError, match=re.escape(f"must be a whole number, 0 or larger; got step={step!r}")
        ):
            checkpoints.save(step, *build())
        checkpoints.save(np.int64(0), *build())
        assert checkpoints.latest == 0


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_path_that_is_a_file(inside, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"stored in a folder; got .*, and .*file is a file\. Pass another path"
    ):
        Checkpoints(tmp_path / "file" / inside)


def test_without_locks_nothing_of_others_is_removed(tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError("Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Path(tmp_path, "4.orbax-checkpoint-tmp").mkdir()
    with pytest.warns(
        UserWarning,
        match=r"there are no locks for .*\.lock \(Operation not supported\): what a killed",
    ):
        saved(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"3", "4.orbax-checkpoint-tmp"}

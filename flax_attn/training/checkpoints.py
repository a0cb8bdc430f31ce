"""Checkpoints of a run: everything that is needed to resume it to the same bits."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from numbers import Integral
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array

from attn_spec.checks import check_positive, check_type
from flax_attn.convert.lock import locked

# A checkpoint moves here in one step, and is removed then: it is complete or absent.
_DELETED = ".deleted"
# Orbax writes it into each, before anything else.
_MARK = "_CHECKPOINT_METADATA"


class Checkpoints:
    """The last checkpoints of a run in a folder, each complete or absent.

    A checkpoint has the parameters of the model, its streams of dropout, the state of the
    optimizer, and other values of the run, such as its position in the data. A run that is killed,
    even during a save, resumes from the last complete checkpoint to the same bits as a run without
    interruption.

    Any number of objects and processes may read a folder while one of them saves: reading writes
    nothing, and sees what others have saved. Saves wait for one another. A save removes what killed
    ones have left, where no other writes, and older checkpoints only after it is complete itself.
    In a remote folder (`gs://bucket/run`) Orbax does both, and what was left goes when the folder
    is opened: one run at a time may use it.

    Args:
        folder: folder of the checkpoints; the first save makes it if there is none.
        keep: number of checkpoints that stay; older ones are deleted.

    Raises:
        ValueError: if `keep` is not positive, the folder is a file or inside one, or it holds a
            folder that has a number for its name and is no checkpoint.

    Example:
        >>> import optax
        >>> from tempfile import TemporaryDirectory
        >>> from flax_attn import Linear
        >>> model = Linear(3, 2, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        >>> with TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        ...     checkpoints.save(7, model, optimizer, document=42)
        ...     model.bias[...] += 1
        ...     checkpoints.restore(model, optimizer)
        (7, {'document': 42})
    """

    def __init__(self, folder: str | PathLike[str], keep: int = 3):
        check_positive(keep=keep)
        self._remote = "://" in str(folder)
        # Orbax takes absolute paths alone; a remote one must not become a path of this machine.
        self.folder = str(folder)
        if not self._remote:
            local = Path(folder).absolute()
            _check_folder(local)
            self.folder = str(local)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=self._remote,
            cleanup_tmp_directories=self._remote,
            todelete_subdir=None if self._remote else _DELETED,
        )
        self._manager = self._open(options)
        self._saving: Thread | None = None
        self._closed = False

    @property
    def _locks(self) -> bool:
        # One process for all: the others wait for it inside Orbax.
        return not self._remote and jax.process_index() == 0

    @property
    def latest(self) -> int | None:
        """The step of the last complete checkpoint, whoever saved it; None where there is none."""
        self.wait()
        return max(self._steps(), default=None)

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, **extra: Any) -> None:
        """Save a run after a step. The files are written in the background.

        Args:
            step: number of the step, whole and larger than that of every checkpoint in the folder.
            model: model to save, with every variable; its mode, train or eval, is not saved.
            optimizer: optimizer whose state is saved.
            extra: other values to save, as JSON has them: numbers, strings, lists and dicts of
                these.

        Raises:
            ValueError: if the step is negative or not whole, the folder has a checkpoint of it or
                of a later one or was closed, model or optimizer is of another kind, or `extra` is
                not JSON. An earlier save that failed raises its error here.
        """
        self._check_open(step)
        _check_kinds(model, optimizer)
        _check_step(step)
        _check_json(extra)
        arrays = _arrays(model=model, optimizer=optimizer)
        args = ocp.args.Composite(
            arrays=ocp.args.PyTreeSave(arrays), extra=ocp.args.JsonSave(extra)
        )
        self.wait()
        # The lock is given back by the thread, when all is written, and not at the end of `with`.
        with ExitStack() as held:
            if self._locks:
                self._keep_others_out(held)
            self._check_increases(step)
            self._manager.reload()  # what others have saved counts for what is deleted
            saving = Thread(target=self._finish, args=[held.pop_all()])
        try:
            self._manager.save(int(step), args=args)
        finally:  # also if it was interrupted, others stay out until nothing is written any more
            saving.start()
            self._saving = saving

    def restore(
        self, model: nnx.Module, optimizer: nnx.Optimizer | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Write the last complete checkpoint into model and optimizer, all of it or nothing.

        If it is deleted while it is read, because newer ones were saved, the last one is read
        instead.

        Args:
            model: model built as in the run.
            optimizer: optimizer built as in the run; None leaves its state unread, as for
                evaluation.

        Returns:
            Its step, and the other values saved with it.

        Raises:
            ValueError: if there is no checkpoint, it cannot be read, model or optimizer is of
                another kind, or it is of another model or optimizer, with a line for each array
                that is missing, unexpected, or of another shape or dtype.
        """
        _check_kinds(model, optimizer, nnx.Optimizer | None)
        nodes: dict[str, Any] = {"model": model}
        if optimizer is not None:
            nodes["optimizer"] = optimizer
        wanted = jax.tree.map(_abstract, _arrays(**nodes))
        # Others may delete what is being read, and have then saved a newer one.
        while True:
            step = self.latest
            if step is None:
                raise ValueError(
                    f"{self.folder} has no complete checkpoint. Save one first, or pass the folder"
                    " of a run"
                )
            problems, found, failure = [], None, None
            try:
                with _without_pages():
                    saved = self._saved(step)
                    unread = {} if optimizer is not None else _of_node("optimizer", saved)
                    problems = _differences(saved, wanted | unread)
                    found = None if problems else self._read(step, wanted)
            except Exception as error:  # of many kinds, of Orbax and TensorStore
                failure = _first_line(error)
            if step in self._steps():  # and was all the time: what was read is one checkpoint
                break
        if failure:
            _drop_abandoned_reads()
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} cannot be read: {failure}. If it "
                "is damaged, delete its folder: the run then resumes from the one before"
            )
        if found is None:
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} is of another model or optimizer."
                " Build both as the run did:\n  " + "\n  ".join(problems)
            )
        _write(found.arrays, **nodes)
        return step, found.extra

    def wait(self) -> None:
        """Wait until everything saved is on disk; raise the error of a save that failed."""
        if self._saving is not None:
            self._saving.join()
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and close the files of the folder."""
        self._closed = True
        if self._saving is not None:
            self._saving.join()
        self._manager.close()

    def _open(self, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
        handlers = {"arrays": ocp.PyTreeCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()}
        listed = None
        while True:
            try:
                return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
            except (FileNotFoundError, NotADirectoryError):
                # Another process may delete a checkpoint after Orbax has listed it, and before
                # Orbax reads its date. It saves a newer one each time.
                before, listed = listed, self._steps()
                if listed == before:
                    raise

    def _steps(self) -> list[int]:
        names = [path.name for path in ocp.utils.checkpoint_steps_paths(self.folder)]
        return [int(name) for name in names if name.isdecimal()]

    def _keep_others_out(self, held: ExitStack) -> None:
        """Wait for the lock of the folder, and remove what killed saves have left."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        if held.enter_context(locked(folder)):
            for path in (*folder.glob("*.orbax-checkpoint-tmp*"), *folder.glob(_DELETED)):
                shutil.rmtree(path)

    def _finish(self, held: ExitStack) -> None:
        """Give the lock back when all is written, and the older checkpoints are deleted."""
        with held:
            try:
                self._manager.wait_until_finished()
            except BaseException:
                return  # `wait` raises it, where the run hears of it
            if self._locks:
                shutil.rmtree(Path(self.folder, _DELETED), ignore_errors=True)

    def _check_open(self, step: int) -> None:
        # Orbax would wait for minutes, for threads that have ended.
        if self._closed:
            raise ValueError(
                f"checkpoints are saved until they are closed, as the end of `with` does; got"
                f" step={step} and a closed {self.folder}. Make Checkpoints(folder) once more"
            )

    def _check_increases(self, step: int) -> None:
        latest = max(self._steps(), default=None)
        if latest is not None and step <= latest:
            raise ValueError(
                f"steps of checkpoints must increase; got step={step}, and {self.folder} has one of"
                f" step {latest}. Restore it first, or save into another folder"
            )

    def _saved(self, step: int) -> dict[str, Any]:
        """Return shape and dtype of each array of a checkpoint, by its dotted path."""
        return self._manager.item_metadata(step).arrays.tree

    def _read(self, step: int, wanted: dict[str, Any]) -> Any:
        # What is not wanted has been found to be of the optimizer, and is not read.
        arrays = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        items = ocp.args.Composite(arrays=arrays, extra=ocp.args.JsonRestore())
        return self._manager.restore(step, args=items)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_folder(folder: Path) -> None:
    # Of a folder that is not there yet, the one that it would be made in counts.
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(
            f"checkpoints are stored in a folder; got {folder}, and {there} is a file. Pass another"
            " path"
        )
    for path in folder.glob("*"):
        # Others may delete a checkpoint meanwhile: what is asked last is whether it is there.
        if path.name.isdecimal() and not (path / _MARK).exists() and path.is_dir():
            raise ValueError(
                "folders with a number for a name are checkpoints here, which are deleted in time;"
                f" got {path}, which is none. Pass another folder, such as"
                f" {folder / 'checkpoints'}"
            )


def _check_kinds(model: object, optimizer: object, kind: Any = nnx.Optimizer) -> None:
    check_type("model", model, nnx.Module, "the model itself, an nnx.Module")
    remedy = "optimizer=nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)"
    check_type("optimizer", optimizer, kind, remedy)


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
        raise ValueError(
            f"the step of a checkpoint must be a whole number, 0 or larger; got step={step!r}. "
            "Pass the number of steps that were taken"
        )


def _first_line(error: BaseException) -> str:
    """Return a line on what an error comes from: Orbax puts a page of settings around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


@contextmanager
def _without_pages() -> Iterator[None]:
    """Print nothing of the reads that are given up where one fails: a page each, and some later."""
    before = sys.unraisablehook

    def print_others(event: Any) -> None:
        text = str(event.exc_value)
        if "Event loop is closed" not in text and "TensorStore" not in text:
            before(event)

    sys.unraisablehook = print_others
    yield
    sys.unraisablehook = before  # not after an error, where more may come


def _drop_abandoned_reads() -> None:
    """Collect the reads that were given up: later each would warn, or print a page."""
    log = logging.getLogger("asyncio")
    before = log.disabled
    log.disabled = True  # errors of tasks that nobody asked for
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that nobody awaited
            # They refer to one another, so that nothing but a collection frees them.
            gc.collect()
    finally:
        log.disabled = before


def _check_json(extra: dict[str, Any]) -> None:
    # JSON would make a list of a tuple, and a string of a key that is a number.
    try:
        same = json.loads(json.dumps(extra)) == extra
    except TypeError:
        same = False
    if not same:
        raise ValueError(
            "values saved beside the arrays must be as JSON has them: finite numbers, strings,"
            f" None, lists, and dicts with strings as keys; got {extra!r}. Write int(...) of an"
            " array, list(...) of a tuple"
        )


def _arrays(**nodes: Any) -> dict[str, Array]:
    """Return the arrays of all variables by dotted path; random stream keys are key data."""
    found = {}
    for node, module in nodes.items():
        state = nnx.state(module)
        arrays = nnx.as_pure(state)
        flat = nnx.to_flat_state(arrays)
        for path, array in flat:
            # Orbax stores numbers, and a key is no number to JAX.
            if _is_key(array):
                array = jax.random.key_data(array)
            name = _dotted(node, path)
            found[name] = array
    return found


def _write(arrays: dict[str, Array], **nodes: Any) -> None:
    """Write what `_arrays` returned."""
    for node, module in nodes.items():
        state = nnx.state(module)
        for path, variable in nnx.to_flat_state(state):
            name = _dotted(node, path)
            array = arrays[name]
            old = variable.get_value()
            if _is_key(old):
                kind = jax.random.key_impl(old)
                array = jax.random.wrap_key_data(array, impl=kind)
            variable.set_value(array)
        # At once: a module is as it was, or as it was saved.
        nnx.update(module, state)


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return a line for each array in which a checkpoint is not what is wanted."""
    lines = []
    for name in sorted(saved.keys() | wanted.keys()):
        there = _describe(saved, name)
        ours = _describe(wanted, name)
        if there != ours:
            lines.append(f"{name}: {there} is saved, {ours} is wanted")
    return lines


def _of_node(node: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of `model` or of `optimizer`."""
    return {name: array for name, array in arrays.items() if name.startswith(f"{node}.")}


def _dotted(node: str, path: tuple[Any, ...]) -> str:
    return ".".join(map(str, (node, *path)))


def _is_key(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _abstract(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _describe(arrays: Any, name: str) -> str:
    if name not in arrays:
        return "nothing"
    return f"{arrays[name].dtype}{list(arrays[name].shape)}"

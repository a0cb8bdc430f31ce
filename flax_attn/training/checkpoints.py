"""Checkpoints of a run: everything that is needed to resume it to the same bits."""

from __future__ import annotations

import json
import shutil
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array

from flax_attn.functional.checks import check_positive


class Checkpoints:
    """The last checkpoints of a run in a folder, each complete or absent.

    A checkpoint has the parameters of the model, its streams of dropout, the state of the optimizer, and other values
    of the run, such as its position in the data. A run that is killed, even during a save, resumes from the last
    complete checkpoint to the same bits as a run without interruption.

    Args:
        folder: created if there is none.
        keep: how many checkpoints stay; older ones are deleted.

    Raises:
        ValueError: if `keep` is not positive.

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
        remote = "://" in str(folder)
        self.folder = str(folder) if remote else str(Path(folder).absolute())
        if not remote and jax.process_index() == 0:
            _remove_incomplete(Path(folder))
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=remote)
        handlers = {"arrays": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    @property
    def latest(self) -> int | None:
        """The step of the last complete checkpoint; None where there is none."""
        self.wait()
        return self._manager.latest_step()

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, **extra: Any) -> None:
        """Save a run after a step. The files are written in the background.

        Args:
            step: larger than that of every checkpoint in the folder.
            model: every variable of it is saved; its mode, train or eval, is not.
            optimizer: its state.
            extra: other values to save, as JSON has them: numbers, strings, lists and dicts of these.

        Raises:
            ValueError: if the folder has a checkpoint of this step or a later one, or if `extra` is not JSON. An
                earlier save that failed raises its error here.
        """
        latest = self.latest
        if latest is not None and step <= latest:
            raise ValueError(
                f"steps of checkpoints must increase; got step={step}, and {self.folder} has one of step {latest}. "
                "Restore it first, or save into another folder"
            )
        _check_json(extra)
        arrays = ocp.args.StandardSave(_arrays(model=model, optimizer=optimizer))
        self._manager.save(step, args=ocp.args.Composite(arrays=arrays, extra=ocp.args.JsonSave(extra)))

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[int, dict[str, Any]]:
        """Write the last complete checkpoint into model and optimizer, all of it or nothing.

        Returns:
            Its step, and the other values saved with it.

        Raises:
            ValueError: if there is no checkpoint, or if it is of another model or optimizer, with a line for each array
                that is missing, unexpected, or of another shape or dtype.
        """
        step = self.latest
        if step is None:
            raise ValueError(f"{self.folder} has no complete checkpoint. Save one first, or pass the folder of a run")
        wanted = jax.tree.map(_abstract, _arrays(model=model, optimizer=optimizer))
        self._check(step, wanted)
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted), extra=ocp.args.JsonRestore())
        found: Any = self._manager.restore(step, args=args)
        _write(found.arrays, model=model, optimizer=optimizer)
        return step, found.extra

    def wait(self) -> None:
        """Wait until everything saved is on disk; raise the error of a save that failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and close the files of the folder."""
        self._manager.close()

    def _check(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
        """Raise unless a checkpoint has the arrays that are wanted."""
        saved = {name: _text(array) for name, array in self._manager.item_metadata(step).arrays.tree.items()}
        ours = {name: _text(array) for name, array in wanted.items()}
        problems = [
            f"{name}: {saved.get(name, 'nothing')} is saved, {ours.get(name, 'nothing')} is wanted"
            for name in sorted(saved.keys() | ours.keys())
            if saved.get(name) != ours.get(name)
        ]
        if problems:
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} is of another model or optimizer. Build both as the "
                "run did:\n  " + "\n  ".join(problems)
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _remove_incomplete(folder: Path) -> None:
    # Orbax would do it beside the run and not wait for it when it is closed: whoever opens the folder next could find
    # files that are being removed, and its first save would fail.
    for path in folder.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)


def _check_json(extra: dict[str, Any]) -> None:
    try:
        same = json.loads(json.dumps(extra)) == extra
    except TypeError:
        same = False
    if not same:
        raise ValueError(
            "values saved beside the arrays must be as JSON has them: finite numbers, strings, None, lists, and dicts "
            f"with strings as keys; got {extra!r}. Write int(...) of an array, list(...) of a tuple"
        )


def _arrays(**nodes: Any) -> dict[str, Array]:
    """Return the arrays of all variables by their dotted paths, the keys of random streams as key data."""
    return {
        ".".join(map(str, (node, *path))): jax.random.key_data(value) if _is_key(value) else value
        for node, state in nodes.items()
        for path, value in nnx.to_flat_state(nnx.as_pure(nnx.state(state)))
    }


def _write(arrays: dict[str, Array], **nodes: Any) -> None:
    """Write what `_arrays` returned."""
    for node, module in nodes.items():
        state = nnx.state(module)
        for path, variable in nnx.to_flat_state(state):
            array, old = arrays[".".join(map(str, (node, *path)))], variable.get_value()
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(old)) if _is_key(old) else array
            variable.set_value(array)
        nnx.update(module, state)


def _is_key(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _abstract(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _text(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"

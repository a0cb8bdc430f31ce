"""The replacement of a model in a folder: at every moment it holds the old one or the new one."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

_SAVING = ".saving-"  # what the names of files begin with until a save has ended


@contextmanager
def named_apart(folder: Path, alone: bool) -> Iterator[str]:
    """Yield a prefix for the files of a save; before and after, remove those of saves that died.

    Those that `config.json` names stay: they are the model. So do those of others where they may be
    alive.
    """
    prefix = f"{_SAVING}{token_hex(4)}-"
    everything = f"{_SAVING if alone else prefix}*"
    # All prefixes are as long as this one.
    size = len(prefix)
    _remove(folder, everything, size)
    try:
        yield prefix
    finally:
        _remove(folder, everything, size)


def _remove(folder: Path, pattern: str, size: int) -> None:
    config = folder / "config.json"
    named = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    for file in folder.glob(pattern):
        if file.name[:size] not in named:
            file.unlink()


def replace_model(folder: Path, fields: str, prefix: str, weights: Path) -> None:
    """Make weights whose names have a prefix those of the folder, with this config."""
    named = {**json.loads(fields), "transformers_weights": weights.name}
    # At once the folder holds the new model.
    _replace_config(folder, prefix, json.dumps(named))
    for pattern in (
        "model.safetensors",
        "model.safetensors.index.json",
        "model-*-of-*.safetensors",
    ):
        for stale in folder.glob(pattern):
            stale.unlink()
    for file in sorted(folder.glob(f"{prefix}*")):
        usual = folder / file.name.removeprefix(prefix)
        # The index of the shards names them.
        if file.suffix == ".json":
            usual.write_text(file.read_text().replace(prefix, ""))
        else:
            _copy(file, usual)
    _replace_config(folder, prefix, fields)


def _replace_config(folder: Path, prefix: str, text: str) -> None:
    new = folder / f"{prefix}config.json"
    new.write_text(text, encoding="utf-8")
    new.replace(folder / "config.json")


def _copy(file: Path, other: Path) -> None:
    """Give a file another name beside its own."""
    try:
        os.link(file, other)
    except OSError:  # not every file system has links
        shutil.copyfile(file, other)

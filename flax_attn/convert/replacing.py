"""Files that are there as a whole or not at all."""

import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

_UNFINISHED: set[Path] = set()
# Held while the process must not end by `abandon`.
HELD = threading.RLock()


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """Yield the path to write a file to that replaces the one at `path` once it is whole.

    Where an exception comes in between, as of a full disk, the old file stays as it was.

    Args:
        path: path of the file, written directly if it is a device or a pipe, like `/dev/stdout`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "x.txt")) as whole:
        ...         _ = whole.write_text("all of it")
        ...         before = Path(folder, "x.txt").exists()
        ...     before, os.listdir(folder)
        (False, ['x.txt'])
    """
    # Of a link, what it leads to is replaced.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    # The suffix stays: writers choose the format by it.
    token = secrets.token_hex(4)
    name = f".{target.stem}.{token}{target.suffix}"
    with unfinished(target.with_name(name)) as whole:
        try:
            yield whole
            if target.exists():
                shutil.copymode(target, whole)
            os.replace(whole, target)
        except OSError as error:
            # A full disk names no file, and the other error names one that is gone.
            error.filename = str(target)
            raise


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yield a path of which nothing is left behind: no file, and no folder."""
    with HELD:
        _UNFINISHED.add(path)
    try:
        yield path
    finally:
        with HELD:
            _remove(path)
            _UNFINISHED.discard(path)


def abandon() -> None:
    """Remove all unfinished files and block new ones, in a process that is about to end."""
    HELD.acquire()
    for path in _UNFINISHED:
        _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)

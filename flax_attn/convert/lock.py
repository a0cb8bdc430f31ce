"""A lock on a folder that falls with its owner: what was left where none has it is of the dead."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Wait until no other writes into a folder, in this process or in another, and keep others out.

    The operating system holds the lock, on the file `.lock`, which is removed in the end. It falls
    when its process is killed, and it holds between the hosts of a shared folder where their file
    system keeps locks, as NFS does.

    Yields:
        Whether there is a lock. A file system may keep none: nothing may be removed there that
        another may be writing, and a warning says so.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, locked(Path(folder)) as held:
        ...     held, [file.name for file in Path(folder).iterdir()]
        (True, ['.lock'])
    """
    path = folder / ".lock"
    while True:
        with path.open("w") as file:
            held = _lock(file)
            if held and not _is_at(file, path):
                # Who had the lock has removed its file: the next waits for another one.
                continue
            try:
                yield held
            finally:
                path.unlink(missing_ok=True)
            return


def _lock(file: IO[str]) -> bool:
    try:
        # Windows has no such module.
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError) as error:
        warnings.warn(
            f"there are no locks for {file.name} ({error}): what a killed save leaves stays there. "
            "Let one process at a time save into this folder",
            stacklevel=5,
        )
        return False
    return True


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False

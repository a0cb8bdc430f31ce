"""What the commands share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class UsageError(Exception):
    """What the user asked for cannot be done; the message says what can."""


def console(width: int) -> Console:
    """Return where tables go: as wide as the terminal, or of a fixed width where there is none."""
    return Console(width=None if sys.stdout.isatty() else width)


def progress() -> Progress:
    """Return a bar on stderr that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def check_writable(path: str | None) -> None:
    """Raise unless a file can be written there, before any work is done."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: it must name a file in a folder that exists and can be written to")


def device(platform: str | None) -> Any:
    """Return the first device of a platform; None where none is named."""
    import jax

    try:
        return None if platform is None else jax.devices(platform)[0]
    except RuntimeError as error:
        raise UsageError(f"no device of the platform {platform!r} here: {error}") from None


def seed(text: str) -> int:
    """Return a seed from the command line."""
    number = int(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"a seed is at least 0 and below 2**32; got {number}")
    return number


def count(text: str) -> int:
    """Return a positive number from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def sizes(names: str):
    """Return a reader of sizes such as `4,12,256,64`, one for each of the names."""

    def read(text: str) -> tuple[int, ...]:
        found = tuple(count(number) for number in text.split(","))
        if len(found) != len(names.split(",")):
            raise argparse.ArgumentTypeError(f"a shape is {names}; got {text}")
        return found

    return read

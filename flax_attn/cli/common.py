"""What the commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status

from flax_attn.cli.guard import UsageError, usage_errors
from flax_attn.convert.replacing import replacing

if TYPE_CHECKING:
    from jaxlib._jax import Device
    from matplotlib.figure import Figure


__all__ = ["UsageError", "usage_errors"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave the error to `guarded`; rich would exit with 1, which says that a check failed."""
        raise BrokenPipeError


def console(width: int) -> Console:
    """Return a console on stdout, as wide as the terminal; `width` columns without a terminal."""
    # Without a terminal rich would take 80 columns, and fold most tables.
    return _Console(width=None if sys.stdout.isatty() else width)


def progress() -> Progress:
    """Return a transient progress bar on stderr, disabled without a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    disable = not sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=disable)


def status(text: str) -> Status:
    """Return a line on stderr that says what is done; nothing is printed without a terminal."""
    return Console(stderr=True).status(text)


def check_writable(path: str | None) -> None:
    """Raise before any work is done unless a file can be written to `path`."""
    if path is None:
        return
    # A comparison takes minutes: that its report cannot be written should not show at its end.
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"cannot write {path}: it must name a file in a folder that exists and can be"
            " written to"
        )


def cache_folder() -> Path:
    """Return the directory of this package in the user's cache.

    Raises:
        RuntimeError: if the user has no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flax-attn"


def need(module: str, what: str) -> None:
    """Raise before any work is done unless a module is there."""
    # Found without importing it: matplotlib and torch take seconds.
    if find_spec(module) is None:
        raise UsageError(f"{what} needs {module}: pip install {module}")


def need_torch(command: str) -> None:
    """Raise unless PyTorch is installed; it runs on one thread."""
    try:
        import torch
    except ImportError:
        raise UsageError(
            f"{command} needs PyTorch: pip install torch, or compare with an export: --against DIR"
        ) from None
    # The processes that compare share the cores, and would wait for one another's threads. A
    # recurrence of 4,096 small steps takes fifteen times as long on two.
    torch.set_num_threads(1)


def known_checks(names: list[str] | None) -> list[str] | None:
    """Return the requested checks; raise if one is unknown."""
    from attn_spec.checks import nearest
    from flax_attn.parity import CHECKS

    unknown = [name for name in names or () if name not in CHECKS]
    if unknown:
        wrong = ", ".join(f"{name}{nearest(name, CHECKS)}" for name in unknown)
        raise UsageError(f"no check is called {wrong}. Known are: {', '.join(CHECKS)}")
    return names


def save_figure(draw: Callable[[], Figure], path: str) -> None:
    """Draw a figure and write it to `path`, in the format that its suffix names."""
    # There is no matplotlib, the format is unknown, or the file cannot be written.
    with usage_errors(ImportError, OSError, ValueError), replacing(path) as whole:
        draw().savefig(whole, dpi=150)
    print(f"wrote {path}")


def device(platform: str | None) -> Device | None:
    """Return the first device of a platform; None for None."""
    if platform is None:
        return None
    import jax

    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        raise UsageError(f"no device of the platform {platform!r} here: {error}") from None


def seed(text: str) -> int:
    """Parse a seed."""
    number = _integer(text)
    # NumPy and PyTorch take more, but the key of a JAX stream has two words of 32 bits.
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 2**32; got {number}")
    return number


def count(text: str) -> int:
    """Parse a positive number."""
    number = _integer(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer; got {text!r}") from None


def sizes(names: str) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of sizes such as `4,12,256,64`, one for each of the names."""

    def parse(text: str) -> tuple[int, ...]:
        found = tuple(count(number) for number in text.split(","))
        if len(found) != len(names.split(",")):
            raise argparse.ArgumentTypeError(f"a shape is {names}; got {text}")
        return found

    return parse

"""The caller's code, where it ends the process or does what JAX cannot compile."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from flax_attn.parity.adapters.adapter import PairingError
from flax_attn.parity.trace.program import Place, place_of


@contextmanager
def users_code() -> Iterator[None]:
    """Run the caller's code in here.

    Raises:
        PairingError: if it ends the process.
    """
    try:
        yield
    except SystemExit as error:
        raise PairingError(ended(error)) from error


def ended(error: SystemExit) -> str:
    """Return which line of the caller's ended the process, and what to do."""
    return (
        f"{_place(error)} ended the process (SystemExit {error.code}). What is compared must"
        " return: remove sys.exit there, or what calls it"
    )


def _place(error: BaseException) -> Place:
    """Return the line of the caller's that an error was raised from."""
    raised = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(raised)]
    return place_of(frames) or Place(*frames[0])

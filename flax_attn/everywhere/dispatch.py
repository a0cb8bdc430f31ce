"""What happens at a place of a target: a call goes to its replacement, or on to the original."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from flax_attn.everywhere import reports
from flax_attn.everywhere.context import in_use
from flax_attn.everywhere.target import LeftAlone, Place

# Name of the place whose replacement runs.
PLACE: ContextVar[str] = ContextVar("place")
# Whether an original runs: what it calls is a part of its call, also where it is of another target.
_IN_ORIGINAL: ContextVar[bool] = ContextVar("in original", default=False)


@contextmanager
def at(place: str) -> Iterator[None]:
    """Name the place that calls are counted at."""
    token = PLACE.set(place)
    try:
        yield
    finally:
        PLACE.reset(token)


def _asked_by_a_backend(place: Place) -> bool:
    """Return whether a backend of ours calls, such as `cudnn`, which is a kernel of `jax.nn`.

    It may be traced long after its attention was, and so the frame that calls tells.
    """
    frame = sys._getframe(1)
    while frame is not None and _module(frame) != place.module:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is not None and _module(caller).startswith("flax_attn.backends.")


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def leave_alone(place: str, reason: str, remedy: str) -> None:
    """Count a call that its library computes.

    Raises:
        ValueError: under `strict=True`.
    """
    if in_use().strict:
        raise ValueError(f"{place} is left alone: {reason}{remedy}")
    reports.add_left_alone(place, reason)


def dispatch(target: str, place: Place, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return what the replacement of a place returns, or the original where it takes no such call.

    Raises:
        ValueError: if a call is left alone under `strict=True`.
    """
    settings = in_use()
    if target not in settings.targets or _IN_ORIGINAL.get() or _asked_by_a_backend(place):
        return original(*args, **kwargs)
    try:
        with at(place.name):
            return place.replacement(original, *args, **kwargs)
    except LeftAlone as found:
        reason = str(found)
    # Outside of the handler, so that an error of the original shows no other as its context.
    leave_alone(
        place.name,
        reason,
        remedy=f". Change the call. If the original accepts it, leave {target!r} out of the"
        " targets, or pass strict=False, and the original runs",
    )
    token = _IN_ORIGINAL.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _IN_ORIGINAL.reset(token)

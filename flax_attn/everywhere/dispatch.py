"""What happens at a place of a target: a call goes to its replacement, or on to the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


def dispatch(target: str, place: Place, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return what the replacement of a place returns, or the original where it takes no such call.

    Raises:
        ValueError: if a call is left alone under `strict=True`.
    """
    settings = in_use()
    if target not in settings.targets or _IN_ORIGINAL.get():
        return original(*args, **kwargs)
    try:
        with at(place.name):
            return place.replacement(original, *args, **kwargs)
    except LeftAlone as found:
        reason = str(found)
    if settings.strict:
        raise ValueError(
            f"{place.name} is left alone: {reason}. Change the call. If the original accepts it,"
            f" leave {target!r} out of the targets, or pass strict=False, and the original runs"
        )
    reports.add(reports.Entry(reports.user_place(), place.name, reason=reason))
    token = _IN_ORIGINAL.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _IN_ORIGINAL.reset(token)

"""Cases by their number alone, and how each comes out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax_attn.backends.call import Unsupported

from . import caches, calls, losses, spoiled
from .judge import Wrong, refused

KINDS = {calls: 0.7, spoiled: 0.12, caches: 0.1, losses: 0.08}
NEVER_UNSUPPORTED = ("auto", "reference", "loss")


@dataclass(frozen=True)
class Outcome:
    """How one case came out in one backend.

    Args:
        backend: the requested backend.
        result: `"equal"`, `"refused"`, `"unsupported"` or `"wrong"`.
        error: the error that was raised or found.
    """

    backend: str
    result: str
    error: BaseException | None = None


def draw(number: int) -> Any:
    """Return the case of a number."""
    rng = np.random.default_rng(number)
    kinds = list(KINDS)
    return kinds[rng.choice(len(kinds), p=list(KINDS.values()))].draw(rng)


def outcomes(case: Any) -> Iterator[Outcome]:
    """Run a case in each of its backends."""
    for backend in case.backends:
        try:
            yield Outcome(backend, _result(case, backend))
        except Exception as error:
            yield Outcome(backend, "wrong", error)


def _result(case: Any, backend: str) -> str:
    try:
        case.check(backend)
    except Wrong:
        raise
    except Unsupported as error:
        if backend in NEVER_UNSUPPORTED or not refused(error):
            raise
        return "unsupported"
    except Exception as error:
        if not refused(error) or not (case.wrong or case.refusable):
            raise
        return "refused"
    if case.wrong:
        raise Wrong("taken, although the contract refuses it")
    return "equal"

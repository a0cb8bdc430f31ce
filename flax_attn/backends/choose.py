"""The choice of a backend: the one asked for by name, or the best that takes the call.

On a CPU that is the first of the table, elsewhere the first whose predicted time is about the
least.
"""

from typing import Any

from flax_attn.backends.backend import Backend
from flax_attn.backends.call import Call, Unsupported
from flax_attn.backends.platform import chip_in_use, varying
from flax_attn.backends.registry import BACKENDS, check_backend, load
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.traced_score import TracedScore

VERY_SHORT = 16  # tokens
EQUAL = 1.25  # predicted times that differ by less are as good as equal


def choose(call: Call, backend: str = "auto") -> Backend:
    """Return the backend that runs the call.

    Raises:
        Unsupported: if a backend that is asked for by name does not support the call.
        ValueError: if there is no backend of that name.
    """
    check_backend(backend)
    if backend == "auto":
        return _best(call)
    reason = refusal(load(backend), call)
    if reason is not None:
        raise Unsupported(
            f'backend {backend!r} does not support this call: {reason}. With backend="auto"'
            f" {_best(call).name} runs it"
        )
    return load(backend)


def _best(call: Call) -> Backend:
    able = _able(call)
    if call.platform == "cpu":
        return able[0]
    # The formula has every derivative, and is as good for very few tokens.
    very_short = max(call.shape[2:]) <= VERY_SHORT
    return load("reference") if very_short else _fastest(call, able)


def _fastest(call: Call, able: list[Backend]) -> Backend:
    times = [predicted(backend, call) for backend in able]
    fast = [time <= EQUAL * min(times) for time in times]
    return able[fast.index(True)]


def in_order(call: Call) -> Backend:
    """Return the first of the table that prefers the call and takes it."""
    return _able(call)[0]


def _able(call: Call) -> list[Backend]:
    candidates = [load(name) for name in BACKENDS]
    able = [x for x in candidates if x.preferred(call) and refusal(x, call) is None]
    # The formula takes every call, also long ones that no kernel takes.
    return able or [load("reference")]


def predicted(backend: Backend, call: Call) -> float:
    """Return the predicted seconds of one forward call, on an accelerator."""
    return backend.work(call).seconds(chip_in_use(call.platform))


def refusal(backend: Backend, call: Call) -> str | None:
    """Return why a backend cannot run the call, or None.

    It is its platform, its dtypes, an option that it does not name, arrays that are typed by the
    axes of a mesh, or a reason of its own. It ends without a full stop.
    """
    if not runs_on(backend, call.platform):
        return (
            f"{backend.name} runs on {' and '.join(p.upper() for p in backend.platforms or ())};"
            f' got platform "{call.platform}"'
        )
    dtype = call.query.dtype.name
    if dtype not in backend.dtypes:
        return (
            f"{backend.name} takes {', '.join(backend.dtypes) or 'no dtype'}; got dtype {dtype}."
            " Cast query, key and value"
        )
    for name, value in call.options.items():
        if name not in backend.honours:
            return f"{backend.name} takes no {name}; got {_text(value)}"
    axes = frozenset() if backend.typed else varying(call)
    if axes:
        return (
            f"{backend.name} does not type its results by the axes of a mesh; got arrays that vary"
            f" over {', '.join(sorted(axes))}. Pass check_vma=False to jax.shard_map"
        )
    return backend.refuse(call)


def _text(option: Any) -> str:
    # Not the numbers of an array, which would be waited for.
    if isinstance(option, KeyedDropout):
        return f"rate {option.rate}"
    if isinstance(option, TracedScore):
        return option.name
    return f"shape {option.shape}" if hasattr(option, "shape") else str(option)


def few_queries(call: Call) -> bool:
    """Return whether a call has so few queries that a backend reads keys once for all of them."""
    _, _, t, s = call.shape
    found = (load(name) for name in BACKENDS)
    return t < s and any(t <= one.few for one in found if runs_on(one, call.platform))


def for_parts(call: Call) -> Backend:
    """Return the first backend that attends to a part of the keys of the call.

    Raises:
        Unsupported: if none does.
    """
    candidates = [load(name) for name in BACKENDS if load(name).in_parts]
    reasons = [refusal(backend, call) for backend in candidates]
    if None in reasons:
        return candidates[reasons.index(None)]
    given = "; ".join(filter(None, reasons))
    raise Unsupported(f"no backend attends to parts of the keys of this call: {given}")


def runs_on(backend: Backend, platform: str) -> bool:
    """Return whether a backend runs on a platform."""
    return backend.platforms is None or platform in backend.platforms

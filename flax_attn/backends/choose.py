"""The choice of a backend: the one asked for by name, or the first that takes the call."""

from __future__ import annotations

from flax_attn.backends.backend import Backend
from flax_attn.backends.call import Call, Unsupported
from flax_attn.backends.registry import BACKENDS, check_backend, load


def choose(call: Call, backend: str = "auto") -> Backend:
    """Return the backend that runs the call.

    Raises:
        Unsupported: if a backend that is asked for by name cannot honour the call.
        ValueError: if there is no backend of that name.
    """
    check_backend(backend)
    if backend == "auto":
        candidates = map(load, BACKENDS)
        return next(x for x in candidates if x.preferred(call) and refusal(x, call) is None)
    reason = refusal(load(backend), call)
    if reason is not None:
        raise Unsupported(f"backend {backend!r} cannot honour this call: {reason}")
    return load(backend)


def refusal(backend: Backend, call: Call) -> str | None:
    """Return why a backend cannot run the call, or None: its platform, dtype or its own reason."""
    if not runs_on(backend, call.platform):
        return (
            f"{backend.name} runs on {' and '.join(p.upper() for p in backend.platforms or ())};"
            " got platform "
            f'"{call.platform}". Pass backend="auto"'
        )
    dtype = call.query.dtype.name
    if dtype not in backend.dtypes:
        return (
            f"{backend.name} takes {', '.join(backend.dtypes) or 'no dtype'}; got dtype {dtype}. "
            'Cast query, key and value, or pass backend="auto"'
        )
    return backend.refuse(call)


def runs_on(backend: Backend, platform: str) -> bool:
    """Return whether a backend runs on a platform."""
    return backend.platforms is None or platform in backend.platforms

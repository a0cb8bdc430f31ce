"""Which backend runs a call: the one asked for by name, or the first of the registry that takes it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jax
from jaxtyping import Array

from flax_attn.backends.backend import Backend
from flax_attn.backends.call import Call, Unsupported, prepare
from flax_attn.backends.platform import PLATFORMS, platform_of
from flax_attn.backends.registry import BACKENDS, check_backend, load
from flax_attn.backends.trees import split
from flax_attn.functional.checks import check_choice


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
    """Return why a backend cannot run the call, for its platform or for a reason of its own, or None."""
    if not _runs_on(backend, call.platform):
        return (
            f"{backend.name} runs on {' and '.join(p.upper() for p in backend.platforms or ())}; got platform "
            f'"{call.platform}". Pass backend="auto"'
        )
    return backend.refuse(call)


def _runs_on(backend: Backend, platform: str) -> bool:
    return backend.platforms is None or platform in backend.platforms


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`.

    Args:
        backend: the name of the backend that would run, or None if the one asked for refuses.
        platform: where it would run.
        refusals: for each backend why it cannot honour the call, or None.
        memory: for each backend that can, its estimate of the bytes of temporaries of one forward call.
        passed_over: the backends that `"auto"` would have taken before this one, had they not refused, best first.
    """

    backend: str | None
    platform: str
    refusals: dict[str, str | None]
    memory: dict[str, int]
    passed_over: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.backend or 'nothing'} runs on {self.platform}"]
        for name, reason in self.refusals.items():
            note = reason or f"can run, in about {self.memory[name] / 2**20:.1f} MiB beside inputs and output"
            lines.append(f"{'->' if name == self.backend else '  '} {name:9}  {note}")
        return "\n".join(lines)


def explain(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> Explanation:
    """Return which backend `dot_product_attention` with these arguments would run, and why not another.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`, also inside a mask. Options are those of
    `dot_product_attention`, and `platform`, to ask about `"cpu"`, `"gpu"` or `"tpu"` instead of the machine at hand.

    Raises:
        ValueError: where `dot_product_attention` does, except that a refusal is part of the result.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import Mask
        >>> x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)
        >>> found = explain(x, x, x, mask=Mask.causal(), platform="gpu")
        >>> found.backend, found.refusals["splash"]
        ('blocked', 'splash runs on TPU; got platform "gpu". Pass backend="auto"')
    """
    backend = options.pop("backend", "auto")
    options.pop("return_weights", None)
    options["platform"] = options.get("platform") or platform_of(query)
    check_choice("platform", options["platform"], PLATFORMS)
    found = []

    abstract, mask_of = split(mask, jax.ShapeDtypeStruct)  # the rest of a mask stays known, as kernels may need it

    def trace(query: Array, key: Array, value: Array, bias: Array | None, abstract: list[Array]) -> None:
        found.append(_explain(prepare(query, key, value, bias, mask_of(abstract), **options), backend))

    jax.eval_shape(trace, query, key, value, bias, abstract)
    return found[0]


def _explain(call: Call, backend: str) -> Explanation:
    refusals = {name: refusal(load(name), call) for name in BACKENDS}
    memory = {name: load(name).memory(call) for name, reason in refusals.items() if reason is None}
    try:
        chosen = choose(call, backend).name
    except Unsupported:
        chosen = None
    before = takewhile(lambda name: name != chosen, BACKENDS)
    wanted = (name for name in before if _runs_on(load(name), call.platform) and load(name).preferred(call))
    return Explanation(chosen, call.platform, refusals, memory, tuple(name for name in wanted if refusals[name]))

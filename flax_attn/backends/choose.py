"""Which backend runs a call: asked for by name, or chosen by platform and size from one table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import jax
from jaxtyping import Array

from flax_attn.backends.call import Call, Unsupported, platform_of, prepare
from flax_attn.backends.decode import FEW
from flax_attn.functional.checks import check_choice

BACKENDS = ("reference", "decode", "blocked", "xla", "cudnn", "splash", "tokamax")

# The first of its platform that does not refuse the call.
PREFERRED = {
    "cpu": ("blocked",),
    "gpu": ("cudnn", "blocked"),
    "tpu": ("splash", "blocked"),
}
# Up to this many scores a head, t * s, the formula itself is as quick and compiles sooner. Measured on CPU, where the
# two cross between 32 and 64 tokens; guessed elsewhere.
SHORT = {"cpu": 2048, "gpu": 256 * 256, "tpu": 256 * 256}


def check_backend(backend: str) -> None:
    """Raise unless `backend` is `"auto"` or the name of one."""
    check_choice("backend", backend, ("auto", *BACKENDS))


def load(name: str) -> ModuleType:
    """Return the module of a backend; imported when it is first needed."""
    return import_module(f"flax_attn.backends.{name}")


def choose(call: Call, backend: str = "auto") -> str:
    """Return the name of the backend that runs the call.

    Raises:
        Unsupported: if a backend that is asked for by name cannot honour the call.
        ValueError: if there is no backend of that name.
    """
    check_backend(backend)
    if backend != "auto":
        reason = load(backend).refuse(call)
        if reason:
            raise Unsupported(f"backend {backend!r} cannot honour this call: {reason}")
        return backend
    _, _, t, s = call.shape
    if t <= FEW and t < s and load("decode").refuse(call) is None:
        return "decode"
    if t * s <= SHORT[call.platform]:
        return "reference"
    return next(name for name in PREFERRED[call.platform] if load(name).refuse(call) is None)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    Args:
        backend: the name of the backend that would run, or None if the one asked for refuses.
        platform: where it would run.
        refusals: for each backend why it cannot honour the call, or None.
        memory: for each backend that can, its estimate of the bytes of temporaries of one forward call.
    """

    backend: str | None
    platform: str
    refusals: dict[str, str | None]
    memory: dict[str, int]

    def __str__(self) -> str:
        lines = [f"{self.backend or 'nothing'} runs on {self.platform}"]
        for name, reason in self.refusals.items():
            note = reason or f"can run, in about {self.memory[name] / 2**20:.1f} MiB beside inputs and output"
            lines.append(f"{'->' if name == self.backend else '  '} {name:9}  {note}")
        return "\n".join(lines)


def explain(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> Explanation:
    """Return which backend `dot_product_attention` with these arguments would run, and why not another.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`. Options are those of `dot_product_attention`, and
    `platform`, to ask about `"cpu"`, `"gpu"` or `"tpu"` instead of the machine at hand.

    Raises:
        ValueError: where `dot_product_attention` does, refusals aside.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import Mask
        >>> x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)
        >>> found = explain(x, x, x, mask=Mask.causal(), platform="cpu")
        >>> found.backend, found.refusals["cudnn"][:20]
        ('blocked', 'cudnn runs on NVIDIA')
    """
    backend = options.pop("backend", "auto")
    options.pop("return_weights", None)
    options["platform"] = options.get("platform") or platform_of(query)
    check_choice("platform", options["platform"], tuple(PREFERRED))
    found = []

    def trace(query: Array, key: Array, value: Array, bias: Array | None) -> None:
        found.append(_explain(prepare(query, key, value, bias, mask, **options), backend))

    jax.eval_shape(trace, query, key, value, bias)
    return found[0]


def _explain(call: Call, backend: str) -> Explanation:
    refusals = {name: load(name).refuse(call) for name in BACKENDS}
    memory = {name: load(name).memory(call) for name, reason in refusals.items() if reason is None}
    try:
        chosen = choose(call, backend)
    except Unsupported:
        chosen = None
    return Explanation(chosen, call.platform, refusals, memory)

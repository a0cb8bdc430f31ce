"""The machine: what figures depend on, and the limits that it sets."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from flax_attn.bench import processor
from flax_attn.bench.timing import seconds_per_call

PACKAGES = ("jax", "jaxlib", "flax", "torch", "attnax", "numpy")


def describe() -> dict[str, Any]:
    """Return the processor, the versions, and how busy the machine is."""
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    } | {package: _version(package) for package in PACKAGES}


def memory_limit() -> int:
    """Return a third of this machine's memory, in bytes: the limit of an implementation."""
    # Inputs, outputs, and what others have in memory take the rest.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3


def product_limit(dtype: str, size: int, rounds: int = 5) -> float:
    """Return the most operations a second of XLA on this machine, in one large square product."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.dot).lower(x, x).compile()

    def run(repeats: int) -> list[jax.Array]:
        return [jax.block_until_ready(product(x, x)) for _ in range(repeats)]

    run(1)  # wakes the threads
    return 2 * size**3 / min(seconds_per_call(run) for _ in range(rounds))


def read_limit() -> float:
    """Return the most GB/s that the machine reads, in a sum over an array that no cache holds."""
    array = jnp.ones(2**28, jnp.float32)  # 1 GiB
    total = jax.jit(jnp.sum).lower(array).compile()

    def run(repeats: int) -> list[jax.Array]:
        return [jax.block_until_ready(total(array)) for _ in range(repeats)]

    run(1)
    # Others use the memory too: the least disturbed of five turns counts.
    return array.nbytes / min(seconds_per_call(run) for _ in range(5)) / 1e9


def _processor() -> str:
    named = (line.split(":", 1)[1].strip() for line in processor.lines("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""Processors of this machine, as JAX simulates any number of them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax


def simulated(count: int) -> Sequence[Any]:
    """Return `count` of this machine's processors, as devices that JAX simulates.

    JAX is told to simulate as many if it has not started.

    Raises:
        ValueError: if JAX has started with fewer.
    """
    with suppress(RuntimeError):  # it has started, and may have enough
        started = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", max(count, started))
    found = jax.devices("cpu")
    if len(found) < count:
        raise ValueError(
            f"cpu:{count} needs {count} simulated devices; JAX has started with {len(found)}. "
            f'Call jax.config.update("jax_num_cpu_devices", {count}) before anything else of JAX'
        )
    return found[:count]

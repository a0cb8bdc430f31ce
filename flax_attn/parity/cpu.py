"""Where comparisons run: in float64, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def on_cpu() -> Iterator[None]:
    """Compute in float64 on the CPU, where rounding is the only difference that is allowed.

    Example:
        >>> import jax.numpy as jnp
        >>> with on_cpu():
        ...     jnp.ones(2).dtype
        dtype('float64')
    """
    # Both are settings of the thread, and return to what they were.
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield

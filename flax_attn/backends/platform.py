"""Where a computation runs."""

from typing import Any

import jax
from jax.core import Tracer

PLATFORMS = ("cpu", "gpu", "tpu")


def platform_of(x: Any) -> str:
    """Return where a computation on `x` runs: `"cpu"`, `"gpu"` or `"tpu"`.

    For a tracer or an abstract array it is the device of the mesh in use, or JAX's default device.

    Example:
        >>> import jax.numpy as jnp
        >>> platform_of(jnp.zeros(1)) in PLATFORMS
        True
    """
    mesh = jax.sharding.get_abstract_mesh().abstract_device
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        platform = next(iter(x.devices())).platform
    elif mesh is not None:
        platform = mesh.platform
    else:
        platform = getattr(default, "platform", default) or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)

"""Where a computation runs."""

from typing import Any

import jax
from jax.core import Tracer

PLATFORMS = ("cpu", "gpu", "tpu")

# Of GPUs that are compiled for from a machine without one, where only the name is known.
_CAPABILITIES = {"A100": 8.0, "H100": 9.0, "H200": 9.0, "B200": 10.0, "B300": 10.3}


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


def may_be_partitioned() -> bool:
    """Return whether XLA may divide the computation among devices.

    It may if there are several, and the computation is in no `jax.shard_map`.

    Example:
        >>> devices = jax.sharding.AbstractMesh((4,), ("data",))
        >>> with jax.sharding.use_abstract_mesh(devices):
        ...     may_be_partitioned()
        True
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    manual = jax.sharding.AxisType.Manual
    return any(
        size > 1 and kind != manual
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def compute_capability() -> float:
    """Return the compute capability of the GPU in use, or of the mesh in use; 0.0 without a GPU.

    Example:
        >>> compute_capability() >= 0
        True
    """
    device, mesh = jax.local_devices()[0], jax.sharding.get_abstract_mesh().abstract_device
    if mesh is None or mesh.device_kind == getattr(device, "device_kind", None):
        return float(getattr(device, "compute_capability", 0))
    return next(
        (capability for name, capability in _CAPABILITIES.items() if name in mesh.device_kind), 0.0
    )

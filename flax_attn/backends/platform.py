"""Where a computation runs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import Tracer

from attn_spec.checks import check_choice
from flax_attn.backends.chips import CHIPS, USUAL, Chip, chip_named

PLATFORMS = ("cpu", "gpu", "tpu")
_PLATFORM_NAMES = {"cuda": "gpu", "rocm": "gpu"}

_ASKED = ContextVar[str | None]("asked", default=None)


@contextmanager
def asked_about(chip: str | None) -> Iterator[None]:
    """Answer for a machine with such a chip, as it would be installed; None is this machine.

    Example:
        >>> with asked_about("h100"):
        ...     compute_capability()
        9.0
    """
    token = _ASKED.set(chip)
    try:
        yield
    finally:
        _ASKED.reset(token)


def asked_chip() -> str | None:
    """Return the name of the chip that is asked about, or None for this machine."""
    return _ASKED.get()


def machine(platform: str) -> tuple[str, str | None]:
    """Return the platform that is asked about, and the name of its chip; None is this machine.

    Args:
        platform: platform, or the name of a chip, in letters of either case. A GPU or TPU that is
            not attached is a usual one.

    Raises:
        ValueError: if it is neither.

    Example:
        >>> machine("A100"), machine("cpu")
        (('gpu', 'a100'), ('cpu', None))
    """
    if isinstance(platform, str):
        platform = platform.lower()
    _check_no_topology(platform)
    chips = [name for name in CHIPS if name not in PLATFORMS]
    known = *PLATFORMS, *chips
    check_choice("platform", platform, known)
    if platform in chips:
        return CHIPS[platform].kind, platform
    if platform in _attached():
        return platform, None
    return platform, USUAL[platform]


def _attached() -> set[str]:
    # The CPU is there beside any accelerator.
    names: set[str] = {device.platform for device in jax.local_devices()}
    return {"cpu"} | {_PLATFORM_NAMES.get(name, name) for name in names}


def _check_no_topology(platform: Any) -> None:
    """Raise for several chips, as `v5e-8` and `v5e:2x4` name them."""
    chip = re.split("[-:]", platform)[0] if isinstance(platform, str) else None
    if chip in CHIPS and chip != platform:
        raise ValueError(
            f"a platform is one chip, and a call is explained for one; got {platform!r}. Pass"
            f" {chip!r}, under a mesh of the devices if the call is split"
        )


def chip_in_use(platform: str) -> Chip:
    """Return the figures of the chip that is asked about, or that a computation would run on.

    Those of a usual one where it is not in the table.

    Example:
        >>> with asked_about("b200"):
        ...     chip_in_use("gpu").capability
        10.0
    """
    name = asked_chip() or chip_named(_device_kind())
    if name is None or CHIPS[name].kind != platform:
        name = USUAL[platform]
    return CHIPS[name]


def _device_kind() -> str:
    mesh = jax.sharding.get_abstract_mesh().abstract_device
    device = jax.local_devices()[0] if mesh is None else mesh
    return device.device_kind


def platform_of(x: Any) -> str:
    """Return where a computation on `x` runs: `"cpu"`, `"gpu"` or `"tpu"`.

    For a tracer or an abstract array it is the device of the mesh in use, or JAX's default device.

    Example:
        >>> import jax.numpy as jnp
        >>> platform_of(jnp.zeros(1)) in PLATFORMS
        True
    """
    known = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    platform = next(iter(x.devices())).platform if known else _platform_in_use()
    return _PLATFORM_NAMES.get(platform, platform)


def _platform_in_use() -> str:
    mesh = jax.sharding.get_abstract_mesh().abstract_device
    if mesh is not None:
        return mesh.platform
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(default, "platform", default) or jax.default_backend()


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
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != manual for size, kind in axes)


def varying(arrays: Any) -> frozenset[str]:
    """Return the axes of a mesh over which an array of a tree varies, by its type.

    There are none outside of `jax.shard_map`, and none under its `check_vma=False`.
    """
    axes = (jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays))
    return frozenset().union(*axes)


def compute_capability() -> float:
    """Return the compute capability of the GPU in use, or of the mesh in use; 0.0 without a GPU.

    Example:
        >>> compute_capability() >= 0
        True
    """
    asked = asked_chip()
    return _capability_in_use() if asked is None else CHIPS[asked].capability


def _capability_in_use() -> float:
    device = jax.local_devices()[0]
    mesh = jax.sharding.get_abstract_mesh().abstract_device
    if mesh is None or mesh.device_kind == getattr(device, "device_kind", None):
        return float(getattr(device, "compute_capability", 0))
    return _capability_of(mesh.device_kind)


def _capability_of(device_kind: str) -> float:
    # Of a GPU that is compiled for from a machine without one only the name is known.
    name = chip_named(device_kind)
    return 0.0 if name is None else CHIPS[name].capability

"""Devices to compile for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AbsentDevices:
    """Devices that are described and not attached.

    Args:
        name: name of the device.
        devices: devices, as JAX describes them.
        memory: memory of one device, in bytes.
    """

    name: str
    devices: Sequence[Any]
    memory: int | None

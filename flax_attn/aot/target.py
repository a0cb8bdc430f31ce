"""Devices to compile for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Args:
        name: name of the device.
        devices: devices, described and not attached.
        memory: memory of one device, in bytes.
    """

    name: str
    devices: Sequence[Any]
    memory: int

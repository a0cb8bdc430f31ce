"""Devices to compile for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Args:
        name: of the device.
        devices: described, not attached.
        memory: of one, in bytes.
    """

    name: str
    devices: Sequence[Any]
    memory: int

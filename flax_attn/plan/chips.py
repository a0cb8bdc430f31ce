"""What each chip can do at most, as its maker publishes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Chip:
    """The published figures of one device, as JAX counts devices; None where nothing is published.

    Args:
        kind: kind of device, `"tpu"`, `"gpu"` or `"cpu"`.
        flops: operations a second in products of bfloat16, without sparsity.
        memory: bytes of its memory.
        bandwidth: bytes a second to and from its memory.
        links: bytes a second that it sends to other chips over all its links together, and receives
            at the same time.
        devices: number of these on what is sold as one chip.
    """

    kind: str
    flops: float | None = None
    memory: int | None = None
    bandwidth: float | None = None
    links: float | None = None
    devices: int = 1


GIB = 2**30

# Links: half of the figure that is published, which counts both directions.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        # docs.cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 16 GB at 819 GBps, 400 GBps of
        # interconnect in both directions
        "v5e": Chip("tpu", 197e12, 16 * GIB, 819e9, 200e9),
        # docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 95 GiB at 2765 GBps, 1200 GBps
        "v5p": Chip("tpu", 459e12, 95 * GIB, 2765e9, 600e9),
        # docs.cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 32 GB at 1638 GBps, 800 GBps
        "v6e": Chip("tpu", 918e12, 32 * GIB, 1638e9, 400e9),
        # docs.cloud.google.com/tpu/docs/tpu7x: 2307 TFLOPs, 192 GiB at 7380 GBps, 1200 GBps; JAX
        # sees each of the two chiplets as a device, and all of this is for both
        "tpu7x": Chip("tpu", 2307e12 / 2, 96 * GIB, 7380e9 / 2, 300e9, devices=2),
        # nvidia.com/en-us/data-center/h200: 1979 TFLOPS with sparsity, which is twice that without,
        # 4.8 TB/s, NVLink 900 GB/s. Of the 141 GB the driver gives 151397597184 bytes to programs,
        # as it describes the device.
        "h200": Chip("gpu", 989.5e12, 151_397_597_184, 4.8e12, 450e9),
        "cpu": Chip("cpu"),  # simulated devices
    }
)

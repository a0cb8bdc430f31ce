"""What each chip can do at most, as its maker publishes it."""

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
        flops_float32: operations a second in products of float32 in JAX's default precision.
        integers: operations a second on integers of 32 bits.
        capability: compute capability of a GPU.
        names: parts of what JAX calls the kind of such a device.
    """

    kind: str
    flops: float | None = None
    memory: int | None = None
    bandwidth: float | None = None
    links: float | None = None
    devices: int = 1
    flops_float32: float | None = None
    integers: float | None = None
    capability: float = 0.0
    names: tuple[str, ...] = ()

    @property
    def launch(self) -> float:
        """Seconds from one kernel to the next."""
        # An assumption, not a published figure: 3 to 5 microseconds are usual on GPUs. A program
        # of a TPU is one launch, whose operations follow each other in well below a microsecond.
        return {"gpu": 4e-6, "tpu": 0.5e-6}.get(self.kind, 0.0)

    @property
    def draws(self) -> float | None:
        """Numbers of 32 bits that Threefry draws a second."""
        # 20 rounds of an addition, a rotation and an exclusive or; five times the key, which is
        # three additions; a comparison and a choice. A TPU rotates in three operations.
        operations = 120 if self.kind == "tpu" else 80
        return None if self.integers is None else self.integers / operations


GIB, GB = 2**30, 10**9

# Links: half of the figure that is published, which counts both directions. Rates of GPUs are those
# without sparsity, half of what is published with it; float32 is multiplied as TF32. A TPU's
# default precision multiplies float32 as bfloat16.
# Integers: half of the INT32 rate in the whitepaper of the H100, which counts a multiplication with
# an addition as two; of a B200, for which none is published, as many a second as an H100 has for
# each of its units of float32. Of TPUs 4096 lanes of a core at the clock that its rate in products
# implies, 1.5 GHz of a v5e and 1.75 of the others; no such figure is published.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        # docs.cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 16 GB at 819 GBps, 400 GBps of
        # interconnect in both directions
        "v5e": Chip(
            "tpu",
            197e12,
            16 * GIB,
            819e9,
            200e9,
            flops_float32=197e12,
            integers=6.1e12,
            names=("v5 lite", "v5e"),
        ),
        # docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 95 GiB at 2765 GBps, 1200 GBps
        "v5p": Chip(
            "tpu",
            459e12,
            95 * GIB,
            2765e9,
            600e9,
            flops_float32=459e12,
            integers=14.3e12,
            names=("v5p", "TPU v5"),
        ),
        # docs.cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 32 GB at 1638 GBps, 800 GBps
        "v6e": Chip(
            "tpu",
            918e12,
            32 * GIB,
            1638e9,
            400e9,
            flops_float32=918e12,
            integers=7.2e12,
            names=("v6 lite", "v6e"),
        ),
        # docs.cloud.google.com/tpu/docs/tpu7x: 2307 TFLOPs, 192 GiB at 7380 GBps, 1200 GBps; JAX
        # sees each of the two chiplets as a device, and all of this is for both
        "tpu7x": Chip(
            "tpu",
            2307e12 / 2,
            96 * GIB,
            7380e9 / 2,
            300e9,
            devices=2,
            flops_float32=2307e12 / 2,
            integers=7.2e12,
            names=("TPU7x", "TPU v7"),
        ),
        # nvidia.com/en-us/data-center/a100: 80 GB SXM, 312 TFLOPS, TF32 156 TFLOPS, 2039 GB/s,
        # NVLink 600 GB/s
        "a100": Chip(
            "gpu", 312e12, 80 * GB, 2.039e12, 300e9, 1, 156e12, 9.75e12, 8.0, names=("A100",)
        ),
        # nvidia.com/en-us/data-center/h100: SXM, 1979 TFLOPS and TF32 989 TFLOPS with sparsity,
        # 80 GB at 3.35 TB/s, NVLink 900 GB/s
        "h100": Chip(
            "gpu", 989.5e12, 80 * GB, 3.35e12, 450e9, 1, 494.7e12, 16.75e12, 9.0, names=("H100",)
        ),
        # nvidia.com/en-us/data-center/h200: 1979 TFLOPS with sparsity, which is twice that without,
        # 4.8 TB/s, NVLink 900 GB/s. Of the 141 GB the driver gives 151397597184 bytes to programs,
        # as it describes the device.
        "h200": Chip(
            "gpu",
            989.5e12,
            151_397_597_184,
            4.8e12,
            450e9,
            1,
            494.7e12,
            16.75e12,
            9.0,
            names=("H200",),
        ),
        # nvidia.com/en-us/data-center/dgx-b200: eight with 72 PFLOPS of FP8, 1440 GB and 64 TB/s
        # together; of one 4.5 PFLOPS of bfloat16 and 2.2 of TF32 with sparsity, NVLink 1.8 TB/s
        "b200": Chip(
            "gpu", 2250e12, 180 * GB, 8e12, 900e9, 1, 1100e12, 18.75e12, 10.0, names=("B200",)
        ),
        "cpu": Chip("cpu"),  # simulated devices
    }
)

# What a platform stands for where no chip is named.
USUAL: Mapping[str, str] = MappingProxyType({"gpu": "h100", "tpu": "v5e", "cpu": "cpu"})


def chip_named(kind: str) -> str | None:
    """Return the name of the chip that JAX calls so, or None for one that is not in the table.

    Example:
        >>> chip_named("NVIDIA H100 80GB HBM3"), chip_named("TPU v5 lite"), chip_named("abacus")
        ('h100', 'v5e', None)
    """
    for name, chip in CHIPS.items():
        if any(part in kind for part in chip.names):
            return name
    return None

"""The chips that a program is compiled for, by a name such as `v5e:16x16`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from flax_attn.aot import gpu, tpu
from flax_attn.aot.simulated import simulated
from flax_attn.backends.chips import CHIPS, Chip

_DIMENSIONS = {"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3, "h200": 1, "cpu": 1}
_EXAMPLES = "v5e:16x16, v6e:16x16, v5p:4x4x4, tpu7x:4x4x4, h200:8, cpu:8"
# NVLink joins so many GPUs.
_PER_HOST = 8


@dataclass(frozen=True)
class Topology:
    """Chips and how they are joined.

    Args:
        name: name as it is written, `v5e:16x16`.
        chip: kind of all chips.
        shape: number of chips along each dimension of the torus.

    Example:
        >>> topology("v5e:16x16").size, topology("tpu7x:2x2x1").size
        (256, 8)
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of devices."""
        return prod(self.shape) * self.chip.devices

    @contextmanager
    def devices(self) -> Iterator[Sequence[Any]]:
        """Return the devices, to be compiled for inside the `with` statement.

        Raises:
            ImportError: if what describes them is not installed.
            ValueError: if JAX has fewer simulated devices, or the compiler knows no such topology.
        """
        if self.chip.kind == "gpu":
            with gpu.described(self.size) as devices:
                yield devices
        else:
            # These stay: JAX simulates processors from its start to its end.
            yield simulated(self.size) if self.chip.kind == "cpu" else _tpu(self)


def topology(text: str) -> Topology:
    """Return the topology of a name.

    Raises:
        ValueError: if the chip is not known, or its chips are not joined in a torus of this shape.
    """
    name, _, sizes = text.partition(":")
    is_shape = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes)
    # A leading 0 is refused with the rest: libtpu would describe another topology, or none.
    if name not in _DIMENSIONS or not is_shape:
        names = ", ".join(_DIMENSIONS)
        remedy = _as_sold(text) or f"one of {_EXAMPLES}"
        raise ValueError(
            f"a topology is one of {names} and the number of its chips in each dimension; got"
            f" {text!r}. Write it as {remedy}"
        )
    shape = tuple(int(size) for size in sizes.split("x"))
    # More GPUs than a host has are joined by a network, of which nothing is known here.
    dimensions = _DIMENSIONS[name]
    gpu = CHIPS[name].kind == "gpu"
    if len(shape) != dimensions or (gpu and shape[0] > _PER_HOST):
        limit = f", {_PER_HOST} at most" if gpu else ""
        raise ValueError(
            f"chips of {name} are counted along {dimensions} dimensions{limit}; got {text!r}. Write"
            f" it as in {_EXAMPLES}"
        )
    return Topology(text, CHIPS[name], shape)


def _as_sold(text: str) -> str | None:
    """Return the topology that is sold under a name such as `v5e-8`; None where it is no such name.

    Example:
        >>> _as_sold("v5e-8"), _as_sold("v5p-128")
        ('v5e:2x4', 'v5p:4x4x4')
    """
    name, _, count = text.partition("-")
    dimensions = _DIMENSIONS.get(name)
    is_number = re.fullmatch(r"[1-9]\d*", count)
    if dimensions is None or not is_number:
        return None
    if dimensions == 1:
        return f"{name}:{count}"
    chips = int(count)
    # Names of three dimensions count the cores, of which a chip has two.
    if dimensions == 3:
        chips //= 2
    doublings = chips.bit_length() - 1
    if chips != 2**doublings:
        return None
    # As even as can be; a slice smaller than a cube has its least side last.
    sides = [2 ** ((doublings + i) // dimensions) for i in range(dimensions)]
    if chips < 2**dimensions:
        sides.reverse()
    shape = "x".join(map(str, sides))
    return f"{name}:{shape}"


def _tpu(wanted: Topology) -> Sequence[Any]:
    try:
        return tpu.described(wanted.name)
    except jax.errors.JaxRuntimeError as error:
        # Anything else, such as a lock held by another process, is no fault of the name.
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise ValueError(
            f"libtpu describes no topology {wanted.name!r}: {str(error).splitlines()[0]}. Ask for"
            " one of the shapes that the chip is sold in"
        ) from None

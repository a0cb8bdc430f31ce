"""One function compiled for a device that is not there."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tools.aot.devices import AbsentDevices

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


@dataclass(frozen=True)
class CompiledCost:
    """The bytes that a program takes on one device; only `reason` is set if it does not compile.

    Args:
        arguments: bytes of the inputs, and the cotangent.
        outputs: bytes of the output, and the gradients.
        temporaries: bytes beside these.
        collectives: number of instructions of each kind that communicate between devices: those in
            loops run repeatedly, and those in branches perhaps never.
        seconds: seconds to trace, lower and compile.
        reason: reason why it does not compile.
    """

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str | None = None

    @property
    def memory(self) -> int:
        """All of it."""
        return self.arguments + self.outputs + self.temporaries


def compile_for(
    target: AbsentDevices, function: Callable, arguments: tuple, batch: int, devices: int = 1
) -> CompiledCost:
    """Return the cost of `function(*arguments)`, or why it fails; arguments as for `compiled`."""
    # Tracing counts: it is what a user waits for.
    start = time.perf_counter()
    try:
        program = compiled(target, function, arguments, batch, devices)
    # Of any library on the way: the reason is what is asked for.
    except Exception as error:
        return CompiledCost(reason=first_line(error))
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    assert memory is not None, "XLA reports memory for TPU and for GPU"
    return CompiledCost(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        collectives=collectives(program.as_text() or ""),
        seconds=seconds,
    )


def compiled(
    target: AbsentDevices, function: Callable, arguments: tuple, batch: int, devices: int = 1
) -> jax.stages.Compiled:
    """Return `function(*arguments)` compiled for several devices, which share the batch.

    Args:
        target: devices to compile for.
        function: function of trees of arrays.
        arguments: trees of `jax.ShapeDtypeStruct`.
        batch: batch size: an array whose first axis has this size is split, the others are on every
            device.
        devices: number of devices.
    """
    mesh = Mesh(np.array(target.devices[:devices]), ("batch",))
    split = NamedSharding(mesh, PartitionSpec("batch"))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> jax.ShapeDtypeStruct:
        sharding = split if x.shape[:1] == (batch,) else whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = jax.tree.map(place, arguments)
    # The mesh tells `dot_product_attention` the platform.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*placed).compile()


def first_line(error: Exception) -> str:
    """Return the first line of an error that says something."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def collectives(text: str) -> dict[str, int]:
    """Return how many instructions of each kind communicate, in a program as XLA prints it.

    Example:
        >>> entry = "ENTRY main { %a = f32[] all-reduce-start(%b) }"
        >>> collectives(chr(10) + entry)
        {'all-reduce': 1}
    """
    # What runs once is the entry; outside of it are the bodies of loops and branches.
    called, _, entry = text.partition("\nENTRY ")
    once = Counter(_kinds(entry, ""))
    repeated = Counter(_kinds(called, " in loops"))
    return dict(once + repeated)


def _kinds(text: str, where: str) -> Iterator[str]:
    # XLA writes in the metadata of an instruction which of JAX's operations it comes from.
    for line in text.splitlines():
        place = " in branches" if "/branch_" in line else where
        for kind in _COLLECTIVE.findall(line):
            yield kind + place

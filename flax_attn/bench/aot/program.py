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

from flax_attn.aot.target import Target

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


@dataclass(frozen=True)
class Program:
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
    target: Target, function: Callable, arguments: tuple, batch: int, devices: int = 1
) -> Program:
    """Return the cost of `function(*arguments)`, or why it fails; arguments as for `compiled`."""
    start = time.perf_counter()
    try:
        program = compiled(target, function, arguments, batch, devices)
    except Exception as error:  # of any library on the way: the reason is what is asked for
        return Program(reason=first_line(error))
    seconds, memory = time.perf_counter() - start, program.memory_analysis()
    assert memory is not None, "XLA reports memory for TPU and for GPU"
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return Program(*sizes, collectives(program.as_text() or ""), seconds)


def compiled(
    target: Target, function: Callable, arguments: tuple, batch: int, devices: int = 1
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
    mesh = jax.sharding.Mesh(np.array(target.devices[:devices]), ("batch",))
    split, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (["batch"], [])
    )

    def place(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=split if x.shape[:1] == (batch,) else whole
        )

    # The mesh tells `dot_product_attention` the platform.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*jax.tree.map(place, arguments)).compile()


def first_line(error: Exception) -> str:
    """Return the first line of an error that says something."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def collectives(text: str) -> dict[str, int]:
    """Return how many instructions of each kind communicate, in a program as XLA prints it.

    Example:
        >>> entry = "ENTRY main { %a = f32[] all-reduce-start(%b) }"
        >>> collectives(chr(10) + entry)
        {'all-reduce': 1}
    """
    called, _, entry = text.partition("\nENTRY ")
    return dict(Counter(_kinds(entry, "")) + Counter(_kinds(called, " in loops")))


def _kinds(text: str, where: str) -> Iterator[str]:
    for line in text.splitlines():
        for kind in _COLLECTIVE.findall(line):
            yield kind + (" in branches" if "/branch_" in line else where)

"""Attention compiled for TPU chips on a machine without one: what fits in memory, and what it takes to compile.

Source: ahead-of-time compilation, `jax.experimental.topologies` (docs.jax.dev/en/latest/aot.html).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from rich.table import Table

from flax_attn.attention import dot_product_attention
from flax_attn.bench.suite import default_backends
from flax_attn.functional.masks import Mask

GroupedShape = tuple[int, int, int, int, int]

# The smallest slice of each generation that libtpu describes; one of its chips is compiled for.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
SHAPES = ((1, 4096, 16, 16, 128), (4, 2048, 8, 8, 128), (1, 8192, 32, 8, 128))  # b, t, n, k, h
BACKENDS = tuple(name for name in default_backends("tpu") if name not in ("auto", "reference"))
DIRECTIONS = ("forward", "forward+backward")
LEGEND = """\
Causal attention in bfloat16, compiled for one chip of each generation; nothing is run.
arguments, outputs, temporaries: of the chip's main memory; what XLA keeps in VMEM is not counted
compile: seconds on this machine, to trace, lower and compile"""

# Without these libtpu asks the cloud for a description of the machine.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_NEEDED = "compiling for TPU needs libtpu, not a TPU: pip install 'flax-attn[tpu]'"


@dataclass(frozen=True)
class TpuProgram:
    """What one program takes on one chip; sizes in bytes. Where it does not compile only `reason` is set.

    Args:
        chip: the generation.
        backend: the backend's name.
        shape: `(b, t, n, k, h)`, causal with t = s.
        direction: forward, or forward and backward.
        arguments: of the inputs, and the cotangent.
        outputs: of the output, and the gradients.
        temporaries: beside these.
        seconds: to trace, lower and compile.
        reason: why it does not compile.
    """

    chip: str
    backend: str
    shape: GroupedShape
    direction: str
    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    seconds: float = 0.0
    reason: str | None = None


def report(
    chips: Sequence[str] = tuple(TOPOLOGIES),
    backends: Sequence[str] = BACKENDS,
    shapes: Sequence[GroupedShape] = SHAPES,
) -> Table:
    """Compile every combination and return a table.

    Raises:
        ImportError: if libtpu is not installed.
    """
    table = Table("chip", "backend", "b t n k h", "direction", title="Compiled for TPU", caption=LEGEND)
    for name in ("arguments", "outputs", "temporaries", "compile"):
        table.add_column(name, justify="right")
    table.add_column("not compiled because", overflow="fold")
    for row in programs(chips, backends, shapes):
        table.add_row(row.chip, row.backend, " ".join(map(str, row.shape)), row.direction, *_cells(row))
    return table


def programs(chips: Sequence[str], backends: Sequence[str], shapes: Sequence[GroupedShape]) -> Iterator[TpuProgram]:
    """Compile every combination, one after the other.

    Raises:
        ImportError: if libtpu is not installed.
    """
    if find_spec("libtpu") is None:
        raise ImportError(_NEEDED)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for chip in chips:
        device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
        for shape in shapes:
            for backend in backends:
                for direction in DIRECTIONS:
                    yield _program(chip, device, backend, shape, direction)


def _program(chip: str, device: Any, backend: str, shape: GroupedShape, direction: str) -> TpuProgram:
    start = time.perf_counter()
    try:
        program = compiled(device, backend, shape, direction)
    except (ValueError, jax.errors.JaxRuntimeError) as error:  # refused by the backend; too large for the chip
        return TpuProgram(chip, backend, shape, direction, reason=str(error).splitlines()[0])
    seconds, memory = time.perf_counter() - start, program.memory_analysis()
    assert memory is not None, "XLA for TPU always reports memory"
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return TpuProgram(chip, backend, shape, direction, *sizes, seconds)


def compiled(device: Any, backend: str, shape: GroupedShape, direction: str) -> jax.stages.Compiled:
    """Return causal attention in bfloat16, compiled for `device`, which need not be attached to this machine."""
    b, t, n, k, h = shape
    mesh = jax.sharding.Mesh(np.array([device]), ("chip",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    query, key = (jax.ShapeDtypeStruct((b, t, m, h), jnp.bfloat16, sharding=sharding) for m in (n, k))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells `dot_product_attention` the platform
        if direction == "forward":
            return jax.jit(lambda *arrays: _attend(backend, *arrays)).lower(query, key, key).compile()
        return jax.jit(lambda *arrays: _gradients(backend, *arrays)).lower(query, key, key, query).compile()


def _attend(backend: str, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return dot_product_attention(query, key, value, mask=Mask.causal(), backend=backend)


def _gradients(backend: str, query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
    output, pullback = jax.vjp(lambda *arrays: _attend(backend, *arrays), query, key, value)
    return output, pullback(cotangent)


def _cells(row: TpuProgram) -> tuple[str, ...]:
    if row.reason is not None:
        return "", "", "", "", row.reason
    sizes = (f"{size / 2**20:.1f} MiB" for size in (row.arguments, row.outputs, row.temporaries))
    return *sizes, f"{row.seconds:.1f} s", ""

"""The programs of a job, compiled for its devices: a training step, or a prompt and one token."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from flax_attn.backends.chips import Chip
from flax_attn.modules.work import Work
from flax_attn.plan import cost, work
from flax_attn.plan.collectives import Collective, collectives
from flax_attn.plan.hlo import read
from flax_attn.plan.job import Job
from flax_attn.plan.placement import (
    Held,
    cache_on,
    mesh_for,
    model_on,
    optimizer_on,
    place_cache,
    tokens_on,
)
from flax_attn.training.step import compiled_step

# How XLA for TPU refuses a program that takes more memory than the chip has: it names all of it, or
# temporaries alone.
_EXCEEDED = re.compile(r"(Used |HLO temporaries \()([\d.]+)([KMGT])\)? (?:of|exceeds)")


@dataclass(frozen=True)
class Phase:
    """One program on one device; bytes, operations and counts are those of one device.

    Args:
        name: name of the program, which says what it does.
        work: operations that the model asks for.
        kernels: operations of attention in kernels that do not say what they compute.
        arguments: bytes of its inputs; those that it writes in place are not in memory a second
            time.
        temporaries: bytes beside inputs and outputs.
        peak: bytes of all of it at once.
        flops: operations of the matrix products of the program.
        moved: bytes to and from memory.
        collectives: collectives by kind and axes.
        endless: number of loops that run an unknown number of times, counted as one turn.
        compiled: whether there is a program; if not, it takes more memory than there is, and only
            the peak is known.
        seconds: seconds to trace, lower and compile.
    """

    name: str
    work: int
    arguments: int = 0
    temporaries: int = 0
    peak: int = 0
    flops: int = 0
    kernels: int = 0
    moved: int = 0
    collectives: Sequence[Collective] = ()
    endless: int = 0
    compiled: bool = True
    seconds: float = 0.0

    @property
    def computed(self) -> int:
        """Operations of the program and its kernels.

        At least what the model asks for, where loops are counted once.
        """
        known = self.flops + self.kernels
        return max(known, self.work) if self.endless else known

    def times(self, chip: Chip) -> dict[str, float]:
        """Return the seconds of compute, memory and links, each alone at the rates of a chip."""
        sent = sum(row.bytes for row in self.collectives)
        parts = {"compute": (self.computed, chip.flops), "memory": (self.moved, chip.bandwidth)}
        parts["links"] = (sent, chip.links)
        return {
            name: amount / rate for name, (amount, rate) in parts.items() if rate and self.compiled
        }


# The name of a program, what lowers it, and the operations that the model asks for.
_Program = tuple[str, Callable[[], Any], Work]


def compiled(job: Job, held: Held, tell: Callable[[str], object]) -> list[Phase]:
    """Compile the programs of a job, of which a device holds so much.

    Args:
        job: job that is planned.
        held: bytes that a device holds.
        tell: called with what is done next, in words.

    Raises:
        ImportError: if what describes the devices is not installed.
        ValueError: if there are no such devices.
    """
    with job.topology.devices() as devices:
        mesh = mesh_for(job, devices)
        # The mesh tells attention the platform.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            programs = _training(job, mesh) if job.train else _generation(job, mesh)
            return _phases(programs, job, held, tell)


def _phases(
    programs: Sequence[_Program], job: Job, held: Held, tell: Callable[[str], object]
) -> list[Phase]:
    found = []
    for name, lower, asked in programs:
        # A program for a pod takes minutes: the user learns which one is under way.
        tell(f"compiling the {name} for {job.topology.size} devices")
        phase = _phase(name, lower, job, asked, held.total)
        found.append(phase)
    return found


def _training(job: Job, mesh: Mesh) -> list[_Program]:
    model = model_on(job, mesh)
    optimizer = optimizer_on(model, mesh)

    def lower() -> Any:
        tokens = tokens_on(job, mesh, job.tokens)
        return compiled_step.lower(model, optimizer, tokens, loss=job.model.loss)

    return [("training step", lower, work.training(job, model))]


def _generation(job: Job, mesh: Mesh) -> list[_Program]:
    model = model_on(job, mesh)
    model.eval()
    graph, state = nnx.split(model)
    tokens = tokens_on(job, mesh, job.tokens)
    token = tokens_on(job, mesh, 1)
    cache = cache_on(job, model, mesh)
    first = partial(_lowered, partial(_prefill, graph, job), mesh, state, tokens)
    then = partial(_lowered, partial(_decode, graph), mesh, state, token, cache)
    return [
        ("prefill", first, work.prefill(job, model)),
        ("decoding step", then, work.decoding(job, model)),
    ]


def _prefill(graph: Any, job: Job, state: Any, tokens: Array) -> Any:
    model = nnx.merge(graph, state)
    # A static length of 0 says that the cache is empty, so that the prompt attends to itself alone.
    empty = tuple(one.replace(length=0) for one in model.init_cache(job.batch, job.tokens))
    decoded = model.decode(tokens, cache=empty)
    return model.logits(decoded.output[:, -1]), decoded.cache


def _decode(graph: Any, state: Any, tokens: Array, cache: Any) -> Any:
    attended = nnx.merge(graph, state).attend(tokens, cache=cache)
    return attended.output, attended.cache


def _lowered(function: Callable, mesh: Mesh, *inputs: Any) -> jax.stages.Lowered:
    """Return `function` of parameters, tokens and perhaps a cache, which gives logits and a cache.

    The cache is written in place, as it is in a program that generates.
    """
    _, cache = jax.eval_shape(function, *inputs)
    where = jax.tree.map(lambda x: x.sharding, place_cache(cache, mesh))
    given = range(2, len(inputs))
    jitted = jax.jit(function, out_shardings=(None, where), donate_argnums=given)
    return jitted.lower(*inputs)


def _phase(name: str, lower: Callable[[], Any], job: Job, asked: Work, held: int) -> Phase:
    """Return the phase whose program `lower` makes, beside so many bytes that the device holds."""
    start = time.perf_counter()
    devices = job.topology.size
    lowered = lower()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        peak = _refused(str(error), held)
        if peak is None:
            raise
        seconds = time.perf_counter() - start
        return Phase(name, asked.total // devices, peak=peak, compiled=False, seconds=seconds)
    with suppress(AttributeError):
        # Flax wraps what JAX compiled.
        program = program.compiled
    seconds = time.perf_counter() - start
    # Under remat attention is computed once more, of three times with its gradients.
    attention = asked.attention * (4 if job.train and job.remat else 3) // 3 // devices
    phase = Phase(name, asked.total // devices, kernels=attention, seconds=seconds)
    return _read(phase, program, job)


def _refused(message: str, held: int) -> int | None:
    """Return the bytes of a program that is refused because they are too many.

    None for other refusals.
    """
    found = _EXCEEDED.search(message)
    if found is None:
        return None
    used = round(float(found[2]) * 1024 ** ("KMGT".index(found[3]) + 1))
    return used if found[1] == "Used " else used + held


def _read(phase: Phase, program: jax.stages.Compiled, job: Job) -> Phase:
    memory = program.memory_analysis()
    hlo = read(program.as_text() or "")
    assert memory is not None, "XLA reports memory on every platform"
    # An output that replaces an input, as the cache does, is not in memory a second time.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments = memory.argument_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    return replace(
        phase,
        arguments=arguments,
        temporaries=temporaries,
        peak=arguments + outputs + temporaries,
        flops=cost.flops(hlo),
        kernels=phase.kernels if cost.has_kernels(hlo) else 0,
        moved=cost.moved(hlo),
        collectives=collectives(hlo, job.mesh),
        endless=hlo.endless,
    )

"""The calls of well-known models compiled with `fused` for each chip, as a table in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from flax_attn.aot import gpu, tpu
from flax_attn.backends.chips import CHIPS
from flax_attn.bench.calls import MODEL_CALLS, ModelCall, forward, forward_and_backward
from flax_attn.plan.hlo import read
from tools.aot.assembler import Assembled, assembled, dumped
from tools.aot.compiled import compiled, first_line
from tools.aot.devices import AbsentDevices
from tools.aot.launches import custom_calls, launches

# The smallest slice of each generation that libtpu describes.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
OURS = {"gpu": "triton", "tpu": "tpu_custom_call"}
MIB = 2**20


@dataclass(frozen=True)
class CompiledCall:
    """One program of a call on one chip; only `reason` is set if it does not compile.

    Args:
        chip: name of the chip.
        call: name of the call.
        kernels: number of kernels of ours that it launches.
        launches: number of all kernels that it launches.
        temporaries: bytes beside arguments and outputs.
        assembled: kernels of ours as the assembler made them, on GPUs.
        reason: reason why it does not compile.
    """

    chip: str
    call: str
    kernels: int = 0
    launches: int = 0
    temporaries: int = 0
    assembled: tuple[Assembled, ...] = ()
    reason: str = ""


Programs = tuple[CompiledCall, CompiledCall]  # forward, and with the backward pass


def programs(
    platform: str, calls: Sequence[ModelCall] = MODEL_CALLS, backend: str = "fused"
) -> Iterator[Programs]:
    """Compile every call for every chip of a platform, forward and with the backward pass."""
    with _folder(platform) as folder:
        for chip in gpu.GPUS if platform == "gpu" else TOPOLOGIES:
            with _target(chip) as target:
                for call in calls:
                    yield _programs(target, call, backend, folder)


@contextmanager
def _folder(platform: str) -> Iterator[Path | None]:
    if platform == "tpu":
        yield None
        return
    with dumped() as folder:
        yield folder


@contextmanager
def _target(chip: str) -> Iterator[AbsentDevices]:
    memory = CHIPS[chip].memory
    if CHIPS[chip].kind == "tpu":
        yield AbsentDevices(chip, tpu.described(TOPOLOGIES[chip]), memory)
        return
    with gpu.described(1, chip) as devices:
        yield AbsentDevices(chip, devices, memory)


def _programs(
    target: AbsentDevices, call: ModelCall, backend: str, folder: Path | None
) -> Programs:
    both = call.arrays, call.cotangent
    return (
        _program(target, call, forward(call, backend), (call.arrays,), folder),
        _program(target, call, forward_and_backward(call, backend), both, folder),
    )


def _program(
    target: AbsentDevices,
    call: ModelCall,
    function: Callable,
    arguments: tuple,
    folder: Path | None,
) -> CompiledCall:
    # A function is traced once for all chips of one kind, unless it is traced anew.
    jax.clear_caches()
    rows = call.arrays["query"].shape[0]
    try:
        program = compiled(target, function, arguments, rows)
    except Exception as error:  # of any library on the way: the reason is what is asked for
        return CompiledCall(target.name, call.name, reason=first_line(error))
    memory = program.memory_analysis()
    assert memory is not None, "XLA reports memory for TPU and for GPU"
    text = read(program.as_text() or "")
    return CompiledCall(
        chip=target.name,
        call=call.name,
        kernels=custom_calls(text, OURS[CHIPS[target.name].kind]),
        launches=launches(text),
        temporaries=memory.temp_size_in_bytes,
        assembled=tuple(assembled(folder)) if folder else (),
    )


def markdown(found: Iterable[Programs]) -> str:
    """Return a table in Markdown: a row for a call, a column for a chip.

    A cell has launches, temporaries in MiB, and of the kernels of ours on a GPU registers, spills
    in bytes, shared memory in KiB and instructions for tensor cores.
    """
    cells: dict[str, dict[str, str]] = {}
    for one, both in found:
        cells.setdefault(one.call, {})[one.chip] = _cell(one, both)
    chips = list(dict.fromkeys(chip for row in cells.values() for chip in row))
    rows = [["call", *chips], ["---"] * (1 + len(chips))]
    rows += [[call, *(row.get(chip, "") for chip in chips)] for call, row in cells.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(one: CompiledCall, both: CompiledCall) -> str:
    if one.reason or both.reason:
        return one.reason or both.reason
    lines = [
        f"{one.kernels} of {one.launches}, {both.kernels} of {both.launches}",
        f"{one.temporaries / MIB:.1f}, {both.temporaries / MIB:.1f}",
    ]
    kernels = both.assembled
    if kernels:
        lines.append(" ".join(str(kernel.registers) for kernel in kernels))
        lines.append(" ".join(str(kernel.spills) for kernel in kernels))
        lines.append(" ".join(f"{kernel.shared / 1024:.0f}" for kernel in kernels))
        lines.append(" ".join(str(kernel.products) for kernel in kernels))
    return "<br>".join(lines)

"""The calls of well-known models compiled with `fused` for each chip, as a table in Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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


# Forward, and with the backward pass.
Programs = tuple[CompiledCall, CompiledCall]


def programs(
    platform: str, calls: Sequence[ModelCall] = MODEL_CALLS, backend: str = "fused"
) -> Iterator[Programs]:
    """Compile every call for every chip of a platform, forward and with the backward pass."""
    chips = gpu.GPUS if platform == "gpu" else TOPOLOGIES
    with _folder(platform) as folder:
        for chip in chips:
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
    compile_call = partial(_program, target, call, folder=folder)
    one = compile_call(forward(call, backend), (call.arrays,))
    both = compile_call(forward_and_backward(call, backend), (call.arrays, call.cotangent))
    return one, both


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
    # Of any library on the way: the reason is what is asked for.
    except Exception as error:
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
    cells: defaultdict[str, dict[str, str]] = defaultdict(dict)
    # A dictionary keeps them in the order in which they come.
    chips: dict[str, None] = {}
    for one, both in found:
        cells[one.call][one.chip] = _cell(one, both)
        chips[one.chip] = None
    heading = ["call", *chips]
    rows = [heading, ["---"] * len(heading)]
    for call, row in cells.items():
        # A call that was not compiled for a chip has no cell there.
        shown = [row.get(chip, "") for chip in chips]
        rows.append([call, *shown])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(one: CompiledCall, both: CompiledCall) -> str:
    reason = one.reason or both.reason
    if reason:
        return reason
    launched = f"{one.kernels} of {one.launches}, {both.kernels} of {both.launches}"
    memory = f"{one.temporaries / MIB:.1f}, {both.temporaries / MIB:.1f}"
    return "<br>".join([launched, memory, *_of_kernels(both.assembled)])


def _of_kernels(kernels: Sequence[Assembled]) -> Iterator[str]:
    # On TPUs nothing is known of them.
    if kernels:
        yield _listed(kernel.registers for kernel in kernels)
        yield _listed(kernel.spills for kernel in kernels)
        yield _listed(kernel.shared / 1024 for kernel in kernels)
        yield _listed(kernel.products for kernel in kernels)


def _listed(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.0f}" for number in numbers)

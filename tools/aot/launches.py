"""The kernels that a compiled program launches, counted in XLA's text."""

from __future__ import annotations

from collections.abc import Iterator

from flax_attn.plan.hlo import ExecutedInstruction, Hlo

# What runs no kernel: names of memory, and what only holds other instructions.
_NO_KERNEL = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "while",
    "conditional",
    "call",
}


def launches(program: Hlo) -> int:
    """Return how many kernels a program launches; those of a loop count as often as it turns.

    Example:
        >>> from flax_attn.plan.hlo import read
        >>> lines = "%x = f32[3] parameter(0)", "ROOT %y = f32[3] negate(%x)"
        >>> launches(read("ENTRY %main (x: f32[3]) -> f32[3] {" + chr(10) + chr(10).join(lines)))
        1
    """
    return sum(run.times for run in _launched(program))


def custom_calls(program: Hlo, target: str) -> int:
    """Return how many of the launches are calls of kernels whose target has such a name."""
    found = (run for run in _launched(program) if run.instruction.opcode == "custom-call")
    return sum(run.times for run in found if target in _target(run))


def _launched(program: Hlo) -> Iterator[ExecutedInstruction]:
    for run in program.runs():
        opcode = run.instruction.opcode
        # What is done is what was started.
        if not run.fused and opcode not in _NO_KERNEL and not opcode.endswith("-done"):
            yield run


def _target(run: ExecutedInstruction) -> str:
    _, _, behind = run.instruction.attributes.partition('custom_call_target="')
    return behind.partition('"')[0]

"""What a compiled program computes, and what it moves to and from memory, on one device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import numpy as np

from flax_attn.plan.collectives import KINDS
from flax_attn.plan.hlo import CALLS, Computation, Hlo, Instruction, Run, Shape

# These move nothing, or what they call does. The data of an asynchronous pair is counted where it
# starts.
_FREE = (
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        *CALLS,
        "after-all",
    ),
    *(
        "partition-id",
        "replica-id",
        "iota",
        "optimization-barrier",
        "async-start",
        "opt-barrier",
        "domain",
    ),
)
_PARTS = ("dynamic-slice", "slice", "gather")  # read as much as they return


def flops(program: Hlo) -> int:
    r"""Return the operations of all matrix products and convolutions.

    Kernels of other libraries do not say theirs.

    Example:
        >>> from flax_attn.plan.hlo import read
        >>> dot = "dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
        >>> lines = ["ENTRY %main (x: f32[5,3]) -> f32[3,3] {", "  %x = f32[5,3]{1,0} parameter(0)"]
        >>> flops(read("\n".join([*lines, f"  ROOT %y = f32[3,3]{{1,0}} {dot}", "}"])))
        90
    """
    return sum(run.times * _products(run.instruction, run.computation) for run in program.runs())


def has_kernels(program: Hlo) -> bool:
    """Return whether a program runs attention kernels that XLA did not write, and cannot count."""
    calls = (run.instruction for run in program.runs() if run.instruction.opcode == "custom-call")
    return any(
        re.search(r'custom_call_target="(tpu_custom_call|__cudnn|mosaic_gpu|triton)', x.attributes)
        for x in calls
    )


def moved(program: Hlo) -> int:
    """Return the bytes that instructions read from memory and write to it, a fusion being one.

    Of an array of which only a part is read or written in place, it is that part; what the compiler
    keeps in smaller memories is left out.
    """
    return sum(
        run.times * _moved(run, program)
        for run in program.runs()
        if not run.fused and not _is_free(run.instruction)
    )


def _is_free(instruction: Instruction) -> bool:
    reserves = (
        "AllocateBuffer" in instruction.attributes or "ConcatBitcast" in instruction.attributes
    )
    return instruction.opcode in _FREE or instruction.opcode.endswith("-done") or reserves


def _products(instruction: Instruction, computation: Computation) -> int:
    if instruction.opcode == "convolution":
        return _convolution(instruction, computation)
    if instruction.opcode == "dot" or (
        instruction.opcode == "custom-call" and "__cublas" in instruction.attributes
    ):
        return _dot(instruction, computation)
    return 0


def _dot(dot: Instruction, computation: Computation) -> int:
    """Return the operations of a product: its results times the length of the sum in each.

    XLA writes it itself or as a call of cuBLAS.
    """
    contracted = _numbers(r'lhs_contracting_dim(?:s=|ensions":)[\[{]([\d,"]*)[\]}]', dot.attributes)
    left, *_ = computation[dot.operands[0]].shapes
    return 2 * prod(dot.shapes[0].sizes) * prod(left.sizes[i] for i in contracted)


def _convolution(convolution: Instruction, computation: Computation) -> int:
    """Return the operations of a convolution, without its padding.

    XLA for TPU writes products as convolutions, whose windows mostly lie on padding.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels is not None, "XLA names the axes of a convolution"
    shapes = [computation[name].shapes[0].sizes for name in convolution.operands[:2]] + [
        convolution.shapes[0].sizes
    ]
    left, right, result = (
        dict(zip(x, sizes, strict=True)) for x, sizes in zip(labels.groups(), shapes, strict=True)
    )
    axes = sorted(label for label in left if label.isdigit())
    window = [_window(convolution.attributes, i) for i in range(len(axes))]
    pairs = (
        _pairs(left[x], right[x], result[x], **part) for x, part in zip(axes, window, strict=True)
    )
    return 2 * result["b"] * result["f"] * right["i"] * prod(pairs)


def _window(attributes: str, axis: int) -> dict[str, int]:
    """Return how the window of a convolution moves along one axis."""
    given = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in given[1].split()) if given else {}
    names = {"stride": "stride", "pad": "pad", "lhs_dilate": "left", "rhs_dilate": "right"}
    return {
        ours: int(parts[name].split("x")[axis].split("_")[0])
        for name, ours in names.items()
        if name in parts
    }


def _pairs(
    taken: int,
    kernel: int,
    result: int,
    *,
    stride: int = 1,
    pad: int = 0,
    left: int = 1,
    right: int = 1,
) -> int:
    """Return how many pairs of a result and a window element have input, not padding or a gap."""
    place = np.arange(result)[:, None] * stride + np.arange(kernel) * right - pad
    return int(np.sum((place >= 0) & (place <= (taken - 1) * left) & (place % left == 0)))


def _numbers(pattern: str, text: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    return tuple(int(x) for x in re.findall(r"\d+", found[1])) if found else ()


def _moved(run: Run, program: Hlo) -> int:
    instruction, computation = run.instruction, run.computation
    if instruction.opcode in (
        "copy-start",
        "slice-start",
    ):  # returns where it writes, where it reads, and a flag
        first, second, _ = instruction.shapes
        size = min(first.bytes, second.bytes)
        return size * ((first.space == 0) + (second.space == 0))
    if instruction.opcode in _PARTS:
        return 2 * _bytes(instruction.shapes)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _bytes(computation[instruction.operands[1]].shapes)
    operands = [computation[name].shapes for name in instruction.operands]
    if instruction.opcode != "fusion":
        return sum(map(_bytes, operands)) + _bytes(instruction.shapes)
    fused = program.computations[instruction.called[0]]
    results, passed = _passed(instruction, fused)
    read = sum(
        _read(shapes, i, fused, program) for i, shapes in enumerate(operands) if i not in passed
    )
    return read + sum(
        size for i, size in enumerate(_written(instruction.shapes, fused)) if i not in results
    )


def _passed(fusion: Instruction, fused: Computation) -> tuple[set[int], set[int]]:
    """Return the results and operands that are buffers of a running collective, just passed on."""
    if not any(x.opcode.removesuffix("-start") in KINDS for x in fused.values()):
        return set(), set()
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{", fusion.attributes)
    return {int(result or 0) for result, _ in pairs}, {int(operand) for _, operand in pairs}


def _read(shapes: Sequence[Shape], index: int, fused: Computation, program: Hlo) -> int:
    """Return the bytes that a fusion reads of an operand."""
    parameter = next(
        (x for x in fused.values() if x.opcode == "parameter" and x.literal == str(index)), None
    )
    if parameter is None or not _bytes(shapes):
        return _bytes(shapes)
    users = [x for x in fused.values() if parameter.name in x.operands]
    return min(
        _bytes(shapes), sum(_read_by(user, parameter.name, shapes, program) for user in users)
    )


def _read_by(user: Instruction, name: str, shapes: Sequence[Shape], program: Hlo) -> int:
    """Return the bytes that an instruction in a fusion reads of an operand.

    XLA for TPU puts fusions into fusions.
    """
    if user.opcode == "fusion":
        inner = program.computations[user.called[0]]
        return sum(
            _read(shapes, i, inner, program)
            for i, operand in enumerate(user.operands)
            if operand == name
        )
    if not _takes_part(user, name):
        return _bytes(shapes)
    return _bytes(user.shapes) if user.opcode in _PARTS else 0


def _written(shapes: Sequence[Shape], fused: Computation) -> list[int]:
    """Return the bytes that a fusion writes to each of its results."""
    root = next(x for x in fused.values() if x.root)
    results = (
        [fused[name] for name in root.operands] if root.opcode == "tuple" else [root] * len(shapes)
    )
    updates = [
        fused[x.operands[1]].shapes if x.opcode == "dynamic-update-slice" else None for x in results
    ]
    return [
        min(_bytes([shape]), _bytes(update) if update else _bytes([shape]))
        for shape, update in zip(shapes, updates, strict=False)
    ]


def _takes_part(user: Instruction, name: str) -> bool:
    """Return whether an instruction reads a part of this array, or writes one in place.

    Not where the array is the index.
    """
    first, *others = user.operands
    return user.opcode in (*_PARTS, "dynamic-update-slice") and first == name and name not in others


def _bytes(shapes: Sequence[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == 0)

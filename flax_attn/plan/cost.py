"""What a compiled program computes, and what it moves to and from memory, on one device."""

import re
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from flax_attn.plan.collectives import KINDS
from flax_attn.plan.hlo import CALLS, Computation, ExecutedInstruction, Hlo, Instruction, Shape

# These move nothing, or what they call does. The data of an asynchronous pair is counted where it
# starts.
_FREE = (
    *CALLS,
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
    "optimization-barrier",
    "async-start",
    "opt-barrier",
    "domain",
)
# Read as much as they return.
_PARTS = ("dynamic-slice", "slice", "gather")


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


_KERNEL = re.compile(
    r'custom_call_target="(tpu_custom_call|__cudnn|mosaic_gpu|triton|flax_attn.attention)'
)


def has_kernels(program: Hlo) -> bool:
    """Return whether a program runs attention kernels that XLA did not write, and cannot count."""
    calls = (run.instruction for run in program.runs() if run.instruction.opcode == "custom-call")
    return any(_KERNEL.search(call.attributes) for call in calls)


def moved(program: Hlo) -> int:
    """Return the bytes that instructions read from memory and write to it, a fusion being one.

    Of an array of which only a part is read or written in place, it is that part; what the compiler
    keeps in smaller memories is left out.
    """
    # What is inside a fusion stays in registers: only the fusion itself reads and writes.
    found = 0
    for run in program.runs():
        if not run.fused and not _is_free(run.instruction):
            found += run.times * _moved(run, program)
    return found


def _is_free(instruction: Instruction) -> bool:
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return True
    # These reserve memory, or name several pieces of it as one array.
    return any(name in instruction.attributes for name in ("AllocateBuffer", "ConcatBitcast"))


def _products(instruction: Instruction, computation: Computation) -> int:
    if instruction.opcode == "convolution":
        return _convolution(instruction, computation)
    cublas = instruction.opcode == "custom-call" and "__cublas" in instruction.attributes
    return _dot(instruction, computation) if instruction.opcode == "dot" or cublas else 0


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
    left, right, result = _labelled_sizes(convolution, computation)
    # Axes with a number are those that the window moves along, in the order of its attributes.
    axes = sorted(label for label in left if label.isdigit())
    found = 2 * result["b"] * result["f"] * right["i"]
    for axis, window in zip(axes, _windows(convolution.attributes, len(axes)), strict=True):
        found *= _pairs(left[axis], right[axis], result[axis], **window)
    return found


_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def _labelled_sizes(convolution: Instruction, computation: Computation) -> list[dict[str, int]]:
    """Return the sizes of the input, the kernel and the result, by the letters of their axes."""
    labels = _LABELS.search(convolution.attributes)
    assert labels is not None, "XLA names the axes of a convolution"
    arrays = [computation[name].shapes[0] for name in convolution.operands[:2]]
    arrays.append(convolution.shapes[0])
    pairs = zip(labels.groups(), arrays, strict=True)
    return [dict(zip(letters, array.sizes, strict=True)) for letters, array in pairs]


_WINDOW = {"stride": "stride", "pad": "pad", "lhs_dilate": "left", "rhs_dilate": "right"}


def _windows(attributes: str, count: int) -> list[dict[str, int]]:
    """Return how the window of a convolution moves along each axis."""
    given = re.search(r"window=\{([^}]*)\}", attributes)
    parts = [part.split("=") for part in given[1].split()] if given else []
    known = {_WINDOW[name]: values.split("x") for name, values in parts if name in _WINDOW}
    return [_window(known, axis) for axis in range(count)]


def _window(known: Mapping[str, Sequence[str]], axis: int) -> dict[str, int]:
    # Padding is written as `low_high`; where the window starts says enough.
    return {name: int(values[axis].partition("_")[0]) for name, values in known.items()}


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
    inside = (place >= 0) & (place <= (taken - 1) * left)
    # Dilated input has `left - 1` zeros behind each element.
    return int(np.sum(inside & (place % left == 0)))


def _numbers(pattern: str, text: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    return tuple(int(x) for x in re.findall(r"\d+", found[1])) if found else ()


def _moved(run: ExecutedInstruction, program: Hlo) -> int:
    instruction, computation = run.instruction, run.computation
    if instruction.opcode in ("copy-start", "slice-start"):
        return _copied(instruction)
    # A part is read, and written elsewhere; the rest of the array is not touched.
    if instruction.opcode in _PARTS:
        return 2 * _bytes(instruction.shapes)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _bytes(computation[instruction.operands[1]].shapes)
    operands = [computation[name].shapes for name in instruction.operands]
    if instruction.opcode == "fusion":
        return _moved_by_fusion(instruction, operands, program)
    return sum(map(_bytes, operands)) + _bytes(instruction.shapes)


def _copied(copy: Instruction) -> int:
    # It returns where it writes, where it reads, and a flag.
    first, second, _ = copy.shapes
    return min(first.bytes, second.bytes) * ((first.space == 0) + (second.space == 0))


def _moved_by_fusion(fusion: Instruction, operands: Sequence[Sequence[Shape]], program: Hlo) -> int:
    fused = program.computations[fusion.called[0]]
    # A fusion that spans a collective has its buffers among its operands and results.
    results, passed = _passed(fusion, fused)
    found = 0
    for i, shapes in enumerate(operands):
        if i not in passed:
            found += _read(shapes, i, fused, program)
    for i, size in enumerate(_written(fusion.shapes, fused)):
        if i not in results:
            found += size
    return found


def _passed(fusion: Instruction, fused: Computation) -> tuple[set[int], set[int]]:
    """Return the results and operands that are buffers of a running collective, just passed on."""
    if not any(x.opcode.removesuffix("-start") in KINDS for x in fused.values()):
        return set(), set()
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{", fusion.attributes)
    return {int(result or 0) for result, _ in pairs}, {int(operand) for _, operand in pairs}


def _read(shapes: Sequence[Shape], index: int, fused: Computation, program: Hlo) -> int:
    """Return the bytes that a fusion reads of an operand."""
    name = _input_name(fused, index)
    whole = _bytes(shapes)
    if name is None or not whole:
        return whole
    users = [x for x in fused.values() if name in x.operands]
    return min(whole, sum(_read_by(user, name, shapes, program) for user in users))


def _input_name(fused: Computation, index: int) -> str | None:
    found = (x for x in fused.values() if x.opcode == "parameter" and x.literal == str(index))
    return next((x.name for x in found), None)


def _read_by(user: Instruction, name: str, shapes: Sequence[Shape], program: Hlo) -> int:
    """Return the bytes that an instruction in a fusion reads of an operand.

    XLA for TPU puts fusions into fusions.
    """
    if user.opcode == "fusion":
        return _read_by_fusion(user, name, shapes, program)
    if not _takes_part(user, name):
        return _bytes(shapes)
    # Written in place, an array is not read: what is written counts as a result.
    return _bytes(user.shapes) if user.opcode in _PARTS else 0


def _read_by_fusion(user: Instruction, name: str, shapes: Sequence[Shape], program: Hlo) -> int:
    inner = program.computations[user.called[0]]
    places = [i for i, operand in enumerate(user.operands) if operand == name]
    return sum(_read(shapes, i, inner, program) for i in places)


def _written(shapes: Sequence[Shape], fused: Computation) -> list[int]:
    """Return the bytes that a fusion writes to each of its results."""
    root = next(x for x in fused.values() if x.root)
    results = [root] * len(shapes)
    if root.opcode == "tuple":
        results = [fused[name] for name in root.operands]
    pairs = zip(shapes, results, strict=False)
    return [_written_to(shape, result, fused) for shape, result in pairs]


def _written_to(shape: Shape, result: Instruction, fused: Computation) -> int:
    whole = _bytes([shape])
    if result.opcode != "dynamic-update-slice":
        return whole
    update = fused[result.operands[1]].shapes
    return min(whole, _bytes(update)) if update else whole


def _takes_part(user: Instruction, name: str) -> bool:
    """Return whether an instruction reads a part of this array, or writes one in place.

    Not where the array is the index.
    """
    first, *others = user.operands
    return user.opcode in (*_PARTS, "dynamic-update-slice") and first == name and name not in others


def _bytes(shapes: Sequence[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == 0)

"""What devices send each other in a compiled program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from flax_attn.plan.hlo import ExecutedInstruction, Hlo

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind over the same axes of the mesh.

    Args:
        kind: kind of collective, such as `all-reduce`.
        axes: mesh axes over which devices exchange.
        count: number of times that a device runs one.
        bytes: bytes that a device sends in all of them, where each goes around in a ring.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int

    def joined(self, other: Collective | None) -> Collective:
        """Return both together, which are of one kind over the same axes."""
        if other is None:
            return self
        return replace(self, count=self.count + other.count, bytes=self.bytes + other.bytes)


def collectives(program: Hlo, mesh: Mapping[str, int]) -> list[Collective]:
    r"""Return the collectives of a program by kind and axes, those that send most first.

    Example:
        >>> from flax_attn.plan.hlo import read
        >>> parameter = "  %x = f32[3]{0} parameter(0)"
        >>> groups = "replica_groups={{0,1},{2,3}}"
        >>> reduced = f"  ROOT %y = f32[3]{{0}} all-reduce(%x), {groups}, to_apply=%add"
        >>> lines = ["ENTRY %main (x: f32[3]) -> f32[3] {", parameter, reduced, "}"]
        >>> program = read("\n".join(lines))
        >>> collectives(program, {"data": 2, "tensor": 2})
        [Collective(kind='all-reduce', axes=('tensor',), count=1, bytes=12)]
    """
    rows: dict[tuple[str, tuple[str, ...]], Collective] = {}
    for run in _once(program):
        one = _collective(run, mesh)
        before = rows.get((one.kind, one.axes))
        rows[one.kind, one.axes] = one.joined(before)
    return sorted(filter(_is_sent, rows.values()), key=lambda row: -row.bytes)


def _is_sent(row: Collective) -> bool:
    # Without an axis a device exchanges with itself alone.
    return bool(row.axes)


def _collective(run: ExecutedInstruction, mesh: Mapping[str, int]) -> Collective:
    """Return what one instruction sends, as often as it runs."""
    kind = _kind(run)
    group = _group(run.instruction.attributes, kind, prod(mesh.values()))
    sent = _sent(kind, len(group), _operand_bytes(run))
    return Collective(kind, _axes(group, mesh), run.times, run.times * sent)


def _kind(run: ExecutedInstruction) -> str:
    return run.instruction.opcode.removesuffix("-start")


def _once(program: Hlo) -> Iterator[ExecutedInstruction]:
    """Yield each collective once.

    One that goes on during products is written again in each fusion that it spans.
    """
    spread: dict[str, ExecutedInstruction] = {}
    for run in program.runs():
        if _kind(run) not in KINDS:
            continue
        channel = _channel(run)
        if channel is None:
            yield run
            continue
        known = spread.get(channel, run)
        # Of fusions in loops the one that runs least often is where it is sent.
        rarest = min(known, run, key=lambda one: one.times)
        spread[channel] = rarest
    yield from spread.values()


def _channel(run: ExecutedInstruction) -> str | None:
    """Return the number of a collective inside a fusion, by which its copies are known."""
    found = re.search(r"channel_id=(\d+)", run.instruction.attributes) if run.fused else None
    return None if found is None else found[1]


def _operand_bytes(run: ExecutedInstruction) -> int:
    operands = [run.computation[name] for name in run.instruction.operands]
    return sum(shape.bytes for operand in operands for shape in operand.shapes)


def _sent(kind: str, size: int, operand: int) -> int:
    """Return the bytes that one of `size` devices sends, each with an operand of so many bytes."""
    # Around a ring a part goes to each other device; a sum is reduced first, and then gathered.
    if kind == "collective-permute":
        return operand
    if kind == "all-gather":
        return operand * (size - 1)
    return operand * (size - 1) * (2 if kind == "all-reduce" else 1) // size


def _axes(group: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of the mesh along which the devices of a group differ."""
    places = np.unravel_index(group, tuple(mesh.values()))
    pairs = zip(mesh, places, strict=True)
    return tuple(axis for axis, place in pairs if len(set(place.tolist())) > 1)


# XLA writes groups as pairs, as an iota, by axes of a mesh, or in full.
_PAIRS = re.compile(r"source_target_pairs=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\S+)? ?\{([^}]*)\}")
_FULL = re.compile(r"replica_groups=\{\{([\d,]+)\}")


def _group(attributes: str, kind: str, count: int) -> np.ndarray:
    """Return the devices that exchange with the first, itself included."""
    if found := _IOTA.search(attributes):
        return _of_iota(found)
    if found := _MESH.search(attributes):
        return _of_mesh(found)
    pattern = _PAIRS if kind == "collective-permute" else _FULL
    return _listed(pattern.search(attributes), count)


def _listed(found: re.Match[str] | None, count: int) -> np.ndarray:
    # Without a group all devices are one.
    return np.arange(count) if found is None else np.array(_integers(found[1]))


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _of_iota(found: re.Match[str]) -> np.ndarray:
    """Return the first group of a transposed iota, `[groups,size]<=[sizes]T(order)`."""
    sizes = _integers(found[2])
    order = _integers(found[3]) if found[3] else None
    devices = np.arange(prod(sizes)).reshape(sizes).transpose(order)
    return devices.reshape(-1, int(found[1]))[0]


def _of_mesh(found: re.Match[str]) -> np.ndarray:
    """Return the group of the first device along axes of a mesh.

    `'a':(2)4` is the part of `a` of size 4 inside 2.
    """
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    group = np.zeros(1, int)
    for name, outer, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[2]):
        steps = _steps(axes, name, int(outer or 1), int(part or axes[name]))
        group = (group[:, None] + steps).ravel()
    return group


def _steps(axes: Mapping[str, int], name: str, outer: int, count: int) -> np.ndarray:
    """Return how far the devices along a part of an axis are from the first."""
    names = list(axes)
    # The last axes change first in the order of devices.
    inner = names[names.index(name) + 1 :]
    stride = prod(axes[other] for other in inner)
    # The parts of an axis are ordered as the axes are: the outer ones are farther apart.
    return stride * axes[name] // (outer * count) * np.arange(count)

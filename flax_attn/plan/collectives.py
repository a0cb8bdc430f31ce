"""What devices send each other in a compiled program."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from flax_attn.plan.hlo import Hlo, Run, Shape

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
    found: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(lambda: [0, 0])
    for run in _once(run for run in program.runs() if _kind(run) in KINDS):
        group = _group(run.instruction.attributes, _kind(run), prod(mesh.values()))
        total = found[_kind(run), _axes(group, mesh)]
        total[0] += run.times
        total[1] += run.times * _sent(
            _kind(run), len(group), sum(shape.bytes for shape in _operands(run))
        )
    rows = [Collective(kind, axes, *total) for (kind, axes), total in found.items() if axes]
    return sorted(rows, key=lambda row: -row.bytes)


def _kind(run: Run) -> str:
    return run.instruction.opcode.removesuffix("-start")


def _once(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield each collective once.

    One that goes on during products is written again in each fusion that it spans.
    """
    spread: dict[str, Run] = {}
    for run in runs:
        channel = re.search(r"channel_id=(\d+)", run.instruction.attributes)
        if not run.fused or channel is None:
            yield run
        elif channel[1] not in spread or run.times < spread[channel[1]].times:
            spread[channel[1]] = run
    yield from spread.values()


def _operands(run: Run) -> Iterator[Shape]:
    for name in run.instruction.operands:
        yield from run.computation[name].shapes


def _sent(kind: str, size: int, operand: int) -> int:
    """Return the bytes that one of `size` devices sends, each with an operand of so many bytes."""
    if kind == "collective-permute":
        return operand
    if kind == "all-gather":
        return operand * (size - 1)
    return operand * (size - 1) * (2 if kind == "all-reduce" else 1) // size


def _axes(group: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of the mesh along which the devices of a group differ."""
    places = np.unravel_index(group, tuple(mesh.values()))
    return tuple(
        axis for axis, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1
    )


def _group(attributes: str, kind: str, count: int) -> np.ndarray:
    """Return the devices that exchange with the first, itself included.

    XLA writes groups in one of four ways.
    """
    if kind == "collective-permute":
        return _numbers(re.search(r"source_target_pairs=\{\{([\d,]+)\}", attributes), count)
    if found := re.search(
        r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        sizes, order = (
            [int(x) for x in text.split(",")] if text else None for text in found.groups()[1:]
        )
        return (
            np.arange(prod(sizes or []))
            .reshape(sizes)
            .transpose(order)
            .reshape(-1, int(found[1]))[0]
        )
    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\S+)? ?\{([^}]*)\}", attributes
    ):
        return _of_mesh(dict(re.findall(r"'([^']+)'=(\d+)", found[1])), found[2])
    return _numbers(re.search(r"replica_groups=\{\{([\d,]+)\}", attributes), count)


def _numbers(found: re.Match[str] | None, count: int) -> np.ndarray:
    return np.array([int(x) for x in found[1].split(",")]) if found else np.arange(count)


def _of_mesh(sizes: Mapping[str, str], wanted: str) -> np.ndarray:
    """Return the group of the first device along axes of a mesh.

    `'a':(2)4` is the part of `a` of size 4 inside 2.
    """
    strides = {name: prod(map(int, list(sizes.values())[i + 1 :])) for i, name in enumerate(sizes)}
    group = np.zeros(1, int)
    for name, outer, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", wanted):
        whole, part = int(sizes[name]), int(size or sizes[name])
        stride = strides[name] * whole // (int(outer or 1) * part)
        group = (group[:, None] + stride * np.arange(part)).ravel()
    return group

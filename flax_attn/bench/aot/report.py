"""The rows as tables, one for each device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import groupby

from rich.table import Table

from flax_attn.aot.target import Target
from flax_attn.bench.aot.kernels import kernel
from flax_attn.bench.aot.program import Program
from flax_attn.bench.aot.rows import Row, rows

LEGEND = (
    "Compiled, not run. Temporaries are in MiB, beside arguments and outputs.\n"
    "plain: the kernel that the backend wraps, called without it\n"
    "of memory: arguments, outputs and temporaries of forward+backward, of the device's memory\n"
    "{devices} devices: forward+backward where each has the batch of the call; collectives: "
    "instructions that communicate\n"
    "s: seconds to compile forward and forward+backward on this machine, while it compiled "
    "others"
)


def tables(platform: str, quick: bool = False) -> Iterator[Table]:
    """Compile for `"tpu"` or `"gpu"`, and return a table for each device as soon as it is done.

    Raises:
        ImportError: if something that this needs is not installed.
    """
    devices = import_module(f"flax_attn.bench.aot.{platform}")
    calls, names = (
        (devices.QUICK_CALLS, devices.QUICK_KERNELS) if quick else (devices.CALLS, devices.KERNELS)
    )
    for target in devices.targets():
        yield table(
            target, rows(target, calls, [kernel(name) for name in names], os.cpu_count() or 1)
        )


def table(target: Target, rows: Iterable[Row]) -> Table:
    """Return the rows of one target, grouped by call."""
    devices = len(target.devices)
    found = Table(
        "call",
        "backend",
        title=f"Compiled for {target.name}",
        caption=LEGEND.format(devices=devices),
    )
    for name in (
        "forward",
        "plain",
        "forward+\nbackward",
        "plain",
        "of\nmemory",
        f"{devices}\ndevices",
    ):
        found.add_column(name, justify="right")
    found.add_column("collectives", overflow="fold")
    found.add_column("s", justify="right")
    found.add_column("not compiled because", overflow="fold")
    for name, group in groupby(rows, key=lambda row: row.call):
        for i, row in enumerate(group):
            found.add_row("" if i else name, row.kernel, *_cells(row, target.memory))
        found.add_section()
    return found


def _cells(row: Row, memory: int) -> tuple[str, ...]:
    forward, backward, spread = row.forward, row.backward or Program(), row.spread or Program()
    plain = row.plain or (None, None)
    ran = backward.reason is None and backward.memory > 0
    return (
        _mib(forward),
        _mib(plain[0]),
        _mib(row.backward),
        _mib(plain[1]),
        f"{backward.memory / memory:.1%}" if ran else "",
        _mib(row.spread),
        _collectives(spread) if spread.memory else "",
        f"{forward.seconds + backward.seconds:.0f}",
        row.reason,
    )


def _mib(program: Program | None) -> str:
    return "-" if program is None or program.reason else f"{program.temporaries / 2**20:.1f}"


def _collectives(program: Program) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in program.collectives.items()) or "none"

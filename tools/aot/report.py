"""The rows as tables, one for each device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import groupby
from operator import attrgetter

from rich.table import Table

from flax_attn.device.kernels import kernel
from tools.aot.compiled import CompiledCost
from tools.aot.devices import AbsentDevices
from tools.aot.rows import Row, rows

LEGEND = (
    "Compiled, not run. Temporaries are in MiB, beside arguments and outputs.\n"
    "plain: the kernel that the backend wraps, called without it\n"
    "of memory: arguments, outputs and temporaries of forward+backward, of the device's memory\n"
    "{devices} devices: forward+backward where each has the batch of the call; collectives: "
    "instructions that communicate\n"
    "s: seconds to compile forward and forward+backward on this machine, while it compiled "
    "others"
)
COLUMNS = ("forward", "plain", "forward+\nbackward", "plain", "of\nmemory", "{devices}\ndevices")


def tables(platform: str, quick: bool = False) -> Iterator[Table]:
    """Compile for `"tpu"` or `"gpu"`, and return a table for each device as soon as it is done.

    Raises:
        ImportError: if something that this needs is not installed.
    """
    of_platform = import_module(f"tools.aot.{platform}")
    calls = of_platform.QUICK_CALLS if quick else of_platform.CALLS
    names = of_platform.QUICK_KERNELS if quick else of_platform.KERNELS
    kernels = [kernel(name) for name in names]
    for target in of_platform.targets():
        # One call a core; each takes some gigabytes.
        yield table(target, rows(target, calls, kernels, workers=os.cpu_count() or 1))


def table(target: AbsentDevices, rows: Iterable[Row]) -> Table:
    """Return the rows of some devices, grouped by call."""
    devices = len(target.devices)
    found = _empty(target.name, devices)
    groups = groupby(rows, attrgetter("call"))
    for call, group in groups:
        # The call is written once for all kernels.
        shown = call
        for row in group:
            cells = _cells(row, target.memory)
            found.add_row(shown, row.kernel, *cells)
            shown = ""
        found.add_section()
    return found


def _empty(name: str, devices: int) -> Table:
    legend = LEGEND.format(devices=devices)
    title = f"Compiled for {name}"
    found = Table("call", "backend", title=title, caption=legend)
    for column in COLUMNS:
        heading = column.format(devices=devices)
        found.add_column(heading, justify="right")
    found.add_column("collectives", overflow="fold")
    found.add_column("s", justify="right")
    found.add_column("not compiled because", overflow="fold")
    return found


def _cells(row: Row, memory: int | None) -> tuple[str, ...]:
    backward = row.backward or CompiledCost()
    spread = row.spread or CompiledCost()
    plain_forward, plain_backward = row.plain or (None, None)
    # Where the backward pass does not compile, its memory is unknown, not none.
    compiled = backward.reason is None and backward.memory > 0
    share = ""
    if compiled and memory:
        share = f"{backward.memory / memory:.1%}"
    seconds = row.forward.seconds + backward.seconds
    return (
        _mib(row.forward),
        _mib(plain_forward),
        _mib(row.backward),
        _mib(plain_backward),
        share,
        _mib(row.spread),
        _collectives(spread) if spread.memory else "",
        f"{seconds:.0f}",
        row.reason,
    )


def _mib(program: CompiledCost | None) -> str:
    return "-" if program is None or program.reason else f"{program.temporaries / 2**20:.1f}"


def _collectives(program: CompiledCost) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in program.collectives.items()) or "none"

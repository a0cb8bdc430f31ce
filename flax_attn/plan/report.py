"""A plan as tables: of memory, of what is sent, of time; and as one line of Markdown."""

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from flax_attn.plan.job import Job
from flax_attn.plan.phases import Phase
from flax_attn.plan.plan import Plan

LEGEND = (
    "Compiled, not run; all figures are of one device. Peak: arguments, outputs that do not "
    "replace them, and temporaries.\n"
    "Sent: what a device sends where a collective goes around in a ring. Loops count as "
    "often as they run.\n"
    "At most: what compute, memory and links would each take alone at the published rates of "
    "the chip: the step takes longer\n"
    "than the longest of them. Links: all of a chip's links together, which a collective "
    "over one axis may not reach."
)

COLUMNS = (
    "model",
    "tokens",
    "batch",
    "chips",
    "mesh",
    "remat",
    "parameters and optimizer",
    "temporaries",
    "peak of memory",
    "fits",
    "compute, s",
    "memory, s",
    "links, s",
)


def tables(plan: Plan) -> Iterator[Table]:
    """Return the tables of a plan."""
    yield memory(plan)
    for phase in plan.phases:
        if phase.compiled:
            yield sent(phase)
            yield times(plan, phase)
    if plan.changes:
        yield would_fit(plan)


def title(plan: Plan) -> str:
    """Return what was planned, in a line."""
    job = plan.job
    what = "training" + " with remat" * job.remat if job.train else "generation"
    dtype = job.dtype or job.model.dtype
    tokens = f"{job.batch} x {job.tokens} tokens in {dtype}"
    return f"{job.name}: {what}, {tokens}, on {job.topology.name}, {_mesh(job.mesh)}{_rules(job)}"


def memory(plan: Plan) -> Table:
    """Return what a device holds, what each program takes, and whether that fits."""
    held, limit = plan.held, plan.job.topology.chip.memory
    table = _table(["memory of one device"], [""])
    _add_bytes(table, "parameters", held.parameters)
    _add_bytes(table, "  of these experts", held.experts)
    _add_bytes(table, "optimizer", held.optimizer)
    _add_bytes(table, "cache", held.cache)
    for phase in plan.phases:
        if phase.compiled:
            table.add_row(f"temporaries, {phase.name}", size(phase.temporaries))
            # XLA has the gradients among the temporaries, where the optimizer takes them.
            _add_bytes(table, "  of these gradients", held.gradients)
        table.add_row(f"peak, {phase.name}", size(phase.peak))
    table.add_row("the device has", "unknown" if limit is None else size(limit))
    table.add_section()
    table.add_row(verdict(plan), "" if limit is None else size(abs(limit - plan.largest.peak)))
    return table


def _table(left: Sequence[str], right: Sequence[str], title: str | None = None) -> Table:
    """Return an empty table, whose last columns hold figures."""
    table = Table(*left, title=title)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _add_bytes(table: Table, name: str, count: int) -> None:
    if count:
        table.add_row(name, size(count))


def verdict(plan: Plan) -> str:
    """Return whether it fits, in words."""
    return {
        None: "whether it fits is unknown",
        True: "fits, free",
        False: "does not fit, too much by",
    }[plan.fits]


def sent(phase: Phase) -> Table:
    """Return the collectives of a program."""
    title = f"Sent by one device in a {phase.name}"
    table = _table(["collective", "over"], ["count", "bytes"], title)
    for row in phase.collectives:
        table.add_row(row.kind, " x ".join(row.axes), str(row.count), size(row.bytes))
    return table if phase.collectives else _with_row(table, "none")


def _with_row(table: Table, *cells: str) -> Table:
    table.add_row(*cells)
    return table


def times(plan: Plan, phase: Phase) -> Table:
    """Return what compute, memory and links would each take."""
    chip = plan.job.topology.chip
    sent = sum(row.bytes for row in phase.collectives)
    table = _table([""], ["amount", "rate", "ms"], f"At most rates, one {phase.name}")
    seconds = phase.times(chip)
    computed = f"{phase.computed / 1e12:.3g} TFLOP"
    _add_time(table, "compute", computed, chip.flops, "TFLOP/s", 1e12, seconds)
    _add_time(table, "memory", f"{phase.moved / 1e9:.3g} GB", chip.bandwidth, "GB/s", 1e9, seconds)
    _add_time(table, "links", f"{sent / 1e9:.3g} GB", chip.links, "GB/s", 1e9, seconds)
    table.add_row("the model asks for", f"{phase.work / 1e12:.3g} TFLOP")
    if phase.endless:
        table.caption = (
            f"At least: {phase.endless} loops run an unknown number of times, and are counted once."
        )
    return table


def _add_time(
    table: Table,
    name: str,
    amount: str,
    rate: float | None,
    unit: str,
    scale: float,
    seconds: Mapping[str, float],
) -> None:
    shown = f"{rate / scale:.4g} {unit}" if rate else "unknown"
    table.add_row(name, amount, shown, f"{1000 * seconds[name]:.3g}" if name in seconds else "")


def would_fit(plan: Plan) -> Table:
    """Return what was tried so that it fits."""
    title = "What would fit, estimated; each change with those above it"
    table = _table(["change", "devices", "mesh"], ["peak", "fits"], title)
    for row in plan.changes:
        devices, fits = str(row.job.topology.size), "yes" if row.fits else "no"
        table.add_row(row.what, devices, _mesh(row.job.mesh), size(row.peak), fits)
    return table


def markdown_heading() -> list[str]:
    """Return the first two lines of a Markdown table of `markdown_row`s."""
    return [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]


def markdown_row(plan: Plan) -> str:
    """Return a plan as a line of a table in Markdown."""
    job, phase, chip = plan.job, plan.largest, plan.job.topology.chip
    limit = "unknown" if chip.memory is None else size(chip.memory)
    seconds = phase.times(chip)
    cells = [
        job.name,
        job.tokens,
        job.batch,
        job.topology.name,
        _mesh(job.mesh) + _rules(job),
        "yes" if job.remat else "no",
        size(plan.held.total),
        size(phase.temporaries),
        f"{size(phase.peak)} of {limit}",
        {None: "unknown", True: "yes", False: "no"}[plan.fits],
    ]
    # What is not known stays empty: a program that does not compile has no times.
    for name in ("compute", "memory", "links"):
        cells.append(f"{seconds[name]:.3g}" if name in seconds else "")
    return f"| {' | '.join(map(str, cells))} |"


def size(count: int) -> str:
    """Return bytes as a number with a unit.

    Example:
        >>> size(3 * 2**29), size(1000)
        ('1.50 GiB', '1000 B')
    """
    if count < 1024:
        return f"{count} B"
    unit = min(int(math.log2(count) // 10), 4)
    return f"{count / 2 ** (10 * unit):.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _rules(job: Job) -> str:
    return "".join(
        f"; {name} over {', '.join(axes) or 'nothing'}" for name, axes in job.rules.items()
    )


def _mesh(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())

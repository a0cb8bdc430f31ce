"""What is measured of whole models, and how it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class TaskResult:
    """What was measured of one task.

    Args:
        task: description of what was done.
        unit: unit of the two figures; more is better for those that end in "/s".
        ours: our figure.
        theirs: figure of transformers.
        compile_seconds: seconds that our first call took beyond a later one; None where nothing is
            compiled.
        note: details.
    """

    task: str
    unit: str
    ours: float
    theirs: float
    compile_seconds: float | None = None
    note: str = ""

    @property
    def gain(self) -> float:
        """How many times better ours is."""
        # A rate is better where it is more, seconds and bytes where they are less.
        return self.ours / self.theirs if self.unit.endswith("/s") else self.theirs / self.ours


def table(results: Sequence[TaskResult], title: str) -> Table:
    """Return what was measured as a table."""
    rows = Table("task", "unit", "ours", "transformers", "gain", "compiles in", "", title=title)
    for one in results:
        compiled = "" if one.compile_seconds is None else f"{one.compile_seconds:.1f} s"
        rows.add_row(
            one.task,
            one.unit,
            f"{one.ours:.4g}",
            f"{one.theirs:.4g}",
            f"{one.gain:.2f}x",
            compiled,
            one.note,
        )
    return rows

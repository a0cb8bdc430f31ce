"""A plugin of pytest: tests run under `flax_attn.everywhere`, whose report is written at the end.

It changes nothing unless `EVERYWHERE_REPORT` names the file for the report.
"""

import json
import os
from pathlib import Path

from flax_attn.everywhere import everywhere

_REPORT = os.environ.get("EVERYWHERE_REPORT", "")


def pytest_configure(config) -> None:
    """Turn it on for the whole program, before a test imports its library."""
    if _REPORT:
        everywhere(True)


def pytest_unconfigure(config) -> None:
    """Write how many calls were computed here, and why others were left alone."""
    if not _REPORT:
        return
    report = everywhere.report()
    reasons = {}
    for entry, count in report.left_alone.items():
        name = f"{entry.place}: {entry.reason}"
        reasons[name] = reasons.get(name, 0) + count
    found = {"taken": sum(report.taken.values()), "left alone": reasons}
    Path(_REPORT).write_text(json.dumps(found, indent=1))

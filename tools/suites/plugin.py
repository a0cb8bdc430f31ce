"""A plugin of pytest: tests run under `flax_attn.everywhere`, whose report is written at the end.

It changes nothing unless `EVERYWHERE_REPORT` names the file for the report.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from flax_attn.everywhere import everywhere

_REPORT = os.environ.get("EVERYWHERE_REPORT", "")


def pytest_configure(config) -> None:
    """Turn it on for the whole program, before a test imports its library."""
    if _REPORT:
        everywhere(True)


def pytest_unconfigure(config) -> None:
    """Write how many calls were computed here, and why others were left alone."""
    if _REPORT:
        text = json.dumps(_found(), indent=1)
        Path(_REPORT).write_text(text)


def _found() -> dict[str, Any]:
    report = everywhere.report()
    # Without the lines of the tests that call it.
    reasons: Counter[str] = Counter()
    for entry, count in report.left_alone.items():
        name = f"{entry.place}: {entry.reason}"
        reasons[name] += count
    return {"taken": sum(report.taken.values()), "left alone": reasons}

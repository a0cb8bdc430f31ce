"""What a comparison has found so far, on disk: a check may end the process."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from flax_attn.parity.check import Check
from flax_attn.parity.report.document import check_document

# What runs beside the checks. It takes longest, and so it is what a time limit ends.
LOCATING = "where they differ"
# The search is tried once more where it was ended.
TRIES = {LOCATING: 2}


class Journal:
    """The checks of one comparison as they run; those that ended the process are left out.

    Args:
        path: path of the file. Beside it stands `.died.json` once a check has ended the process.

    Attributes:
        died: names of the checks that ended the process at earlier starts, once for each.
    """

    def __init__(self, path: Path):
        self.path = path
        self.record = path.with_suffix(".died.json")
        self._found: list[dict[str, Any]] = []
        self.died: list[str] = list(_read(self.record).get("died", []))
        self._take_over(_read(path))

    def _take_over(self, left: dict[str, Any]) -> None:
        """Note the check that ran when an earlier process ended."""
        # What a signal ended is removed at once, and a process that is alive has ended nothing.
        if not left or _alive(left["process"]):
            return
        self.died.append(left["running"])
        content = {"died": self.died, "found": left["found"]}
        text = json.dumps(content, indent=1)
        self.record.write_text(text, encoding="utf-8")

    def begin(self, name: str) -> None:
        """Note that a check runs."""
        content = {"process": os.getpid(), "running": name, "found": self._found}
        self.path.write_text(json.dumps(content), encoding="utf-8")

    def end(self, check: Check) -> None:
        """Note what a check found."""
        self._found.append(check_document(check))

    @property
    def left_out(self) -> list[str]:
        """The names of the checks that do not run any more."""
        names = dict.fromkeys(self.died)
        return [name for name in names if self.died.count(name) >= TRIES.get(name, 1)]

    def reason(self) -> str:
        """Return why a check that died does not run, and how it does."""
        return (
            "the check ended the process at an earlier start, as a segmentation fault or a lack of"
            f" memory does. Run it alone, or remove {self.record} to run it again"
        )


def _read(path: Path) -> dict[str, Any]:
    # It may be cut, where the process ended while it was written.
    with suppress(FileNotFoundError, json.JSONDecodeError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It is there, and of another user.
        return True
    return True

"""Results as they are kept: one compact JSON object a line, a line a port, a file a library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SUFFIX = ".jsonl"


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the results of all libraries, in the order of the files."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def write(folder: Path, library: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Keep the results of one library, those of others left out."""
    folder.mkdir(exist_ok=True)
    own = (row for row in rows if row["port"].startswith(f"{library}/"))
    lines = (json.dumps(row, sort_keys=True, separators=(",", ":")) for row in own)
    (folder / f"{library}{SUFFIX}").write_text("".join(f"{line}\n" for line in lines))

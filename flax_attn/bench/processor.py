"""What Linux says of the processor. Without JAX, since the command line asks before it is imported."""

from __future__ import annotations

from pathlib import Path


def lines(*fields: str) -> list[str]:
    """Return the lines of `/proc/cpuinfo` that begin with one of these, of one core; none where there is no such file.

    Example:
        >>> lines("no such field")
        []
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return []
    return [line for line in text.split("\n\n")[0].splitlines() if line.startswith(fields)]

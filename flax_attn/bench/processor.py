"""Linux's description of the processor, without JAX: the command line asks before its import."""

from pathlib import Path


def lines(*fields: str) -> list[str]:
    """Return one core's lines of `/proc/cpuinfo` that begin with one of these.

    There are none where there is no such file.

    Example:
        >>> lines("no such field")
        []
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return []
    # The cores of a machine are described one behind another; the first stands for all.
    return [line for line in text.split("\n\n")[0].splitlines() if line.startswith(fields)]

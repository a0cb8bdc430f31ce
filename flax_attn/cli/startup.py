"""What a start costs: from the process to the first token."""

import os
import time
from pathlib import Path

_COMPILING = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_HERE = time.monotonic()


class Startup:
    """Times of one run of the command line, in seconds.

    Args:
        load: seconds to load the model.
        compile: seconds spent so far to compile programs, or to load compiled ones.
        tokens: time at which each token was ready, in seconds since the process began.
    """

    def __init__(self):
        import jax

        self.load, self.compile, self.tokens = 0.0, 0.0, []
        self._start = _process_start()
        # Cannot be taken back: so there is one of these in a process.
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def add_token(self) -> None:
        """Note that a token is there."""
        self.tokens.append(time.monotonic() - self._start)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows to show, a name and a figure each; the rate starts at the third token."""
        rows = [("load", f"{self.load:.2f} s"), ("compile", f"{self.compile:.2f} s")]
        if self.tokens:
            rows.append(("first token", f"{self.tokens[0]:.2f} s after the start"))
        # The second token may wait for a program to be compiled, as the first does.
        count = len(self.tokens) - 2
        if count > 0:
            seconds = self.tokens[-1] - self.tokens[1]
            rows.append(("rate", f"{count / seconds:.1f} tokens/s"))
        return rows

    def _add(self, event: str, duration_secs: float, **_: object) -> None:
        self.compile += duration_secs if event in _COMPILING else 0.0


def _process_start() -> float:
    """Return the monotonic time at which the process began.

    Where the system does not tell it, it is the time at which this module was imported.
    """
    try:
        # The 22nd field is the start in ticks since boot; the name before it may hold spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return _HERE
    return time.monotonic() - age

"""How much of the time that was given is left."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Clock:
    """A clock that runs out.

    Args:
        seconds: seconds that were given.
        now: function that returns the time in seconds.
        start: time at which it began.

    Example:
        >>> clock = Clock(10.0, now=lambda: 4.0, start=0.0)
        >>> clock.spent, clock.over(0.5), clock.over(0.3)
        (4.0, False, True)
    """

    seconds: float
    now: Callable[[], float] = time.monotonic
    start: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.now() - self.start

    def over(self, share: float = 1.0) -> bool:
        """Return whether this share of the time is spent."""
        return self.spent >= share * self.seconds

"""A time limit for a command that computes many runs: it ends between runs, so that no computed work is lost."""

from __future__ import annotations

import math
import time

from .results import RunSpec


class TimeLimit:
    """Decides whether another run can start, from the time left and the longest run so far.

    Before the first run has ended, every run can start.

    Args:
        seconds: The time for all runs together, counted from now; None for no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.has_refused = False
        """Whether a run was not started because it would not have ended in time."""
        self._longest = 0.0
        self._starts: dict[RunSpec, float] = {}

    def allows_start(self) -> bool:
        """Return whether a run that is as long as the longest one so far would end in time."""
        allowed = time.monotonic() + self._longest < self.end
        self.has_refused |= not allowed
        return allowed

    def begin(self, spec: RunSpec) -> None:
        """Record that a run starts."""
        self._starts[spec] = time.monotonic()

    def finish(self, spec: RunSpec) -> None:
        """Record that a run has ended."""
        self._longest = max(self._longest, time.monotonic() - self._starts.pop(spec))

"""The clock of a stream, derived from the times of its events."""

from __future__ import annotations

import math

import numpy as np

from ..data.events import Array
from .pending import PendingEvents

EVENTS_TO_CONFIRM_A_JUMP = 3
"""A jump beyond the horizon is accepted after this many consecutive events that are ahead of the clock."""


class StreamClock:
    """The current time of a stream: the median time of the newest batch, which never decreases.

    A single event that is dated years ahead must not expire all pending events. A batch whose median lies more than the
    horizon ahead therefore does not move the clock until `EVENTS_TO_CONFIRM_A_JUMP` consecutive events agree. Events
    and labels that arrived in between are then dated to the new time.
    """

    def __init__(self) -> None:
        self.now = -math.inf
        self.latest = math.nan
        """The largest time of the newest batch."""
        self.events_ahead = 0
        """The number of consecutive events beyond the horizon that are not confirmed yet."""
        self.first_unconfirmed = 0
        """The position of the first event, among all events so far, that arrived since the unconfirmed jump."""

    @property
    def label_arrival(self) -> float:
        """The arrival time of a label that arrives now; infinite while the time is unknown or a jump is unconfirmed."""
        return math.inf if self.events_ahead or self.now == -math.inf else self.now

    def advance(self, times: Array, pending: PendingEvents) -> None:
        """Advance the clock to a new batch, before its events are added to the pending ones.

        Args:
            times: the times of the events of the batch.
            pending: the pending events and labels, whose arrival times are corrected when a jump is confirmed.
        """
        median, self.latest = _median_and_largest(times)
        limit = self.now + pending.horizon
        if median <= limit or self.now == -math.inf:
            pending.date_labels(median if self.now == -math.inf else self.now)
            self.now, self.events_ahead = max(self.now, median), 0
            return
        if not self.events_ahead:
            self.first_unconfirmed = pending.tail
        self.events_ahead += int((times > limit).sum())
        if self.events_ahead >= EVENTS_TO_CONFIRM_A_JUMP:
            pending.date_events(median, self.first_unconfirmed)
            pending.date_labels(median)
            self.now, self.events_ahead = median, 0


def _median_and_largest(values: Array) -> tuple[float, float]:
    """Return the lower median and the maximum. np.median takes six times as long for the events of a batch."""
    middle, last = (len(values) - 1) // 2, len(values) - 1
    ordered = np.partition(values, (middle, last))
    return float(ordered[middle]), float(ordered[last])

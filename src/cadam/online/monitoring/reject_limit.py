"""Stops a learner if too many events are rejected."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .rejection_reasons import format_reasons

if TYPE_CHECKING:
    from ..learner import Learner

logger = logging.getLogger("cadam.online")

DEFAULT_MAX_REJECTED = 0.01
"""The share of rejected events above which a run counts as failed."""
EVENTS_PER_CHECK = 10_000
HOPELESS_SHARE = 0.5
"""A run over finite data stops early if a larger share of its first events is rejected."""


def rejected_share(rejected: float, events: float) -> float:
    """Return the share of rejected events among all events; `events` are the accepted ones."""
    return rejected / max(1, rejected + events)


class RejectLimit:
    """A report that stops the learner if too many events are rejected, counted since the process started.

    Args:
        max_rejected: the share of events that may be rejected; None to stop only if the first 10,000 events show that
            most are rejected.
        follow: whether the input never ends. Then `max_rejected` applies to every 10,000 events. Without
            `max_rejected`, a share above 1% is logged as a warning.
    """

    def __init__(self, max_rejected: float | None, follow: bool = False) -> None:
        self.max_rejected, self.follow = max_rejected, follow
        self.stop_reason = ""
        """The reason for which the learner was stopped; empty if it was not."""
        self._start: tuple[int, int] | None = None
        self._has_checked = False

    def __call__(self, learner: Learner) -> None:
        """Check the events since the last check, once there are enough."""
        if self._start is None:
            self._start = (learner.resumed_at, learner.rejections.count_at_start)
        accepted, rejected = learner.events - self._start[0], learner.rejected - self._start[1]
        total = accepted + rejected
        if total < EVENTS_PER_CHECK or (self._has_checked and not self.follow):
            return
        self._has_checked = True
        if self.follow and self.max_rejected is None and rejected > DEFAULT_MAX_REJECTED * total:
            reasons = format_reasons(learner.rejections.reasons)
            logger.warning("%s of the last %s events were rejected: %s", f"{rejected:,}", f"{total:,}", reasons)
        limit = self.max_rejected if self.follow else HOPELESS_SHARE
        if limit is not None and rejected > limit * total:
            self.stop_reason = f"{rejected:,} of {total:,} events were rejected"
            learner.stop()
        if self.follow:
            self._start = (learner.events, learner.rejected)

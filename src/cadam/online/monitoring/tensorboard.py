"""A report of all metrics to TensorBoard."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...optim.alignment import Writer
from .alignment_window import AlignmentWindow
from .prometheus_metrics import sanitize

if TYPE_CHECKING:
    from ..learner import Learner


class TensorBoard:
    """Writes every metric of a learner at regular intervals. Alignment ratios cover the time since the last interval.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or any object with a method `add_scalar`.
        every: the number of events between two points.
    """

    def __init__(self, writer: Writer, every: int = 10_000) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.writer, self.every = writer, every
        self._events_at_last = 0
        self._alignment = AlignmentWindow()

    def __call__(self, learner: Learner) -> None:
        """Write a point if it is due."""
        if learner.events - self._events_at_last >= self.every:
            self.end(learner)

    def end(self, learner: Learner) -> None:
        """Write a point now."""
        self._events_at_last = learner.events
        for name, value in {**learner.metrics(), **learner.health()}.items():
            if math.isfinite(value) and not name.startswith("alignment"):
                self.writer.add_scalar(f"online/{sanitize(name)}", value, learner.events)
        self._alignment.advance(learner).write(self.writer, learner.events, parameters=True)

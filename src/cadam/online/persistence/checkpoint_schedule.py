"""The schedule of checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ...distributed.sharded_checkpoint import ShardedCheckpoints
    from .checkpoints import Checkpoints

logger = logging.getLogger("cadam.online")

CheckpointStore: TypeAlias = "Checkpoints | ShardedCheckpoints"


@dataclass(frozen=True)
class CheckpointOptions:
    """The folder and the interval of a learner's checkpoints.

    The interval has no influence on the results: it only determines how much is computed again after a crash.

    Args:
        folder: the folder for checkpoints. `Learner.run` resumes from the newest one.
        every: the number of events between two checkpoints.
        seconds: the longest time between two checkpoints, if new events have arrived.
        keep: how many of the newest checkpoints are kept.
    """

    folder: Path | str
    every: int = 1_000_000
    seconds: float = 30.0
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"checkpoints must be at least 1 event apart, got every={self.every}")


class CheckpointSchedule:
    """Decides when a checkpoint is due, writes it, and counts failures."""

    def __init__(self, store: CheckpointStore, options: CheckpointOptions) -> None:
        self.store, self.options = store, options
        self.saves = self.failures = 0
        self.last_save_succeeded = True
        self.events_at_save = 0
        self.time_of_save = time.monotonic()
        self.has_unsaved_events = False

    def is_due(self, events: int) -> bool:
        """Whether a checkpoint is due after a total of `events` events."""
        is_late = time.monotonic() - self.time_of_save > self.options.seconds
        return events - self.events_at_save >= self.options.every or (is_late and self.has_unsaved_events)

    def make_due(self) -> None:
        """Let the next checkpoint be due now."""
        self.has_unsaved_events, self.time_of_save = True, -math.inf

    def save(self, events: int, state_dict: Callable[[], Any]) -> Path | None:
        """Write a checkpoint.

        A failure is logged and does not stop the learner; the previous checkpoint remains the newest one.

        Returns:
            The path of the checkpoint, or None if it could not be written.
        """
        self.saves += 1
        self.events_at_save, self.time_of_save, self.has_unsaved_events = events, time.monotonic(), False
        try:
            path = self.store.save(self.saves, state_dict())
        except OSError as error:
            self.failures, self.last_save_succeeded = self.failures + 1, False
            logger.error("the checkpoint at %d events was not written; learning continues: %s", events, error)
            return None
        self.last_save_succeeded = True
        return path

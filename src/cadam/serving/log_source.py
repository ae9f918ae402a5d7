"""The event log as a source of the learner."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..online.data.events import Batch
from ..online.data.schema import Schema
from ..online.data.sources.base import Source, check_batch_size, check_state
from ..online.run_config import SCHEMA_KEY
from .config import without_label
from .event_log import Entry, EventLog, LogUnavailableError, Rollback

logger = logging.getLogger("cadam.serving")

POLL_SECONDS = 0.02
"""The pause between two polls of the log while it has no new entries."""
SECONDS_BETWEEN_CHECKPOINTS = 2.0
"""The time between two copies of the write-ahead log to the database."""


class LogSource(Source):
    """Reads the event log in its order.

    The end of each batch is recorded in the log before the batch is produced. After a crash the same batches are
    produced again, so the learner reaches the same state as if it had never stopped.

    Args:
        log: the log, in a separate connection.
        schema: the schema of the events, with an id.
        batch_size: the largest number of entries per batch.
        follow: whether to wait for more entries at the end.
        patience: the number of seconds to wait for a full batch before a smaller one is produced.
        rollbacks: labels in these ranges are not produced.
    """

    def __init__(
        self,
        log: EventLog,
        schema: Schema,
        *,
        batch_size: int = 512,
        follow: bool = True,
        patience: float = 0.1,
        rollbacks: Sequence[Rollback] = (),
    ) -> None:
        check_batch_size(batch_size)
        self.log, self.schema, self.batch_size = log, schema, batch_size
        self.event_schema = without_label(schema)
        self.follow, self.patience, self.rollbacks = follow, patience, list(rollbacks)
        self.location = log.location
        self.position = 0
        """The number of the last entry that was produced."""
        self._time_of_checkpoint = -math.inf
        self._has_logged_failure = False

    def __iter__(self) -> Iterator[Batch | None]:
        """Yield batches of entries, and None while waiting."""
        while True:
            try:
                self._checkpoint()
                last = self._next_end()
                entries = [] if last is None else self.log.read(self.position, last=last)
                self._has_logged_failure = False
            except LogUnavailableError as error:  # for example a full disk: wait until there is space
                if not self._has_logged_failure:
                    logger.error("learning pauses: %s", error)
                last, self._has_logged_failure = None, True
            if last is not None:
                self.position = last
                yield self._convert(entries)
            elif self.follow:
                yield None
                time.sleep(POLL_SECONDS)
            else:
                return

    def _next_end(self) -> int | None:
        """Return the number of the last entry of the next batch, None if it is not complete yet."""
        if (recorded := self.log.next_batch(self.position)) is not None:
            return recorded
        entries = self.log.read(self.position, limit=self.batch_size)
        if not entries:
            return None
        age = time.time() - entries[0].time
        # If the clock was set back, entries seem to come from the future; they must not wait for it.
        if self.follow and len(entries) < self.batch_size and 0 <= age < self.patience:
            return None
        self.log.add_batch(entries[-1].number)
        return entries[-1].number

    def _checkpoint(self) -> None:
        """Copy the write-ahead log to the database from time to time."""
        if self.follow and time.monotonic() - self._time_of_checkpoint > SECONDS_BETWEEN_CHECKPOINTS:
            self._time_of_checkpoint = time.monotonic()
            self.log.checkpoint()

    def _convert(self, entries: Sequence[Entry]) -> Batch:
        """Convert entries to a batch, in which each label follows the events before it."""
        events = [entry for entry in entries if entry.kind == "event"]
        labels = [entry for entry in entries if entry.kind == "label"]
        withdrawn = [entry.id for entry in labels if self._is_rolled_back(entry)]
        labels = [entry for entry in labels if not self._is_rolled_back(entry)] if withdrawn else labels
        batch = Batch()
        if events:
            where = [self._where(entry) for entry in events]
            batch = self.event_schema.convert_records([json.loads(entry.body) for entry in events], where)
        if labels:
            ids, values = [entry.id for entry in labels], [json.loads(entry.body) for entry in labels]
            converted = self.schema.convert_labels(ids, values, lambda row: self._where(labels[row]))
            batch.labels = converted.labels
            batch.rejected += converted.rejected
            if not converted.rejected and not (events and batch.rejected):
                numbers = np.array([entry.number for entry in events])
                batch.events_before = np.searchsorted(numbers, [entry.number for entry in labels])
        batch.withdrawn = withdrawn
        return batch

    def _is_rolled_back(self, entry: Entry) -> bool:
        return any(rollback.position < entry.number <= rollback.until for rollback in self.rollbacks)

    def _where(self, entry: Entry) -> str:
        return f"{self.location}, entry {entry.number}"

    def backlog(self) -> int | None:
        """Return the number of entries after the position, None if the log is not available."""
        try:
            return max(0, self.log.last_number() - self.position)
        except LogUnavailableError:
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last entry that was produced, that of the last rollback, and the schema."""
        state = {"source": "event log", "position": self.position, "rollback": self.generation}
        return {**state, SCHEMA_KEY: self.schema.settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after an entry."""
        check_state(state, source="event log")
        self.position = state["position"]

    @property
    def generation(self) -> int:
        """The number of rollbacks so far."""
        return self.rollbacks[-1].number if self.rollbacks else 0

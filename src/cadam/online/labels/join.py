"""The join of events and labels, which decides the outcome of each event exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

from ..data.events import Array, Columns, Labels, as_key_array
from .clock import StreamClock
from .pending import PendingEvents

Unmatched = Literal["drop", "negative"]


class Outcome(IntEnum):
    """The way in which an event was resolved."""

    LABELED = 0
    """A label arrived."""
    ASSUMED_NEGATIVE = 1
    """No label arrived within the horizon, and the event is learned with label 0."""
    DROPPED = 2
    """No label arrived within the horizon, and the event is not learned."""


Resolved = tuple[Columns, Outcome]
"""Events with their labels, and the outcome that they share."""


@dataclass(frozen=True)
class LabelOptions:
    """How long events wait for their labels, and what happens to events without one.

    Args:
        horizon: how long an event waits for its label, in seconds of the events' time, or in events if they have none.
        unmatched: what happens to an event without a label after the horizon: ``"drop"``, or ``"negative"`` to learn
            it with label 0, which needs a finite horizon.
        capacity: how many events can wait; beyond it the oldest expire as if the horizon had passed.
        remember: how many ids of resolved events are remembered to recognize repeated events and labels.
    """

    horizon: float = math.inf
    unmatched: Unmatched = "drop"
    capacity: int = 1_000_000
    remember: int = 100_000

    def __post_init__(self) -> None:
        if self.unmatched not in ("drop", "negative"):
            raise ValueError(f"unmatched must be 'drop' or 'negative', got {self.unmatched!r}")
        if self.unmatched == "negative" and self.horizon == math.inf:
            raise ValueError("unmatched='negative' needs a finite horizon, after which an event counts as negative")


class LabelJoin:
    """Joins labels with their events by id. An event is resolved by its label or when the horizon has passed."""

    def __init__(self, options: LabelOptions) -> None:
        self.options = options
        self.pending = PendingEvents(options.horizon, options.capacity, options.remember)
        self.clock = StreamClock()

    def advance_clock(self, times: Array) -> None:
        """Advance the clock of the stream to the times of a batch."""
        self.clock.advance(times, self.pending)

    def split_repeated(self, columns: Columns) -> tuple[Columns, Labels | None]:
        """Separate new events from repeated ones.

        Returns:
            The new events, and the labels of the repeated ones.
        """
        is_new = self.pending.find_new(columns["id"].tolist())
        if is_new is None:
            return columns, None
        labels = None
        if "label" in columns:
            has_label = ~is_new & ~np.isnan(columns["label"])
            labels = Labels(columns["id"][has_label], columns["label"][has_label])
        return {name: values[is_new] for name, values in columns.items()}, labels

    def add_events(self, columns: Columns, labels_of_repeated: Labels | None) -> Iterator[Resolved]:
        """Add new events, with or without labels, and yield the events that are resolved by that.

        Args:
            columns: new events. Those without a label become pending.
            labels_of_repeated: labels of events that arrived before, see `split_repeated`.
        """
        has_label = ~np.isnan(columns["label"]) if "label" in columns else np.zeros(len(columns["id"]), dtype=bool)
        if has_label.any():
            labeled = columns if has_label.all() else {name: values[has_label] for name, values in columns.items()}
            self.pending.remember_labeled(labeled["id"].tolist())
            yield labeled, Outcome.LABELED
        if labels_of_repeated is not None:
            yield from self.match_labels(self.pending.select_pending(labels_of_repeated))
        if not has_label.all():
            unlabeled = {name: values[~has_label] for name, values in columns.items() if name != "label"}
            yield from self.add_unlabeled(unlabeled)
        if labels_of_repeated is not None:  # an event may be repeated within one batch: its first copy is pending now
            yield from self.match_labels(self.pending.select_pending(labels_of_repeated))
        yield from self._resolve_expired(self.pending.expire(self.clock.now))

    def add_unlabeled(self, columns: Columns) -> Iterator[Resolved]:
        """Add new events without labels, and yield those whose label arrived before them."""
        if len(columns["id"]):
            self.pending.add(columns, self.clock.now)
            early = self.pending.pop_early_labels(columns["id"].tolist())
            if early is not None:
                yield from self.match_labels(Labels(as_key_array(early[0], "ids"), early[1]))
        yield from self._resolve_expired(self.pending.expire(self.clock.now))

    def match_labels(self, labels: Labels) -> Iterator[Resolved]:
        """Yield the pending events that finite labels belong to; keep labels whose events have not arrived yet."""
        columns = self.pending.match(labels.ids.tolist(), labels.labels, self.clock.label_arrival)
        if columns is not None:
            yield columns, Outcome.LABELED

    def expire_all(self) -> Iterator[Resolved]:
        """Resolve all pending events, because the stream has ended."""
        yield from self._resolve_expired(self.pending.expire_all())

    def _resolve_expired(self, columns: Columns | None) -> Iterator[Resolved]:
        if columns is None:
            return
        if self.options.unmatched == "negative":
            label, outcome = 0.0, Outcome.ASSUMED_NEGATIVE
        else:
            label, outcome = math.nan, Outcome.DROPPED
        columns["label"] = np.full(len(columns["id"]), label, dtype=np.float32)
        yield columns, outcome

"""The join of events and labels: what becomes of each event, and when that is decided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from ..data.events import Array, Columns, Labels, as_key_array
from ..persistence.logs import ASSUMED, DROPPED, LABEL
from .clock import Clock
from .pending import Pending

Unmatched = Literal["drop", "negative"]
Settled = tuple[Columns, int]
"""Events with their labels, and the outcome: `LABEL`, `ASSUMED` or `DROPPED`."""


class LabelJoin:
    """Events wait for their labels on the stream's clock; each is settled once, by a label or by the horizon.

    Args:
        unmatched: what an event without a label becomes after the horizon, see `Learner`. Others: see `Pending`.
    """

    def __init__(self, horizon: float, unmatched: Unmatched, capacity: int, remember: int) -> None:
        if unmatched not in ("drop", "negative"):
            raise ValueError(f"unmatched must be 'drop' or 'negative', got {unmatched!r}")
        if unmatched == "negative" and horizon == math.inf:
            raise ValueError("unmatched='negative' needs a finite horizon, which says when an event counts as negative")
        self.unmatched = unmatched
        self.pending, self.clock = Pending(horizon, capacity, remember), Clock()

    def tick(self, times: Array) -> None:
        self.clock.tick(times, self.pending)

    def new(self, columns: Columns) -> tuple[Columns, Labels | None]:
        """The events that did not come before, and the labels that the others bring."""
        new = self.pending.new(columns["id"].tolist())
        if new is None:
            return columns, None
        brought = None
        if "label" in columns:
            with_label = ~new & ~np.isnan(columns["label"])
            brought = Labels(columns["id"][with_label], columns["label"][with_label])
        return {name: values[new] for name, values in columns.items()}, brought

    def take(self, columns: Columns, brought: Labels | None) -> Iterator[Settled]:
        """New events, some with their labels; the others wait. `brought`: labels of events that came again."""
        known = ~np.isnan(columns["label"]) if "label" in columns else np.zeros(len(columns["id"]), dtype=bool)
        if known.any():
            labelled = columns if known.all() else {name: values[known] for name, values in columns.items()}
            self.pending.finish(labelled["id"].tolist())
            yield labelled, LABEL
        if brought is not None:
            yield from self.match(self.pending.waited_for(brought))
        if not known.all():
            yield from self.wait({name: values[~known] for name, values in columns.items() if name != "label"})
        if brought is not None:  # of events that came a moment ago, in this batch
            yield from self.match(self.pending.waited_for(brought))
        yield from self._expired(self.pending.expire(self.clock.now))

    def wait(self, columns: Columns) -> Iterator[Settled]:
        """New events without labels; of those that came before them, the labels are here."""
        if len(columns["id"]):
            self.pending.add(columns, self.clock.now)
            early = self.pending.early_labels(columns["id"].tolist())
            if early is not None:
                yield from self.match(Labels(as_key_array(early[0], "ids"), early[1]))
        yield from self._expired(self.pending.expire(self.clock.now))

    def match(self, labels: Labels) -> Iterator[Settled]:
        """Labels, which must be finite, meet their events; those without one wait for it."""
        columns = self.pending.match(labels.ids.tolist(), labels.labels, self.clock.arrival)
        if columns is not None:
            yield columns, LABEL

    def end(self) -> Iterator[Settled]:
        """No label will come any more."""
        yield from self._expired(self.pending.expire_all())

    def _expired(self, columns: Columns | None) -> Iterator[Settled]:
        if columns is not None:
            value, outcome = (0.0, ASSUMED) if self.unmatched == "negative" else (math.nan, DROPPED)
            columns["label"] = np.full(len(columns["id"]), value, dtype=np.float32)
            yield columns, outcome

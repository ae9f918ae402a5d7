"""A source that ends after a given number of events, even in the middle of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .events import Batch, Columns, Events, Labels
from .sources import Source

REST = "rest_of_batch"
"""The key of `state_dict` under which the unread rest of a batch is saved."""


class LimitedSource(Source):
    """The first events of another source.

    When the limit falls into the middle of a batch, the rest of the batch is part of the position: it is the first
    batch that is produced after `load_state_dict`.

    Args:
        source: The source to read from.
        limit: The number of events after which this source ends. None: it ends where the other source ends.
        batch_size: The largest number of events of a batch; larger ones are cut. The other source may produce larger
            ones, and so may the saved rest of a batch be, which an earlier run has read with another batch size.
    """

    def __init__(self, source: Source, limit: int | None, batch_size: int | None = None) -> None:
        self.source, self.limit, self.remaining, self.batch_size = source, limit, limit, batch_size
        self.rest: Batch | None = None
        self.has_produced = False
        """Whether any batch was produced."""

    def __iter__(self) -> Iterator[Events | Labels | Batch | None]:
        yield from self._produce_rest()
        if self.remaining == 0:
            return
        for batch in self.source:
            self.has_produced |= batch is not None
            if isinstance(batch, Events):
                batch = Batch(batch)
            yield self._cut(batch) if isinstance(batch, Batch) else batch
            yield from self._produce_rest()
            if self.remaining == 0:
                return

    def _produce_rest(self) -> Iterator[Batch]:
        """Yield the rest of a batch that was cut, up to the limit."""
        while self.rest is not None and self.remaining != 0:
            rest, self.rest, self.has_produced = self.rest, None, True
            yield self._cut(rest)

    @property
    def share(self) -> float | None:
        """The fraction of the events that was produced, None if the source has no end."""
        if self.limit is None or self.remaining is None:
            return self.source.share
        return 1 - self.remaining / max(1, self.limit)

    def backlog(self) -> int | None:
        """Return the backlog of the wrapped source."""
        return self.source.backlog()

    def _cut(self, batch: Batch) -> Batch:
        """Cut a batch at the limit and keep the rest.

        A separate label stays with the event before it, or with the last event if its position is unknown.
        """
        events = batch.events
        if events is None:
            return batch
        count = min(size for size in (len(events), self.remaining, self.batch_size) if size is not None)
        if self.remaining is not None:
            self.remaining -= count
        if count == len(events):
            return batch
        labels, events_before = batch.labels, batch.events_before
        first = replace(batch, events=events.take(slice(count)), labels=None, events_before=None)
        self.rest = Batch(events.take(slice(count, None)), labels)
        if labels is not None and events_before is not None:
            for part, rows, start in ((first, events_before <= count, 0), (self.rest, events_before > count, count)):
                part.labels = Labels(labels.ids[rows], labels.labels[rows])
                part.events_before = events_before[rows] - start
        return first

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the other source and the rest of a batch that was cut."""
        state = self.source.state_dict()
        if self.rest is None or self.rest.events is None:
            return state
        labels, events_before = self.rest.labels, self.rest.events_before
        label_columns: Columns = {} if labels is None else {"id": labels.ids, "label": labels.labels}
        if events_before is not None:
            label_columns["events_before"] = events_before
        return {**state, REST: {"events": self.rest.events.columns(), "labels": label_columns}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        self.source.load_state_dict({name: value for name, value in state.items() if name != REST})
        if (rest := state.get(REST)) is not None:
            labels = Labels(rest["labels"]["id"], rest["labels"]["label"]) if rest["labels"] else None
            self.rest = Batch(
                Events.from_columns(rest["events"]), labels, events_before=rest["labels"].get("events_before")
            )

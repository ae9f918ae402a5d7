"""A portion of a source: exactly so many events, even where that is in the middle of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .events import Batch, Columns, Events, Labels, from_columns
from .sources import Source

REST = "rest_of_batch"


class Portion:
    """A source that ends after `events` more events; None: where the source ends.

    What is left of a batch that was cut is part of the position, and the first batch of whoever goes on from there.
    """

    def __init__(self, source: Source, events: int | None) -> None:
        self.source, self.events, self.left = source, events, events
        self.rest: Batch | None = None
        self.given = False
        """Whether it had anything to give."""

    def __iter__(self) -> Iterator[Events | Labels | Batch | None]:
        if self.rest is not None and self.left != 0:
            rest, self.rest, self.given = self.rest, None, True
            yield self._cut(rest)
        if self.left == 0:
            return
        for batch in self.source:
            self.given |= batch is not None
            yield self._cut(batch) if isinstance(batch, Batch) else batch
            if self.left == 0:
                return

    @property
    def share(self) -> float | None:
        """Of what it has to give, the share that it has given."""
        if self.events is None or self.left is None:
            return getattr(self.source, "share", None)
        return 1 - self.left / max(1, self.events)

    def _cut(self, batch: Batch) -> Batch:
        """As much of the batch as is left to give. Labels on their own go with its last event."""
        events = batch.events
        if self.left is None or events is None:
            return batch
        count = min(self.left, len(events))
        self.left -= count
        if count == len(events):
            return batch
        self.rest = Batch(events.take(slice(count, None)), batch.labels)
        return Batch(events.take(slice(count)), rejected=batch.rejected)

    def state_dict(self) -> dict[str, Any]:
        state = self.source.state_dict()
        if self.rest is None or self.rest.events is None:
            return state
        labels = self.rest.labels
        alone: Columns = {} if labels is None else {"id": labels.ids, "label": labels.labels}
        return {**state, REST: {"events": self.rest.events.columns(), "labels": alone}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict({name: value for name, value in state.items() if name != REST})
        rest = state.get(REST)
        if rest is not None:
            alone = rest["labels"]
            self.rest = Batch(from_columns(rest["events"]), Labels(alone["id"], alone["label"]) if alone else None)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the source can tell, such as its backlog."""
        if name == "source" or name.startswith("__"):  # not there yet, or asked for by copy and pickle
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.source, name)

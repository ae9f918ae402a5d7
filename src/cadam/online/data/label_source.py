"""A source of labels beside the source of events. Both are read as one stream, in the order of time.

The records of the source of labels have the id of an event, its label and, optionally, the time at which the label
became known, in columns that are called as in the schema of the events.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .events import Batch, Columns, Events, Labels, Rejected, concatenate_columns
from .schema import Schema
from .sources import Source, open_source

SECONDS_BETWEEN_CHECKS = 0.05
"""The time to wait for the thread that reads labels before checking again whether it has caught up."""
MAX_BATCHES_AHEAD = 4
"""The number of batches of labels that the thread reads ahead."""


def open_with_labels(
    events: Source, uri: str, schema: Schema, *, batch_size: int, follow: bool, patience: float | None
) -> LabeledSource:
    """Open a source of labels and merge it with a source of events.

    Args:
        events: the source of events.
        uri: the URI of the source of labels.
        schema: the schema of the events.
        batch_size: the number of labels that are read at once.
        follow: whether to wait for more labels at the end.
        patience: see `open_source`.

    Raises:
        ValueError: if labels cannot be joined with events, or cannot be merged with them in the order of time.
    """
    if "id" not in schema.roles:
        raise ValueError("labels from another source are joined by the id of their event: name its column with --id")
    # The records are read as events with the id as their only feature, so every kind of source can be used.
    own = replace(schema, features={schema.roles["id"][0]: "hash:2"}, user=None, time=None, weight=None, header=None)
    options: dict[str, Any] = {"batch_size": batch_size, "follow": follow, "patience": patience}
    source = open_source(uri, own, **options)
    names = source.columns()
    has_time = "time" in schema.roles and names is not None and schema.roles["time"][0] in names.names
    if names is not None and names.are_complete:
        missing = [name for name in own.column_names() if name not in names.names]
        if missing:
            raise ValueError(
                f"the labels in {source.location} have no column {missing[0]!r}: rename it as in the events"
            )
    if not has_time and not follow:
        column = f"have no column {schema.roles['time'][0]!r}" if "time" in schema.roles else "cannot be ordered"
        advice = "give the time of events and labels, with --time, so that both are read in the order of time"
        raise ValueError(f"the labels in {source.location} {column}: {advice}")
    if has_time:
        source = open_source(uri, replace(own, time=schema.time), **options)
    return LabeledSource(events, source, is_live=follow)


class LabeledSource(Source):
    """Events of one source with labels of another.

    A batch of events comes with the labels up to the time of its last event. If a label source is live, labels that
    have not arrived when they are due come with a later batch. Labels without a time come as they arrive. At the end of
    the events come all other labels.

    The position consists of the positions of both sources, and the labels that were read but are not due yet.

    Args:
        events: the source of events.
        labels: a source whose events are the labels: with ids, labels and, optionally, times.
        is_live: whether the sources wait for more data. Labels are then read in a thread, because events must not wait
            for them.
    """

    def __init__(self, events: Source, labels: Source, *, is_live: bool = False) -> None:
        self.events, self.labels, self.is_live = events, labels, is_live
        self.location = events.location
        self._waiting: Columns = {}
        """Labels that were read and are not due yet: id, label and time."""
        self._newest_start = -math.inf
        """The earliest time in the last batch of labels. Labels are read until it is not due."""
        self._due_times = np.empty(0)
        """The times of the labels that were returned last, -inf if they have none."""
        self._label_position: dict[str, Any] | None = None
        """The position after the last batch that was taken from the reader, which may have read more; None before the
        first iteration."""

    def __iter__(self) -> Iterator[Batch | None]:
        if self._label_position is None:
            self._label_position = self.labels.state_dict()
        reader = _ThreadedReader(self.labels) if self.is_live else _Reader(self.labels)
        try:
            for item in self.events:
                if item is None:  # no event is waiting, so all labels that have arrived are due
                    labels, rejected = self._take_due(reader, math.inf)
                    yield Batch(labels=labels, rejected=rejected) if labels is not None or rejected else None
                else:
                    yield self._add_labels(reader, item)
            labels, rejected = self._take_due(reader, math.inf)
            if labels is not None or rejected:
                yield Batch(labels=labels, rejected=rejected)
        finally:
            reader.close()

    def _add_labels(self, reader: _Reader, item: Events | Labels | Batch) -> Batch:
        """Add the labels to a batch of events that are due with it."""
        batch = Batch(item) if isinstance(item, Events) else Batch(labels=item) if isinstance(item, Labels) else item
        if batch.events is None or not len(batch.events):
            return batch
        times = batch.events.time
        until = math.inf if times is None else float(np.max(times, initial=-math.inf, where=np.isfinite(times)))
        labels, rejected = self._take_due(reader, until)
        if labels is None:
            return replace(batch, rejected=batch.rejected + rejected)
        count = len(batch.events)
        positions = np.full(len(labels), count)
        if times is not None and np.isfinite(self._due_times).all():
            positions = np.searchsorted(np.fmax.accumulate(times), self._due_times, side="right")
        if batch.labels is not None:
            own = np.full(len(batch.labels), count) if batch.events_before is None else batch.events_before
            positions = np.concatenate([own, positions])
            order = np.argsort(positions, kind="stable")
            ids, values = (
                np.concatenate(pair) for pair in ((batch.labels.ids, labels.ids), (batch.labels.labels, labels.labels))
            )
            labels, positions = Labels(ids[order], values[order]), positions[order]
        return replace(batch, labels=labels, events_before=positions, rejected=batch.rejected + rejected)

    def _take_due(self, reader: _Reader, until: float) -> tuple[Labels | None, list[Rejected]]:
        """Read labels until they are later than `until`, and remove and return those up to `until`, ordered by time."""
        rejected: list[Rejected] = []
        while self._newest_start <= until:
            batch = reader.read()
            if batch is None:
                break
            self._label_position = reader.position()
            rejected += batch.rejected
            if batch.events is None:
                continue
            columns = batch.events.columns()
            part = {"id": columns["id"], "label": columns["label"]}
            part["time"] = columns.get("time", np.full(len(part["id"]), -math.inf))
            self._newest_start = float(part["time"].min())
            self._waiting = concatenate_columns([self._waiting, part]) if self._waiting else part
        if not self._waiting:
            return None, rejected
        order = np.argsort(self._waiting["time"], kind="stable")
        count = int(np.searchsorted(self._waiting["time"][order], until, side="right"))
        due = {name: values[order[:count]] for name, values in self._waiting.items()}
        later = np.sort(order[count:])
        self._waiting = {name: values[later] for name, values in self._waiting.items()} if len(later) else {}
        self._due_times = due["time"]
        return (Labels(due["id"], due["label"]) if count else None), rejected

    @property
    def share(self) -> float | None:
        """The fraction of the events that was read."""
        return self.events.share

    def backlog(self) -> int | None:
        """Return the backlog of the source of events."""
        return self.events.backlog()

    def state_dict(self) -> dict[str, Any]:
        """Return both positions, and the labels that were read and are not due yet."""
        return {
            "events": self.events.state_dict(),
            "labels": self._label_position or self.labels.state_dict(),
            "waiting": dict(self._waiting),
            "newest_start": self._newest_start,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned.

        Raises:
            ValueError: if the position is that of a run without a source of labels.
        """
        if "waiting" not in state:
            raise ValueError("the checkpoint is of a run without --labels")
        self.events.load_state_dict(state["events"])
        self.labels.load_state_dict(state["labels"])
        self._label_position = dict(state["labels"])
        self._waiting = {name: np.array(values) for name, values in state["waiting"].items()}
        self._newest_start = float(state["newest_start"])


class _Reader:
    """Reads batches of labels one by one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._batches = iter(source)

    def read(self) -> Batch | None:
        """Return the next batch, or None if there is none at the moment."""
        item = next(self._batches, None)
        return Batch(item) if isinstance(item, Events) else item  # type: ignore[return-value]

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return self.source.state_dict()

    def close(self) -> None:
        """Stop reading."""


class _ThreadedReader(_Reader):
    """Reads batches of labels in a thread, so that waiting for labels does not delay events."""

    def __init__(self, source: Source) -> None:
        self._results: queue.Queue[tuple[Any, dict[str, Any]] | Exception] = queue.Queue(MAX_BATCHES_AHEAD)
        self._has_caught_up, self._is_closed = threading.Event(), threading.Event()
        self._position: dict[str, Any] = {}
        super().__init__(source)
        self._thread = threading.Thread(target=self._read_all, name="cadam-labels", daemon=True)
        self._thread.start()

    def _read_all(self) -> None:
        try:
            for item in self._batches:
                if self._is_closed.is_set():
                    return
                if item is None:
                    self._has_caught_up.set()
                else:
                    self._has_caught_up.clear()
                    self._put((Batch(item) if isinstance(item, Events) else item, self.source.state_dict()))
        except Exception as error:  # it is raised again where the labels are used
            self._put(error)
        self._has_caught_up.set()

    def _put(self, result: tuple[Any, dict[str, Any]] | Exception) -> None:
        while not self._is_closed.is_set():
            try:
                self._results.put(result, timeout=1.0)
                return
            except queue.Full:
                continue

    def read(self) -> Batch | None:
        """Return the next batch, or None if all labels that had arrived at the last check were returned."""
        while True:
            has_caught_up = self._has_caught_up.is_set()  # asked first: a batch may be added afterwards
            try:
                result = self._results.get(not has_caught_up, SECONDS_BETWEEN_CHECKS)
            except queue.Empty:
                if has_caught_up:
                    return None
                continue
            if isinstance(result, Exception):
                raise result
            batch, self._position = result
            return batch  # type: ignore[no-any-return]

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch that `read` returned."""
        return self._position

    def close(self) -> None:
        """Let the thread end after the batch that it reads."""
        self._is_closed.set()

"""The data that sources produce and the learner consumes: events, labels that arrive separately, and rejected records.

All values are stored as columns, which are numpy arrays with one row per event. No part of the learner has to loop over
single events in Python.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...printable import printable

Array = NDArray[Any]
Columns = dict[str, Array]
_Column = TypeVar("_Column")
"""An array, or a tensor with the same values."""

FEATURE_PREFIX = "feature/"
"""The prefix of feature names in the dict that `Events.columns` returns."""
ROLES = ("label", "id", "user", "time", "weight")
"""The names of the columns that are not features in the dict that `Events.columns` returns."""


@dataclass
class Events:
    """Events (impressions) in the order of their arrival.

    Arrays are not copied, so they must not change until the learner has logged and learned the events.

    Args:
        features: The model's arguments by name, each an array with one row per event.
        labels: The outcome of each event, nan where it is not known yet. None if no label is known.
        ids: The ids by which labels that arrive later refer to their events: integers, or text as an array of objects.
            Without ids the learner numbers the events from 0, so either all events of a stream have ids or none.
        users: The user of each event, for metrics per user.
        time: The time at which each event happened, in seconds. Without it, time is the number of events so far.
        weights: The weight of each event in the loss and in metrics that are means over events, at least 0.

    Raises:
        ValueError: If there are no features, if the columns differ in length, or if a column other than a feature has
            more than one value per event.

    Example:
        >>> Events({"price": np.array([1.5, 2.0])}, labels=np.array([0, 1])).columns()["label"]
        array([0., 1.], dtype=float32)
    """

    features: Columns
    labels: Array | None = None
    ids: Array | None = None
    users: Array | None = None
    time: Array | None = None
    weights: Array | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("events need at least one feature")
        self.features = {name: np.asarray(values) for name, values in self.features.items()}
        self.labels = None if self.labels is None else np.asarray(self.labels, dtype=np.float32)
        self.ids = None if self.ids is None else as_key_array(self.ids, "ids")
        self.users = None if self.users is None else as_key_array(self.users, "users")
        self.time = None if self.time is None else np.asarray(self.time, dtype=np.float64)
        self.weights = None if self.weights is None else np.asarray(self.weights, dtype=np.float32)
        for name, values in self.columns().items():
            if name in ROLES and values.ndim != 1:
                raise ValueError(f"{name} has the shape {values.shape}: it needs one value per event")
            if len(values) != len(self):
                first = next(iter(self.features))
                raise ValueError(
                    f"{name} has {len(values)} rows, but {first!r} has {len(self)}: columns need one row per event"
                )

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))

    def columns(self) -> Columns:
        """Return all columns as one dict, in which names of features begin with `FEATURE_PREFIX`."""
        optional = dict(zip(ROLES, (self.labels, self.ids, self.users, self.time, self.weights), strict=True))
        columns = {name: values for name, values in optional.items() if values is not None}
        return columns | {FEATURE_PREFIX + name: values for name, values in self.features.items()}

    @classmethod
    def from_columns(cls, columns: Columns) -> Events:
        """Create events from the columns that `Events.columns` returned."""
        return cls(select_features(columns), *map(columns.get, ROLES))

    def take(self, rows: Any) -> Events:
        """Return the events that a mask, an array of row indices or a slice selects."""
        selected = copy.copy(self)  # without checking the columns again
        selected.features = {name: values[rows] for name, values in self.features.items()}
        selected.labels, selected.ids, selected.users, selected.time, selected.weights = (
            None if values is None else values[rows]
            for values in (self.labels, self.ids, self.users, self.time, self.weights)
        )
        return selected


def select_features(columns: Mapping[str, _Column]) -> dict[str, _Column]:
    """Return the features among columns that `Events.columns` returned, without the prefix of their names."""
    return {
        name.removeprefix(FEATURE_PREFIX): values for name, values in columns.items() if name.startswith(FEATURE_PREFIX)
    }


def as_key_array(values: Any, name: str) -> Array:
    """Convert ids or users to an int64 array, or to an array of objects if they are text.

    Args:
        values: Integers or text.
        name: The name of the column, for the error message.

    Raises:
        TypeError: If the values are neither integers nor text.
    """
    array = np.asarray(values)
    if array.dtype.kind == "U" and not isinstance(values, np.ndarray):
        # An array of numpy's text type would lose NUL characters at the end of a text.
        return np.array([str(value) for value in values], dtype=object)
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind in "US":
        return array.astype(str).astype(object)
    if array.dtype.kind == "O" or not array.size:
        return array.astype(object)
    raise TypeError(f"{name} must be integers or text, got {array.dtype}")


def concatenate_columns(parts: Sequence[Columns]) -> Columns:
    """Concatenate dicts that have the same columns."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass
class Labels:
    """Labels that arrive separately from their events, before or after them.

    Args:
        ids: The ids of the events.
        labels: One label per id.
    """

    ids: Array
    labels: Array

    def __post_init__(self) -> None:
        self.ids, self.labels = as_key_array(self.ids, "ids"), np.asarray(self.labels, dtype=np.float32)
        if len(self.ids) != len(self.labels):
            raise ValueError(f"there are {len(self.ids)} ids, but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Rejected:
    """A record that cannot be used."""

    reason: str
    where: str
    """The position of the record in its source, such as a file and a line."""
    event: str
    """The beginning of the record's text."""
    size: int
    """The size of the complete record in bytes."""
    events: int = 1
    """The number of events that cannot be used: all rows of a file from some row on, if the file is damaged there."""

    def __post_init__(self) -> None:
        # Names of columns and files are printed, logged and exported as labels of metrics.
        object.__setattr__(self, "reason", printable(self.reason))
        object.__setattr__(self, "where", printable(self.where))


@dataclass
class Batch:
    """The events, separate labels and rejected records that a source read together."""

    events: Events | None = None
    labels: Labels | None = None
    rejected: list[Rejected] = field(default_factory=list)
    events_before: Array | None = None
    """For each separate label, the number of events of this batch that arrived before it; None if that is unknown."""
    missing_columns: dict[str, int] = field(default_factory=dict)
    """The number of events whose record did not have a column of the schema, by column."""
    withdrawn: list[Any] = field(default_factory=list)
    """The ids of events whose labels must not be learned, so that the events wait no longer."""

    def in_order(self) -> Iterator[tuple[Events | None, Labels | None]]:
        """Yield pairs of events and the separate labels that arrived right after them, in the order of arrival."""
        if self.events is None or not self.labels or self.events_before is None:
            yield self.events, self.labels
            return
        ends, first_labels = np.unique(self.events_before, return_index=True)
        start = 0
        for end, first, last in zip(ends.tolist(), first_labels, [*first_labels[1:], len(self.labels)], strict=True):
            labels = Labels(self.labels.ids[first:last], self.labels.labels[first:last])
            yield self.events.take(slice(start, end)) if end > start else None, labels
            start = end
        if start < len(self.events):
            yield self.events.take(slice(start, None)), None

    def split(self, size: int) -> list[Batch]:
        """Split the batch into batches of `size` events.

        A separate label stays with the event before it, or with the last event if its position is unknown. Rejected
        records and missing columns are in the first batch, withdrawn ids in the last.
        """
        if self.events is None or len(self.events) <= size:
            return [self]
        batches = [Batch(self.events.take(slice(start, start + size))) for start in range(0, len(self.events), size)]
        batches[0].rejected, batches[0].missing_columns = self.rejected, self.missing_columns
        batches[-1].withdrawn = self.withdrawn
        if self.labels is not None and self.events_before is None:
            batches[-1].labels = self.labels
        elif self.labels is not None and self.events_before is not None:
            batch_of_label = np.maximum(self.events_before - 1, 0) // size
            for index in np.unique(batch_of_label).tolist():
                rows = batch_of_label == index
                batches[index].labels = Labels(self.labels.ids[rows], self.labels.labels[rows])
                batches[index].events_before = self.events_before[rows] - index * size
        return batches


def concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches in their order of arrival."""
    if len(batches) == 1:
        return batches[0]
    events = [batch.events.columns() for batch in batches if batch.events is not None]
    labels = [batch.labels for batch in batches if batch.labels is not None]
    events_before: list[Array] = []
    total = 0
    for batch in batches:
        count = 0 if batch.events is None else len(batch.events)
        if batch.labels is not None:
            in_batch = np.full(len(batch.labels), count) if batch.events_before is None else batch.events_before
            events_before.append(total + in_batch)
        total += count
    combined = Batch(rejected=[rejected for batch in batches for rejected in batch.rejected])
    combined.withdrawn = [key for batch in batches for key in batch.withdrawn]
    combined.missing_columns = dict(sum((Counter(batch.missing_columns) for batch in batches), Counter()))
    if events:
        combined.events = Events.from_columns(concatenate_columns(events))
    if labels:
        ids, values = [part.ids for part in labels], [part.labels for part in labels]
        combined.labels = Labels(np.concatenate(ids), np.concatenate(values))
        combined.events_before = np.concatenate(events_before)
    return combined

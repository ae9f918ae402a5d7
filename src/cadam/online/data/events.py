"""What flows through a learner: events with features, labels that come on their own, and what could not be read.

Everything is columns, numpy arrays with a row per event, so that no step of the loop goes event by event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Columns = dict[str, Array]


@dataclass
class Events:
    """Impressions, in the order of their arrival.

    Args:
        features: the model's arguments by name, each an array with a row per event.
        labels: what happened, nan where it is not known yet; None if nothing is known.
        ids: what labels that come later refer to: integers, or text as an array of objects. Without them the learner
            numbers the events from 0; so a stream has ids throughout or nowhere.
        users: whom an event belongs to, for metrics per user.
        time: seconds; of the events, not of their arrival. Without it the stream's time is the number of events.
    """

    features: Columns
    labels: Array | None = None
    ids: Array | None = None
    users: Array | None = None
    time: Array | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("events need at least one feature")
        self.features = {name: np.asarray(values) for name, values in self.features.items()}
        self.labels = None if self.labels is None else np.asarray(self.labels, dtype=np.float32)
        self.ids = None if self.ids is None else keys(self.ids, "ids")
        self.users = None if self.users is None else keys(self.users, "users")
        self.time = None if self.time is None else np.asarray(self.time, dtype=np.float64)
        for name, values in self.columns().items():
            if len(values) != len(self):
                first = next(iter(self.features))
                raise ValueError(f"{name} has {len(values)} rows, {first!r} has {len(self)}: a row per event is needed")

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))

    def columns(self) -> Columns:
        """All that is known of the events as one dict; features carry their prefix."""
        known = {"label": self.labels, "id": self.ids, "user": self.users, "time": self.time}
        features = {FEATURE + name: values for name, values in self.features.items()}
        return {**{name: values for name, values in known.items() if values is not None}, **features}

    def take(self, rows: Any) -> Events:
        """Some of the events: a mask, places or a slice."""
        return from_columns({name: values[rows] for name, values in self.columns().items()})


FEATURE = "feature/"


def from_columns(columns: Columns) -> Events:
    """Events from what `Events.columns` gave."""
    features = {name.removeprefix(FEATURE): v for name, v in columns.items() if name.startswith(FEATURE)}
    return Events(features, columns.get("label"), columns.get("id"), columns.get("user"), columns.get("time"))


def keys(values: Any, what: str) -> Array:
    """Ids or users as an array: int64, or text as objects."""
    array = np.asarray(values)
    if array.dtype.kind == "U" and not isinstance(values, np.ndarray):  # numpy's text drops NULs at its end
        return np.array([str(value) for value in values], dtype=object)
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind in "US":
        return array.astype(str).astype(object)
    if array.dtype.kind == "O" or not array.size:
        return array.astype(object)
    raise TypeError(f"{what} must be integers or text, got {array.dtype}")


def concatenated(parts: Sequence[Columns]) -> Columns:
    """The same columns of several parts, one after the other."""
    return dict(parts[0]) if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}


@dataclass
class Labels:
    """Labels of events that came before, or will come."""

    ids: Array
    labels: Array

    def __post_init__(self) -> None:
        self.ids, self.labels = keys(self.ids, "ids"), np.asarray(self.labels, dtype=np.float32)
        if len(self.ids) != len(self.labels):
            raise ValueError(f"{len(self.ids)} ids but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Rejected:
    """A rejected event: why, where in the source it is, its text (the beginning) and its size."""

    reason: str
    where: str
    event: str
    size: int


@dataclass(init=False)
class Batch:
    """What a source read at one go: events, labels, and what is rejected.

    `before` says, where it is known, of each label how many of the events came before it.
    """

    events: Events | None
    labels: Labels | None
    rejected: list[Rejected]
    before: Array | None

    def __init__(
        self,
        events: Events | None = None,
        labels: Labels | None = None,
        rejected: list[Rejected] | None = None,
        *,
        before: Array | None = None,
    ) -> None:
        self.events, self.labels, self.before = events, labels, before
        self.rejected = rejected or []

    def in_order(self) -> Iterator[tuple[Events | None, Labels | None]]:
        """Events and the labels after them, as they came."""
        if self.events is None or not self.labels or self.before is None:
            yield self.events, self.labels
            return
        places, firsts = np.unique(self.before, return_index=True)
        start = 0
        for place, first, end in zip(places.tolist(), firsts, [*firsts[1:], len(self.labels)], strict=True):
            labels = Labels(self.labels.ids[first:end], self.labels.labels[first:end])
            yield self.events.take(slice(start, place)) if place > start else None, labels
            start = place
        if start < len(self.events):
            yield self.events.take(slice(start, None)), None


def joined(parts: Sequence[Batch]) -> Batch:
    """Several batches as one, in their order."""
    if len(parts) == 1:
        return parts[0]
    events = [part.events.columns() for part in parts if part.events is not None]
    labels = [part.labels for part in parts if part.labels is not None]
    before: list[Array] = []
    count = 0
    for part in parts:
        own = 0 if part.events is None else len(part.events)
        if part.labels is not None:
            before.append(count + (np.full(len(part.labels), own) if part.before is None else part.before))
        count += own
    return Batch(
        from_columns(concatenated(events)) if events else None,
        Labels(np.concatenate([one.ids for one in labels]), np.concatenate([one.labels for one in labels]))
        if labels
        else None,
        [rejected for part in parts for rejected in part.rejected],
        before=np.concatenate(before) if before else None,
    )

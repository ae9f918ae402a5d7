"""Predictions that wait for their labels.

A ring buffer of columns holds every event from the oldest pending one to the newest; a dict maps the id of an event to
its number. Adding, matching and expiring work on whole arrays, and memory is limited to the events within the horizon.
The ring has a column `label`, which is nan as long as the label of an event is unknown.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from ..data.events import Array, Columns, Labels

logger = logging.getLogger("cadam.online")

Key = Any
"""The id of an event: int or str."""
IdSets = tuple[set[Key], set[Key]]
"""Ids without a label, and ids with a label."""


@dataclass
class JoinCounts:
    """Counts of events and labels that did not match one to one."""

    repeated_events: int = 0
    repeated_labels: int = 0
    late_labels: int = 0
    orphan_labels: int = 0
    expired: int = 0
    crowded_out: int = 0


class ResolvedIds:
    """Remembers the ids of the last `size` to `2 * size` resolved events, and whether they had a label.

    Ids are collected in `recent`. When it is full, it replaces `older`, so that forgetting costs almost nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.recent: IdSets = (set(), set())
        self.older: IdSets = (set(), set())

    def add(self, keys: Sequence[Key], labeled: bool) -> None:
        """Add ids; the result is the same as if they were added one by one."""
        start = 0
        while start < len(keys):
            end = start + self.size - len(self.recent[0]) - len(self.recent[1])
            self.recent[labeled].update(keys[start:end])
            start = end
            if len(self.recent[0]) + len(self.recent[1]) >= self.size:
                self.recent, self.older = (set(), set()), self.recent

    def get(self, key: Key) -> bool | None:
        """Whether the event with this id had a label; None if the id is not remembered."""
        for sets in (self.recent, self.older):
            for labeled in (True, False):
                if key in sets[labeled]:
                    return labeled
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return all remembered ids."""
        return {
            age: {"unlabeled": key_array(list(unlabeled)), "labeled": key_array(list(labeled))}
            for age, (unlabeled, labeled) in (("recent", self.recent), ("older", self.older))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the remembered ids."""
        self.recent, self.older = (
            (set(state[age]["unlabeled"].tolist()), set(state[age]["labeled"].tolist())) for age in ("recent", "older")
        )


def _to_arrays(values: Mapping[Key, Any]) -> dict[str, Array]:
    return {"keys": key_array(list(values)), "values": np.array(list(values.values()))}


def _from_arrays(arrays: Mapping[str, Array]) -> dict[Key, Any]:
    return dict(zip(arrays["keys"].tolist(), arrays["values"].tolist(), strict=True))


def key_array(values: list[Key]) -> Array:
    """Convert ids to an array: int64 if all are integers, objects otherwise."""
    array = np.empty(len(values), dtype=np.int64 if set(map(type, values)) <= {int} else object)
    array[:] = values
    return array


def _find_first(ids: list[Key], known_ids: Sequence[AbstractSet[Key]]) -> Array:
    """Return a mask of the first occurrence of each id that is not known."""
    distinct = set(ids)
    if len(distinct) == len(ids) and all(keys.isdisjoint(distinct) for keys in known_ids):
        return np.ones(len(ids), dtype=bool)
    mask, seen = np.empty(len(ids), dtype=bool), set[Key]()
    for row, key in enumerate(ids):
        mask[row] = not (key in seen or any(key in keys for keys in known_ids))
        seen.add(key)
    return mask


@dataclass
class PendingEvents:
    """Events that wait for their labels, and labels that wait for their events.

    Args:
        horizon: how long an event waits for its label, on the clock of the stream.
        capacity: how many events can wait; beyond it the oldest expire as if the horizon had passed, and are counted.
        remember: how many ids of resolved events are remembered, to tell a repeated label from an orphan.
        keeps_labeled: whether an event stays pending until its horizon has passed although its label has arrived.
    """

    horizon: float
    capacity: int
    remember: int
    keeps_labeled: bool = False
    counts: JoinCounts = field(default_factory=JoinCounts)

    def __post_init__(self) -> None:
        if not self.horizon > 0:
            raise ValueError(f"horizon must be above 0, got {self.horizon}")
        if self.capacity < 1 or self.remember < 1:
            raise ValueError(f"capacity and remember must be at least 1, got {self.capacity} and {self.remember}")
        self.ring: Columns = {}
        self.ring_size = 0
        self.head = self.tail = 0
        """The number of the oldest event in the ring, and of the next event to be added."""
        self.number_of: dict[Key, int] = {}
        """The numbers of the pending events, by id."""
        self.arrivals: deque[tuple[float, int]] = deque()
        """For each batch: the clock when it arrived, and the number after its last event."""
        self.resolved = ResolvedIds(self.remember)
        self.early: dict[Key, tuple[float, float]] = {}
        """Labels that arrived before their events: label and arrival time."""
        self.has_undated_labels = False
        """Whether some early labels arrived while the time was unknown."""

    def __len__(self) -> int:
        return len(self.number_of)

    # Events ----------------------------------------------------------------------------------------------------

    def find_new(self, ids: list[Key]) -> Array | None:
        """Return a mask of the events that are not repeated, or None if none is repeated; count the repeated ones."""
        mask = _find_first(ids, [self.number_of.keys(), *self.resolved.recent, *self.resolved.older])
        repeated = len(ids) - int(mask.sum())
        self.counts.repeated_events += repeated
        return mask if repeated else None

    def find_unknown(self, ids: list[Key]) -> Array:
        """Return a mask of the first event of each id that is new and has no early label."""
        known_ids = [self.number_of.keys(), self.early.keys(), *self.resolved.recent, *self.resolved.older]
        return _find_first(ids, known_ids)

    def remember_labeled(self, ids: list[Key]) -> None:
        """Remember events that arrived with their labels. Early labels of these events count as repeated."""
        self.resolved.add(ids, True)
        if self.early:
            self.counts.repeated_labels += sum(self.early.pop(key, None) is not None for key in ids)

    def add(self, columns: Columns, clock: float) -> None:
        """Add new events, whose labels are nan if they are unknown."""
        numbers = self._append(columns)
        self.number_of.update(zip(columns["id"].tolist(), numbers.tolist(), strict=True))
        self.arrivals.append((clock, self.tail))

    def _append(self, columns: Columns) -> Array:
        """Append events to the ring and return their numbers."""
        numbers = np.arange(self.tail, self.tail + len(columns["id"]))
        self._make_room(len(numbers), columns)
        for name, values in columns.items():
            self.ring[name][numbers % self.ring_size] = values
        self.tail += len(numbers)
        return numbers

    def _make_room(self, count: int, columns: Columns) -> None:
        """Check that the columns are those of earlier events, and enlarge the ring for `count` more events."""
        if not self.ring:
            self.ring = {name: values[:0] for name, values in columns.items()}
        for name in columns.keys() | self.ring.keys():
            if name not in columns or name not in self.ring:
                raise ValueError(f"events {'without' if name in self.ring else 'with'} {name!r}, unlike earlier events")
            new, old = columns[name], self.ring[name]
            if new.dtype != old.dtype or new.shape[1:] != old.shape[1:]:
                raise ValueError(
                    f"{name!r} is {new.dtype} with rows of shape {new.shape[1:]}, but earlier it was {old.dtype} with "
                    f"{old.shape[1:]}"
                )
        if self.tail - self.head + count <= self.ring_size:
            return
        self._release_resolved()
        needed = self.tail - self.head + count
        # A ring that is more than half full after the release grows nevertheless: otherwise the next calls would have
        # to search it for resolved events again and again.
        if 2 * needed <= self.ring_size:
            return
        size = max(2 * self.ring_size, needed, 1024)
        numbers = np.arange(self.head, self.tail)
        for name, old in self.ring.items():
            grown = np.empty((size, *old.shape[1:]), dtype=old.dtype)
            if len(numbers):
                grown[numbers % size] = old[numbers % self.ring_size]
            self.ring[name] = grown
        self.ring_size = size

    def _release_resolved(self) -> None:
        """Release the rows before the oldest pending event."""
        numbers = np.arange(self.head, self.tail)
        self.head += int(np.argmax(np.append(self._is_pending(numbers), True)))
        while self.arrivals and self.arrivals[0][1] <= self.head:
            self.arrivals.popleft()

    def _is_pending(self, numbers: Array) -> Array:
        """Return a mask of the events that still wait for a label."""
        ids = self.ring["id"][numbers % self.ring_size].tolist() if len(numbers) else []
        pending = np.fromiter(map(self.number_of.get, ids, repeat(-1)), dtype=np.int64, count=len(ids))
        return np.asarray(pending == numbers)

    # Labels ----------------------------------------------------------------------------------------------------

    def match(self, ids: list[Key], labels: Array, arrival: float) -> Columns | None:
        """Return the events that labels belong to, in the order of the labels, and remove them unless `keeps_labeled`.

        The first label of an event counts. A label without an event is kept until the event arrives.

        Args:
            ids: the ids of the events.
            labels: the labels.
            arrival: the arrival time of the labels; infinite if it is unknown until `date_labels` is called.
        """
        find = self.number_of.get if self.keeps_labeled else self.number_of.pop
        numbers = np.fromiter(map(find, ids, repeat(-1)), dtype=np.int64, count=len(ids))
        is_match = numbers >= 0
        unknown = np.flatnonzero(~is_match).tolist()
        if self.keeps_labeled and is_match.any():
            is_match &= self._find_first_labels(numbers)
        columns = None
        if is_match.any():
            matched = numbers[is_match]
            self.ring["label"][matched % self.ring_size] = labels[is_match]
            columns = self._rows(matched)
            if not self.keeps_labeled:
                self.resolved.add(columns["id"].tolist(), True)
        for row in unknown:
            self._keep_or_count(ids[row], float(labels[row]), arrival)
        return columns

    def _find_first_labels(self, numbers: Array) -> Array:
        """Return a mask of the labels that are the first of their event, and count the others of known events."""
        _, first = np.unique(numbers, return_index=True)
        is_first = np.zeros(len(numbers), dtype=bool)
        is_first[first] = True
        is_first &= np.isnan(self.ring["label"][numbers % self.ring_size])
        self.counts.repeated_labels += int((~is_first & (numbers >= 0)).sum())
        return is_first

    def _keep_or_count(self, key: Key, label: float, arrival: float) -> None:
        """Keep a label whose event is unknown; count a label whose event is resolved or that is repeated."""
        was_labeled = self.resolved.get(key)
        if was_labeled is None and key not in self.early:
            if len(self.early) >= self.capacity:
                del self.early[next(iter(self.early))]
                self.counts.orphan_labels += 1
            self.early[key] = (label, arrival)
            self.has_undated_labels |= arrival == math.inf
        elif was_labeled is False:
            self.counts.late_labels += 1
        else:
            self.counts.repeated_labels += 1

    def select_pending(self, labels: Labels) -> Labels:
        """Select the labels whose events are pending."""
        mask = np.fromiter(map(self.number_of.__contains__, labels.ids.tolist()), dtype=bool, count=len(labels.ids))
        return Labels(labels.ids[mask], labels.labels[mask])

    def pop_early_labels(self, ids: list[Key]) -> tuple[list[Key], Array] | None:
        """Remove and return the labels that arrived before these events, or None if there are none."""
        if not self.early or self.early.keys().isdisjoint(ids):
            return None
        with_label = [key for key in ids if key in self.early]
        return with_label, np.array([self.early.pop(key)[0] for key in with_label], dtype=np.float32)

    def withdraw(self, ids: list[Key]) -> None:
        """Let events wait no longer, although they have no label.

        If a label of such an event arrives later, or the event itself, it counts as repeated.
        """
        self.resolved.add([key for key in ids if self.resolved.get(key) is None], True)
        for key in ids:
            self.number_of.pop(key, None)

    # Time ------------------------------------------------------------------------------------------------------

    def expire(self, clock: float) -> Columns | None:
        """Remove and return the events whose horizon has passed, or that exceed the capacity, oldest first."""
        end, crowded_end = self.head, max(self.tail - self.capacity, self.head)
        while self.arrivals and (clock - self.arrivals[0][0] > self.horizon or self.arrivals[0][1] <= crowded_end):
            end = self.arrivals.popleft()[1]
        while self.early:
            key = next(iter(self.early))
            if clock - self.early[key][1] <= self.horizon:
                break
            del self.early[key]
            self.counts.orphan_labels += 1
        return self._release(max(end, crowded_end), crowded_end)

    def date_events(self, clock: float, first: int) -> None:
        """Set the arrival time of all events from number `first` on."""
        self.arrivals = deque((clock if end > first else arrived, end) for arrived, end in self.arrivals)

    def date_labels(self, clock: float) -> None:
        """Set the arrival time of early labels that arrived while the time was unknown."""
        if self.has_undated_labels:
            self.early = {k: (y, clock if arrived == math.inf else arrived) for k, (y, arrived) in self.early.items()}
            self.has_undated_labels = False

    def expire_all(self) -> Columns | None:
        """Remove and return all pending events, oldest first."""
        self.arrivals.clear()
        self.counts.orphan_labels += len(self.early)
        self.early.clear()
        return self._release(self.tail, self.head)

    def _release(self, end: int, crowded_end: int) -> Columns | None:
        """Remove the events before number `end`, and return those that were still pending, with nan or their label.

        Events before `crowded_end` are counted as crowded out.
        """
        if end == self.head:
            return None
        numbers = np.arange(self.head, end)
        is_pending = self._is_pending(numbers)
        crowded_out = int(is_pending[numbers < crowded_end].sum())
        if crowded_out and not self.counts.crowded_out and self.horizon != math.inf:
            logger.warning(
                "more than %s events wait for their labels: the oldest are resolved before their horizon has passed. "
                "Increase --capacity, or give a shorter --horizon",
                f"{self.capacity:,}",
            )
        self.counts.crowded_out += crowded_out
        self.head = end
        if not is_pending.any():
            return None
        columns = self._rows(numbers[is_pending])
        ids = columns["id"].tolist()
        for key in ids:
            del self.number_of[key]
        has_label = ~np.isnan(columns["label"])
        self.counts.expired += len(ids) - int(has_label.sum())
        for is_labeled in (False, True):
            self.resolved.add(columns["id"][has_label == is_labeled].tolist(), is_labeled)
        return columns

    def _rows(self, numbers: Array) -> Columns:
        return {name: values[numbers % self.ring_size] for name, values in self.ring.items()}

    # State -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the pending events and labels, the remembered ids and the counts."""
        self._release_resolved()
        numbers = np.arange(self.head, self.tail)
        return {
            "rows": self._rows(numbers) if self.ring_size else {},
            "head": self.head,
            "number_of": _to_arrays(self.number_of),
            "arrivals": {
                "clock": np.array([clock for clock, _ in self.arrivals], dtype=np.float64),
                "end": np.array([end for _, end in self.arrivals], dtype=np.int64),
            },
            "resolved": self.resolved.state_dict(),
            "early": _to_arrays(self.early) if self.early else None,
            "counts": vars(self.counts).copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        rows = {name: np.array(values) for name, values in state["rows"].items()}
        if rows and "label" not in rows:  # a checkpoint of an older version, in which no pending event had a label
            rows["label"] = np.full(len(rows["id"]), np.nan, dtype=np.float32)
        self.ring, self.ring_size = {name: values[:0] for name, values in rows.items()}, 0
        self.head = self.tail = state["head"]
        if rows and len(rows["id"]):
            self._append(rows)
        self.number_of = _from_arrays(state["number_of"])
        arrivals = state["arrivals"]
        self.arrivals = deque(zip(arrivals["clock"].tolist(), arrivals["end"].tolist(), strict=True))
        self.resolved.load_state_dict(state["resolved"])
        early = _from_arrays(state["early"]) if state["early"] else {}
        self.early = {key: (label, clock) for key, (label, clock) in early.items()}
        self.has_undated_labels = any(clock == math.inf for _, clock in self.early.values())
        self.counts = JoinCounts(**state["counts"])

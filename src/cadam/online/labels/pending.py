"""Predictions that wait for their labels.

A ring of columns holds every event from the oldest that still waits to the newest; a dict leads from an event's id to
its place. Adding, matching and expiring work on whole arrays, and memory is that of the events within the horizon.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from ..data.events import Array, Columns, Labels

Key = Any  # int or str
Sets = tuple[set[Key], set[Key]]  # keys without a label, and with one


@dataclass
class Counts:
    """What became of labels and events that did not meet one to one."""

    repeated_events: int = 0
    repeated_labels: int = 0
    late_labels: int = 0
    orphan_labels: int = 0
    expired: int = 0
    crowded_out: int = 0


class Memory:
    """Remembers the last `size` keys at least, twice as many at most, and which of them got a label."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.recent: Sets = (set(), set())
        self.older: Sets = (set(), set())

    def add(self, keys: Sequence[Key], labelled: bool) -> None:
        """As if they were added one by one."""
        start = 0
        while start < len(keys):
            end = start + self.size - len(self.recent[0]) - len(self.recent[1])
            self.recent[labelled].update(keys[start:end])
            start = end
            if len(self.recent[0]) + len(self.recent[1]) >= self.size:
                self.recent, self.older = (set(), set()), self.recent

    def get(self, key: Key) -> bool | None:
        """Whether a key got a label; None if it is not remembered."""
        for sets in (self.recent, self.older):
            for labelled in (True, False):
                if key in sets[labelled]:
                    return labelled
        return None

    def meets(self, keys: set[Key]) -> bool:
        """Whether it remembers any of the keys."""
        return not all(known.isdisjoint(keys) for known in (*self.recent, *self.older) if known)

    def state_dict(self) -> dict[str, Any]:
        names = ("without", "labelled")
        return {
            age: {name: key_array(list(known)) for name, known in zip(names, sets, strict=True)}
            for age, sets in (("recent", self.recent), ("older", self.older))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent, self.older = (
            (set(state[age]["without"].tolist()), set(state[age]["labelled"].tolist())) for age in ("recent", "older")
        )


def _table(values: Mapping[Key, Any]) -> dict[str, Array]:
    return {"keys": key_array(list(values)), "values": np.array(list(values.values()))}


def _dict(table: Mapping[str, Array]) -> dict[Key, Any]:
    return dict(zip(table["keys"].tolist(), table["values"].tolist(), strict=True))


def key_array(values: list[Key]) -> Array:
    """Keys as an array: int64 if all are integers, objects if not."""
    array = np.empty(len(values), dtype=np.int64 if set(map(type, values)) <= {int} else object)
    array[:] = values
    return array


@dataclass
class Pending:
    """Joins labels with the predictions they belong to, on the event's id.

    Args:
        horizon: how long, on the stream's clock, a prediction waits for its label.
        capacity: how many events are held at most; beyond it the oldest expire as if past the horizon, and are counted.
        remember: how many ids of finished events are remembered, to tell a second label from an orphan.
    """

    horizon: float
    capacity: int
    remember: int
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        if not self.horizon > 0:
            raise ValueError(f"horizon must be above 0, got {self.horizon}")
        if self.capacity < 1 or self.remember < 1:
            raise ValueError(f"capacity and remember must be at least 1, got {self.capacity} and {self.remember}")
        self.ring: Columns = {}
        self.size = 0  # of the ring
        self.head = self.tail = 0  # numbers of the oldest event held and of the next one
        self.place: dict[Key, int] = {}  # of events that still wait
        self.arrivals: deque[tuple[float, int]] = deque()  # clock at a batch's arrival, number after its last event
        self.done = Memory(self.remember)  # ids of finished events: True if by a label, False if past the horizon
        self.early: dict[Key, tuple[float, float]] = {}  # labels before their events: label, clock
        self.has_undated = False  # whether some of these came while there was no clock to believe

    def __len__(self) -> int:
        return len(self.place)

    # Events --------------------------------------------------------------------------------------------------

    def new(self, ids: list[Key]) -> Array | None:
        """A mask of the events that are not repeated; None if none of them is."""
        distinct = set(ids)
        if len(distinct) == len(ids) and self.place.keys().isdisjoint(distinct) and not self.done.meets(distinct):
            return None
        mask, seen = np.ones(len(ids), dtype=bool), set()
        for row, key in enumerate(ids):
            mask[row] = not (key in seen or key in self.place or self.done.get(key) is not None)
            seen.add(key)
        self.counts.repeated_events += int(len(ids) - mask.sum())
        return mask

    def unheard_of(self, ids: list[Key]) -> Array:
        """Which events are certainly new, and have no label that waits for them: the first of each id."""
        distinct = set(ids)
        known = (self.place.keys(), self.early.keys(), *self.done.recent, *self.done.older)
        if len(distinct) == len(ids) and all(keys.isdisjoint(distinct) for keys in known):
            return np.ones(len(ids), dtype=bool)
        mask, seen = np.empty(len(ids), dtype=bool), set[Key]()
        for row, key in enumerate(ids):
            mask[row] = not (key in seen or any(key in keys for keys in known))
            seen.add(key)
        return mask

    def finish(self, ids: list[Key]) -> None:
        """Remember events that had their labels with them; one that came before them has nothing left to wait for."""
        self.done.add(ids, True)
        if self.early:
            before = [key for key in ids if self.early.pop(key, None) is not None]
            self.counts.repeated_labels += len(before)

    def add(self, columns: Columns, clock: float) -> None:
        """Let new events wait."""
        count = len(columns["id"])
        self._make_room(count, columns)
        places = np.arange(self.tail, self.tail + count)
        for name, values in columns.items():
            self.ring[name][places % self.size] = values
        self.place.update(zip(columns["id"].tolist(), places.tolist(), strict=True))
        self.tail += count
        self.arrivals.append((clock, self.tail))

    def _make_room(self, count: int, columns: Columns) -> None:
        if not self.ring:
            self.ring = {name: values[:0] for name, values in columns.items()}
        for name in columns.keys() | self.ring.keys():
            if name not in columns or name not in self.ring:
                raise ValueError(f"events {'without' if name in self.ring else 'with'} {name!r}, unlike those before")
            new, old = columns[name], self.ring[name]
            if new.dtype != old.dtype or new.shape[1:] != old.shape[1:]:
                raise ValueError(
                    f"{name!r} is {new.dtype} with rows of shape {new.shape[1:]}, before it was {old.dtype} with "
                    f"{old.shape[1:]}"
                )
        if self.tail - self.head + count <= self.size:
            return
        self._drop_settled()
        needed = self.tail - self.head + count
        if 2 * needed <= self.size:  # else the next ones would soon have to look for room again
            return
        size = max(2 * self.size, needed, 1024)
        places = np.arange(self.head, self.tail)
        for name, old in self.ring.items():
            grown = np.empty((size, *old.shape[1:]), dtype=old.dtype)
            if len(places):
                grown[places % size] = old[places % self.size]
            self.ring[name] = grown
        self.size = size

    def _drop_settled(self) -> None:
        """Release the rows before the oldest event that still waits."""
        places = np.arange(self.head, self.tail)
        self.head += int(np.argmax(np.append(self._waiting(places), True)))
        while self.arrivals and self.arrivals[0][1] <= self.head:
            self.arrivals.popleft()

    def _waiting(self, places: Array) -> Array:
        """Which of these events still wait."""
        ids = self.ring["id"][places % self.size].tolist() if len(places) else []
        held = np.fromiter(map(self.place.get, ids, repeat(-1)), dtype=np.int64, count=len(ids))
        return np.asarray(held == places)

    # Labels --------------------------------------------------------------------------------------------------

    def match(self, ids: list[Key], labels: Array, clock: float) -> Columns | None:
        """The events that these labels belong to, in the order of the labels. The first label of an event counts.

        `clock` is when they came; infinite if that is not known, until `labels_came_at` says it.
        """
        places = np.fromiter(map(self.place.pop, ids, repeat(-1)), dtype=np.int64, count=len(ids))
        found = places >= 0
        columns = None
        if found.any():
            columns = self._rows(places[found])
            columns["label"] = labels[found]
            self.done.add(columns["id"].tolist(), True)
        if not found.all():
            self._without_event(ids, labels, clock, np.flatnonzero(~found))
        return columns

    def _without_event(self, ids: list[Key], labels: Array, clock: float, rows: Array) -> None:
        for row in rows.tolist():
            key = ids[row]
            before = self.done.get(key)
            if before is None and key not in self.early:
                if len(self.early) >= self.capacity:
                    del self.early[next(iter(self.early))]
                    self.counts.orphan_labels += 1
                self.early[key] = (float(labels[row]), clock)
                self.has_undated |= clock == math.inf
            elif before is False:
                self.counts.late_labels += 1
            else:
                self.counts.repeated_labels += 1

    def waited_for(self, labels: Labels) -> Labels:
        """Those whose events wait for them."""
        wanted = np.fromiter(map(self.place.__contains__, labels.ids.tolist()), dtype=bool, count=len(labels.ids))
        return Labels(labels.ids[wanted], labels.labels[wanted])

    def early_labels(self, ids: list[Key]) -> tuple[list[Key], Array] | None:
        """The labels that came before these events, if any did."""
        if not self.early or self.early.keys().isdisjoint(ids):
            return None
        known = [key for key in ids if key in self.early]
        return known, np.array([self.early.pop(key)[0] for key in known], dtype=np.float32)

    # Time ----------------------------------------------------------------------------------------------------

    def expire(self, clock: float) -> Columns | None:
        """The events whose horizon is past, oldest first; they wait no longer."""
        end, crowded = self.head, max(self.tail - self.capacity, self.head)
        while self.arrivals and (clock - self.arrivals[0][0] > self.horizon or self.arrivals[0][1] <= crowded):
            end = self.arrivals.popleft()[1]
        while self.early:
            key = next(iter(self.early))
            if clock - self.early[key][1] <= self.horizon:
                break
            del self.early[key]
            self.counts.orphan_labels += 1
        return self._release(max(end, crowded), crowded)

    def events_came_at(self, clock: float, first: int) -> None:
        """Events from a number on have come at this time."""
        self.arrivals = deque((clock if end > first else arrived, end) for arrived, end in self.arrivals)

    def labels_came_at(self, clock: float) -> None:
        """Labels before their events, of which it was not known when they came, have come at this time."""
        if self.has_undated:
            self.early = {k: (y, clock if arrived == math.inf else arrived) for k, (y, arrived) in self.early.items()}
            self.has_undated = False

    def expire_all(self) -> Columns | None:
        """All that wait, oldest first."""
        self.arrivals.clear()
        self.counts.orphan_labels += len(self.early)
        self.early.clear()
        return self._release(self.tail, self.head)

    def _release(self, end: int, crowded: int) -> Columns | None:
        if end == self.head:
            return None
        places = np.arange(self.head, end)
        waiting = self._waiting(places)
        self.counts.crowded_out += int(waiting[places < crowded].sum())
        self.head = end
        if not waiting.any():
            return None
        columns = self._rows(places[waiting])
        gone = columns["id"].tolist()
        for key in gone:
            del self.place[key]
        self.counts.expired += len(gone)
        self.done.add(gone, False)
        return columns

    def _rows(self, places: Array) -> Columns:
        return {name: values[places % self.size] for name, values in self.ring.items()}

    # State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._drop_settled()
        places = np.arange(self.head, self.tail)
        return {
            "rows": self._rows(places) if self.size else {},
            "head": self.head,
            "place": _table(self.place),
            "arrivals": {
                "clock": np.array([clock for clock, _ in self.arrivals], dtype=np.float64),
                "end": np.array([end for _, end in self.arrivals], dtype=np.int64),
            },
            "done": self.done.state_dict(),
            "early": _table(self.early) if self.early else None,
            "counts": vars(self.counts).copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows = {name: np.array(values) for name, values in state["rows"].items()}
        self.ring, self.size, self.head = {name: v[:0] for name, v in rows.items()}, 0, state["head"]
        self.tail = self.head
        if rows and len(rows["id"]):
            count = len(rows["id"])
            self._make_room(count, rows)
            places = np.arange(self.head, self.head + count)
            for name, values in rows.items():
                self.ring[name][places % self.size] = values
            self.tail += count
        self.place = _dict(state["place"])
        arrivals = state["arrivals"]
        self.arrivals = deque(zip(arrivals["clock"].tolist(), arrivals["end"].tolist(), strict=True))
        self.done.load_state_dict(state["done"])
        early = _dict(state["early"]) if state["early"] else {}
        self.early = {key: (label, clock) for key, (label, clock) in early.items()}
        self.has_undated = any(clock == math.inf for _, clock in self.early.values())
        self.counts = Counts(**state["counts"])

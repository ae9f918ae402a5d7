"""What may happen to a stream, planted: to see how a model and its optimizer bear it before they go live.

Each wraps a source and is one: `LabelNoise(SuddenChange(source, "item", 1000, [50_000]), 0.1)`. What it does to an
event follows from the seed and the event's number in the stream alone; to a label that comes on its own, from the seed
and its id. So a stream is the same however it is batched, and a run that goes on from `state_dict` meets what an
uninterrupted one does.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .events import Array, Batch, Events, Labels
from .sources import Source

HOUR = 3600.0


class Drift(ABC):
    """A source whose events are changed on their way."""

    def __init__(self, source: Source, seed: int = 0) -> None:
        self.source, self.seed = source, seed
        self.seen = 0
        """Events so far: the number of the next one."""

    def __iter__(self) -> Iterator[Batch | None]:
        for given in self.source:
            batch = Batch(given) if isinstance(given, Events) else given
            batch = Batch(labels=batch) if isinstance(batch, Labels) else batch
            if batch is None:
                yield None
            elif batch.events is None or not len(batch.events):
                yield self.change_late(batch)
            else:
                numbers = np.arange(self.seen, self.seen + len(batch.events))
                self.seen += len(batch.events)
                yield self.change(batch, batch.events, numbers)

    @abstractmethod
    def change(self, batch: Batch, events: Events, numbers: Array) -> Batch:
        """The batch as it becomes; `numbers` are those of its events in the stream."""

    def change_late(self, batch: Batch) -> Batch:
        """A batch without events as it becomes: it may have labels that come on their own."""
        return batch

    def chance(self, numbers: Array, purpose: str = "") -> Array:
        """A number in [0, 1) for each event: the same for the same seed, kind of drift, purpose and number."""
        return _uniform(numbers, f"{self.seed} {type(self).__name__} {purpose}")

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.seen = int(state["seen"])


class LabelNoise(Drift):
    """A share of the labels is wrong: 0 becomes 1, and 1 becomes 0."""

    def __init__(self, source: Source, share: float, seed: int = 0) -> None:
        super().__init__(source, seed)
        self.share = _share("share", share)

    def change(self, batch: Batch, events: Events, numbers: Array) -> Batch:
        if events.labels is not None:
            batch = replace(batch, events=replace(events, labels=self._flipped(events.labels, self.chance(numbers))))
        return self.change_late(batch)

    def change_late(self, batch: Batch) -> Batch:
        if batch.labels is None:
            return batch
        chance = self.chance(_as_numbers(batch.labels.ids), "late")
        return replace(batch, labels=replace(batch.labels, labels=self._flipped(batch.labels.labels, chance)))

    def _flipped(self, labels: Array, chance: Array) -> Array:
        return np.where(chance < self.share, 1 - labels, labels)


class SuddenChange(Drift):
    """At given moments a feature gets a new meaning: its values change places, so what was liked no longer is.

    Args:
        feature: a feature of whole numbers from 0 to `values` - 1.
        moments: numbers of the events at which it changes; after each, values are in other places again.
        share: the share of the values that take part.
    """

    def __init__(
        self, source: Source, feature: str, values: int, moments: Sequence[int], share: float = 1.0, seed: int = 0
    ) -> None:
        super().__init__(source, seed)
        if not moments or moments[0] < 0 or list(moments) != sorted(set(moments)):
            raise ValueError(f"moments must be numbers of events in rising order, got {list(moments)}")
        self.feature, self.values, self.moments = feature, values, list(moments)
        self.share = _share("share", share)

    def change(self, batch: Batch, events: Events, numbers: Array) -> Batch:
        if self.feature not in events.features:
            raise ValueError(f"no feature is called {self.feature!r}; there are {', '.join(events.features)}")
        old = events.features[self.feature]
        if len(old) and not (old.dtype.kind in "iu" and old.min() >= 0 and old.max() < self.values):
            raise ValueError(f"{self.feature!r} must hold whole numbers from 0 to {self.values - 1} to change places")
        new = old.copy()
        changes = np.searchsorted(self.moments, numbers, side="right")
        for change in np.unique(changes[changes > 0]):
            now = changes == change
            new[now] = self._places(int(change))[old[now]]
        return replace(batch, events=replace(events, features={**events.features, self.feature: new}))

    def _places(self, change: int) -> Array:
        """Where each value goes after so many changes."""
        random = np.random.default_rng([self.seed, change])
        places = np.arange(self.values)
        moved = np.flatnonzero(random.random(self.values) < self.share)
        places[moved] = moved[random.permutation(len(moved))]
        return places


class HourlyPopulation(Drift):
    """Who is there depends on the hour: each user has a favourite one, and comes less the farther it is.

    An event is kept with a chance that falls from 1 at the favourite hour to 1 - `strength` twelve hours away. The
    favourite follows from the user and the seed. Events need users, and a time in seconds.
    """

    def __init__(self, source: Source, strength: float = 0.9, seed: int = 0) -> None:
        super().__init__(source, seed)
        self.strength = _share("strength", strength)

    def change(self, batch: Batch, events: Events, numbers: Array) -> Batch:
        if events.users is None or events.time is None:
            raise ValueError("a population that changes by the hour needs events with users and time")
        favourite = 24 * self.chance(_as_numbers(events.users), "favourite")
        away = np.abs((events.time / HOUR) % 24 - favourite)
        away = np.minimum(away, 24 - away)
        kept = self.chance(numbers, "kept") >= self.strength * away / 12
        return replace(batch, events=events.take(kept) if kept.any() else None)


class LabelDelay(Drift):
    """Labels come later, out of order, some twice and some never. One that comes on its own comes later still.

    Args:
        mean: how much later on average, in the unit of the events' time; without time, in events. Delays are
            exponential: most labels come soon, some very late.
        never: the share of events whose label never comes.
        twice: the share whose label comes again, after one more delay.

    Labels are given after the events of a batch.
    """

    def __init__(self, source: Source, mean: float, never: float = 0.0, twice: float = 0.0, seed: int = 0) -> None:
        super().__init__(source, seed)
        if not (mean >= 0 and math.isfinite(mean)):
            raise ValueError(f"the mean delay must be 0 or more, got {mean}")
        self.mean, self.never, self.twice = mean, _share("never", never), _share("twice", twice)
        self._due, self._ids, self._labels = np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        self._clock = -math.inf
        """That of the last event; before the first, a label is not held back."""

    def __iter__(self) -> Iterator[Batch | None]:
        yield from super().__iter__()
        if len(self._due):  # the stream has ended, what is under way still comes
            yield Batch(labels=self._arrived(math.inf))

    def change(self, batch: Batch, events: Events, numbers: Array) -> Batch:
        ids = numbers if events.ids is None else events.ids
        clock = numbers.astype(np.float64) if events.time is None else events.time
        if events.labels is not None:
            known = np.isfinite(events.labels)
            self._hold(Labels(ids[known], events.labels[known]), clock[known], numbers[known])
        if batch.labels is not None:
            before = np.full(len(batch.labels), len(events)) if batch.before is None else batch.before
            self._hold_late(batch.labels, np.concatenate([[self._clock], clock])[before])
        self._clock = float(clock[-1])
        return replace(
            batch, events=replace(events, ids=ids, labels=None), labels=self._arrived(self._clock), before=None
        )

    def change_late(self, batch: Batch) -> Batch:
        if batch.labels is None:
            return batch
        self._hold_late(batch.labels, np.full(len(batch.labels), self._clock))
        return replace(batch, labels=self._arrived(self._clock), before=None)

    def _hold_late(self, labels: Labels, clock: Array) -> None:
        self._hold(labels, clock, _as_numbers(labels.ids), "late ")

    def _hold(self, labels: Labels, clock: Array, numbers: Array, kind: str = "") -> None:
        """Put labels that would come at `clock` under way. What becomes of each follows from its number and `kind`."""
        due = clock + self._delay(numbers, f"{kind}first")
        coming = self.chance(numbers, f"{kind}never") >= self.never
        again = coming & (self.chance(numbers, f"{kind}twice") < self.twice)
        for rows, when in ((coming, due), (again, due + self._delay(numbers, f"{kind}second"))):
            self._due = np.concatenate([self._due, when[rows]])
            self._ids = np.concatenate([self._ids, labels.ids[rows]]) if len(self._ids) else labels.ids[rows]
            self._labels = np.concatenate([self._labels, labels.labels[rows]])

    def _delay(self, numbers: Array, purpose: str) -> Array:
        delay: Array = -self.mean * np.log1p(-self.chance(numbers, purpose))
        return delay

    def _arrived(self, clock: float) -> Labels | None:
        """What is due by now, in the order in which it is."""
        order = np.argsort(self._due, kind="stable")
        now, later = np.split(order, [np.searchsorted(self._due[order], clock, side="right")])
        labels = Labels(self._ids[now], self._labels[now])
        later.sort()
        self._due, self._ids, self._labels = self._due[later], self._ids[later], self._labels[later]
        return labels if len(labels) else None

    def state_dict(self) -> dict[str, Any]:
        under_way = {"due": self._due.copy(), "ids": self._ids.copy(), "labels": self._labels.copy()}
        return {**super().state_dict(), "under way": under_way, "clock": self._clock}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        under_way = state["under way"]
        self._due, self._ids, self._labels = (np.array(under_way[name]) for name in ("due", "ids", "labels"))
        self._clock = state.get("clock", -math.inf)


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    return float(value)


def _as_numbers(keys: Array) -> Array:
    """Users as whole numbers: text by its checksum."""
    if keys.dtype.kind in "iu":
        return keys
    return np.array([zlib.crc32(str(key).encode()) for key in keys], dtype=np.int64)


def _uniform(numbers: Array, purpose: str) -> Array:
    """A number in [0, 1) for each whole number: splitmix64, started from a hash of the purpose."""
    start = np.frombuffer(hashlib.sha256(purpose.encode()).digest()[:8], dtype="<u8")[0]
    z = np.asarray(numbers).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    uniform: Array = (z >> np.uint64(11)) / 2.0**53
    return uniform

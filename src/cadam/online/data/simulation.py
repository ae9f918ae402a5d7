"""Simulated disturbances of a stream: label noise, sudden changes and delayed labels.

They show how a model and its optimizer react before a stream is disturbed in production. Each class wraps a source and
is a source itself: `LabelNoise(SuddenChange(source, "item", 1000, [50_000]), 0.1)`.

The change to an event depends only on the seed and the event's index in the stream, and the change to a label that
arrives separately only on the seed and its id. The result is therefore independent of the batch size, and a run that
continues from `state_dict` sees the same stream as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .conversion import mix_splitmix64
from .events import Array, Batch, Events, Labels
from .sources import Source


class Disturbance(Source):
    """A source that changes the events and labels of another source.

    Args:
        source: The source to read from.
        seed: The seed of the random choices.
    """

    def __init__(self, source: Source, seed: int = 0) -> None:
        self.source, self.seed = source, seed
        self.count = 0
        """The number of events so far, which is the index of the next one."""

    def __iter__(self) -> Iterator[Batch | None]:
        for item in self.source:
            batch = Batch(item) if isinstance(item, Events) else item
            batch = Batch(labels=batch) if isinstance(batch, Labels) else batch
            if batch is None:
                yield None
            elif batch.events is None or not len(batch.events):
                yield self.change_labels(batch)
            else:
                indices = np.arange(self.count, self.count + len(batch.events))
                self.count += len(batch.events)
                yield self.change(batch, batch.events, indices)

    @abstractmethod
    def change(self, batch: Batch, events: Events, indices: Array) -> Batch:
        """Return the disturbed batch.

        Args:
            batch: A batch with events.
            events: The events of the batch.
            indices: The indices of these events in the stream.
        """

    def change_labels(self, batch: Batch) -> Batch:
        """Return the disturbed version of a batch without events, which only has labels that arrive separately."""
        return batch

    def draw(self, numbers: Array, purpose: str = "") -> Array:
        """Return one pseudo-random number in [0, 1) per integer, determined by seed, class, purpose and integer."""
        text = f"{self.seed} {type(self).__name__} {purpose}"
        start = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], dtype="<u8")[0]
        mixed = mix_splitmix64(np.asarray(numbers).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start)
        uniform: Array = (mixed >> np.uint64(11)) / 2.0**53
        return uniform

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the wrapped source and the number of events so far."""
        return {"source": self.source.state_dict(), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        self.source.load_state_dict(state["source"])
        self.count = int(state["count"])


class LabelNoise(Disturbance):
    """A source in which a random part of the labels is flipped: 0 becomes 1, and 1 becomes 0.

    Args:
        source: The source to read from.
        share: The probability that a label is flipped.
        seed: The seed of the random choices.
    """

    def __init__(self, source: Source, share: float, seed: int = 0) -> None:
        super().__init__(source, seed)
        self.share_flipped = _probability("share", share)

    def change(self, batch: Batch, events: Events, indices: Array) -> Batch:
        """Flip labels of events, and labels that arrive separately."""
        if events.labels is not None:
            batch = replace(batch, events=replace(events, labels=self._flip(events.labels, self.draw(indices))))
        return self.change_labels(batch)

    def change_labels(self, batch: Batch) -> Batch:
        """Flip labels that arrive separately."""
        if batch.labels is None:
            return batch
        draws = self.draw(_as_integers(batch.labels.ids), "late")
        return replace(batch, labels=replace(batch.labels, labels=self._flip(batch.labels.labels, draws)))

    def _flip(self, labels: Array, draws: Array) -> Array:
        return np.where(draws < self.share_flipped, 1 - labels, labels)


class SuddenChange(Disturbance):
    """A source in which the values of one feature are permuted at given events, so that they change their meaning.

    Args:
        source: The source to read from.
        feature: The name of a feature with integers from 0 to `values` - 1.
        values: The number of values of the feature.
        change_points: The increasing indices of the events at which the values are permuted again.
        share: The fraction of the values that take part.
        seed: The seed of the permutations.
    """

    def __init__(
        self, source: Source, feature: str, values: int, change_points: Sequence[int], share: float = 1.0, seed: int = 0
    ) -> None:
        super().__init__(source, seed)
        if not change_points or change_points[0] < 0 or list(change_points) != sorted(set(change_points)):
            raise ValueError(f"change_points must be increasing indices of events, got {list(change_points)}")
        self.feature, self.values, self.change_points = feature, values, list(change_points)
        self.share_permuted = _probability("share", share)

    def change(self, batch: Batch, events: Events, indices: Array) -> Batch:
        """Replace the values of the feature by those of the permutation in effect at each event."""
        if self.feature not in events.features:
            raise ValueError(f"no feature is called {self.feature!r}; the features are {', '.join(events.features)}")
        old = events.features[self.feature]
        if len(old) and not (old.dtype.kind in "iu" and old.min() >= 0 and old.max() < self.values):
            raise ValueError(f"{self.feature!r} must contain only integers from 0 to {self.values - 1} to be permuted")
        new = old.copy()
        changes = np.searchsorted(self.change_points, indices, side="right")
        for change in np.unique(changes[changes > 0]):
            rows = changes == change
            new[rows] = self._permutation(int(change))[old[rows]]
        return replace(batch, events=replace(events, features={**events.features, self.feature: new}))

    def _permutation(self, change: int) -> Array:
        random = np.random.default_rng([self.seed, change])
        permutation = np.arange(self.values)
        moved = np.flatnonzero(random.random(self.values) < self.share_permuted)
        permutation[moved] = moved[random.permutation(len(moved))]
        return permutation


class LabelDelay(Disturbance):
    """A source in which labels arrive later than their events and out of order; some arrive twice and some never.

    Labels that already arrive separately are delayed further. The delayed labels of a batch come after its events.

    Args:
        source: The source to read from.
        mean: The mean of the delays, which are exponentially distributed, in the unit of the events' time. If events
            have no time, the unit is one event.
        never: The probability that a label never arrives.
        twice: The probability that a label arrives a second time, after another delay.
        seed: The seed of the random choices.
    """

    def __init__(self, source: Source, mean: float, never: float = 0.0, twice: float = 0.0, seed: int = 0) -> None:
        super().__init__(source, seed)
        if not (mean >= 0 and math.isfinite(mean)):
            raise ValueError(f"the mean delay must be 0 or more, got {mean}")
        self.mean, self.never, self.twice = mean, _probability("never", never), _probability("twice", twice)
        self._due, self._ids, self._labels = np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        self._clock = -math.inf
        """The time of the last event. Labels that arrive before the first event are not delayed."""

    def __iter__(self) -> Iterator[Batch | None]:
        yield from super().__iter__()
        if len(self._due):  # The labels that are still under way arrive when the stream ends.
            yield Batch(labels=self._pop_due(math.inf))

    def change(self, batch: Batch, events: Events, indices: Array) -> Batch:
        """Remove the labels of the events, and add those whose delay has passed."""
        ids = indices if events.ids is None else events.ids
        clock = indices.astype(np.float64) if events.time is None else events.time
        if events.labels is not None:
            rows = np.isfinite(events.labels)
            self._delay(Labels(ids[rows], events.labels[rows]), clock[rows], indices[rows])
        if batch.labels is not None:
            before = np.full(len(batch.labels), len(events)) if batch.events_before is None else batch.events_before
            self._delay_separate(batch.labels, np.concatenate([[self._clock], clock])[before])
        self._clock = float(clock[-1])
        return replace(
            batch, events=replace(events, ids=ids, labels=None), labels=self._pop_due(self._clock), events_before=None
        )

    def change_labels(self, batch: Batch) -> Batch:
        """Delay labels that arrive separately."""
        if batch.labels is None:
            return batch
        self._delay_separate(batch.labels, np.full(len(batch.labels), self._clock))
        return replace(batch, labels=self._pop_due(self._clock), events_before=None)

    def _delay_separate(self, labels: Labels, clock: Array) -> None:
        self._delay(labels, clock, _as_integers(labels.ids), "late ")

    def _delay(self, labels: Labels, clock: Array, numbers: Array, kind: str = "") -> None:
        """Schedule the delayed arrival of labels.

        Args:
            labels: The labels.
            clock: The time at which each label would arrive without delay.
            numbers: An integer for each label, which seeds its random delay.
            kind: A text that seeds the delays too, so that two kinds of labels have independent delays.
        """
        due = clock - self.mean * np.log1p(-self.draw(numbers, f"{kind}first"))
        due_again = due - self.mean * np.log1p(-self.draw(numbers, f"{kind}second"))
        arrives = self.draw(numbers, f"{kind}never") >= self.never
        repeats = arrives & (self.draw(numbers, f"{kind}twice") < self.twice)
        for rows, times in ((arrives, due), (repeats, due_again)):
            self._due = np.concatenate([self._due, times[rows]])
            self._ids = np.concatenate([self._ids, labels.ids[rows]]) if len(self._ids) else labels.ids[rows]
            self._labels = np.concatenate([self._labels, labels.labels[rows]])

    def _pop_due(self, clock: float) -> Labels | None:
        """Remove the labels that are due at `clock` and return them in the order of their due times."""
        order = np.argsort(self._due, kind="stable")
        due, later = np.split(order, [np.searchsorted(self._due[order], clock, side="right")])
        labels = Labels(self._ids[due], self._labels[due])
        later.sort()
        self._due, self._ids, self._labels = self._due[later], self._ids[later], self._labels[later]
        return labels if len(labels) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the labels that are under way."""
        delayed = {"due": self._due.copy(), "ids": self._ids.copy(), "labels": self._labels.copy()}
        return {**super().state_dict(), "delayed": delayed, "clock": self._clock}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        super().load_state_dict(state)
        self._due, self._ids, self._labels = (np.array(state["delayed"][name]) for name in ("due", "ids", "labels"))
        self._clock = state["clock"]


def _probability(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    return float(value)


def _as_integers(keys: Array) -> Array:
    """Convert ids to integers: text is replaced by its checksum."""
    if keys.dtype.kind in "iu":
        return keys
    return np.array([zlib.crc32(str(key).encode()) for key in keys], dtype=np.int64)

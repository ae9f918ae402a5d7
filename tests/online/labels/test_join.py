"""The join of events and labels is compared with a simple reference on random streams of late labels."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field

import numpy as np
import pytest

from cadam.online.data.events import Labels
from cadam.online.labels.join import LabelJoin, LabelOptions
from cadam.online.persistence.prediction_log import OUTCOME_NAMES

HORIZON = 50.0
Event = tuple[int, float, float | None]  # id, time, label
Batch = tuple[list[Event], list[tuple[int, float]]]
Row = tuple[int, float, str]


@dataclass
class Reference:
    """The rules, one event at a time, with nothing remembered that is not needed and nothing forgotten."""

    clock: float | None = None
    ahead: int = 0
    waiting: dict[int, float | None] = field(default_factory=dict)  # when each came; None: not known yet
    early: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    done: dict[int, bool] = field(default_factory=dict)  # whether by a label
    rows: list[Row] = field(default_factory=list)
    repeated_events: int = 0
    repeated_labels: int = 0
    late_labels: int = 0
    orphan_labels: int = 0
    expired: int = 0

    def take(self, batch: Batch) -> None:
        events, labels = batch
        if events:
            self.tick([time for _, time, _ in events])
            self.events(events)
        for key, label in labels:
            self.label(key, label)

    def tick(self, times: list[float]) -> None:
        median = statistics.median_low(times)
        if self.clock is None or median <= self.clock + HORIZON:
            self.date(median if self.clock is None else self.clock)
            self.clock = median if self.clock is None else max(self.clock, median)
            self.ahead = 0
            return
        self.ahead += sum(time > self.clock + HORIZON for time in times)
        if self.ahead >= 3:
            self.date(median)
            self.clock, self.ahead = median, 0

    def date(self, clock: float) -> None:
        self.waiting = {key: clock if came is None else came for key, came in self.waiting.items()}
        self.early = {key: (label, clock if came is None else came) for key, (label, came) in self.early.items()}

    @property
    def now(self) -> float | None:
        return None if self.ahead else self.clock

    def events(self, events: list[Event]) -> None:
        seen: set[int] = set()
        new, brought = [], []
        for key, _, label in events:
            if key in seen or key in self.waiting or key in self.done:
                self.repeated_events += 1
                brought += [(key, label)] if label is not None else []
            else:
                new.append((key, label))
            seen.add(key)
        for key, label in new:
            if label is not None:
                self.repeated_labels += self.early.pop(key, None) is not None
                self.resolve(key, label, "label")
        for key, label in brought:
            if key in self.waiting:
                self.resolve(key, label, "label")
        without = [key for key, label in new if label is None]
        for key in without:
            self.waiting[key] = self.now
        for key in without:
            if key in self.early:
                self.resolve(key, self.early.pop(key)[0], "label")
        if without:
            self.expire()
        for key, label in brought:
            if key in self.waiting:
                self.resolve(key, label, "label")
        self.expire()

    def label(self, key: int, label: float) -> None:
        if key in self.waiting:
            self.resolve(key, label, "label")
        elif key in self.early or self.done.get(key) is True:
            self.repeated_labels += 1
        elif key in self.done:
            self.late_labels += 1
        else:
            self.early[key] = (label, self.now)

    def expire(self) -> None:
        assert self.clock is not None
        for key, came in list(self.waiting.items()):
            if came is not None and self.clock - came > HORIZON:
                self.expired += 1
                self.resolve(key, 0.0, "assumed")
        for key, (_, came) in list(self.early.items()):
            if came is not None and self.clock - came > HORIZON:
                self.orphan_labels += 1
                del self.early[key]

    def resolve(self, key: int, label: float, outcome: str) -> None:
        self.waiting.pop(key, None)
        self.done[key] = outcome == "label"
        self.rows.append((key, label, outcome))


def stream(dice: random.Random) -> list[Batch]:
    """Batches with pauses of many horizons and with times that are wrong by years; labels of any event at any time."""
    batches: list[Batch] = []
    time, number = 0.0, 0
    jumpy = dice.choice([0.0, 0.1, 0.5])
    for _ in range(dice.randrange(5, 40)):
        time += dice.choice([HORIZON * dice.uniform(1, 100)]) if dice.random() < jumpy else dice.uniform(0, 20)
        events: list[Event] = []
        for _ in range(dice.randrange(0, 6)):
            again = number and dice.random() < 0.1
            at = dice.choice([1e12, -1e12]) if dice.random() < 0.05 else time + dice.uniform(-5, 5)
            label = float(dice.randrange(2)) if dice.random() < 0.3 else None
            events.append((dice.randrange(number) if again else number, at, label))
            number += not again
        # Labels of earlier events, of later events, and of events that never arrive.
        keys = [
            dice.randrange(number + 20) if dice.random() < 0.9 else 10**6 + number for _ in range(dice.randrange(6))
        ]
        batches.append((events, [(key, float(dice.randrange(2))) for key in keys]))
    return batches


def joined(batches: list[Batch]) -> tuple[list[Row], LabelJoin]:
    """The rows that `LabelJoin` resolves for a stream."""
    join = LabelJoin(LabelOptions(HORIZON, "negative", capacity=10**6, remember=10**6))
    rows: list[Row] = []
    for events, labels in batches:
        resolved = []
        if events:
            keys, times, known = zip(*events, strict=True)
            columns = {
                "id": np.array(keys),
                "time": np.array(times),
                "score": np.zeros(len(keys), np.float32),
                "label": np.array([math.nan if label is None else label for label in known], np.float32),
            }
            join.advance_clock(columns["time"])
            resolved += list(join.add_events(*join.split_repeated(columns)))
        if labels:
            resolved += list(join.match_labels(Labels(*map(np.array, zip(*labels, strict=True)))))
        for columns, outcome in resolved:
            pairs = zip(columns["id"].tolist(), columns["label"].tolist(), strict=True)
            rows += [(key, label, OUTCOME_NAMES[outcome]) for key, label in pairs]
    return rows, join


@pytest.mark.parametrize("seed", range(300))
def test_the_join_equals_a_plain_reference_implementation(seed: int) -> None:
    batches = stream(random.Random(seed))
    expected = Reference()
    for batch in batches:
        expected.take(batch)
    rows, join = joined(batches)
    assert rows == expected.rows
    assert list(join.pending.early) == list(expected.early)
    counts = vars(join.pending.counts)
    assert counts == {name: getattr(expected, name, 0) for name in counts}

"""The join of events and labels is compared with a simple reference on random streams of late labels."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from cadam.online.data.events import Labels
from cadam.online.labels.join import LabelJoin, LabelOptions, Resolved, Unmatched
from cadam.online.persistence.prediction_log import OUTCOME_NAMES

HORIZON = 50.0
Event = tuple[int, float, float | None]  # id, time, label
Batch = tuple[list[Event], list[tuple[int, float]]]
Row = tuple[int, float, str]


@dataclass
class Reference:
    """A reference of the rules: it processes single events, and remembers exactly what it needs."""

    waits: bool
    """Whether the outcome of an event is decided at its horizon."""
    clock: float | None = None
    ahead: int = 0
    # The arrival of each label; None if it has not arrived.
    waiting: dict[int, float | None] = field(default_factory=dict)
    known: dict[int, float] = field(default_factory=dict)  # labels of events that wait for their horizon
    early: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    done: dict[int, bool] = field(default_factory=dict)  # whether the outcome is a label
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
        if self.clock is not None:
            self.expire()

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
            if label is not None and not self.waits:
                self.repeated_labels += self.early.pop(key, None) is not None
                self.resolve(key, label, "label")
        for key, label in brought:
            if key in self.waiting:
                self.label(key, label)
        without = [(key, label) for key, label in new if label is None or self.waits]
        for key, label in without:
            self.waiting[key] = self.now
            if label is not None:
                self.known[key] = label
        for key, _ in without:
            if key in self.early:
                self.label(key, self.early.pop(key)[0])
        for key, label in brought:
            if key in self.waiting:
                self.label(key, label)

    def label(self, key: int, label: float) -> None:
        if key in self.waiting and not self.waits:
            self.resolve(key, label, "label")
        elif key in self.waiting and key not in self.known:
            self.known[key] = label
        elif key in self.known or key in self.early or self.done.get(key) is True:
            self.repeated_labels += 1
        elif key in self.done:
            self.late_labels += 1
        else:
            self.early[key] = (label, self.now)

    def expire(self) -> None:
        assert self.clock is not None
        for key, came in list(self.waiting.items()):
            if came is None or self.clock - came <= HORIZON:
                continue
            if key in self.known:
                self.resolve(key, self.known.pop(key), "label")
            else:
                self.expired += 1
                self.resolve(key, 0.0 if self.waits else math.nan, "assumed" if self.waits else "dropped")
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


def joined(batches: list[Batch], options: LabelOptions) -> tuple[list[Resolved], LabelJoin]:
    """Return everything that `LabelJoin` yields for a stream, and the join."""
    join, resolved = LabelJoin(options), list[Resolved]()
    for events, labels in batches:
        if events:
            keys, times, known = zip(*events, strict=True)
            columns = {
                "id": np.array(keys),
                "time": np.array(times),
                "score": np.zeros(len(keys), np.float32),
                "label": np.array([math.nan if label is None else label for label in known], np.float32),
            }
            join.advance_clock(columns["time"])
            resolved += join.add_events(*join.split_repeated(columns))
        if labels:
            resolved += join.match_labels(Labels(*map(np.array, zip(*labels, strict=True))))
        resolved += join.expire()
    return resolved, join


def rows_of(parts: list[Resolved]) -> list[Row]:
    rows: list[Row] = []
    for part in parts:
        outcomes = [OUTCOME_NAMES[outcome] for outcome in part.outcomes]
        rows += zip(part.columns["id"].tolist(), part.columns["label"].tolist(), outcomes, strict=True)
    return rows


@pytest.mark.parametrize("unmatched", ["drop", "negative"])
@pytest.mark.parametrize("seed", range(200))
def test_the_join_equals_a_plain_reference_implementation(seed: int, unmatched: Unmatched) -> None:
    batches = stream(random.Random(seed))
    expected = Reference(waits=unmatched == "negative")
    for batch in batches:
        expected.take(batch)
    options = LabelOptions(HORIZON, unmatched, capacity=10**6, remember=10**6)
    parts, join = joined(batches, options)
    assert repr(rows_of(parts)) == repr(expected.rows)  # as text, because nan is not equal to itself
    assert all(part.is_final and part.is_learned == (2 not in part.outcomes) for part in parts)
    assert list(join.pending.early) == list(expected.early)
    counts = vars(join.pending.counts)
    assert counts == {name: getattr(expected, name, 0) for name in counts}


@pytest.mark.parametrize("seed", range(50))
def test_early_positives_are_learned_twice_and_recorded_once(seed: int) -> None:
    batches = stream(random.Random(seed))
    options = LabelOptions(HORIZON, early_positives=True, capacity=10**6, remember=10**6)
    parts, join = joined(batches, options)
    final = rows_of([part for part in parts if part.is_final])
    waiting, _ = joined(batches, replace(options, early_positives=False))
    assert final == rows_of(waiting)
    learned = rows_of([part for part in parts if part.is_learned])
    assert all(part.is_final != part.is_learned for part in parts)
    arrived = list(dict.fromkeys(key for events, _ in batches for key, _, _ in events))
    assert [key for key, label, _ in learned if label == 0] == arrived
    positives = [key for key, label, _ in learned if label == 1]
    still_waiting = join.pending.number_of
    labels = join.pending.ring["label"]
    known = [key for key, number in still_waiting.items() if labels[number % len(labels)] == 1]
    assert sorted(positives) == sorted([*known, *(key for key, label, _ in final if label == 1)])


def test_events_with_labels_wait_for_their_horizon_in_the_order_of_the_events() -> None:
    batches: list[Batch] = [
        ([(0, 0.0, None), (1, 1.0, 1.0)], [(0, 1.0)]),
        ([(2, 10.0, None)], [(2, 1.0), (2, 0.0)]),
        ([(3, 52.0, 1.0)], []),
        ([(4, 70.0, None)], []),
    ]
    parts, join = joined(batches, LabelOptions(HORIZON))
    assert rows_of(parts) == [(0, 1.0, "label"), (1, 1.0, "label"), (2, 1.0, "label")]
    assert (len(join.pending), join.pending.counts.repeated_labels) == (2, 1)


def test_a_label_of_the_batch_that_passes_the_horizon_still_counts() -> None:
    batches: list[Batch] = [([(0, 0.0, None)], []), ([(1, 40.0, None)], []), ([(2, 50.5, None)], [(0, 1.0)])]
    parts, join = joined(batches, LabelOptions(HORIZON))
    assert rows_of(parts) == [(0, 1.0, "label")]
    assert join.pending.counts.late_labels == 0


def test_a_full_join_warns_that_the_horizon_is_cut_short(caplog: pytest.LogCaptureFixture) -> None:
    batches: list[Batch] = [([(n, float(n), None)], []) for n in range(10)]
    parts, join = joined(batches, LabelOptions(HORIZON, capacity=4))
    assert len(rows_of(parts)) == join.pending.counts.crowded_out == 6
    assert caplog.text.count("--capacity") == 1


@pytest.mark.parametrize(
    ("options", "assumes_negative"),
    [({}, False), ({"horizon": 5.0}, True), ({"horizon": 5.0, "unmatched": "drop"}, False)],
)
def test_a_horizon_makes_events_without_a_label_negative(options: dict[str, Any], assumes_negative: bool) -> None:
    assert LabelOptions(**options).assumes_negative == assumes_negative


def test_early_positives_need_a_horizon_and_binary_labels() -> None:
    for options in list[dict[str, Any]]([{}, {"horizon": 5.0, "unmatched": "drop"}]):
        with pytest.raises(ValueError, match="early_positives needs a finite horizon"):
            LabelOptions(early_positives=True, **options)
    with pytest.raises(ValueError, match=r"0 or 1 to learn positives early, got 0\.5"):
        joined([([(0, 0.0, 0.5)], [])], LabelOptions(HORIZON, early_positives=True))

"""Simulated disturbances do what they say, for every batch size and after continuing from a state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from cadam.online import Source
from cadam.online.data.events import Batch, Events, Labels
from cadam.online.data.schema import Schema
from cadam.online.data.simulation import LabelDelay, LabelNoise, SuddenChange
from tests.optim.exact import present

COUNT = 3000


class InMemorySource(Source):
    """A source that continues from an index."""

    at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class SimulatedEvents(InMemorySource):
    """Random events in batches of `size`, half an hour apart if they have a time."""

    def __init__(self, size: int = 64, count: int = COUNT, timed: bool = True, named: bool = False) -> None:
        self.size, self.count = size, count
        random = np.random.default_rng(0)
        users = random.integers(40, size=count)
        self.events = Events(
            {"item": random.integers(50, size=count), "x": random.normal(size=count)},
            labels=random.random(count) < 0.4,
            users=np.array([f"u{u}" for u in users]) if named else users,
            time=1800.0 * np.arange(count) if timed else None,
        )

    def __iter__(self) -> Iterator[Batch]:
        while self.at < self.count:
            start, self.at = self.at, min(self.at + self.size, self.count)
            yield Batch(self.events.take(slice(start, self.at)))


KINDS: dict[str, Callable[[Source], Source]] = {
    "noise": lambda source: LabelNoise(source, 0.2, seed=3),
    "change": lambda source: SuddenChange(source, "item", 50, [1000, 2000], seed=3),
    "delay": lambda source: LabelDelay(source, 36_000, never=0.1, twice=0.1, seed=3),
    "all": lambda source: LabelDelay(SuddenChange(LabelNoise(source, 0.2), "item", 50, [1000]), 36_000),
}


def columns(stream: Iterable[object]) -> dict[str, np.ndarray]:
    """Concatenate all events, and all labels that arrived separately."""
    batches = []
    for batch in stream:
        assert isinstance(batch, Batch)
        batches.append(batch)
    parts = [batch.events.columns() for batch in batches if batch.events is not None]
    made = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    late = [batch.labels for batch in batches if batch.labels is not None]
    if late:
        made["late ids"] = np.concatenate([labels.ids for labels in late])
        made["late_labels"] = np.concatenate([labels.labels for labels in late])
    return made


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return set(first) == set(second) and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all"])
@pytest.mark.parametrize("size", [1, 7, COUNT])
def test_the_result_does_not_depend_on_the_batch_size(kind: str, size: int) -> None:
    complete, parts = (columns(list(KINDS[kind](SimulatedEvents(s)))) for s in (64, size))
    assert same(complete, parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", [False, True])
def test_a_stream_that_continues_from_a_state_is_the_same(kind: str, named: bool) -> None:
    complete = list(KINDS[kind](SimulatedEvents(named=named)))
    first = KINDS[kind](SimulatedEvents(named=named))
    head = [batch for _, batch in zip(range(20), first, strict=False)]
    state = first.state_dict()
    next(iter(first))  # The state must not change with the source.
    second = KINDS[kind](SimulatedEvents(named=named))
    second.load_state_dict(state)
    assert same(columns(complete), columns(head + list(second)))


@pytest.mark.parametrize("kind", ["noise", "change", "delay"])
def test_different_seeds_give_different_streams(kind: str) -> None:
    drifts = [KINDS[kind](SimulatedEvents()), KINDS[kind](SimulatedEvents())]
    drifts[1].seed = 4  # type: ignore[attr-defined]
    first, second = (columns(list(drift)) for drift in drifts)
    assert not same(first, second)


def test_label_noise_flips_the_given_share_of_the_labels() -> None:
    made = columns(list(LabelNoise(SimulatedEvents(), 0.2)))
    assert np.mean(made["label"] != SimulatedEvents().events.labels) == pytest.approx(0.2, abs=0.03)
    assert same(columns(list(LabelNoise(SimulatedEvents(), 0.0))), SimulatedEvents().events.columns())


def test_a_sudden_change_permutes_values_at_the_change_point_and_not_before() -> None:
    old = SimulatedEvents().events.features["item"]
    new = columns(list(SuddenChange(SimulatedEvents(), "item", 50, [1000, 2000])))["feature/item"]
    assert np.array_equal(new[:1000], old[:1000])
    for part in (slice(1000, 2000), slice(2000, None)):
        pairs = set(zip(old[part].tolist(), new[part].tolist(), strict=True))
        assert len(pairs) == 50  # a permutation
        assert len({moved for _, moved in pairs}) == 50
        assert np.mean(old[part] != new[part]) > 0.8
    assert not np.array_equal(
        new[1000:2000], columns(list(SuddenChange(SimulatedEvents(), "item", 50, [0])))["feature/item"]
    )
    some = columns(list(SuddenChange(SimulatedEvents(), "item", 50, [0], share=0.3)))["feature/item"]
    assert 0.1 < np.mean(some != old) < 0.5


@pytest.mark.parametrize("timed", [False, True])
def test_delayed_labels_arrive_late_twice_or_never_and_are_correct(timed: bool) -> None:
    unit = 1800 if timed else 1
    source = LabelDelay(SimulatedEvents(timed=timed), 50 * unit, never=0.1, twice=0.2)
    truth, at = present(SimulatedEvents().events.labels), 0
    come: list[int] = []
    lags: list[int] = []
    for batch in source:
        assert isinstance(batch, Batch)
        if batch.events is not None:
            assert batch.events.labels is None
            at += len(batch.events)
        if batch.labels is not None:
            assert np.array_equal(batch.labels.labels, truth[batch.labels.ids])
            assert (batch.labels.ids < at).all()
            come += batch.labels.ids.tolist()
            lags += (at - batch.labels.ids).tolist()
    times = np.bincount(come, minlength=COUNT)
    assert [np.mean(times == n) for n in (0, 1, 2)] == pytest.approx([0.1, 0.72, 0.18], abs=0.03)
    assert 50 < np.mean(lags) < 130
    assert come != sorted(come)


# Labels that arrive separately ---------------------------------------------------------------------------------------


class SeparateLabels(InMemorySource):
    """A stream in which the first `own` labels come with their events, and the others 20 events later."""

    def __init__(self, size: int = 64, count: int = 500, own: int = 0, text: bool = False) -> None:
        self.size, self.count, self.own = size, count, own
        ids = [f"e{number}" if text else number for number in range(count)]
        records: list[dict[str, Any]] = []
        for number in range(count + 20):
            if number < count:
                record = {"id": ids[number], "at": float(number), "x": 0.5}
                records.append({**record, "click": number % 2} if number < own else record)
            if own + 20 <= number:
                records.append({"id": ids[number - 20], "click": number % 2})
        self.records, self.schema = records, Schema({"x": "number"}, "click", id="id:text" if text else "id", time="at")

    def __iter__(self) -> Iterator[Batch]:
        while self.at < len(self.records):
            start, self.at = self.at, min(self.at + self.size, len(self.records))
            yield self.schema.convert_records(self.records[start : self.at], list(map(str, range(start, self.at))))


LATE: dict[str, Callable[[Source], Source]] = {
    "noise": lambda source: LabelNoise(source, 0.2, seed=3),
    "delay": lambda source: LabelDelay(source, 30, never=0.1, twice=0.1, seed=3),
    "both": lambda source: LabelDelay(LabelNoise(source, 0.2), 30),
    "both, in the other order": lambda source: LabelNoise(LabelDelay(source, 30), 0.2),
}


def late(stream: Iterable[object]) -> dict[str, np.ndarray]:
    """Return the labels that arrived separately, after checking that events have no labels."""
    made = columns(stream)
    assert np.isnan(made.get("label", np.array(np.nan))).all()
    return {name: made[name] for name in ("late ids", "late_labels")}


@pytest.mark.parametrize("text", [False, True])
def test_label_noise_flips_labels_that_arrive_separately(text: bool) -> None:
    truth = late(SeparateLabels(text=text))
    assert np.array_equal(late(LabelNoise(SeparateLabels(text=text), 1.0))["late_labels"], 1 - truth["late_labels"])
    some = late(LabelNoise(SeparateLabels(text=text), 0.2))
    assert np.mean(some["late_labels"] != truth["late_labels"]) == pytest.approx(0.2, abs=0.06)
    assert np.array_equal(some["late ids"], truth["late ids"])


def test_labels_that_arrive_separately_are_delayed_further() -> None:
    at, come, lags = 0, list[int](), list[int]()
    for batch in LabelDelay(SeparateLabels(size=1), 30):
        assert isinstance(batch, Batch)
        at += 0 if batch.events is None else len(batch.events)
        if batch.labels is not None:
            assert np.array_equal(batch.labels.labels, batch.labels.ids % 2)
            come += batch.labels.ids.tolist()
            lags += (at - batch.labels.ids).tolist()
    assert sorted(come) == list(range(500))
    assert min(lags[:400]) >= 20  # At the end of the stream all others arrive at once.
    assert np.mean(lags[:400]) == pytest.approx(50, abs=6)


def test_labels_of_events_and_separate_labels_are_delayed() -> None:
    made = columns(LabelDelay(SeparateLabels(own=250), 30))
    assert "label" not in made
    assert sorted(made["late ids"]) == list(range(500))
    assert np.array_equal(made["late_labels"], made["late ids"] % 2)


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("size", [1, 7, 2000])
def test_separate_labels_do_not_depend_on_the_batch_size(kind: str, size: int) -> None:
    complete, parts = (late(LATE[kind](SeparateLabels(s))) for s in (64, size))
    assert same(complete, parts)


@pytest.mark.parametrize("kind", LATE)
def test_separate_labels_are_the_same_after_continuing_from_a_state(kind: str) -> None:
    first, second = LATE[kind](SeparateLabels()), LATE[kind](SeparateLabels())
    head = [batch for _, batch in zip(range(7), first, strict=False)]
    second.load_state_dict(first.state_dict())
    assert same(late(LATE[kind](SeparateLabels())), late(head + list(second)))


def test_a_label_before_the_first_event_is_not_delayed() -> None:
    events = Events({"x": np.zeros(2)}, ids=np.arange(2), time=np.array([100.0, 101.0]))
    given = [Labels(np.array([1]), np.array([1.0])), events]

    class Early(SeparateLabels):
        def __iter__(self) -> Iterator[Any]:
            return iter(given)

    batches = list(LabelDelay(Early(), 1e9))
    assert [batch.labels is not None and batch.labels.ids.tolist() for batch in batches if batch] == [[1], False]


def test_impossible_arguments_and_features_are_errors() -> None:
    for make in (
        lambda: LabelNoise(SimulatedEvents(), 1.5),
        lambda: LabelDelay(SimulatedEvents(), -1),
        lambda: LabelDelay(SimulatedEvents(), 1, never=2),
        lambda: SuddenChange(SimulatedEvents(), "item", 50, [2000, 1000]),
        lambda: SuddenChange(SimulatedEvents(), "item", 50, []),
    ):
        with pytest.raises(ValueError, match="must"):
            make()
    for source, message in (
        (SuddenChange(SimulatedEvents(), "shop", 50, [1]), "'shop'"),
        (SuddenChange(SimulatedEvents(), "x", 50, [1]), "'x'.*from 0 to 49"),
        (SuddenChange(SimulatedEvents(), "item", 20, [1]), "'item'.*from 0 to 19"),
    ):
        with pytest.raises(ValueError, match=message):
            next(iter(source))

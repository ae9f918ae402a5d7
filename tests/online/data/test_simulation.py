"""Planted drift: what it says it does, the same however the stream is batched, interrupted or begun again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from cadam.online import Source
from cadam.online.data.events import Batch, Events, Labels
from cadam.online.data.schema import Schema
from cadam.online.data.simulation import HourlyPopulation, LabelDelay, LabelNoise, SuddenChange
from tests.optim.exact import present

COUNT = 3000


class Placed:
    """A source that goes on from where it was."""

    at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class Made(Placed):
    """Events made up, in batches of `size`; half an hour between them if they have a time."""

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
    "hours": lambda source: HourlyPopulation(source, 0.9, seed=3),
    "delay": lambda source: LabelDelay(source, 36_000, never=0.1, twice=0.1, seed=3),
    "all": lambda source: LabelDelay(
        HourlyPopulation(SuddenChange(LabelNoise(source, 0.2), "item", 50, [1000]), 0.5), 36_000
    ),
}


def columns(stream: Iterable[object]) -> dict[str, np.ndarray]:
    """All events, and all labels that came on their own, one after the other."""
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
def test_batches_do_not_matter(kind: str, size: int) -> None:
    whole, parts = (columns(list(KINDS[kind](Made(s)))) for s in (64, size))
    assert same(whole, parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", [False, True])
def test_an_interrupted_stream_goes_on_the_same(kind: str, named: bool) -> None:
    whole = list(KINDS[kind](Made(named=named)))
    first = KINDS[kind](Made(named=named))
    head = [batch for _, batch in zip(range(20), first, strict=False)]
    state = first.state_dict()
    next(iter(first))  # the state is a copy
    second = KINDS[kind](Made(named=named))
    second.load_state_dict(state)
    assert same(columns(whole), columns(head + list(second)))


@pytest.mark.parametrize("kind", ["noise", "change", "hours", "delay"])
def test_seeds_differ(kind: str) -> None:
    drifts = [KINDS[kind](Made()), KINDS[kind](Made())]
    drifts[1].seed = 4  # type: ignore[attr-defined]
    first, second = (columns(list(drift)) for drift in drifts)
    assert not same(first, second)


def test_noise_flips_the_share() -> None:
    made = columns(list(LabelNoise(Made(), 0.2)))
    assert np.mean(made["label"] != Made().events.labels) == pytest.approx(0.2, abs=0.03)
    assert same(columns(list(LabelNoise(Made(), 0.0))), Made().events.columns())


def test_a_change_moves_values_at_the_moment_and_not_before() -> None:
    old = Made().events.features["item"]
    new = columns(list(SuddenChange(Made(), "item", 50, [1000, 2000])))["feature/item"]
    assert np.array_equal(new[:1000], old[:1000])
    for part in (slice(1000, 2000), slice(2000, None)):
        pairs = set(zip(old[part].tolist(), new[part].tolist(), strict=True))
        assert len(pairs) == 50  # one place for each value
        assert len({moved for _, moved in pairs}) == 50
        assert np.mean(old[part] != new[part]) > 0.8
    assert not np.array_equal(new[1000:2000], columns(list(SuddenChange(Made(), "item", 50, [0])))["feature/item"])
    some = columns(list(SuddenChange(Made(), "item", 50, [0], share=0.3)))["feature/item"]
    assert 0.1 < np.mean(some != old) < 0.5


def test_users_come_at_their_hour() -> None:
    made = columns(list(HourlyPopulation(Made(count=40_000), 1.0)))
    hours, users = made["time"] / 3600 % 24, made["user"]
    angle = 2 * np.pi * hours / 24
    lean = [np.abs(np.exp(1j * angle[users == user]).mean()) for user in range(40)]
    assert 0.3 < len(hours) / 40_000 < 0.7
    assert min(lean) > 0.25  # each has a time of day
    means = [np.angle(np.exp(1j * angle[users == user]).mean()) for user in range(40)]
    assert np.abs(np.exp(1j * np.array(means)).mean()) < 0.4  # and not all the same
    assert len(columns(list(HourlyPopulation(Made(), 0.0)))["time"]) == COUNT


@pytest.mark.parametrize("timed", [False, True])
def test_labels_come_late_twice_or_never_and_are_the_right_ones(timed: bool) -> None:
    unit = 1800 if timed else 1
    source = LabelDelay(Made(timed=timed), 50 * unit, never=0.1, twice=0.2)
    truth, at = present(Made().events.labels), 0
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


# Labels in records of their own ------------------------------------------------------------------------------------


class Apart(Placed):
    """A stream as a schema reads it: each label, but for those of `own`, is a record some events after its event."""

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
            yield self.schema.records(self.records[start : self.at], list(map(str, range(start, self.at))))


LATE: dict[str, Callable[[Source], Source]] = {
    "noise": lambda source: LabelNoise(source, 0.2, seed=3),
    "delay": lambda source: LabelDelay(source, 30, never=0.1, twice=0.1, seed=3),
    "both": lambda source: LabelDelay(LabelNoise(source, 0.2), 30),
    "both, the other way": lambda source: LabelNoise(LabelDelay(source, 30), 0.2),
}


def late(stream: Iterable[object]) -> dict[str, np.ndarray]:
    """The labels that came on their own; events have none of theirs."""
    made = columns(stream)
    assert np.isnan(made.get("label", np.array(np.nan))).all()
    return {name: made[name] for name in ("late ids", "late_labels")}


@pytest.mark.parametrize("text", [False, True])
def test_noise_flips_labels_that_come_on_their_own(text: bool) -> None:
    truth = late(Apart(text=text))
    assert np.array_equal(late(LabelNoise(Apart(text=text), 1.0))["late_labels"], 1 - truth["late_labels"])
    some = late(LabelNoise(Apart(text=text), 0.2))
    assert np.mean(some["late_labels"] != truth["late_labels"]) == pytest.approx(0.2, abs=0.06)
    assert np.array_equal(some["late ids"], truth["late ids"])


def test_labels_that_come_on_their_own_come_later_still_and_unknown_ones_never() -> None:
    at, come, lags = 0, list[int](), list[int]()
    for batch in LabelDelay(Apart(size=1), 30):
        assert isinstance(batch, Batch)
        at += 0 if batch.events is None else len(batch.events)
        if batch.labels is not None:
            assert np.array_equal(batch.labels.labels, batch.labels.ids % 2)
            come += batch.labels.ids.tolist()
            lags += (at - batch.labels.ids).tolist()
    assert sorted(come) == list(range(500))
    assert min(lags[:400]) >= 20  # at the end of the stream the rest comes at once
    assert np.mean(lags[:400]) == pytest.approx(50, abs=6)


def test_labels_of_both_kinds_are_all_delayed() -> None:
    made = columns(LabelDelay(Apart(own=250), 30))
    assert "label" not in made
    assert sorted(made["late ids"]) == list(range(500))
    assert np.array_equal(made["late_labels"], made["late ids"] % 2)


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("size", [1, 7, 2000])
def test_batches_do_not_matter_to_labels_that_come_on_their_own(kind: str, size: int) -> None:
    whole, parts = (late(LATE[kind](Apart(s))) for s in (64, size))
    assert same(whole, parts)


@pytest.mark.parametrize("kind", LATE)
def test_an_interrupted_stream_goes_on_with_the_same_late_labels(kind: str) -> None:
    first, second = LATE[kind](Apart()), LATE[kind](Apart())
    head = [batch for _, batch in zip(range(7), first, strict=False)]
    second.load_state_dict(first.state_dict())
    assert same(late(LATE[kind](Apart())), late(head + list(second)))


def test_a_label_before_any_event_comes_at_once() -> None:
    events = Events({"x": np.zeros(2)}, ids=np.arange(2), time=np.array([100.0, 101.0]))
    given = [Labels(np.array([1]), np.array([1.0])), events]

    class Early(Apart):
        def __iter__(self) -> Iterator[Any]:
            return iter(given)

    batches = list(LabelDelay(Early(), 1e9))
    assert [batch.labels is not None and batch.labels.ids.tolist() for batch in batches if batch] == [[1], False]


def test_what_cannot_be() -> None:
    for make in (
        lambda: LabelNoise(Made(), 1.5),
        lambda: LabelDelay(Made(), -1),
        lambda: LabelDelay(Made(), 1, never=2),
        lambda: HourlyPopulation(Made(), -0.1),
        lambda: SuddenChange(Made(), "item", 50, [2000, 1000]),
        lambda: SuddenChange(Made(), "item", 50, []),
    ):
        with pytest.raises(ValueError, match="must"):
            make()
    for source, message in (
        (SuddenChange(Made(), "shop", 50, [1]), "no feature is called 'shop'; there are item, x"),
        (SuddenChange(Made(), "x", 50, [1]), "'x' must hold whole numbers from 0 to 49"),
        (SuddenChange(Made(), "item", 20, [1]), "'item' must hold whole numbers from 0 to 19"),
        (HourlyPopulation(Made(timed=False)), "needs events with users and time"),
    ):
        with pytest.raises(ValueError, match=message):
            next(iter(source))

"""Labels from a second source are merged with the events in the order of time, and each counts exactly once."""

from __future__ import annotations

import csv
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadam.cli.main import main
from cadam.online import Schema, Source, open_source
from cadam.online.data.events import Batch
from cadam.online.data.label_source import LabeledSource, open_with_labels
from tests.online.streams import SCHEMA, Replayed, build, events, files, learner, table, weights
from tests.optim.exact import present

COUNT = 600
DELAYED = Schema(SCHEMA.features, label="click", id="event", user="user", time="at")


def write(path: Path, names: list[str], rows: list[tuple[Any, ...]]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def write_stream(folder: Path, *, unordered: bool = False) -> tuple[Path, Path]:
    """Events without labels, and the positives alone, each up to 80 events late."""
    columns = table(COUNT)
    names = ["event", "user", "item", "price", "at"]
    rows = list(zip(*(columns[name].tolist() for name in names), strict=True))
    delays = np.random.default_rng(3).uniform(0, 80, COUNT)
    late = [(int(n), 1, float(n + delays[n])) for n in np.flatnonzero(columns["click"])]
    late.sort(key=lambda row: row[2])
    if unordered:
        late[5] = (late[5][0], 1, 1e12)  # one label is dated years ahead
    return write(folder / "events.csv", names, rows), write(folder / "labels.csv", ["event", "click", "at"], late)


def open_both(events: Path, labels: Path, **options: Any) -> LabeledSource:
    source = open_source(f"csv:{events}", DELAYED, batch_size=16)
    settings = {"batch_size": 32, "follow": False, "patience": None, **options}
    return open_with_labels(source, f"csv:{labels}", DELAYED, **settings)


def test_labels_come_with_the_batch_in_whose_time_they_fall(tmp_path: Path) -> None:
    events, labels = write_stream(tmp_path)
    times = {row[0]: float(row[2]) for row in list(csv.reader(labels.read_text().splitlines()))[1:]}
    earlier, seen = -np.inf, 0
    for batch in open_both(events, labels):
        assert batch is not None
        until = np.inf if batch.events is None else float(present(batch.events.time).max())
        if batch.labels is None:
            continue
        due = np.array([times[str(key)] for key in batch.labels.ids])
        assert (np.diff(due) >= 0).all()
        assert due.min() > earlier
        assert due.max() <= until
        if batch.events is not None:
            before = present(batch.events_before)
            assert before.tolist() == [int((present(batch.events.time) <= moment).sum()) for moment in due]
        earlier, seen = until, seen + len(due)
    assert seen == len(times)


def test_a_label_dated_years_ahead_does_not_hold_up_the_others(tmp_path: Path) -> None:
    batches = [batch for batch in open_both(*write_stream(tmp_path, unordered=True)) if batch is not None]
    last = present(batches[-1].labels)
    with_events = sum(len(batch.labels) for batch in batches[:-1] if batch.labels is not None)
    assert with_events > 100 > len(last)


def learn(folder: Path, source: Any) -> Any:
    ours = learner(
        build(), horizon=100, log=folder / "log", log_rows=100, checkpoint=folder / "state", checkpoint_every=40
    )
    try:
        return ours.run(source)
    finally:
        ours.close()


class Crashing(Source):
    """A source that fails after some batches, as if the process had been killed."""

    def __init__(self, source: Source, batches: int) -> None:
        self.source, self.batches = source, batches

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.source):
            if number == self.batches:
                raise KeyboardInterrupt
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.source.load_state_dict(state)


def test_a_run_that_crashes_at_any_batch_ends_with_the_same_bits(tmp_path: Path) -> None:
    both = write_stream(tmp_path)
    (tmp_path / "whole").mkdir()
    whole = learn(tmp_path / "whole", open_both(*both))
    assert whole.metrics()["expired"] > 0 < whole.pending.counts.repeated_labels + whole.metrics()["learned"]
    chance = random.Random(0)
    (tmp_path / "crashed").mkdir()
    for _ in range(12):
        with pytest.raises(KeyboardInterrupt):
            learn(tmp_path / "crashed", Crashing(open_both(*both), chance.randrange(1, 6)))
    crashed = learn(tmp_path / "crashed", open_both(*both))
    assert crashed.resumed
    assert weights(crashed) == weights(whole)
    assert crashed.metrics() == whole.metrics()
    assert files(tmp_path / "crashed" / "log") == files(tmp_path / "whole" / "log")


def test_live_labels_come_as_they_arrive_and_count_once(tmp_path: Path) -> None:
    events, labels = write_stream(tmp_path)
    lines = labels.read_text().splitlines(keepends=True)
    labels.write_text("".join(lines[:50]))
    source = open_both(events, labels, follow=True, patience=0.05)

    def append() -> None:
        time.sleep(0.3)
        with open(labels, "a") as file:
            file.write("".join(lines[50:]))

    writer = threading.Thread(target=append)
    writer.start()
    ids: list[int] = []
    positions = []
    source.events.follow = True  # type: ignore[attr-defined]
    for batch in source:
        positions.append(source.state_dict())
        ids += [] if batch is None or batch.labels is None else batch.labels.ids.tolist()
        if len(ids) == len(lines) - 1:
            break
    writer.join()
    assert len(set(ids)) == len(ids)
    resumed = open_both(events, labels)
    resumed.load_state_dict(positions[-1])
    assert all(isinstance(batch, Batch) and batch.labels is None for batch in resumed)


class Gated(Replayed):
    """A source of labels that has nothing to read until its gate is opened."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches)
        self.gate = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        yield None
        self.gate.wait(60)
        yield from super().__iter__()


def test_labels_that_only_the_thread_has_read_are_not_part_of_the_position() -> None:
    """A learner that is killed before the first label is due must read it again."""
    labels = Gated([events(3)])
    batches = iter(source := LabeledSource(Replayed([events(5), events(5, first=5)]), labels, is_live=True))
    assert present(next(batches)).labels is None
    labels.gate.set()
    while not labels.position:
        time.sleep(0.001)
    assert source.state_dict()["labels"] == {"position": 0}


def test_a_source_of_labels_that_cannot_be_merged_is_an_error(tmp_path: Path) -> None:
    events, _ = write_stream(tmp_path)
    undated = write(tmp_path / "undated.csv", ["event", "click"], [(1, 1)])
    unnamed = write(tmp_path / "unnamed.csv", ["event", "bought", "at"], [(1, 1, 5)])
    with pytest.raises(ValueError, match="have no column 'at'"):
        open_both(events, undated)
    with pytest.raises(ValueError, match="have no column 'click'"):
        open_both(events, unnamed)
    source = open_source(f"csv:{events}", DELAYED)
    with pytest.raises(ValueError, match="--id"):
        open_with_labels(
            source, f"csv:{undated}", Schema({"item": "category:20"}), batch_size=8, follow=False, patience=None
        )
    with pytest.raises(ValueError, match="without --labels"):
        open_both(*write_stream(tmp_path)).load_state_dict(source.state_dict())


def test_the_command_learns_from_positives_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_stream(tmp_path)
    DELAYED.write("schema.json")
    command = "run events.csv --schema schema.json --labels labels.csv --horizon 100 --batch-size 16 --model linear"
    assert main(command.split()) == 0
    output = capfd.readouterr()
    assert "600 events; 1" in output.err
    assert "wait for their horizon" in output.err
    assert main([*command.split(), "--early-positives", "--checkpoint", "early"]) == 0
    for wrong in ("--unmatched drop --early-positives", "--labels missing.csv"):
        assert main([*command.split(), *wrong.split(), "--checkpoint", "other"]) == 2

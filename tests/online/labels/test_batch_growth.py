"""The batch size that grows with the number of learned events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadam.cli.main import main
from cadam.online import Batch, Events, Labels
from cadam.online.labels.batch_growth import BatchGrowth
from cadam.online.persistence.checkpoints import read_newest
from tests.online.streams import Replayed, events, learner, table, weights

GROWTH = BatchGrowth(first=8, last=32, divisor=16)
"""Batches of 8 up to 256 learned events, of 16 up to 512, and of 32 from then on."""


def count_step_sizes(monkeypatch: pytest.MonkeyPatch, ours: Any) -> list[int]:
    """Return a list to which the size of each training step of a learner is appended."""
    sizes: list[int] = []
    count_steps = ours.training.count_steps

    def count(steps: int, learned: int) -> None:
        sizes.append(learned)
        count_steps(steps, learned)

    monkeypatch.setattr(ours.training, "count_steps", count)
    return sizes


def test_the_size_doubles_until_the_last_one_is_reached() -> None:
    sizes = [GROWTH.size(learned) for learned in range(2000)]
    assert sizes == [8] * 256 + [16] * 256 + [32] * (2000 - 512)
    assert {BatchGrowth(64, 64, 1).size(learned) for learned in (0, 1, 10**9)} == {64}


@pytest.mark.parametrize("sizes", [(0, 256, 512), (24, 256, 512), (32, 250, 512), (32, 256, 500), (64, 32, 512)])
def test_sizes_that_are_not_powers_of_two_or_not_in_order_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must be a power of two|is above the last one"):
        BatchGrowth(*sizes)


def test_batches_of_the_source_are_predicted_and_learned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [events(64, seed=number, first=64 * number) for number in range(12)]
    ours = learner(batch_growth=GROWTH)
    sizes = count_step_sizes(monkeypatch, ours)
    for batch in batches:
        ours.process(batch)
    assert sizes == [8] * 32 + [16] * 16 + [32] * 8
    parts = learner()
    for batch in batches:
        size = GROWTH.size(parts.learned)
        for start in range(0, 64, size):
            parts.process(batch.take(slice(start, start + size)))
    assert weights(ours) == weights(parts)
    assert ours.log_loss.results() == parts.log_loss.results(), "the predictions are those of the parts, too"


def test_many_labels_at_once_are_learned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = learner(batch_growth=GROWTH)
    sizes = count_step_sizes(monkeypatch, ours)
    ours.process(events(100, labels=False))
    assert not sizes
    columns = table(100)
    ours.process(Batch(labels=Labels(columns["event"], columns["click"])))
    assert sizes == [8] * 12 + [4]
    assert ours.queue.count == 0


def test_labels_of_a_batch_without_their_positions_are_joined_after_its_events() -> None:
    columns = table(20)
    late = Labels(columns["event"], columns["click"])
    ours = learner(batch_growth=GROWTH)
    ours.process(Batch(events(20, labels=False), late))
    assert (ours.learned, len(ours.pending)) == (20, 0)


def test_a_run_that_is_killed_at_a_change_of_the_size_continues_to_the_bit(tmp_path: Path) -> None:
    batches = [
        replace(part, time=None)
        for number in range(14)
        for part in [events(56, seed=number, first=56 * number, labels=number % 3 > 0)]
    ]

    def stream() -> list[Batch]:
        """Every third batch has no labels; they come with the next batch."""
        return [
            Batch(each, Labels(np.arange(56 * (n - 1), 56 * n), table(56, n - 1)["click"]) if n % 3 == 1 else None)
            for n, each in enumerate(batches)
        ]

    whole = learner(batch_growth=GROWTH)
    whole.run(Replayed(stream()))
    assert GROWTH.size(whole.learned) == 32
    for end in range(2, 12):
        folder = tmp_path / str(end)
        options: dict[str, Any] = {"batch_growth": GROWTH, "checkpoint": folder}
        learner(**options).run(Replayed(stream()[:end]))
        resumed = learner(**options)
        resumed.run(Replayed(stream()))
        assert resumed.resumed
        assert weights(resumed) == weights(whole), f"killed after {end} batches"
        assert resumed.log_loss.results() == whole.log_loss.results()


def test_batch_growth_excludes_other_sizes() -> None:
    for options in ({"batch_size": 8}, {"per_event": True}):
        with pytest.raises(ValueError, match="batch_growth chooses the number of events per step"):
            learner(batch_growth=GROWTH, **options)


def write(path: Path, columns: dict[str, np.ndarray]) -> Path:
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("more", [(), ("--ids",), ("--lr", "0.01")])
def test_cadam_run_begins_with_small_batches_and_resumes_across_their_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr("cadam.cli.run.BatchGrowth", lambda: BatchGrowth(32, 256, 4))
    data = write(tmp_path / "clicks.csv", table(2560))

    def run(folder: str, *options: str) -> dict[str, Any]:
        columns = ["--label", "click", "--ignore", "event,at", "--model", "fm", "--quiet", *more]
        assert main(["run", str(data), *columns, "--checkpoint", str(tmp_path / folder), *options]) == 0
        return read_newest(tmp_path / folder)[1]

    whole = run("whole")
    # 256 events in steps of 32, 256 of 64, 512 of 128, and the others in steps of 256.
    assert whole["counts"]["steps"] == 8 + 4 + 4 + 6
    for events_before in ("256", "512", "1024"):
        run("parts", "--events", events_before)
    parts = run("parts")
    assert parts["counts"] == {**whole["counts"], "saves": parts["counts"]["saves"]}
    for name, value in whole["model"].items():
        assert value.numpy().tobytes() == parts["model"][name].numpy().tobytes(), name
    assert run("fixed", "--batch-size", "64")["counts"]["steps"] == 2560 // 64


def test_events_are_learned_in_parts_without_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = learner(batch_growth=GROWTH)
    sizes = count_step_sizes(monkeypatch, ours)
    batch: Events = events(20)
    ours.learn(batch)
    assert sizes == [8, 8, 4]

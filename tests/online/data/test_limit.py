"""Sources that end after a number of events."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from cadam.online import Batch, Labels, LinesSource
from cadam.online.data.limit import LimitedSource
from tests.online.streams import SCHEMA, Replayed, events, learner, table


def test_a_number_of_events_is_exact_and_a_resumed_run_loses_none(tmp_path: Path) -> None:
    """The cut batch may also contain labels without events, and rejected events."""
    lines, columns = tmp_path / "a.jsonl", table(200)
    records = [{name: values[n].item() for name, values in columns.items()} for n in range(200)]
    del records[10]["click"]
    records[40]["item"] = 10**6
    records.insert(60, {"event": 10, "click": 1.0})
    lines.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for most, expected in ((30, 30), (30, 30), (77, 77), (None, 199)):
        ours = learner(checkpoint=tmp_path / "state", log=tmp_path / "log")
        ours.resume()
        left = None if most is None else most - ours.events
        ours.run(LimitedSource(LinesSource(lines, SCHEMA, "jsonl", batch_size=64, patience=None), left), events=most)
        assert ours.events == expected
        ours.close()
    assert (ours.learned, ours.rejected) == (199, 1)
    assert sorted(pq.read_table(tmp_path / "log")["id"].to_pylist()) == [n for n in range(200) if n != 40]


def ids_and_labels(batch: Any) -> tuple[list[int], bool]:
    """Return the ids of the events of a batch, and whether it has separate labels."""
    return batch.events.ids.tolist(), batch.labels is not None


def test_the_rest_of_a_batch_is_produced_in_the_batch_size_of_the_resumed_run() -> None:
    """The rest of a chunk of per-event training is larger than a batch. It keeps its labels, and is cut at a limit."""
    labels = Labels(np.array([3]), np.array([1.0]))
    first = LimitedSource(Replayed([Batch(events(100), labels)]), 10)
    assert [ids for ids, _ in map(ids_and_labels, first)] == [list(range(10))]
    resumed = LimitedSource(Replayed([Batch(events(100), labels)]), 60, batch_size=32)
    resumed.load_state_dict(first.state_dict())
    assert list(map(ids_and_labels, resumed)) == [(list(range(10, 42)), False), (list(range(42, 70)), False)]
    last = LimitedSource(Replayed([Batch(events(100), labels)]), None, batch_size=32)
    last.load_state_dict(resumed.state_dict())
    assert list(map(ids_and_labels, last)) == [(list(range(70, 100)), True)]


def test_batches_that_are_larger_than_the_batch_size_are_cut_and_no_event_is_lost() -> None:
    """A source of the user's own may produce batches of any size, and events without a `Batch`."""
    source = Replayed([Batch(events(10), Labels(np.array([3]), np.array([1.0]))), events(7, first=10)])
    limited = LimitedSource(source, 15, batch_size=4)
    assert list(map(ids_and_labels, limited)) == [
        (list(range(4)), False),
        (list(range(4, 8)), False),
        (list(range(8, 10)), True),
        (list(range(10, 14)), False),
        ([14], False),
    ]
    resumed = LimitedSource(source, None, batch_size=4)
    resumed.load_state_dict(limited.state_dict())
    assert list(map(ids_and_labels, resumed)) == [([15, 16], False)]


def test_labels_stay_at_their_place_among_the_events() -> None:
    """Events that were predicted before a label was known must not be predicted after it, or the other way round."""

    def places(source: LimitedSource) -> list[tuple[int, float]]:
        """Return each label with the number of events before it."""
        pairs = [pair for batch in source if isinstance(batch, Batch) for pair in batch.in_order()]
        counts = np.cumsum([0 if part is None else len(part) for part, _ in pairs]).tolist()
        return [(n, label) for n, (_, part) in zip(counts, pairs, strict=True) if part for label in part.labels]

    def replayed() -> Replayed:
        labels = Labels(np.arange(5), np.arange(5) / 4)
        return Replayed([Batch(events(10), labels, events_before=np.array([0, 2, 4, 7, 10]))])

    whole = [(0, 0.0), (2, 0.25), (4, 0.5), (7, 0.75), (10, 1.0)]
    assert places(LimitedSource(replayed(), None)) == whole
    assert places(LimitedSource(replayed(), None, batch_size=3)) == whole
    first = LimitedSource(replayed(), 4)
    assert places(first) == whole[:3]
    resumed = LimitedSource(replayed(), None)
    resumed.load_state_dict(first.state_dict())
    assert places(resumed) == [(n - 4, label) for n, label in whole[3:]]


class HalfRead(Replayed):
    """A source that knows its progress and its backlog."""

    share = 0.5

    def backlog(self) -> int:
        return 7


def test_a_limited_source_can_be_copied_and_passes_on_the_progress_and_backlog_of_its_source() -> None:
    limited = LimitedSource(HalfRead([]), 30)
    for made in (copy.copy(limited), copy.deepcopy(limited), pickle.loads(pickle.dumps(limited))):
        assert (made.remaining, made.has_produced, made.share, made.backlog()) == (30, False, 0, 7)
    assert LimitedSource(HalfRead([]), None).share == 0.5
    assert copy.copy(limited).source is limited.source

"""Sources that end after a number of events."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

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


def test_the_rest_of_a_large_batch_is_produced_in_batches_of_the_present_size() -> None:
    """Per-event training reads thousands of events at once, and may be followed by training in batches."""
    batches = [Batch(events(100), Labels(np.array([7]), np.array([1.0]))), Batch(events(30, first=100))]
    first = LimitedSource(Replayed(batches), 20)
    assert produced_ids(first) == [list(range(20))]
    second = LimitedSource(Replayed(batches), 45, batch_size=32)
    second.load_state_dict(first.state_dict())
    assert produced_ids(second) == [list(range(20, 52)), list(range(52, 65))]
    third = LimitedSource(Replayed(batches), None, batch_size=32)
    third.load_state_dict(second.state_dict())
    produced = list(third)
    assert [batch.labels is None for batch in produced if isinstance(batch, Batch)] == [True, False, True]
    third.load_state_dict(second.state_dict())
    assert produced_ids(third) == [list(range(65, 97)), list(range(97, 100)), list(range(100, 130))]


def produced_ids(source: LimitedSource) -> list[list[int]]:
    batches = [batch for batch in source if isinstance(batch, Batch)]
    return [batch.events.ids.tolist() for batch in batches if batch.events is not None and batch.events.ids is not None]


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

"""The event log: what is written stays, what cannot be written changes nothing, and the learner reads it in order."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import pytest

from cadam.online.data.schema import Schema
from cadam.serving.event_log import Entry, EventLog, LogUnavailableError
from cadam.serving.log_source import LogSource

SCHEMA = Schema({"user": "hash:10"}, label="click", id="key", user="user:text", time="at")


def event(key: int, age: float = 0.0) -> Entry:
    return Entry("event", key, json.dumps({"key": key, "user": "ann", "at": key}), time.time() - age)


def label(key: int) -> Entry:
    return Entry("label", key, "1", time.time())


def test_entries_are_numbered_in_order_and_repeated_ids_are_left_out(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.db")
    entries = [event(1), event(2), event(1), label(1), label(1)]
    log.append(entries)
    numbers = [entry.number for entry in entries]
    assert numbers[2] == numbers[4] == 0
    assert 0 < numbers[0] < numbers[1] < numbers[3]
    other = EventLog(tmp_path / "events.db")
    assert [(entry.kind, entry.id) for entry in other.read(1)] == [("event", 2), ("label", 1)]
    assert other.find_unknown([1, 3]) == [3]
    assert other.last_number() == numbers[3]


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.db")
    log.append([event(1)])
    pages = log._connection.execute("PRAGMA page_count").fetchone()[0]
    log._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(LogUnavailableError, match="full"):
        log.append([event(key) for key in range(2, 1000)])
    assert log.last_number() == 1
    log._connection.execute("PRAGMA max_page_count = 100000")
    log.append([event(2)])
    assert [entry.id for entry in log.read(0)] == [1, 2]


def test_a_file_that_is_not_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.db").write_text("not a database, " * 100)
    with pytest.raises(ValueError, match="not an event log"):
        EventLog(tmp_path / "events.db")
    with pytest.raises(LogUnavailableError):
        EventLog(tmp_path / "nowhere" / "events.db")
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(ValueError, match="another version"):
        EventLog(tmp_path / "newer.db")


def test_old_entries_are_deleted_up_to_the_position_of_a_checkpoint(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.db")
    log.append([event(key, age=100 if key <= 60 else 0) for key in range(1, 101)])
    assert log.delete_old(50, seconds=50) == 50
    assert log.delete_old(80, seconds=50) == 10
    assert [entry.id for entry in log.read(0)] == list(range(61, 101))
    assert log.delete_old(100, size=1) == 40
    assert log.last_number() == 100
    log.append([event(101)])
    assert log.read(0)[0].number == 101


def test_the_source_produces_the_batches_of_its_first_run_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.db")
    log.append([event(1), event(2), label(1)])
    first = LogSource(log, SCHEMA, follow=False)
    sizes = [len(batch.events or ()) for batch in first if batch is not None]
    log.append([event(3), label(3), label(2)])
    sizes += [len(batch.events or ()) for batch in first if batch is not None]
    again = LogSource(log, SCHEMA, follow=False)
    batches = [batch for batch in again if batch is not None]
    assert [len(batch.events or ()) for batch in batches] == sizes == [2, 1]
    assert batches[1].labels is not None
    assert batches[1].labels.ids.tolist() == [3, 2]
    assert again.state_dict() == first.state_dict() == {"source": "event log", "position": 6, "rollback": 0}


def test_labels_of_a_rollback_are_not_produced(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.db")
    log.append([event(1), event(2), label(1)])
    rollback = log.add_rollback("1", 1)
    log.append([label(2)])
    source = LogSource(log, SCHEMA, follow=False, rollbacks=log.rollbacks())
    [batch] = [batch for batch in source if batch is not None]
    assert batch.labels is not None
    assert batch.labels.ids.tolist() == [2]
    assert batch.withdrawn == [1]
    assert (rollback.position, rollback.until) == (1, 3)

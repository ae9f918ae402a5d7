"""The event log: what is written stays, what cannot be written changes nothing, and the learner reads it in order."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadam.online.data.schema import Schema
from cadam.serving.event_log import Entry, EventLog, LogUnavailableError
from cadam.serving.event_log import open_log as open_log_of_folder
from cadam.serving.log_source import LogSource
from cadam.serving.redis_log import RedisLog
from cadam.serving.sqlite_log import SqliteLog

SCHEMA = Schema({"user": "hash:10"}, label="click", id="key", user="user:text", time="at")


def event(key: int, age: float = 0.0) -> Entry:
    return Entry("event", key, json.dumps({"key": key, "user": "ann", "at": key}), time.time() - age)


def label(key: int) -> Entry:
    return Entry("label", key, "1", time.time())


Open = Callable[[], EventLog]


@pytest.fixture(params=["sqlite", "redis"])
def open_log(tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    """A function that opens another connection to the same log."""
    if request.param == "sqlite":
        return lambda: SqliteLog(tmp_path / "events.db")
    server = request.getfixturevalue("redis_server")
    return lambda: RedisLog(f"{server.url}/clicks")


def test_entries_are_numbered_in_order_and_repeated_ids_are_left_out(open_log: Open) -> None:
    log = open_log()
    entries = [event(1), event(2), event(1), label(1), label(1)]
    log.append(entries)
    numbers = [entry.number for entry in entries]
    assert numbers[2] == numbers[4] == 0
    assert 0 < numbers[0] < numbers[1] < numbers[3]
    other = open_log()
    assert [(entry.kind, entry.id) for entry in other.read(1)] == [("event", 2), ("label", 1)]
    assert other.read(0, last=numbers[1]) == entries[:2]
    assert other.read(0, limit=1) == entries[:1]
    assert other.find_unknown([1, 3, "1"]) == [3, "1"]
    assert other.last_number() == numbers[3]
    assert other.oldest_label_time(0) == entries[3].time
    assert other.oldest_label_time(numbers[3]) is None
    scored = Entry("event", "é", "{}", 1.5, 0.1 + 0.2, "7-r1")
    log.append([scored])
    assert other.read(numbers[3]) == [scored]
    assert other.size() > 0


def test_batches_rollbacks_and_promotions_are_recorded(open_log: Open) -> None:
    log, other = open_log(), open_log()
    log.append([event(1), event(2), label(1)])
    assert other.next_batch(0) is None
    for last in (2, 3):
        log.add_batch(last)
    assert [other.next_batch(after) for after in (0, 2, 3)] == [2, 3, None]
    rollback = log.add_rollback("1", 1)
    assert other.rollbacks() == [rollback]
    assert (rollback.number, rollback.position, rollback.until) == (1, 1, 3)
    log.add_promotion("Adam:lr=0.01")
    log.add_promotion("Lion:lr=0.01", 3)
    other.set_promotion_position(1, 2)
    assert [(each.number, each.challenger, each.position) for each in log.promotions()] == [
        (1, "Adam:lr=0.01", 2),
        (2, "Lion:lr=0.01", 3),
    ]
    assert [each.number for each in log.promotions(1)] == [2]


def set_capacity(log: EventLog, is_full: bool, server: Any) -> None:
    """Let the disk or the memory of a log be full, or not."""
    if isinstance(log, SqliteLog):
        pages = log._connection.execute("PRAGMA page_count").fetchone()[0]
        log._connection.execute(f"PRAGMA max_page_count = {pages + 1 if is_full else 100000}")
    else:
        server.client.config_set("maxmemory", "1" if is_full else "0")


def test_a_full_disk_leaves_the_log_as_it_was(open_log: Open, request: pytest.FixtureRequest) -> None:
    log = open_log()
    server = None if isinstance(log, SqliteLog) else request.getfixturevalue("redis_server")
    log.append([event(1)])
    set_capacity(log, True, server)
    with pytest.raises(LogUnavailableError):
        log.append([event(key) for key in range(2, 1000)])
    assert log.last_number() == 1
    set_capacity(log, False, server)
    log.append([event(2)])
    assert [entry.id for entry in log.read(0)] == [1, 2]


def test_a_file_that_is_not_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.db").write_text("not a database, " * 100)
    with pytest.raises(ValueError, match="not an event log"):
        SqliteLog(tmp_path / "events.db")
    with pytest.raises(LogUnavailableError):
        SqliteLog(tmp_path / "nowhere" / "events.db")
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(ValueError, match="another version"):
        SqliteLog(tmp_path / "newer.db")


def test_a_redis_server_that_could_lose_labels_is_refused(redis_server: Any) -> None:
    for uri in ("kafka://localhost/clicks", "redis://localhost", "redis:///clicks"):
        with pytest.raises(ValueError, match="redis://HOST"):
            RedisLog(uri)
    redis_server.client.xadd("foreign", {"a": 1})
    redis_server.client.set("text", "1")
    for name, reason in (("foreign", "not the log of a service"), ("text", "is a string, not a stream")):
        with pytest.raises(ValueError, match=reason):
            RedisLog(f"{redis_server.url}/{name}")
    redis_server.client.config_set("appendfsync", "everysec")
    with pytest.raises(ValueError, match=r"it has appendonly yes and appendfsync everysec: it needs .* always"):
        RedisLog(f"{redis_server.url}/clicks")
    with pytest.raises(LogUnavailableError):
        RedisLog("redis://127.0.0.1:1/clicks")


def test_old_entries_are_deleted_up_to_the_position_of_a_checkpoint(open_log: Open) -> None:
    log = open_log()
    log.append([event(key, age=100 if key <= 60 else 0) for key in range(1, 101)])
    log.add_batch(30)
    log.add_batch(90)
    assert log.delete_old(50, seconds=50) == 50
    assert log.delete_old(80, seconds=50) == 10
    assert [entry.id for entry in log.read(0)] == list(range(61, 101))
    assert log.next_batch(0) == 90
    assert log.find_unknown([60, 61]) == [60]
    assert log.delete_old(100, size=1) == 40
    assert log.last_number() == 100
    log.append([event(101)])
    assert log.read(0)[0].number == 101


def test_the_source_produces_the_batches_of_its_first_run_again(open_log: Open) -> None:
    log = open_log()
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
    state = {"source": "event log", "position": 6, "rollback": 0, "schema": SCHEMA.settings()}
    assert again.state_dict() == first.state_dict() == state


def test_labels_of_a_rollback_are_not_produced(open_log: Open) -> None:
    log = open_log()
    log.append([event(1), event(2), label(1)])
    rollback = log.add_rollback("1", 1)
    log.append([label(2)])
    source = LogSource(log, SCHEMA, follow=False, rollbacks=log.rollbacks())
    [batch] = [batch for batch in source if batch is not None]
    assert batch.labels is not None
    assert batch.labels.ids.tolist() == [2]
    assert batch.withdrawn == [1]
    assert (rollback.position, rollback.until) == (1, 3)


def test_a_log_that_was_deleted_is_noticed_and_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    log = SqliteLog(path)
    log.append([event(1)])
    for missing in (path, path.with_name("events.db-wal")):
        moved = missing.rename(tmp_path / "moved")
        with pytest.raises(LogUnavailableError, match=rf"{missing.name} is missing"):
            log.append([event(2)])
        missing.touch()
        with pytest.raises(LogUnavailableError, match="was replaced while the service ran"):
            log.append([event(2)])
        moved.replace(missing)
    log.append([event(2)])
    path.unlink()
    with pytest.raises(LogUnavailableError, match="unable to open"):
        open_log_of_folder(tmp_path)
    assert not path.exists()
    log.close()


def test_the_learner_flushes_promotions_to_disk_but_not_batches(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "events.db", is_durable=False)
    statements: list[str] = []
    log._connection.set_trace_callback(statements.append)
    full, normal = "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"
    log.add_batch(1)
    assert full not in statements
    log.add_promotion("Adam:lr=0.01")
    log.set_promotion_position(1, 5)
    shown = [text for text in statements if text.startswith(("PRAGMA", "COMMIT"))]
    assert shown == ["COMMIT", *2 * (full, "COMMIT", normal)]
    log.close()

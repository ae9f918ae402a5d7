"""Sources: positions, following growing data, rotated files, damaged data and rejected records."""

from __future__ import annotations

import csv
import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.online import (
    Batch,
    Events,
    KafkaSource,
    Labels,
    LinesSource,
    ParquetSource,
    RedisSource,
    Schema,
    Source,
    open_source,
)
from cadam.online.data import conversion
from cadam.online.data.conversion import convert
from cadam.online.data.kind import Kind
from cadam.online.data.sources.parquet import read_values
from cadam.online.data.sources.records import Message, convert_messages
from cadam.online.data.text_columns import DictionaryColumn, TextColumn
from cadam.online.data.validation import MismatchError, check_columns
from tests.online.redis_server import Server
from tests.online.streams import ITEMS, SCHEMA, USERS, learner, table
from tests.optim.exact import present


def all_ids(batches: list[Batch]) -> list[int]:
    return [i for batch in batches if batch.events is not None for i in present(batch.events.ids).tolist()]


def read(source: Source) -> list[Batch]:
    found = []
    for batch in source:
        if batch is not None:
            assert isinstance(batch, Batch)
            found.append(batch)
    return found


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> None:
    new = path.with_name(f".{path.name}")
    pq.write_table(pa.table(columns), new, **options)
    new.rename(path)


def write_jsonl(path: Path, columns: dict[str, np.ndarray], mode: str = "w") -> None:
    rows = {name: values.tolist() for name, values in columns.items()}
    with path.open(mode) as file:
        for row in zip(*rows.values(), strict=True):
            file.write(json.dumps(dict(zip(rows, row, strict=True))) + "\n")


def write_csv(path: Path, columns: dict[str, np.ndarray]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))


@pytest.mark.parametrize("value", [1.1e19, -1e30, 1e39, float("inf"), float("nan")])
def test_numbers_whose_square_is_not_finite_are_rejected(value: float) -> None:
    """Such a number would make a second moment infinite, after which its weight would never change again."""
    schema = Schema({"price": "number"}, label="click")
    assert schema.convert_records([{"price": 1e19, "click": 1}, {"price": -1e19, "click": 0}], ["", ""]).rejected == []
    for good in (1.0, 1):  # A column of floats, and one of several types.
        bad = schema.convert_records([{"price": good, "click": 1}, {"price": value, "click": 0}], ["", ""])
        assert len(bad.rejected) == 1
        assert re.search(r"price: .*(too large|not finite)", bad.rejected[0].reason)
        assert bad.events is not None
        assert len(bad.events) == 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def sources(kind: str, folder: Path, request: pytest.FixtureRequest) -> Any:
    """Return a function that opens a source of the same 1,000 events."""
    columns = table(1000)
    if kind == "parquet":
        data = folder / "data"
        data.mkdir()
        for number in range(3):
            part = {name: values[(0, 600, 900)[number] : (600, 900, 1000)[number]] for name, values in columns.items()}
            write_parquet(data / f"{number}.parquet", part, row_group_size=250)
        return lambda: ParquetSource(data, SCHEMA, batch_size=7)
    if kind == "jsonl":
        write_jsonl(folder / "a.jsonl", columns)
        return lambda: LinesSource(folder / "a.jsonl", SCHEMA, "jsonl", batch_size=7)
    if kind == "csv":
        write_csv(folder / "a.csv", columns)
        return lambda: LinesSource(folder / "a.csv", SCHEMA, "csv", batch_size=7)
    if kind == "redis":
        server = request.getfixturevalue("server")
        server.fill("clicks", columns, 1000)
        return lambda: RedisSource(server.url, "clicks", SCHEMA, batch_size=7)
    servers = request.getfixturevalue("kafka")(columns)
    return lambda: KafkaSource(servers, "clicks", SCHEMA, batch_size=7)


@pytest.fixture
def kafka() -> Iterator[Any]:
    """The mock cluster of librdkafka, which runs in the process of the producer and speaks Kafka's protocol."""
    confluent = pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    producer = confluent.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock"})

    def fill(columns: dict[str, np.ndarray], topic: str = "clicks", partition: int = 0) -> str:
        rows = {name: values.tolist() for name, values in columns.items()}
        for row in zip(*rows.values(), strict=True):
            producer.produce(topic, json.dumps(dict(zip(rows, row, strict=True))), partition=partition)
        producer.flush(20)
        broker = next(iter(producer.list_topics(timeout=10).brokers.values()))
        return f"{broker.host}:{broker.port}"

    yield fill
    producer.flush(5)


class PartialConsumer:
    """A Kafka consumer that sees only some of the partitions of a topic."""

    def __init__(self, consumer: Any, *partitions: int) -> None:
        self.consumer, self.partitions = consumer, list(partitions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.consumer, name)

    def list_topics(self, topic: str, timeout: float) -> Any:
        complete = self.consumer.list_topics(topic, timeout=timeout).topics[topic].partitions
        shown = {number: complete[number] for number in self.partitions}
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=shown)})


@pytest.mark.parametrize("follow", [True, False])
def test_a_kafka_partition_that_is_added_is_read_while_following(
    kafka: Any, follow: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cadam.online.data.sources.kafka.PARTITION_CHECK_SECONDS", 0.0)
    caplog.set_level("INFO", "cadam.online")
    kafka(table(10))
    servers = kafka(table(10, first=10), partition=2)
    source = KafkaSource(servers, "clicks", SCHEMA, batch_size=10, follow=follow, patience=0.05, poll=0.05)
    consumer = PartialConsumer(source.consumer, 0)
    monkeypatch.setattr(source, "consumer", consumer)
    found: list[int] = []
    for batch in source:
        found += [] if batch is None else all_ids([batch])
        if len(found) == 10 and consumer.partitions == [0]:
            assert source.state_dict()["offsets"] == {0: 10}
            consumer.partitions = [0, 2]
        elif len(found) == 20:
            break
    assert found == list(range(20 if follow else 10))
    assert source.state_dict()["offsets"] == ({0: 10, 2: 10} if follow else {0: 10})
    assert ("new partitions" in caplog.text) == follow


@pytest.mark.parametrize("count", [3, 0])
def test_a_kafka_topic_that_was_created_again_is_logged_as_an_error(
    kafka: Any, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    kafka(table(20), partition=1)
    servers = kafka(table(count, first=20))
    source = KafkaSource(servers, "clicks", SCHEMA, poll=0.05)
    source.load_state_dict({"source": "kafka", "topic": "clicks", "offsets": {0: 500, 1: 20, 9: 4}})
    assert all_ids(read(source)) == list(range(20, 20 + count))
    assert source.state_dict()["offsets"] == {0: count, 1: 20, 2: 0, 3: 0}
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert sum("partition 0" in error and "500" in error for error in errors) == 1
    assert sum("[9]" in error for error in errors) == 1
    assert not any("partition 1" in error for error in errors)


@pytest.mark.parametrize("follow", [True, False])
def test_a_fatal_error_of_kafka_is_a_connection_error(
    kafka: Any, follow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import confluent_kafka

    fatal = confluent_kafka.KafkaError(confluent_kafka.KafkaError._FATAL, "fenced by another", fatal=True)
    message = SimpleNamespace(error=lambda: fatal, partition=lambda: 0, offset=lambda: None)
    servers = kafka(table(10))
    source = KafkaSource(servers, "clicks", SCHEMA, follow=follow)
    consumer = SimpleNamespace(
        list_topics=source.consumer.list_topics, assign=lambda all: None, consume=lambda count, wait: [message]
    )
    monkeypatch.setattr(source, "consumer", consumer)
    with pytest.raises(ConnectionError, match=f"{servers}.*'clicks'.*fenced by another"):
        next(iter(source))


KINDS = ["parquet", "jsonl", "csv", "redis", "kafka"]


@pytest.mark.parametrize("removed", [(), range(12, 40)])
def test_kafka_messages_that_were_removed_before_they_were_read_are_a_warning(
    kafka: Any, removed: Sequence[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = KafkaSource(kafka(table(100)), "clicks", SCHEMA, batch_size=7)
    consumer = source.consumer

    class Trimmed:
        def __getattr__(self, name: str) -> Any:
            return getattr(consumer, name)

        def consume(self, count: int, timeout: float) -> list[Any]:
            return [m for m in consumer.consume(count, timeout) if m.error() or m.offset() not in removed]

    monkeypatch.setattr(source, "consumer", Trimmed())
    ids = np.concatenate([batch.events.ids for batch in read(source) if batch.events is not None])
    assert len(ids) == 100 - len(removed)
    assert ("offset 40 after 11" in caplog.text) == bool(removed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_yields_all_events_unchanged_and_in_order(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    batches = read(sources(kind, tmp_path, request)())
    columns = table(1000)
    assert not any(batch.rejected for batch in batches)
    assert all_ids(batches) == list(range(1000))
    for name in ("user", "item", "price"):
        values = np.concatenate([batch.events.features[name] for batch in batches if batch.events])
        assert values.dtype == (np.float64 if name == "price" else np.int64)
        assert values.tobytes() == columns[name].astype(values.dtype).tobytes()
    labels = np.concatenate([batch.events.labels for batch in batches if batch.events])
    assert labels.tobytes() == columns["click"].tobytes()
    assert max(len(batch.events) for batch in batches if batch.events) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_continues_from_a_position_yields_the_same_batches(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    make = sources(kind, tmp_path, request)
    complete = [all_ids([batch]) for batch in read(make())]
    for stop in (0, 1, 64, 65, len(complete)):
        first = make()
        stream = (batch for batch in first if batch is not None)
        before = [all_ids([next(stream)]) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        if "offsets" in state:  # JSON has no integer keys, but checkpoints have.
            state["offsets"] = {int(key): value for key, value in state["offsets"].items()}
        second = make()
        second.load_state_dict(state)
        assert before + [all_ids([batch]) for batch in read(second)] == complete


def test_a_position_of_another_source_is_an_error(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    csv_source, parquet = (sources(kind, tmp_path, request)() for kind in ("csv", "parquet"))
    with pytest.raises(ValueError, match=r"'csv'.*'parquet'"):
        parquet.load_state_dict(csv_source.state_dict())
    with pytest.raises(ValueError, match="--batch-size"):
        ParquetSource(parquet.path, SCHEMA, batch_size=8).load_state_dict(parquet.state_dict())


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_position_in_a_file_that_was_replaced_is_an_error(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    opened = sources(kind, tmp_path, request)
    first = opened()
    next(iter(first))
    state = first.state_dict()
    opened().load_state_dict(state)
    other = table(1000, seed=9)
    path = next(p for p in sorted(tmp_path.rglob("*")) if p.is_file())
    {"parquet": write_parquet, "jsonl": write_jsonl, "csv": write_csv}[kind](path, other)
    with pytest.raises(ValueError, match="is not the file"):
        opened().load_state_dict(state)


def test_a_position_in_a_parquet_file_that_was_replaced_while_it_was_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, table(1000))
    source = ParquetSource(path, SCHEMA, batch_size=2)
    batches = iter(source)
    next(batches)
    write_parquet(tmp_path / "new", table(900, seed=9))
    (tmp_path / "new").rename(path)
    next(batches)  # The old file is still open.
    with pytest.raises(ValueError, match="is not the file"):
        ParquetSource(path, SCHEMA, batch_size=2).load_state_dict(source.state_dict())


def test_a_folder_that_cannot_be_listed_is_logged_once_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / f"{name}.parquet", table(10, first=10 * (name == "b")))
    scandir = os.scandir

    def closed(path: Any) -> Any:
        if Path(path).name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    source = ParquetSource(tmp_path, SCHEMA)
    with caplog.at_level(logging.ERROR):
        assert all_ids(read(source)) == list(range(10, 20))
    source._find_new_files()
    (message,) = caplog.messages
    assert str(tmp_path / "a") in message


def test_a_header_of_csv_may_be_quoted_and_must_contain_the_features(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"event","user","item","price","at","click"\n1,2,3,0.5,4,1\n')
    assert all_ids(read(LinesSource(path, SCHEMA, "csv"))) == [1]
    path.write_text("event,user,price,at,click\n1,2,0.5,4,1\n")
    with pytest.raises(ValueError, match="no column item"):
        read(LinesSource(path, SCHEMA, "csv"))


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_last_line_without_a_line_break_is_left_for_a_later_run(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, columns = tmp_path / "a", {**table(12), "last": np.linspace(0, 0.1, 12)}
    (write_csv if form == "csv" else write_jsonl)(path, columns)
    schema = Schema({"user": f"category:{USERS}", "last": "number"}, label="click", id="event")
    complete = path.read_bytes()
    path.write_bytes(complete[:-9])
    first = LinesSource(path, schema, form, batch_size=5)  # type: ignore[arg-type]
    assert all_ids(read(first)) == list(range(11))
    assert f"{path}: line {12 + (form == 'csv')}, the last, of" in caplog.text
    assert "echo >> FILE" in caplog.text
    path.write_bytes(complete)
    again = LinesSource(path, schema, form, batch_size=5)  # type: ignore[arg-type]
    again.load_state_dict(first.state_dict())
    caplog.clear()
    (rest,) = read(again)
    assert rest.events is not None
    assert all_ids([rest]) == [11]
    assert rest.events.features["last"] == pytest.approx([0.1])
    assert not rest.rejected
    assert not caplog.text


def test_a_complete_json_object_without_a_line_break_is_read_and_later_lines_are_numbered_correctly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, table(3))
    path.write_bytes(path.read_bytes()[:-1])
    source = LinesSource(path, SCHEMA, "jsonl")
    assert all_ids(read(source)) == [0, 1, 2]
    assert not caplog.text
    with path.open("a") as file:
        file.write("\nno event\n")
    rejected = [one for batch in read(source) for one in batch.rejected]
    assert [one.where for one in rejected] == [f"{path}, line 4 at byte {path.stat().st_size - 9}"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_every_file_format_yields_the_same_batches(form: str, tmp_path: Path) -> None:
    {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}[form](tmp_path / f"a.{form}", table(120))
    batches = read(open_source(f"{form}:{tmp_path / 'a'}.{form}", SCHEMA, batch_size=50))
    assert [len(batch.events) for batch in batches if batch.events is not None] == [50, 50, 20]


def test_a_folder_is_listed_again_only_when_all_its_files_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        write_parquet(tmp_path / f"{number}.parquet", table(2, first=2 * number))
    listings: list[str] = []
    walk = os.walk

    def counted(folder: str, **options: Any) -> Any:
        listings.append(folder)
        return walk(folder, **options)

    monkeypatch.setattr(os, "walk", counted)
    assert all_ids(read(ParquetSource(tmp_path, SCHEMA))) == list(range(10))
    assert len(listings) == 2


def test_a_parquet_file_that_vanishes_is_rejected(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", table(10, first=10 * (name == "b")))
    source = ParquetSource(tmp_path, SCHEMA, follow=True)
    source._find_new_files()
    (tmp_path / "a.parquet").unlink()
    batches = iter(source)
    assert "the file cannot be read: " in present(next(batches)).rejected[0].reason
    assert all_ids([present(next(batches))]) == list(range(10, 20))


def test_separate_labels_and_missing_labels_are_joined(tmp_path: Path) -> None:
    lines = [
        {"event": 1, "user": 1, "item": 2, "price": 0.5, "at": 1},
        {"event": 2, "user": 1, "item": 2, "price": 0.5, "at": 1, "click": None},
        {"event": 1, "click": 1},
        {"event": 2, "click": True},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ours = learner().run(LinesSource(tmp_path / "a.jsonl", SCHEMA, "jsonl"))
    numbers = ours.metrics()
    assert (numbers["events"], numbers["learned"], numbers["pending"], numbers["rejected"]) == (2, 2, 0, 0)


def test_a_growing_file_and_a_growing_folder_are_followed(tmp_path: Path) -> None:
    lines, folder = tmp_path / "a.jsonl", tmp_path / "data"
    folder.mkdir()
    write_jsonl(lines, table(10))
    write_parquet(folder / "0.parquet", table(10))
    for source in (
        LinesSource(lines, SCHEMA, "jsonl", batch_size=8, follow=True, patience=0.05, poll=0.01),
        ParquetSource(folder, SCHEMA, batch_size=8, follow=True, poll=0.01),
    ):
        seen: list[int] = []
        grown = False
        for batch in source:
            seen += all_ids([batch]) if batch is not None else []
            if len(seen) == 10 and not grown:
                grown = True
                write_jsonl(lines, table(10, first=10), "a")
                write_parquet(folder / "1.parquet", table(10, first=10))
            if len(seen) == 20:
                break
        assert seen == list(range(20))
        lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:10]))
        (folder / "1.parquet").unlink()


def write_lines(path: Path, count: int, first: int, form: str) -> None:
    (write_csv if form == "csv" else write_jsonl)(path, table(count, first=first))


def rotate(path: Path, way: str) -> None:
    """Rotate a file like logrotate: it is either moved away and created again, or copied and truncated."""
    if way == "copytruncate":
        path.with_name(f"{path.name}.1").write_bytes(path.read_bytes())
        path.write_bytes(b"")
    else:
        path.rename(path.with_name(f"{path.name}.1"))


def followed(path: Path, form: str) -> LinesSource:
    return LinesSource(path, SCHEMA, form, batch_size=8, follow=True, patience=0.02, poll=0.005)  # type: ignore[arg-type]


def until(batches: Iterator[Batch | None], last: int, attempts: int = 400) -> list[int]:
    """Return the ids up to `last`, or those of the first batches if it does not arrive."""
    seen: list[int] = []
    for _ in range(attempts):
        batch = next(batches)
        seen += [] if batch is None else all_ids([batch])
        assert batch is None or not batch.rejected
        if last in seen:
            break
    return seen


WAYS = [(way, count, form) for way in ("copytruncate", "rename") for count in (3, 500) for form in ("csv", "jsonl")]


def hundred_lines(path: Path, form: str) -> tuple[LinesSource, Iterator[Batch | None]]:
    write_lines(path, 100, 0, form)
    source = followed(path, form)
    return source, iter(source)


@pytest.mark.parametrize(("way", "count", "form"), WAYS)
def test_a_file_that_is_rotated_while_it_is_followed_is_read_completely(
    way: str, count: int, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    source, batches = hundred_lines(path, form)
    assert until(batches, 99) == list(range(100))
    if way == "rename":
        with path.open("a") as file:  # Lines are added before and after it is renamed.
            file.write(write_row(100, form))
        rotate(path, way)
        with path.with_name("a.1").open("a") as file:
            file.write(write_row(101, form))
        assert until(batches, 101) == [100, 101]
        assert until(batches, -1, attempts=5) == []
    else:
        rotate(path, way)
    assert not caplog.text
    write_lines(path, count, 1000, form)
    assert until(batches, 999 + count) == list(range(1000, 1000 + count))
    (record,) = caplog.records
    if way == "copytruncate":
        assert record.levelname == "ERROR"
    else:
        assert record.levelname == "WARNING"
        assert str(path) in record.getMessage()
    again = followed(path, form)
    again.load_state_dict(source.state_dict())
    with path.open("a") as file:
        file.write(write_row(9999, form))
    assert until(iter(again), 9999) == [9999]


def write_row(number: int, form: str) -> str:
    row = {name: values[0].item() for name, values in table(1, first=number).items()}
    return (json.dumps(row) if form == "jsonl" else ",".join(map(str, row.values()))) + "\n"


def test_an_incomplete_last_line_of_a_rotated_file_is_reported_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.csv"
    write_lines(path, 10, 0, "csv")
    with path.open("a") as file:
        file.write("10,3,")
    batches = iter(followed(path, "csv"))
    assert until(batches, 9) == list(range(10))
    rotate(path, "rename")
    write_lines(path, 10, 20, "csv")
    assert until(batches, 29) == list(range(20, 30))
    assert "5 bytes without a line break" in caplog.text


@pytest.mark.parametrize(("way", "count", "form"), WAYS)
def test_a_file_that_was_rotated_before_a_restart_is_found_under_its_new_name_or_is_an_error(
    way: str, count: int, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    source, batches = hundred_lines(path, form)
    first = until(batches, 39)
    rotate(path, way)
    write_lines(path, count, 1000, form)
    state = source.state_dict()  # The position in the old file.
    refusing = LinesSource(path, SCHEMA, form)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is not the file.*--follow"):
        refusing.load_state_dict(state)
    again = followed(path, form)
    again.load_state_dict(state)
    assert f"{path}.1" in caplog.text
    assert first + until(iter(again), 999 + count) == [*range(100), *range(1000, 1000 + count)]
    path.with_name("a.1").unlink()
    with pytest.raises(ValueError, match="is not the file"):
        followed(path, form).load_state_dict(state)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("begun", [False, True], ids=["at the beginning", "after the header"])
def test_a_rotated_file_is_recognized_even_if_the_new_one_begins_alike(form: str, begun: bool, tmp_path: Path) -> None:
    """The bytes before the position are empty or the header, so only the inode differs."""
    path = tmp_path / "a[1]"
    write_lines(path, 0 if begun and form == "csv" else 5, 0, form)
    source = followed(path, form)
    if begun and form == "csv":
        next(iter(source))
        assert source.offset > 0
        with path.open("a") as file:
            file.writelines(write_row(number, form) for number in range(5))
    state = source.state_dict()
    rotate(path, "rename")
    write_lines(path, 3, 1000, form)
    again = followed(path, form)
    again.load_state_dict(state)
    assert until(iter(again), 1002) == [*range(5), *range(1000, 1003)]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_file_that_is_replaced_by_a_longer_copy_is_not_read_twice(form: str, tmp_path: Path) -> None:
    """Programs such as rsync replace files this way."""
    path = tmp_path / "a"
    write_lines(path, 5, 0, form)
    source = followed(path, form)
    batches = iter(source)
    assert until(batches, 4) == list(range(5))
    new = tmp_path / "new"
    new.write_bytes(path.read_bytes() + write_row(5, form).encode())
    new.rename(path)
    assert until(batches, 5) == [5]
    again = followed(path, form)
    again.load_state_dict(source.state_dict())
    assert until(iter(again), -1, attempts=3) == []


def test_a_position_after_a_line_that_is_too_long_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x" * 700_000 + "y" * 5 + "\n" + write_row(1, "jsonl"))
    source = LinesSource(path, SCHEMA, "jsonl", batch_size=1, max_bytes=1000)
    assert next(iter(source)).rejected[0].size == 700_006  # type: ignore[union-attr]
    again = LinesSource(path, SCHEMA, "jsonl", batch_size=1, max_bytes=1000)
    again.load_state_dict(source.state_dict())
    assert all_ids(read(again)) == [1]


def test_a_damaged_parquet_file_is_rejected_and_the_next_is_read(tmp_path: Path) -> None:
    for number in range(3):
        write_parquet(tmp_path / f"{number}.parquet", table(100, first=100 * number))
    content = (tmp_path / "1.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(content[: len(content) // 2])
    batches = read(ParquetSource(tmp_path, SCHEMA))
    assert all_ids(batches) == [*range(100), *range(200, 300)]
    (rejected,) = [one for batch in batches for one in batch.rejected]
    assert rejected.where.endswith("1.parquet")
    assert "the file cannot be read: " in rejected.reason


def test_parquet_rows_may_contain_missing_values_lists_text_and_timestamps(tmp_path: Path) -> None:
    schema = Schema({"ids": "category:10[2]", "word": "hash:50"}, time="at", user="who:text")
    ids = pa.array([[1, 2], [3, 10], [5, 6], None], pa.list_(pa.int32(), 2))
    at = pa.array(np.array(["2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04"], "datetime64[ms]"))
    columns = {
        "ids": ids,
        "word": ["a", "b", "é", "a"],
        "label": [1, 0, None, 1],
        "at": at,
        "who": ["x", "y", "z", "x"],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (batch,) = read(ParquetSource(tmp_path / "a.parquet", schema))
    found = present(batch.events)
    assert found.features["ids"].tolist() == [[1, 2], [5, 6]]
    assert present(found.time).tolist() == [1704067200.0, 1704240000.0]
    assert present(found.users).tolist() == ["x", "z"]
    assert np.isnan(present(found.labels)).tolist() == [False, True]
    assert [one.reason for one in batch.rejected] == ["ids: 10 is not from 0 to 9", "missing field 'ids'"]
    assert "row 1" in batch.rejected[0].where


@pytest.mark.parametrize("gap", [[], [None]])
@pytest.mark.parametrize("zone", [None, "Europe/Athens"])
def test_parquet_times_may_have_nanoseconds(zone: str | None, gap: list[None], tmp_path: Path) -> None:
    at = pa.array([1_704_067_200_000_000_001, 1_704_067_200_500_000_999, *gap], pa.timestamp("ns", zone))
    pq.write_table(pa.table({"at": at, "x": [1.0] * len(at), "label": [1] * len(at)}), tmp_path / "a.parquet")
    (batch,) = read(ParquetSource(tmp_path / "a.parquet", Schema({"x": "number"}, time="at")))
    assert batch.events is not None
    assert batch.events.time is not None
    assert batch.events.time.tolist() == [1704067200.0, 1704067200.5]
    assert [one.reason for one in batch.rejected] == ["missing field 'at'"] * len(gap)


def test_a_boolean_is_not_a_number_but_may_be_a_label(tmp_path: Path) -> None:
    schema = Schema({"price": "number", "prices": "number[2]"}, label="click", time="at")
    good: dict[str, Any] = {"price": 1, "prices": [1.0, 2], "click": True, "at": 3}
    wrong: list[dict[str, Any]] = [{"price": True}, {"prices": [1, False]}, {"at": True}]
    lines = [good, *({**good, **change} for change in wrong), {**good, "click": False}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (batch,) = read(LinesSource(tmp_path / "a.jsonl", schema, "jsonl"))
    assert batch.events is not None
    assert batch.events.labels is not None
    assert batch.events.labels.tolist() == [1, 0]
    assert [one.reason.partition(":")[0] for one in batch.rejected] == ["price", "prices", "at"]
    assert all("not a number" in one.reason for one in batch.rejected)


@pytest.mark.parametrize("distinct", [200, 900, 2048])
def test_every_distinct_text_is_converted_once_if_there_are_separate_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distinct: int
) -> None:
    rows = 2048
    texts = [None if row == 5 else f"text {row % distinct}" for row in range(rows)]
    columns = {"event": np.arange(rows), "word": texts, "label": np.ones(rows)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    converted: list[Any] = []
    original = conversion._integer_of_text

    def counted(value: Any, has_comma: bool) -> Any:
        converted.append(value)
        return original(value, has_comma)

    monkeypatch.setattr(conversion, "_integer_of_text", counted)
    schema = Schema({"word": "hash:1000"}, id="event")
    batches = read(ParquetSource(tmp_path / "a.parquet", schema, batch_size=64))
    assert len(converted) <= rows
    buckets = np.concatenate([present(batch.events).features["word"] for batch in batches])
    assert buckets.tolist() == convert([text for text in texts if text], Kind("hash", 1000))[0].tolist()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("index", [None, pa.int8(), pa.int32()])
def test_plain_and_dictionary_encoded_text_are_read_alike(kind: pa.DataType, index: pa.DataType | None) -> None:
    texts = ["a", "bé", None, "", "a"] * 30
    column = pa.chunked_array([pa.array(texts, kind)[:70], pa.array(texts, kind)[70:]])
    if index is not None:
        column = column.cast(pa.dictionary(index, kind))
    values = read_values(column)
    assert list(values) == texts
    assert [values[row] for row in range(1, 5)] == texts[1:5]
    assert isinstance(values, TextColumn if index is None else DictionaryColumn)


@pytest.mark.parametrize("kind", ["hash:1000003", "hash:1000003[1]"])
@pytest.mark.parametrize("number", [0, 5, -5, 123456789, 2**63 - 1, -(2**63)])
def test_an_integer_has_the_same_hash_as_number_and_as_text(number: int, kind: str) -> None:
    schema = Schema({"x": kind})

    def buckets(*values: Any, text: bool = False) -> list[int]:
        shown = [[value] if kind.endswith("]") and not text else value for value in values]
        batch = schema.convert_records([{"x": value} for value in shown], [""] * len(values), text=text)
        assert batch.events is not None
        return [int(bucket) for bucket in batch.events.features["x"].reshape(-1)]

    (bucket,) = buckets(number)
    assert buckets(str(number), text=True) == buckets(str(number)) == [bucket]
    assert buckets(number, "word")[0] == buckets("word", str(number), text=True)[1] == bucket
    assert buckets(str(number), str(number), "", text=True)[:2] == [bucket, bucket]
    for column in (np.array([number]), np.array([str(number)])):
        alone = schema.convert_columns({"x": column[:, None] if kind.endswith("]") else column}, 1, str).events
        assert alone is not None
        assert alone.features["x"].reshape(-1).tolist() == [bucket]
    other = [f"+{number}", f"0{number}", f" {number}", f"{number}.5", str(10 * number) + "0" * 20, "-0", "٥"]
    if not kind.endswith("]"):
        assert bucket not in buckets(*other, text=True)


@pytest.mark.parametrize("kind", ["hash:1000003", "hash:1000003?"])
@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (True, ["true", "True", "1", "1.0"]),
        (False, ["false", "False", "0", "0.0"]),
        (3.0, ["3", "3.0", "3.00"]),
        (-3, ["-3", "-3.0"]),
        (2.0**53, [f"{2**53}", f"{2**53}.0"]),
    ],
)
def test_equal_values_in_csv_and_json_have_the_same_hash(kind: str, value: Any, texts: list[str]) -> None:
    """A model that learned from CSV may be queried with JSON."""
    schema = Schema({"x": kind})
    asked = schema.convert_records([{"x": value}], [""]).events
    given = schema.convert_records(
        [{"x": text} for text in [*texts, "word"]], [""] * (len(texts) + 1), text=True
    ).events
    assert asked is not None
    assert given is not None
    assert given.features["x"][:-1].tolist() == asked.features["x"].tolist() * len(texts)
    assert given.features["x"][-1] != asked.features["x"][0]


def test_texts_of_integers_beyond_the_precision_of_floats_are_hashed_as_text() -> None:
    texts = [f"{2**53 + 2}.0", f"{2**53 + 2}", "03.0", "3.5", "tRUE"]
    buckets = convert(texts, Kind("hash", 1_000_003), text=True)[0].tolist()
    meant = convert([2**53 + 2, 3, 1], Kind("hash", 1_000_003))[0].tolist()
    assert buckets[1] == meant[0]
    assert not {buckets[0], *buckets[2:]} & set(meant)


def test_integers_beyond_64_signed_bits_are_hashed_and_joined_like_their_texts() -> None:
    integers = [2**63, 2**64 - 1, 2**70, -(2**63) - 1]
    for kind in (Kind("hash", 1_000_003), Kind("hash", 1_000_003, optional=True), Kind("text")):
        expected, _ = convert([str(integer) for integer in integers], kind, text=True)
        for values in (integers, [*integers, 5], np.array(integers[:2], np.uint64)):
            converted, problems = convert(values, kind)
            assert not problems
            size = min(len(values), len(integers))
            assert converted[:size].tolist() == expected[:size].tolist()
    assert "write NAME:text" in convert([2**63], Kind("integer"))[1][0]
    assert "is not from 0 to 4" in convert([2**70], Kind("category", 5))[1][0]


@pytest.mark.parametrize("kind", ["integer", "hash:1000"])
def test_a_whole_float_is_an_integer_as_far_as_floats_are_exact(kind: str, tmp_path: Path) -> None:
    schema = Schema({"price": "number", "item": kind if "hash" in kind else "hash:9"}, id="event")
    name = "event" if kind == "integer" else "item"
    rows = [2.0**53, -(2.0**53), 2.0**53 + 2, 1e18]
    columns: dict[str, list[float]] = {"price": [1.0] * 4, "item": [1] * 4, "event": [1, 2, 3, 4], "label": [1.0] * 4}
    columns[name] = rows
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    lines = [json.dumps({key: values[row] for key, values in columns.items()}) for row in range(4)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for source in (ParquetSource(tmp_path / "a.parquet", schema), LinesSource(tmp_path / "a.jsonl", schema, "jsonl")):
        (batch,) = read(source)
        assert len(present(batch.events)) == 2
        for one, row in zip(batch.rejected, rows[2:], strict=True):
            assert one.reason.startswith(f"{name}: {row:.0f} is a float")


def test_csv_may_contain_booleans_and_integers_as_pandas_writes_them(tmp_path: Path) -> None:
    schema = Schema({"item": "category:9", "price": "number"}, label="click", id="event")
    rows = [
        "1,3.0,1.5,True",
        "2,4,2,False",
        "3,5.0,1,true",
        "4,0,1,false",
        "5.0,8.0,1,",
        "6,3.5,1,1",
        "7,9.0,1,1",
        "8,True,1,1",
        "9,1,true,1",
        "10,1,1,yes",
    ]
    (tmp_path / "a.csv").write_text("\n".join(["event,item,price,click", *rows, ""]))
    (batch,) = read(LinesSource(tmp_path / "a.csv", schema, "csv"))
    assert batch.events is not None
    assert batch.events.labels is not None
    assert batch.events.features["item"].tolist() == [3, 4, 5, 0, 8]
    assert batch.events.labels[:4].tolist() == [1, 0, 1, 0]
    assert all_ids([batch]) == [1, 2, 3, 4, 5]
    assert [one.reason for one in batch.rejected] == [
        "item: 3.5 is not an integer",
        "item: 9 is not from 0 to 8",
        "item: text 'True' is not a number",
        "price: text 'true' is not a number",
        "click: text 'yes' is not a number",
    ]


@pytest.mark.parametrize("text", ["1_000", "٣", "１", "0x10", "1__0", "1,0", "−1"])
@pytest.mark.parametrize("kind", ["number", "category:2000"])
def test_a_number_in_text_must_be_written_in_ascii(kind: str, text: str) -> None:
    batch = Schema({"x": kind}).convert_records([{"x": text}, {"x": " 1"}], ["first", "second"], text=True)
    assert [one.reason for one in batch.rejected] == [f"x: text {text!r} is not a number"]
    assert batch.events is not None
    assert batch.events.features["x"].tolist() == [1]


@pytest.mark.parametrize("gap", [False, None])
def test_a_boolean_column_of_parquet_is_0_and_1(gap: bool | None, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"x": [True, False, gap], "click": [True, False, False]})
    (batch,) = read(ParquetSource(tmp_path / "a.parquet", Schema({"x": "number"}, label="click")))
    assert batch.events is not None
    assert batch.events.features["x"].tolist() == ([1, 0, 0] if gap is False else [1, 0])


def test_standard_input_is_read_until_it_is_closed() -> None:
    code = (
        "import sys; from tests.online.streams import SCHEMA, learner; from cadam.online import open_source\n"
        "ours = learner().run(open_source('csv:-', SCHEMA, batch_size=64)); print(ours.events, ours.learned)"
    )
    rows = [table(1), *zip(*(v.tolist() for v in table(500).values()), strict=True)]
    lines = "\n".join(",".join(map(str, row)) for row in rows)  # The last line has no line break.
    result = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, timeout=100)
    assert result.stdout.split() == ["500", "500"], result.stderr


def test_uris_name_sources(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", table(3))
    assert len(all_ids(read(open_source(f"csv:{tmp_path}/a.csv", SCHEMA)))) == 3
    assert isinstance(open_source("redis://localhost:1/clicks?db=2", SCHEMA), RedisSource)
    for wrong in ("", "csv:", "ftp://host/x", "redis://localhost", "redis://localhost/x?bd=2", "kafka://host"):
        with pytest.raises(ValueError, match=r"not a source|unknown fields"):
            open_source(wrong, SCHEMA)
    with pytest.raises(FileNotFoundError):
        open_source(f"parquet:{tmp_path}/none", SCHEMA)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"features": {}}, "at least one feature"),
        ({"features": {"a": "float"}}, "unknown kind 'float'"),
        ({"features": {"a": "category"}}, "need a size"),
        ({"features": {"a": "number:3"}}, "need a size"),
        ({"features": {"a": "text"}}, "'text'"),
        ({"features": {"a": "number"}, "id": "x:float"}, "'x:float'"),
    ],
)
def test_an_invalid_schema_is_an_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schema(**wrong)


# Redis ---------------------------------------------------------------------------------------------------------


def test_redis_stopped_and_restarted_in_the_middle(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fill("clicks", table(3000), 3000)
    source = RedisSource(server.url, "clicks", SCHEMA, batch_size=64, follow=True, patience=None, poll=0.01, retry=0.05)
    ours = learner(checkpoint=tmp_path / "state")

    back = threading.Timer(0.5, server.start)

    def disturb(_: object) -> None:
        if ours.events == 640 and back.ident is None:  # Reports are called repeatedly while nothing arrives.
            server.stop()
            back.start()
        if ours.events >= 2944:
            ours.stop()

    ours.reports = [disturb]
    ours.run(source)
    back.join()
    assert (ours.events, ours.learned) == (2944, 2944)
    assert "Redis is away" in caplog.text
    assert "Redis is back" in caplog.text


@pytest.mark.parametrize("kind", ["redis", "kafka"])
def test_an_unreachable_server_is_an_error_unless_it_is_followed(kind: str) -> None:
    pytest.importorskip({"redis": "redis", "kafka": "confluent_kafka"}[kind])
    uri = f"{kind}://127.0.0.1:1/clicks"
    with pytest.raises(ConnectionError, match=r"cannot be reached.*127\.0\.0\.1:1"):
        next(iter(open_source(uri, SCHEMA)))
    assert next(iter(open_source(uri, SCHEMA, follow=True))) is None


def test_a_source_waits_for_a_redis_server_that_goes_away_even_without_follow(server: Server) -> None:
    server.fill("clicks", table(20), 20)
    batches = iter(RedisSource(server.url, "clicks", SCHEMA, batch_size=10, retry=0.01))
    first = next(batches)
    server.stop()
    assert next(batches) is None
    server.start()
    assert all_ids([present(first), *(batch for batch in batches if batch is not None)]) == list(range(20))


def test_a_redis_stream_that_was_trimmed_beyond_the_position_is_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fill("clicks", table(100), 100)
    source = RedisSource(server.url, "clicks", SCHEMA, batch_size=10)
    next(iter(source))
    server.client.xtrim("clicks", maxlen=50, approximate=False)
    second = RedisSource(server.url, "clicks", SCHEMA, batch_size=10)
    second.load_state_dict(source.state_dict())
    assert all_ids(read(second)) == list(range(50, 100))
    assert caplog.records[0].levelname == "WARNING"
    assert source.position in caplog.records[0].getMessage()


def test_a_redis_stream_that_is_trimmed_while_it_is_read_is_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fill("clicks", table(100), 100)
    batches = iter(RedisSource(server.url, "clicks", SCHEMA, batch_size=10))
    first = [next(batches), next(batches)]
    assert "trimmed" not in caplog.text
    server.client.xtrim("clicks", maxlen=50, approximate=False)
    assert all_ids([present(batch) for batch in (*first, *batches)]) == [*range(20), *range(50, 100)]
    assert "trimmed" in caplog.text


def test_a_redis_stream_that_was_created_again_is_logged_as_an_error(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.xadd("clicks", {"event": "1"}, id="5-1")
    source = RedisSource(server.url, "clicks", SCHEMA)
    source.load_state_dict({"source": "redis", "stream": "clicks", "position": "9-9"})
    assert read(source) == []
    assert "ERROR" in [record.levelname for record in caplog.records]


def test_the_columns_of_a_redis_stream_are_validated(server: Server) -> None:
    source = RedisSource(server.url, "clicks", Schema({"prize": "number"}, label="click", id="event"))
    with pytest.raises(ValueError, match="no stream 'clicks'"):
        check_columns(source, source.schema)
    server.client.xadd("clicks", {"event": 1, "click": 1})
    check_columns(source, source.schema)  # There is only a separate label.
    server.client.xadd("clicks", {"json": json.dumps({"event": 2, "user": 3, "item": 4, "price": 5.0, "at": 6.0})})
    with pytest.raises(
        MismatchError, match=r"clicks has no column 'prize'.*it has event, click, user, item, price, at"
    ):
        check_columns(source, source.schema)
    server.client.xadd("clicks", {"event": 3, "user": 3, "item": 4, "prize": 5.0, "at": 6.0})
    check_columns(source, source.schema)  # Events without the column are rejected later.


def test_a_redis_key_that_is_not_a_stream_is_an_error(server: Server) -> None:
    server.client.set("clicks", "text")
    source = RedisSource(server.url, "clicks", SCHEMA)
    with pytest.raises(ValueError, match="'clicks': WRONGTYPE"):
        check_columns(source, SCHEMA)
    with pytest.raises(ValueError, match="'clicks': WRONGTYPE"):
        list(source)


@pytest.mark.parametrize("setting", ["securty.protocol=ssl", "security.protocol=nonsense"])
def test_an_unknown_setting_of_kafka_is_an_error(setting: str) -> None:
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    with pytest.raises(ValueError, match=f"settings .{setting.partition('=')[0]}.: .*configuration"):
        open_source(f"kafka://localhost:1/clicks?{setting}", SCHEMA)


def test_following_a_compressed_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").touch()
    with pytest.raises(ValueError, match="follow"):
        LinesSource(tmp_path / "a.csv.gz", SCHEMA, "csv", follow=True)


def test_redis_entries_may_be_json_and_unreadable_entries_are_rejected(server: Server) -> None:
    good = {"event": 1, "user": 1, "item": 2, "price": 0.5, "at": 1, "click": 1}
    for entry in (
        {"json": json.dumps(good)},
        {"json": "{"},
        {"json": "x" * 3000},
        {"event": b"\xff\xfe"},
        {**good, "event": "2"},
        {"nothing": ""},
    ):
        server.client.xadd("clicks", entry)
    source = RedisSource(server.url, "clicks", SCHEMA, max_bytes=2000)
    (batch,) = read(source)
    assert all_ids([batch]) == [1, 2]
    reasons = sorted(one.reason.partition(":")[2][:12] for one in batch.rejected)
    assert len(batch.rejected) == 4
    assert any("3000 bytes, more than 2000" in one.reason for one in batch.rejected), reasons


def test_the_conversion_of_a_message_does_not_depend_on_other_messages() -> None:
    schema = Schema({"x": "number"}, label="click", id="event")

    def in_json(event: int, x: Any, **more: Any) -> Message:
        return Message(str(event), text=json.dumps({"event": event, "x": x, **more}).encode())

    def in_fields(event: int, **more: bytes) -> Message:
        fields = {b"event": str(event).encode(), **{name.encode(): value for name, value in more.items()}}
        return Message(str(event), fields=fields)

    records = [
        in_json(1, "0.5"),
        in_fields(2, x=b"0.5"),
        in_json(3, 0.25),
        in_json(4, ""),
        in_fields(5, click=b"1"),
        Message("6", text=b'{"event": 3, "click": 1}'),
        in_fields(7, x=b"1"),
    ]
    batch = convert_messages(records, schema, max_bytes=1000)
    assert all_ids([batch]) == [2, 3, 7]
    assert batch.events is not None
    assert batch.events.features["x"].tolist() == [0.5, 0.25, 1]
    assert batch.labels is not None
    assert batch.labels.ids.tolist() == [5, 3]
    apart = [convert_messages([record], schema, max_bytes=1000) for record in records]
    assert batch.rejected == [one for part in apart for one in part.rejected]
    assert [one.where for one in batch.rejected] == ["1", "4"]


@pytest.mark.parametrize("of", [list, tuple, lambda texts: np.array(texts, dtype=object)])
def test_ids_and_users_keep_nul_characters_at_their_end(of: Any) -> None:
    texts = ["a", "a\0", "a\0\0"]
    events = Events({"x": np.zeros(3)}, ids=of(texts), users=of(texts))
    assert events.ids is not None
    assert events.users is not None
    assert events.ids.tolist() == events.users.tolist() == Labels(of(texts), np.ones(3)).ids.tolist() == texts


# Fuzzing ------------------------------------------------------------------------------------------------------


def fuzzed(random: random.Random, number: int) -> bytes:
    """Return a line that is valid, or invalid in one of many ways."""
    event: dict[str, Any] = {
        "event": number,
        "user": random.randrange(USERS),
        "item": random.randrange(ITEMS),
        "price": random.random(),
        "at": float(number),
        "click": random.randrange(2),
    }
    name = random.choice(list(event))
    way = random.randrange(14)
    odd: list[Any] = [None, True, "", "12", "é\u0000💥", [], {}, [1, 2], -1, 2**63, 2**70, 10**400, 1e39, -0.0, 1.5]
    odd.append("x" * 5000)
    if way == 0:
        del event[name]
    elif way == 1:
        event[name] = random.choice(odd)
    elif way == 2:
        event[name] = random.choice([float("nan"), float("inf"), -float("inf")])
    elif way == 3:
        text = json.dumps(event).encode()
        return text[: random.randrange(len(text))].replace(b"\n", b" ")
    elif way == 4:
        return random.randbytes(random.randrange(60)).replace(b"\n", b"")
    elif way == 5:
        invalid = bytearray(json.dumps(event).encode())
        invalid[random.randrange(len(invalid))] = random.choice([0, 34, 44, 92, 123, 125, 200, 255])
        return bytes(invalid)
    elif way == 6:
        return json.dumps(random.choice([1, "a", [event], None, {"a": {}}, {}])).encode()
    elif way == 7:
        return b"[" * random.choice([10, 3000])
    elif way == 8:
        return json.dumps({**event, "more": "\ud800", "\u202e": "ё"}, ensure_ascii=random.random() < 2).encode()
    return json.dumps(event).encode()


@pytest.mark.parametrize(
    ("form", "count"),
    [
        ("jsonl", 15_000),
        pytest.param("jsonl", 100_000, marks=pytest.mark.slow),
        ("csv", 15_000),
        pytest.param("csv", 30_000, marks=pytest.mark.slow),
    ],
)
def test_fuzzed_events_are_all_accounted_for(form: Literal["csv", "jsonl"], count: int, tmp_path: Path) -> None:
    dice = random.Random(3)
    long = {10: 10_000_000, 5_000: 10_000_000, 7_000: 2_000_000}
    empty = 0
    with (tmp_path / "events").open("wb") as file:
        if form == "csv":
            file.write(b"event,user,item,price,at,click\n")
        for number in range(count):
            line = fuzzed(dice, number) if number not in long else b"7" * long[number]
            if form == "csv" and number % 2:  # Half of the lines are well-formed.
                line = b",".join(
                    str(v).encode()
                    for v in (number, dice.choice([1, 10**9, "é", ""]), 2, dice.choice([1.5, "nan", "1e99"]), 3, 1)
                )
            empty += not line.strip()
            file.write(line + b"\n")
    ours = learner(rejected=tmp_path / "rejected.jsonl", horizon=1000, unmatched="drop")
    ours.run(LinesSource(tmp_path / "events", SCHEMA, form, batch_size=500))
    numbers = ours.metrics()
    rejections = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    pending, counts = ours.pending, ours.pending.counts
    labels_alone = counts.repeated_labels + counts.late_labels + counts.orphan_labels + len(pending.early)
    assert len(rejections) == numbers["rejected"]
    assert numbers["events"] + numbers["rejected"] + empty == count - labels_alone
    assert (
        numbers["events"] == numbers["learned"] + numbers["pending"] + numbers["expired"] + numbers["repeated_events"]
    )
    assert all(one["reason"] and one["where"] for one in rejections)
    assert sum(one["size"] > 10_000_000 for one in rejections) == 2
    assert (tmp_path / "rejected.jsonl").stat().st_size < 200_000_000
    assert numbers["learned"] > (0.15 if form == "jsonl" else 0.03) * count
    for reason in ("missing field", "is not from 0 to", "not finite", "not readable", "more than 1048576"):
        assert any(reason in one["reason"] for one in rejections), reason


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("size", [1, 1000])
def test_a_byte_order_mark_is_not_part_of_the_first_row(rows: int, size: int, tmp_path: Path) -> None:
    path, schema = tmp_path / "a.csv", Schema({"a": "category:50"}, label="y", header=["a", "y"])
    text = "".join(f"{row},1\n" for row in range(rows))
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    source = LinesSource(path, schema, "csv", batch_size=size)
    batches = read(source)
    assert [batch.rejected for batch in batches if batch.rejected] == []
    assert [value for b in batches if b.events for value in b.events.features["a"].tolist()] == list(range(rows))
    again = LinesSource(path, schema, "csv")
    again.load_state_dict(source.state_dict())  # The mark is part of the fingerprint.
    assert read(again) == []


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("separator", [",", "\t", " "])
def test_a_line_of_separators_is_an_event_whose_values_are_missing(separator: str, rows: int, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    kinds = {"a": "category:50?", "b": "number?"}
    schema = Schema(kinds, label="y", id="i", header=["a", "b", "y", "i"], separator=separator)
    lines = [separator.join((str(row), "1.5", "1", str(row))) for row in range(rows)]
    path.write_text("\n".join([*lines, separator * 3, "", separator, separator * 3 + "\r"]) + "\n")
    (batch,) = read(LinesSource(path, schema, "csv"))
    reasons = [(one.where.split(",")[1].split(" at")[0], one.reason) for one in batch.rejected]
    assert batch.events is not None
    assert len(batch.events) == rows
    assert sorted(reasons) == [
        (f" line {rows + 1}", "missing field 'i'"),
        (f" line {rows + 3}", "not readable: 2 fields, not 4"),
        (f" line {rows + 4}", "missing field 'i'"),
    ]
    plain = Schema(kinds, label="y", header=["a", "b", "y"], separator=separator)
    path.write_text("".join(separator.join(("", "", "")) + "\n" for _ in range(rows)))
    (batch,) = read(LinesSource(path, plain, "csv"))
    assert batch.events is not None
    assert len(batch.events) == rows


@pytest.mark.parametrize("rows", [2, 40])
def test_both_parts_of_a_quoted_field_with_a_line_break_are_rejected(rows: int, tmp_path: Path) -> None:
    path, schema = tmp_path / "a.csv", Schema({"a": "hash:50", "b": "number"}, label="y")
    path.write_text('a,b,y\n"hello\nworld",1,1\n' + '"say ""hi"", you",1,0\n' * rows)
    (batch,) = read(LinesSource(path, schema, "csv"))
    assert batch.events is not None
    assert len(batch.events) == rows
    first, second = batch.rejected
    assert "line 2" in first.where
    assert "line 3" in second.where
    assert "a quote that closes nothing" in second.reason


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_split_batch_keeps_separate_labels_after_the_events_before_them(size: int) -> None:
    events = Events({"x": np.arange(7.0)}, ids=np.arange(7))
    labels = Labels(np.array([50, 1, 2, 5, 6]), np.array([1.0, 0.0, 1.0, 0.0, 1.0]))
    batch = Batch(events, labels, events_before=np.array([0, 2, 3, 7, 7]))
    parts = batch.split(size)
    assert [len(present(part.events)) for part in parts] == [
        len(range(7)[start:][:size]) for start in range(0, 7, size)
    ]

    def arrivals(batches: list[Batch]) -> list[int]:
        ids: list[int] = []
        for one in batches:
            for some_events, some_labels in one.in_order():
                ids += [] if some_events is None else present(some_events.ids).tolist()
                ids += [] if some_labels is None else [-label for label in some_labels.ids.tolist()]
        return ids

    assert arrivals(parts) == arrivals([batch]) == [-50, 0, 1, -1, 2, -2, 3, 4, 5, 6, -5, -6]
    unknown = Batch(events, labels).split(size)  # without the positions of the labels
    assert [len(present(part.labels)) for part in unknown if part.labels is not None] == [5]
    assert arrivals(unknown)[-5:] == [-50, -1, -2, -5, -6]


# Brokers -----------------------------------------------------------------------------------------------------------


class ImpatientConsumer(PartialConsumer):
    """A Kafka consumer that waits only briefly for brokers."""

    def list_topics(self, topic: str, timeout: float) -> Any:
        return self.consumer.list_topics(topic, timeout=0.3)


def test_a_broker_that_cannot_be_reached_is_one_message_that_names_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    caplog.set_level(logging.DEBUG, "cadam.online")
    source = KafkaSource("127.0.0.1:9", "clicks", SCHEMA)
    source.consumer = ImpatientConsumer(source.consumer)  # type: ignore[assignment]
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9.*refused"):
        source.sample()
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert caplog.records  # The log of the client is there for those who ask for it.


@pytest.mark.parametrize("knows_additions", [True, False])
def test_the_backlog_of_a_redis_stream_is_the_number_of_entries_after_the_position(
    knows_additions: bool, server: Server
) -> None:
    trimmed = 40

    def opened() -> RedisSource:
        source = RedisSource(server.url, "clicks", SCHEMA, batch_size=30)
        original = source.client.xinfo_stream

        def xinfo_stream(name: str) -> Any:  # The number of added entries, which Redis 7 returns, or none.
            info = {key: value for key, value in original(name).items() if key != "entries-added"}
            return {**info, "entries-added": info["length"] + trimmed} if knows_additions else info

        source.client.xinfo_stream = xinfo_stream  # type: ignore[method-assign, assignment]
        return source

    server.fill("clicks", table(100), 100)
    source = opened()
    batches = iter(source)
    next(batches)
    assert source.backlog() == 70
    again = opened()
    again.load_state_dict(source.state_dict())
    assert again.backlog() == 70
    server.client.xtrim("clicks", maxlen=60, approximate=False)
    trimmed += 40
    assert again.backlog() == (60 if knows_additions else None)
    assert len(all_ids(read(again))) == 60
    assert again.backlog() == 0
    server.fill("clicks", table(7, first=100), 7)
    assert again.backlog() == 7
    server.stop()
    assert again.backlog() is None
    server.start()

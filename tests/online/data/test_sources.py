"""Sources: batches from a position are the same again, growing ones are followed, nothing that is read gets lost."""

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
from cadam.online.data import schema as schema_module
from cadam.online.data.schema import Kind, Repeated, convert
from cadam.online.data.sources.parquet import read_values
from cadam.online.data.sources.records import Record, batch_of
from cadam.online.data.text_columns import Texts
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
    """One of them, learnt from once, would make a second moment infinite and hold its weight still for ever."""
    schema = Schema({"price": "number"}, label="click")
    assert schema.records([{"price": 1e19, "click": 1}, {"price": -1e19, "click": 0}], ["", ""]).rejected == []
    for good in (1.0, 1):  # a column of floats at one go, and one of several types
        bad = schema.records([{"price": good, "click": 1}, {"price": value, "click": 0}], ["", ""])
        assert len(bad.rejected) == 1
        assert re.search(r"too large: of 1e\+19 and more|is not finite", bad.rejected[0].reason)
        assert bad.events is not None
        assert len(bad.events) == 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def sources(kind: str, folder: Path, request: pytest.FixtureRequest) -> Any:
    """Something that opens the same source of 1,000 events anew."""
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
    """librdkafka's mock cluster, in the process of its producer: brokers that speak the protocol, without a disk."""
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


class Seen:
    """A Kafka consumer that is shown only some of the topic's partitions."""

    def __init__(self, consumer: Any, *partitions: int) -> None:
        self.consumer, self.partitions = consumer, list(partitions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.consumer, name)

    def list_topics(self, topic: str, timeout: float) -> Any:
        whole = self.consumer.list_topics(topic, timeout=timeout).topics[topic].partitions
        shown = {number: whole[number] for number in self.partitions}
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=shown)})


@pytest.mark.parametrize("follow", [True, False])
def test_a_kafka_partition_that_is_added_is_read_while_following(
    kafka: Any, follow: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cadam.online.data.sources.kafka.LOOK_EVERY", 0.0)
    caplog.set_level("INFO", "cadam.online")
    kafka(table(10))
    servers = kafka(table(10, first=10), partition=2)
    source = KafkaSource(servers, "clicks", SCHEMA, batch_size=10, follow=follow, patience=0.05, poll=0.05)
    consumer = Seen(source.consumer, 0)
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
    assert ("clicks has new partitions, which are read from their beginning: [2]" in caplog.text) == follow


@pytest.mark.parametrize("count", [3, 0])
def test_a_kafka_topic_that_began_anew_is_said(kafka: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    kafka(table(20), partition=1)
    servers = kafka(table(count, first=20))
    source = KafkaSource(servers, "clicks", SCHEMA, poll=0.05)
    source.load_state_dict({"source": "kafka", "topic": "clicks", "offsets": {0: 500, 1: 20, 9: 4}})
    assert all_ids(read(source)) == list(range(20, 20 + count))
    assert source.state_dict()["offsets"] == {0: count, 1: 20, 2: 0, 3: 0}
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert sum("clicks, partition 0 goes on at offset 0, before the position 500" in error for error in errors) == 1
    assert sum("clicks no longer has the partitions [9]" in error for error in errors) == 1
    assert not any("partition 1" in error for error in errors)


@pytest.mark.parametrize("follow", [True, False])
def test_a_fatal_error_of_kafka_is_one_that_the_command_catches(
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
    with pytest.raises(ConnectionError, match=f"Kafka at {servers} .*'clicks' with a fatal error: fenced by another"):
        next(iter(source))


KINDS = ["parquet", "jsonl", "csv", "redis", "kafka"]


@pytest.mark.parametrize("removed", [(), range(12, 40)])
def test_kafka_messages_that_were_removed_unread_are_a_warning(
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
    assert ("goes on at offset 40 after 11" in caplog.text) == bool(removed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_events_in_order_and_as_they_are(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    batches = read(sources(kind, tmp_path, request)())
    columns = table(1000)
    assert not any(batch.rejected for batch in batches)
    assert all_ids(batches) == list(range(1000))
    for name in ("user", "item", "price"):
        values = np.concatenate([batch.events.features[name] for batch in batches if batch.events])
        assert values.tobytes() == columns[name].tobytes()
        assert values.dtype == (np.float32 if name == "price" else np.int64)
    labels = np.concatenate([batch.events.labels for batch in batches if batch.events])
    assert labels.tobytes() == columns["click"].tobytes()
    assert max(len(batch.events) for batch in batches if batch.events) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_position_come_the_same_batches(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    make = sources(kind, tmp_path, request)
    whole = [all_ids([batch]) for batch in read(make())]
    for stop in (0, 1, 64, 65, len(whole)):
        first = make()
        stream = (batch for batch in first if batch is not None)
        before = [all_ids([next(stream)]) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        if "offsets" in state:  # JSON has no integer keys, the checkpoint does
            state["offsets"] = {int(key): value for key, value in state["offsets"].items()}
        second = make()
        second.load_state_dict(state)
        assert before + [all_ids([batch]) for batch in read(second)] == whole


def test_a_position_of_another_source_is_refused(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    csv_source, parquet = (sources(kind, tmp_path, request)() for kind in ("csv", "parquet"))
    with pytest.raises(ValueError, match=r"'csv'.*'parquet'"):
        parquet.load_state_dict(csv_source.state_dict())
    with pytest.raises(ValueError, match="batch_size"):
        ParquetSource(parquet.path, SCHEMA, batch_size=8).load_state_dict(parquet.state_dict())


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_file_that_is_another_one_now_is_not_gone_on_with(
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
    with pytest.raises(ValueError, match=r"is not (what it was|the file that)"):
        opened().load_state_dict(state)


def test_a_parquet_file_that_is_replaced_while_it_is_read_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, table(1000))
    source = ParquetSource(path, SCHEMA, batch_size=2)
    batches = iter(source)
    next(batches)
    write_parquet(tmp_path / "new", table(900, seed=9))
    (tmp_path / "new").rename(path)
    next(batches)  # of the old one, which is still open
    with pytest.raises(ValueError, match="is not the file that"):
        ParquetSource(path, SCHEMA, batch_size=2).load_state_dict(source.state_dict())


def test_a_folder_that_cannot_be_looked_into_is_said_once_and_the_others_are_read(
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
    source._look()
    assert caplog.messages == [f"{tmp_path / 'a'} cannot be looked into, files in it are not read: Permission denied"]


def test_a_header_of_csv_may_be_quoted_and_must_name_the_features(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"event","user","item","price","at","click"\n1,2,3,0.5,4,1\n')
    assert all_ids(read(LinesSource(path, SCHEMA, "csv"))) == [1]
    path.write_text("event,user,price,at,click\n1,2,0.5,4,1\n")
    with pytest.raises(ValueError, match="has no column item; it has event, user, price"):
        read(LinesSource(path, SCHEMA, "csv"))


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_last_line_that_is_still_being_written_is_left_for_a_later_run(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, columns = tmp_path / "a", {**table(12), "last": np.linspace(0, 0.1, 12)}
    (write_csv if form == "csv" else write_jsonl)(path, columns)
    schema = Schema({"user": f"category:{USERS}", "last": "number"}, label="click", id="event")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    first = LinesSource(path, schema, form, batch_size=5)  # type: ignore[arg-type]
    assert all_ids(read(first)) == list(range(11))
    assert f"{path}: line {12 + (form == 'csv')}, the last, of" in caplog.text
    assert "echo >> FILE" in caplog.text
    path.write_bytes(whole)
    again = LinesSource(path, schema, form, batch_size=5)  # type: ignore[arg-type]
    again.load_state_dict(first.state_dict())
    caplog.clear()
    (rest,) = read(again)
    assert rest.events is not None
    assert all_ids([rest]) == [11]
    assert rest.events.features["last"] == pytest.approx([0.1])
    assert not rest.rejected
    assert not caplog.text


def test_a_whole_json_object_at_the_end_is_read_and_the_lines_after_it_are_numbered_rightly(
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
def test_the_same_events_come_in_the_same_batches_from_every_kind_of_file(form: str, tmp_path: Path) -> None:
    {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}[form](tmp_path / f"a.{form}", table(120))
    batches = read(open_source(f"{form}:{tmp_path / 'a'}.{form}", SCHEMA, batch_size=50))
    assert [len(batch.events) for batch in batches if batch.events is not None] == [50, 50, 20]


def test_a_folder_is_looked_through_when_all_that_was_found_is_read_not_for_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        write_parquet(tmp_path / f"{number}.parquet", table(2, first=2 * number))
    looks: list[str] = []
    walk = os.walk

    def look(folder: str, **options: Any) -> Any:
        looks.append(folder)
        return walk(folder, **options)

    monkeypatch.setattr(os, "walk", look)
    assert all_ids(read(ParquetSource(tmp_path, SCHEMA))) == list(range(10))
    assert len(looks) == 2


def test_a_parquet_file_that_vanishes_is_rejected(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", table(10, first=10 * (name == "b")))
    source = ParquetSource(tmp_path, SCHEMA, follow=True)
    source._look()
    (tmp_path / "a.parquet").unlink()
    batches = iter(source)
    assert "the file cannot be read: " in present(next(batches)).rejected[0].reason
    assert all_ids([present(next(batches))]) == list(range(10, 20))


def test_labels_of_their_own_and_missing_labels(tmp_path: Path) -> None:
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
    """As logrotate does it: the file is moved away and made anew by its writer, or copied and cut off."""
    if way == "copytruncate":
        path.with_name(f"{path.name}.1").write_bytes(path.read_bytes())
        path.write_bytes(b"")
    else:
        path.rename(path.with_name(f"{path.name}.1"))


def followed(path: Path, form: str) -> LinesSource:
    return LinesSource(path, SCHEMA, form, batch_size=8, follow=True, patience=0.02, poll=0.005)  # type: ignore[arg-type]


def until(batches: Iterator[Batch | None], last: int, looks: int = 400) -> list[int]:
    """The ids up to the last one that is waited for, or those that came in so many looks."""
    seen: list[int] = []
    for _ in range(looks):
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
def test_a_file_that_is_rotated_while_it_is_followed_is_gone_on_with(
    way: str, count: int, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    source, batches = hundred_lines(path, form)
    assert until(batches, 99) == list(range(100))
    if way == "rename":
        with path.open("a") as file:  # more comes to the old one, also when it has another name and there is no new one
            file.write(write_row(100, form))
        rotate(path, way)
        with path.with_name("a.1").open("a") as file:
            file.write(write_row(101, form))
        assert until(batches, 101) == [100, 101]
        assert until(batches, -1, looks=5) == []
    else:
        rotate(path, way)
    assert not caplog.text
    write_lines(path, count, 1000, form)
    assert until(batches, 999 + count) == list(range(1000, 1000 + count))
    (said,) = caplog.records
    if way == "copytruncate":
        assert said.levelname == "ERROR"
        assert "what was not read by then is lost" in said.getMessage()
    else:
        assert said.getMessage() == f"{path} is another file now, which is read after the end of the old"
    again = followed(path, form)
    again.load_state_dict(source.state_dict())
    with path.open("a") as file:
        file.write(write_row(9999, form))
    assert until(iter(again), 9999) == [9999]


def write_row(number: int, form: str) -> str:
    row = {name: values[0].item() for name, values in table(1, first=number).items()}
    return (json.dumps(row) if form == "jsonl" else ",".join(map(str, row.values()))) + "\n"


def test_half_a_line_at_the_end_of_a_file_that_was_rotated_away_is_said_to_be_lost(
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
    assert "its last line, of 5 bytes without a line break, is lost" in caplog.text


@pytest.mark.parametrize(("way", "count", "form"), WAYS)
def test_a_file_that_was_rotated_before_a_restart_is_finished_under_its_new_name_or_refused(
    way: str, count: int, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    source, batches = hundred_lines(path, form)
    first = until(batches, 39)
    rotate(path, way)
    write_lines(path, count, 1000, form)
    state = source.state_dict()  # of the file that was read, not of the one under its name
    refusing = LinesSource(path, SCHEMA, form)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is not what it was before the position.*--follow"):
        refusing.load_state_dict(state)
    again = followed(path, form)
    again.load_state_dict(state)
    assert f"the rest of the old one is in {path}.1" in caplog.text
    assert first + until(iter(again), 999 + count) == [*range(100), *range(1000, 1000 + count)]
    path.with_name("a.1").unlink()
    with pytest.raises(ValueError, match="is not what it was before the position"):
        followed(path, form).load_state_dict(state)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("begun", [False, True], ids=["at its beginning", "behind the names"])
def test_a_rotated_file_is_told_from_the_new_one_where_they_look_alike(form: str, begun: bool, tmp_path: Path) -> None:
    """Before the position is nothing, or what every such file begins with."""
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
    del state["file"]  # as of an older version: the file under the path is taken
    old = followed(path, form)
    old.load_state_dict(state)
    assert until(iter(old), 1002) == [*range(1000, 1003)]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_file_that_is_replaced_by_itself_and_more_is_not_read_twice(form: str, tmp_path: Path) -> None:
    """As rsync and editors do."""
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
    assert until(iter(again), -1, looks=3) == []


def test_a_position_after_a_line_that_is_too_long_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x" * 700_000 + "y" * 5 + "\n" + write_row(1, "jsonl"))
    source = LinesSource(path, SCHEMA, "jsonl", batch_size=1, longest=1000)
    assert next(iter(source)).rejected[0].size == 700_006  # type: ignore[union-attr]
    again = LinesSource(path, SCHEMA, "jsonl", batch_size=1, longest=1000)
    again.load_state_dict(source.state_dict())
    assert all_ids(read(again)) == [1]


def test_a_parquet_file_that_is_damaged_is_rejected_and_the_next_is_read(tmp_path: Path) -> None:
    for number in range(3):
        write_parquet(tmp_path / f"{number}.parquet", table(100, first=100 * number))
    content = (tmp_path / "1.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(content[: len(content) // 2])
    batches = read(ParquetSource(tmp_path, SCHEMA))
    assert all_ids(batches) == [*range(100), *range(200, 300)]
    (rejected,) = [one for batch in batches for one in batch.rejected]
    assert rejected.where.endswith("1.parquet")
    assert "the file cannot be read: " in rejected.reason


def test_parquet_rows_with_gaps_lists_text_and_timestamps(tmp_path: Path) -> None:
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


def test_true_is_no_number_but_a_label_may_be_true_or_false(tmp_path: Path) -> None:
    schema = Schema({"price": "number", "prices": "number[2]"}, label="click", time="at")
    good: dict[str, Any] = {"price": 1, "prices": [1.0, 2], "click": True, "at": 3}
    wrong: list[dict[str, Any]] = [{"price": True}, {"prices": [1, False]}, {"at": True}]
    lines = [good, *({**good, **change} for change in wrong), {**good, "click": False}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (batch,) = read(LinesSource(tmp_path / "a.jsonl", schema, "jsonl"))
    assert batch.events is not None
    assert batch.events.labels is not None
    assert batch.events.labels.tolist() == [1, 0]
    assert [one.reason for one in batch.rejected] == [
        f"{name}: a bool, not a number" for name in ("price", "prices", "at")
    ]


@pytest.mark.parametrize("distinct", [200, 900, 2048])
def test_text_beside_labels_on_their_own_is_converted_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distinct: int
) -> None:
    """Once for the whole and once in its slice: not all that differs for each slice."""
    rows = 2048
    texts = [None if row == 5 else f"text {row % distinct}" for row in range(rows)]
    columns = {"event": np.arange(rows), "word": texts, "label": np.ones(rows)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    looked_at: list[Any] = []
    meant = schema_module._meant

    def counted(value: Any) -> Any:
        looked_at.append(value)
        return meant(value)

    monkeypatch.setattr(schema_module, "_meant", counted)
    schema = Schema({"word": "hash:1000"}, id="event")
    batches = read(ParquetSource(tmp_path / "a.parquet", schema, batch_size=64))
    assert len(looked_at) <= 2 * rows
    places = np.concatenate([present(batch.events).features["word"] for batch in batches])
    assert places.tolist() == convert([text for text in texts if text], Kind("hash", 1000))[0].tolist()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("index", [None, pa.int8(), pa.int32()])
def test_text_is_the_same_as_it_is_and_by_its_distinct_values(kind: pa.DataType, index: pa.DataType | None) -> None:
    texts = ["a", "bé", None, "", "a"] * 30
    column = pa.chunked_array([pa.array(texts, kind)[:70], pa.array(texts, kind)[70:]])
    if index is not None:
        column = column.cast(pa.dictionary(index, kind))
    values = read_values(column)
    assert list(values) == texts
    assert list(values[1:5]) == texts[1:5]
    assert isinstance(values, Texts if index is None else Repeated)


@pytest.mark.parametrize("kind", ["hash:1000003", "hash:1000003[1]"])
@pytest.mark.parametrize("number", [0, 5, -5, 123456789, 2**63 - 1, -(2**63)])
def test_an_integer_is_hashed_alike_as_number_and_as_text(number: int, kind: str) -> None:
    schema = Schema({"x": kind})

    def places(*values: Any, text: bool = False) -> list[int]:
        shown = [[value] if kind.endswith("]") and not text else value for value in values]
        batch = schema.records([{"x": value} for value in shown], [""] * len(values), text=text)
        assert batch.events is not None
        return [int(place) for place in batch.events.features["x"].reshape(-1)]

    (place,) = places(number)
    assert places(str(number), text=True) == places(str(number)) == [place]
    assert places(number, "word")[0] == places("word", str(number), text=True)[1] == place
    assert places(str(number), str(number), "", text=True)[:2] == [place, place]
    for column in (np.array([number]), np.array([str(number)])):
        alone = schema.columns({"x": column[:, None] if kind.endswith("]") else column}, 1, str).events
        assert alone is not None
        assert alone.features["x"].reshape(-1).tolist() == [place]
    other = [f"+{number}", f"0{number}", f" {number}", f"{number}.5", str(10 * number) + "0" * 20, "-0", "٥"]
    if not kind.endswith("]"):
        assert place not in places(*other, text=True)


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
def test_csv_and_json_that_mean_the_same_have_the_same_place(kind: str, value: Any, texts: list[str]) -> None:
    """A model that is trained on CSV is asked in JSON."""
    schema = Schema({"x": kind})
    asked = schema.records([{"x": value}], [""]).events
    given = schema.records([{"x": text} for text in [*texts, "word"]], [""] * (len(texts) + 1), text=True).events
    assert asked is not None
    assert given is not None
    assert given.features["x"][:-1].tolist() == asked.features["x"].tolist() * len(texts)
    assert given.features["x"][-1] != asked.features["x"][0]


def test_whole_floats_that_floats_cannot_tell_apart_stay_text() -> None:
    texts = [f"{2**53 + 2}.0", f"{2**53 + 2}", "03.0", "3.5", "TRUE"]
    places = convert(texts, Kind("hash", 1_000_003), text=True)[0].tolist()
    meant = convert([2**53 + 2, 3, 1], Kind("hash", 1_000_003))[0].tolist()
    assert places[1] == meant[0]
    assert not {places[0], *places[2:]} & set(meant)


@pytest.mark.parametrize("kind", ["integer", "hash:1000"])
def test_a_whole_number_as_a_float_is_taken_as_far_as_floats_are_exact(kind: str, tmp_path: Path) -> None:
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
        assert [one.reason for one in batch.rejected] == [
            f"{name}: {row:.0f} as a float, which cannot tell whole numbers of this size apart" for row in rows[2:]
        ]


def test_csv_as_pandas_writes_booleans_and_integers_with_gaps(tmp_path: Path) -> None:
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
        "item: 3.5 is not a whole number",
        "item: 9 is not from 0 to 8",
        "item: text 'True', not a number",
        "price: text 'true', not a number",
        "click: text 'yes', not a number",
    ]


@pytest.mark.parametrize("text", ["1_000", "٣", "１", "0x10", "1__0", "1,0", "−1"])
@pytest.mark.parametrize("kind", ["number", "category:2000"])
def test_a_number_in_text_is_written_in_plain_ascii(kind: str, text: str) -> None:
    batch = Schema({"x": kind}).records([{"x": text}, {"x": " 1"}], ["first", "second"], text=True)
    assert [one.reason for one in batch.rejected] == [f"x: text {text!r}, not a number"]
    assert batch.events is not None
    assert batch.events.features["x"].tolist() == [1]


@pytest.mark.parametrize("gap", [False, None])
def test_a_column_of_parquet_that_is_boolean_is_0_and_1(gap: bool | None, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"x": [True, False, gap], "click": [True, False, False]})
    (batch,) = read(ParquetSource(tmp_path / "a.parquet", Schema({"x": "number"}, label="click")))
    assert batch.events is not None
    assert batch.events.features["x"].tolist() == ([1, 0, 0] if gap is False else [1, 0])


def test_standard_input_is_read_to_its_end() -> None:
    code = (
        "import sys; from tests.online.streams import SCHEMA, learner; from cadam.online import open_source\n"
        "ours = learner().run(open_source('csv:-', SCHEMA, batch_size=64)); print(ours.events, ours.learned)"
    )
    rows = [table(1), *zip(*(v.tolist() for v in table(500).values()), strict=True)]
    lines = "\n".join(",".join(map(str, row)) for row in rows)  # the last one ends with the pipe
    result = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, timeout=100)
    assert result.stdout.split() == ["500", "500"], result.stderr


def test_uris_name_sources(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", table(3))
    assert len(all_ids(read(open_source(f"csv:{tmp_path}/a.csv", SCHEMA)))) == 3
    assert isinstance(open_source("redis://localhost:1/clicks?db=2", SCHEMA), RedisSource)
    for wrong in ("", "csv:", "ftp://host/x", "redis://localhost", "redis://localhost/x?bd=2", "kafka://host"):
        with pytest.raises(ValueError, match=r"no source|unknown fields"):
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
def test_a_schema_that_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
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
        if ours.events == 640 and back.ident is None:  # once: it is told again and again while nothing comes
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
def test_a_server_that_was_never_there_is_an_error_unless_it_is_followed(kind: str) -> None:
    pytest.importorskip({"redis": "redis", "kafka": "confluent_kafka"}[kind])
    uri = f"{kind}://127.0.0.1:1/clicks"
    with pytest.raises(ConnectionError, match=r"cannot be reached.*127\.0\.0\.1:1"):
        next(iter(open_source(uri, SCHEMA)))
    assert next(iter(open_source(uri, SCHEMA, follow=True))) is None


def test_a_redis_that_goes_away_is_waited_for_without_follow_too(server: Server) -> None:
    server.fill("clicks", table(20), 20)
    batches = iter(RedisSource(server.url, "clicks", SCHEMA, batch_size=10, retry=0.01))
    first = next(batches)
    server.stop()
    assert next(batches) is None
    server.start()
    assert all_ids([present(first), *(batch for batch in batches if batch is not None)]) == list(range(20))


def test_a_redis_stream_cut_past_the_position_is_said(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.fill("clicks", table(100), 100)
    source = RedisSource(server.url, "clicks", SCHEMA, batch_size=10)
    next(iter(source))
    server.client.xtrim("clicks", maxlen=50, approximate=False)
    second = RedisSource(server.url, "clicks", SCHEMA, batch_size=10)
    second.load_state_dict(source.state_dict())
    assert all_ids(read(second)) == list(range(50, 100))
    assert "past the position" in caplog.text


def test_a_redis_stream_that_is_cut_while_it_is_read_is_said(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.fill("clicks", table(100), 100)
    batches = iter(RedisSource(server.url, "clicks", SCHEMA, batch_size=10))
    first = [next(batches), next(batches)]
    assert "be removed unread" not in caplog.text
    server.client.xtrim("clicks", maxlen=50, approximate=False)
    assert all_ids([present(batch) for batch in (*first, *batches)]) == [*range(20), *range(50, 100)]
    assert "be removed unread" in caplog.text


def test_a_redis_stream_that_began_anew_is_said(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.client.xadd("clicks", {"event": "1"}, id="5-1")
    source = RedisSource(server.url, "clicks", SCHEMA)
    source.load_state_dict({"source": "redis", "stream": "clicks", "position": "9-9"})
    assert read(source) == []
    assert "older than the position" in caplog.text


def test_columns_of_redis_are_looked_at_too(server: Server) -> None:
    source = RedisSource(server.url, "clicks", Schema({"prize": "number"}, label="click", id="event"))
    with pytest.raises(MismatchError, match="Redis has no stream 'clicks'; there is no stream at all"):
        check_columns(source, source.schema)
    server.client.xadd("clicks", {"event": 1, "click": 1})
    check_columns(source, source.schema)  # a label on its own
    server.client.xadd("clicks", {"json": json.dumps({"event": 2, "user": 3, "item": 4, "price": 5.0, "at": 6.0})})
    with pytest.raises(
        MismatchError, match=r"clicks has no column 'prize'.*it has event, click, user, item, price, at"
    ):
        check_columns(source, source.schema)
    server.client.xadd("clicks", {"event": 3, "user": 3, "item": 4, "prize": 5.0, "at": 6.0})
    check_columns(source, source.schema)  # some events have it: the others are rejected


def test_a_redis_key_that_is_no_stream_is_an_error_that_says_so(server: Server) -> None:
    server.client.set("clicks", "text")
    source = RedisSource(server.url, "clicks", SCHEMA)
    with pytest.raises(MismatchError, match="does not give the stream 'clicks': WRONGTYPE"):
        check_columns(source, SCHEMA)
    with pytest.raises(ValueError, match="does not give the stream 'clicks': WRONGTYPE"):
        list(source)


@pytest.mark.parametrize("setting", ["securty.protocol=ssl", "security.protocol=nonsense"])
def test_a_setting_that_kafka_does_not_know_is_an_error_that_says_so(setting: str) -> None:
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    with pytest.raises(ValueError, match=f"does not take the settings .{setting.partition('=')[0]}.: .*configuration"):
        open_source(f"kafka://localhost:1/clicks?{setting}", SCHEMA)


def test_a_compressed_file_is_not_followed_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").touch()
    with pytest.raises(ValueError, match=r"follow the file that is written, or read it without follow$"):
        LinesSource(tmp_path / "a.csv.gz", SCHEMA, "csv", follow=True)


def test_redis_entries_as_json_and_entries_that_cannot_be_read(server: Server) -> None:
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
    source = RedisSource(server.url, "clicks", SCHEMA, longest=2000)
    (batch,) = read(source)
    assert all_ids([batch]) == [1, 2]
    reasons = sorted(one.reason.partition(":")[2][:12] for one in batch.rejected)
    assert len(batch.rejected) == 4
    assert any("3000 bytes, more than 2000" in one.reason for one in batch.rejected), reasons


def test_whether_a_record_counts_does_not_depend_on_its_neighbours() -> None:
    schema = Schema({"x": "number"}, label="click", id="event")

    def in_json(event: int, x: Any, **more: Any) -> Record:
        return Record(str(event), text=json.dumps({"event": event, "x": x, **more}).encode())

    def in_fields(event: int, **more: bytes) -> Record:
        fields = {b"event": str(event).encode(), **{name.encode(): value for name, value in more.items()}}
        return Record(str(event), fields=fields)

    records = [
        in_json(1, "0.5"),
        in_fields(2, x=b"0.5"),
        in_json(3, 0.25),
        in_json(4, ""),
        in_fields(5, click=b"1"),
        Record("6", text=b'{"event": 3, "click": 1}'),
        in_fields(7, x=b"1"),
    ]
    batch = batch_of(records, schema, longest=1000)
    assert all_ids([batch]) == [2, 3, 7]
    assert batch.events is not None
    assert batch.events.features["x"].tolist() == [0.5, 0.25, 1]
    assert batch.labels is not None
    assert batch.labels.ids.tolist() == [5, 3]
    apart = [batch_of([record], schema, longest=1000) for record in records]
    assert batch.rejected == [one for part in apart for one in part.rejected]
    assert [one.where for one in batch.rejected] == ["1", "4"]


@pytest.mark.parametrize("of", [list, tuple, lambda texts: np.array(texts, dtype=object)])
def test_text_of_ids_and_users_keeps_nulls_at_its_end(of: Any) -> None:
    texts = ["a", "a\0", "a\0\0"]
    events = Events({"x": np.zeros(3)}, ids=of(texts), users=of(texts))
    assert events.ids is not None
    assert events.users is not None
    assert events.ids.tolist() == events.users.tolist() == Labels(of(texts), np.ones(3)).ids.tolist() == texts


# Events that are wrong in every way ----------------------------------------------------------------------------


def fuzzed(random: random.Random, number: int) -> bytes:
    """A line: good, or wrong in one of many ways."""
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
        spoilt = bytearray(json.dumps(event).encode())
        spoilt[random.randrange(len(spoilt))] = random.choice([0, 34, 44, 92, 123, 125, 200, 255])
        return bytes(spoilt)
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
            if form == "csv" and number % 2:  # half of them well-formed, half as they come
                line = b",".join(
                    str(v).encode()
                    for v in (number, dice.choice([1, 10**9, "é", ""]), 2, dice.choice([1.5, "nan", "1e99"]), 3, 1)
                )
            empty += not line.strip()
            file.write(line + b"\n")
    ours = learner(rejected=tmp_path / "rejected.jsonl", horizon=1000)
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
def test_the_mark_of_utf_8_before_the_first_row_is_no_part_of_it(rows: int, size: int, tmp_path: Path) -> None:
    path, schema = tmp_path / "a.csv", Schema({"a": "category:50"}, label="y", header=["a", "y"])
    text = "".join(f"{row},1\n" for row in range(rows))
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    source = LinesSource(path, schema, "csv", batch_size=size)
    batches = read(source)
    assert [batch.rejected for batch in batches if batch.rejected] == []
    assert [value for b in batches if b.events for value in b.events.features["a"].tolist()] == list(range(rows))
    again = LinesSource(path, schema, "csv")
    again.load_state_dict(source.state_dict())  # the mark is among the bytes by which the file is known
    assert read(again) == []


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("separator", [",", "\t", " "])
def test_a_line_of_separators_alone_is_an_event_whose_values_are_missing(
    separator: str, rows: int, tmp_path: Path
) -> None:
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

"""Damaged data: every row is used or rejected with its position and a reason, and later good files are read."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.online import Batch, LinesSource, ParquetSource, Schema
from cadam.online.data.sources.records import Message, convert_messages
from cadam.online.data.validation import MismatchError, check_columns
from tests.online.streams import SCHEMA, learner, table

TEXT = Schema({"word": "hash:50", "price": "number"}, label="click", id="event:text", user="who:text", time="at")


def read(path: Path, schema: Schema, batch_size: int = 16) -> list[Batch]:
    return given(ParquetSource(path, schema, batch_size=batch_size))


def given(source: Iterable[Batch | None]) -> list[Batch]:
    return [batch for batch in source if batch is not None]


def used(batches: list[Batch]) -> int:
    return sum(len(part) for batch in batches for part in (batch.events, batch.labels) if part is not None)


def rejected(batches: list[Batch]) -> list[Any]:
    return [one for batch in batches for one in batch.rejected]


def text_rows(count: int) -> dict[str, Any]:
    return {
        "event": [f"e{row}" for row in range(count)],
        "who": [f"ü{row % 7}" for row in range(count)],
        "word": [f"w{row % 5}" for row in range(count)],
        "price": np.arange(count) / 4,
        "click": [None if row % 5 == 0 else float(row % 2) for row in range(count)],
        "at": pa.array(range(count), pa.timestamp("ms")),
    }


def bad_text(values: list[str], row: int) -> pa.Array:
    """Strings, of which one is not UTF-8."""
    content = [value.encode() for value in values]
    content[row] = b"\xff" + content[row]
    return pa.array(content, pa.binary()).view(pa.string())


@pytest.mark.parametrize("column", ["event", "who", "word"])
def test_a_row_that_is_not_utf_8_is_rejected_and_the_others_are_used(column: str, tmp_path: Path) -> None:
    rows = text_rows(50)
    rows[column] = bad_text(rows[column], 37)
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    batches = read(tmp_path, TEXT)
    assert used(batches) == 49
    (one,) = rejected(batches)
    assert one.where == f"{tmp_path / 'a.parquet'}, row 37"
    assert one.reason.startswith(f"{column}: a value of type string that cannot be read: 'utf-8' codec")


FAR = 2**62
STRANGE = {
    "date32 after 9999": pa.array([FAR % 2**31] * 4, pa.int32()).view(pa.date32()),
    "date64 after 9999": pa.array([FAR] * 4, pa.int64()).view(pa.date64()),
    "timestamp": pa.array([FAR] * 4, pa.int64()).view(pa.timestamp("ms")),
    "timestamp in lists": pa.array([[FAR]] * 4, pa.list_(pa.int64())).cast(pa.list_(pa.timestamp("us"))),
    "duration s": pa.array([FAR] * 4, pa.int64()).view(pa.duration("s")),
    "duration ns": pa.array([FAR + 1] * 4, pa.int64()).view(pa.duration("ns")),
    "time of nanoseconds": pa.array([1] * 4, pa.time64("ns")),
    "decimal128": pa.array([decimal.Decimal("1.5")] * 4, pa.decimal128(38, 10)),
    "decimal256": pa.array([decimal.Decimal(10) ** 70] * 4, pa.decimal256(76, 0)),
    "date": pa.array([datetime.date(2024, 1, 1)] * 4),
    "binary": pa.array([b"\xff"] * 4),
    "binary of one size": pa.array([b"ab"] * 4, pa.binary(2)),
    "lists of bad text": pa.ListArray.from_arrays([0, 1, 2, 3, 4], bad_text(["a", "b", "c", "d"], 2)),
    "lists in lists": pa.array([[[1.0]]] * 4),
    "lists of fixed size": pa.array([[1, None]] * 4, pa.list_(pa.int32(), 2)),
    "struct": pa.array([{"a": 1}] * 4),
    "struct with one name twice": pa.StructArray.from_arrays([pa.array([1] * 4), pa.array([2] * 4)], ["a", "a"]),
    "map": pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(4),
    "half floats": pa.array(np.full(4, np.inf, np.float16)),
    "unsigned": pa.array([2**64 - 1] * 4, pa.uint64()),
    "dictionary of dates": pa.DictionaryArray.from_arrays(
        pa.array([0, 0, 0, 0]), pa.array([FAR % 2**31], pa.int32()).view(pa.date32())
    ),
}


@pytest.mark.parametrize("place", ["event", "who", "word", "price", "click", "at"])
@pytest.mark.parametrize("kind", STRANGE)
def test_no_type_of_parquet_in_any_place_ends_the_reading(kind: str, place: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({**text_rows(4), place: STRANGE[kind]}), tmp_path / "a.parquet")
    pq.write_table(pa.table(text_rows(3)), tmp_path / "b.parquet")
    batches = read(tmp_path, TEXT)
    assert used(batches) + len(rejected(batches)) == 7
    assert used(batches) >= 3
    rows = [one.where for one in rejected(batches)]
    assert rows == sorted(f"{tmp_path / 'a.parquet'}, row {where.rpartition(' ')[2]}" for where in rows)


def test_a_file_whose_dictionary_is_not_utf_8_is_rejected_as_a_whole(tmp_path: Path) -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1]), bad_text(["a", "b"], 1))
    pq.write_table(pa.table({**text_rows(4), "word": words}), tmp_path / "a.parquet")
    pq.write_table(pa.table(text_rows(3)), tmp_path / "b.parquet")
    batches = read(tmp_path, TEXT)
    assert used(batches) == 3
    assert [one.where for one in rejected(batches)] == [str(tmp_path / "a.parquet")]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_of_every_unit_are_seconds(unit: str, tmp_path: Path) -> None:
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    at = pa.array([-3 * per_second // 2, 0, 1_700_000_000 * per_second, 2**52], pa.int64()).view(pa.timestamp(unit))
    pq.write_table(pa.table({**text_rows(4), "at": at}), tmp_path / "a.parquet")
    (batch,) = read(tmp_path, TEXT)
    assert batch.events is not None
    assert batch.events.time is not None
    exact = [-2.0 if unit == "s" else -1.5, 0.0, 1.7e9, 2**52 / per_second]
    assert batch.events.time.tolist() == pytest.approx(exact, rel=1e-15, abs=1e-6)


# One name twice ----------------------------------------------------------------------------------------------------


def twice(name: str, count: int) -> pa.Table:
    """A table with one more column of a name that it has."""
    whole = pa.table(table(count))
    return whole.append_column(name, whole["price"])


def test_a_parquet_file_with_a_column_twice_is_rejected_and_the_next_is_read(tmp_path: Path) -> None:
    pq.write_table(twice("price", 10), tmp_path / "a.parquet")
    pq.write_table(pa.table(table(10)), tmp_path / "b.parquet")
    batches = read(tmp_path, SCHEMA)
    assert used(batches) == 10
    (one,) = rejected(batches)
    assert one.where == str(tmp_path / "a.parquet")
    assert one.reason == "the file cannot be read: ArrowInvalid: it has more than one column 'price'"


def test_a_column_twice_that_the_schema_does_not_ask_for_harms_nothing(tmp_path: Path) -> None:
    whole = pa.table(table(10))
    for _ in range(2):
        whole = whole.append_column("more", whole["price"])
    pq.write_table(whole, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("event,user,item,more,price,at,click,more\n1,2,3,9,0.5,1,1,9\n")
    assert used(read(tmp_path, SCHEMA)) == 10
    assert used(given(LinesSource(tmp_path / "a.csv", SCHEMA, "csv"))) == 1


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_single_file_with_a_column_twice_is_refused_before_the_run(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(twice("price", 10), path)
    else:
        path.write_text("event,user,item,price,at,click,price\n1,2,3,0.5,1,1,7\n")
    source = ParquetSource(path, SCHEMA) if form == "parquet" else LinesSource(path, SCHEMA, "csv")
    with pytest.raises(MismatchError, match="more than one column 'price'"):
        check_columns(source, SCHEMA)


def test_csv_with_a_column_twice_is_refused_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("event,user,item,price,at,click,price\n1,2,3,0.5,1,1,7\n")
    with pytest.raises(ValueError, match="more than one column 'price'"):
        list(LinesSource(tmp_path / "a.csv", SCHEMA, "csv"))
    with pytest.raises(ValueError, match="more than one column 'item'"):
        LinesSource(tmp_path / "a.csv", replace(SCHEMA, header=["item", "user", "item", "price"]), "csv")


def test_a_header_of_csv_that_cannot_be_read_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x" * 200_000 + ",user\n")
    with pytest.raises(ValueError, match="the first line"):
        list(LinesSource(tmp_path / "a.csv", SCHEMA, "csv"))


def test_a_json_object_with_a_name_twice_is_rejected_and_the_next_is_used(tmp_path: Path) -> None:
    good = '{"event": 0, "user": 1, "item": 2, "price": 0.5, "at": 1}'
    bad = good.replace("}", ', "at": 2}')
    (tmp_path / "a.jsonl").write_text("\n".join([bad, good, bad]))
    batches = given(LinesSource(tmp_path / "a.jsonl", SCHEMA, "jsonl"))
    assert used(batches) == 1
    assert [one.reason for one in rejected(batches)] == ["not readable: the JSON object contains 'at' twice"] * 2
    record = Message("entry 1", text=bad.encode())
    assert [one.where for one in convert_messages([record], SCHEMA, 1 << 20).rejected] == ["entry 1"]


# Files with flipped bits -------------------------------------------------------------------------------------------


def flipped(dice: random.Random, content: pa.Table) -> bytes:
    """A Parquet file, written in one of many ways, with a few bits wrong anywhere."""
    file = io.BytesIO()
    pq.write_table(
        content,
        file,
        row_group_size=dice.choice([70, 200]),
        compression=dice.choice(["none", "snappy", "zstd", "lz4"]),
        use_dictionary=dice.choice([True, False]),
        data_page_version=dice.choice(["1.0", "2.0"]),
    )
    written = bytearray(file.getvalue())
    for _ in range(dice.choice([1, 1, 2, 8])):
        written[dice.randrange(len(written))] ^= 1 << dice.randrange(8)
    return bytes(written)


@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_of_files_with_flipped_bits_every_row_is_used_or_rejected_with_its_place(count: int, tmp_path: Path) -> None:
    dice, path, rows = random.Random(count), tmp_path / "a.parquet", 200
    numbers = {
        **table(rows),
        "tags": pa.array([[1.0, 2.0]] * rows, pa.list_(pa.float32(), 2)),
        "more": pa.array([[1, 2, 3]] * rows),
    }
    schemas = [
        (pa.table(text_rows(rows)), TEXT),
        (pa.table(numbers), Schema({**SCHEMA.features, "tags": "number[2]", "more": "hash:9[3]"}, "click", "event")),
    ]
    whole = partly = 0
    for _ in range(count):
        content, schema = dice.choice(schemas)
        path.write_bytes(flipped(dice, content))
        batches = read(path, schema, batch_size=dice.choice([1, 16]))
        rejections = rejected(batches)
        assert all(one.where.startswith(str(path)) for one in rejections)
        assert all(one.reason for one in rejections)
        # The rest of the file or the whole file was rejected.
        if rejections and not rejections[-1].where.rpartition(" ")[2].isdigit():
            end = rejections.pop().where
            first = int(end.removeprefix(f"{path}, row ").removesuffix(" and all after it")) if end != str(path) else 0
            partly += first > 0
        else:
            first, whole = rows, whole + 1
        assert used(batches) + len(rejections) == first
    assert whole > count // 10  # enough files could be read for the check to be meaningful
    assert partly > 0


def test_a_run_over_damaged_files_ends_and_so_does_the_next(tmp_path: Path) -> None:
    dice = random.Random(0)
    for number in range(20):
        content = flipped(dice, pa.table(table(200, first=200 * number)))
        (tmp_path / f"{number:02d}.parquet").write_bytes(content)
    pq.write_table(pa.table(table(100, first=4000)), tmp_path / "99.parquet")
    rejections, seen = [], []
    for _ in range(2):
        ours = learner(checkpoint=tmp_path / "state")
        ours.run(ParquetSource(tmp_path, SCHEMA, batch_size=16))
        ours.close()
        rejections.append(ours.rejected)
        seen.append(ours.events)
        assert 4099 in ours.pending.resolved.recent[True]  # the last row behind all of them
    assert rejections[0] == rejections[1] > 0
    assert seen[0] == seen[1] >= 100


# Records of message brokers ----------------------------------------------------------------------------------------


def fuzzed(dice: random.Random, number: int) -> Message:
    good = {"event": number, "user": 1, "item": 2, "price": 0.5, "at": float(number), "click": 1}
    way, where = dice.randrange(8), f"entry {number}"
    if way == 0:
        return Message(where, text=dice.randbytes(dice.randrange(60)))
    text = json.dumps(good)
    if way == 1:
        broken = bytearray(text.encode())
        for _ in range(dice.randrange(1, 4)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        return Message(where, text=bytes(broken))
    if way == 2:
        depth = dice.randrange(800, 1100)  # about the greatest depth that Python can read and show
        name = dice.choice(list(good))
        nested = json.dumps({**good, name: 0})[:-1] + f', "{name}": ' + "[" * depth + "]" * depth + "}"
        return Message(where, text=nested.encode())
    fields = {name.encode(): str(value).encode() for name, value in good.items()}
    if way == 3:
        fields[dice.choice(list(fields))] = dice.randbytes(dice.randrange(8))
    elif way == 4:
        fields[dice.randbytes(3)] = b"1"
    elif way == 5:
        del fields[dice.choice(list(fields))]
    return Message(where, fields=fields)


@pytest.mark.parametrize("count", [3_000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_of_fuzzed_records_every_one_is_used_or_rejected_with_its_place(count: int) -> None:
    dice = random.Random(count)
    for start in range(0, count, 500):
        batch = convert_messages([fuzzed(dice, number) for number in range(start, start + 500)], SCHEMA, 1 << 20)
        places = [one.where for one in batch.rejected]
        assert used([batch]) + len(places) == 500
        assert len(set(places)) == len(places)
        assert all(one.reason for one in batch.rejected)
        assert used([batch]) > 100

"""Hive partitions: columns from the names of folders, files in the order of time, and positions."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from cadam import CAdam
from cadam.online import Batch, Learner, ParquetSource, Schema, models
from cadam.online.data.conversion import convert
from cadam.online.data.kind import Kind
from cadam.online.data.sources.partitions import partition_values, time_order
from cadam.online.data.validation import check_columns
from tests.online.data.test_inference import inferred, read
from tests.online.data.test_sources import all_ids
from tests.online.data.test_sources import read as read_batches
from tests.online.streams import weights
from tests.optim.exact import present

SCHEMA = Schema({"country": "hash:100?", "hour": "number", "price": "number"}, label="click", id="event", time="dt:iso")
COUNTRIES = ("DE", "FR", "US")


def write(folder: Path, country: str, day: int, hour: int, first: int, own_hour: int | None = None) -> None:
    path = folder / f"country={country}" / f"dt=2024-01-{day:02}" / f"hour={hour}"
    path.mkdir(parents=True, exist_ok=True)
    ids = np.arange(first, first + 10)
    table = pa.table({"event": ids, "price": ids / 2, "click": ids % 2})
    if own_hour is not None:
        table = table.append_column("hour", pa.array([own_hour] * 10))
    pq.write_table(table, path / ".part-0.parquet")
    (path / ".part-0.parquet").rename(path / "part-0.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty-six files of ten events, whose ids are in the order of time."""
    first = 0
    for day in (1, 2):
        for hour in (0, 2, 9, 10, 11, 23):
            for country in COUNTRIES:
                write(tmp_path, country, day, hour, first)
                first += 10
    return tmp_path


def test_partitions_are_read_from_folders_of_any_content() -> None:
    path = PurePath("a/country=DE/x%3Dy=a%20b/dt=__HIVE_DEFAULT_PARTITION__/k=v=w/=z/a=b.parquet")
    assert partition_values(path) == {"country": "DE", "x=y": "a b", "dt": None, "k": "v=w"}


def test_files_are_sorted_by_their_times_and_then_by_path() -> None:
    paths = ["b=2/when=2024-01-02/0", "b=1/when=2024-01-10/0", "b=1/when=2024-01-02/0", "0", "a"]
    assert sorted(paths, key=lambda path: time_order(PurePath(path), None)) == [
        "0",
        "a",
        *map(paths.__getitem__, (2, 0, 1)),
    ]
    months = [f"year={year}/month={month}/0" for year in (2023, 2024) for month in range(1, 13)]
    assert sorted(months, key=lambda path: time_order(PurePath(path), None)) == months
    numbers = [f"slot={number}/0" for number in (2, 10)]
    assert sorted(numbers, key=lambda path: time_order(PurePath(path), "slot")) == numbers
    assert sorted(numbers, key=lambda path: time_order(PurePath(path), None)) == numbers[::-1]


def test_folders_are_columns_and_files_are_read_in_the_order_of_time(folder: Path) -> None:
    source = ParquetSource(folder, SCHEMA, batch_size=7)
    check_columns(source, SCHEMA)
    batches = read_batches(source)
    assert not any(batch.rejected or batch.missing_columns for batch in batches)
    assert all_ids(batches) == list(range(360))
    events = [present(batch.events) for batch in batches]
    hours = np.concatenate([one.features["hour"] for one in events])
    assert hours[::30].tolist() == [0, 2, 9, 10, 11, 23] * 2
    buckets = convert(COUNTRIES, Kind.parse("hash:100?"))[0]
    assert np.concatenate([one.features["country"] for one in events])[::10].tolist() == buckets.tolist() * 12
    times = np.concatenate([present(one.time) for one in events])
    assert (times[::180] == [1704067200, 1704153600]).all()


def test_a_missing_partition_a_column_of_the_file_and_a_file_without_partitions(tmp_path: Path) -> None:
    write(tmp_path, "__HIVE_DEFAULT_PARTITION__", 1, 0, 0)
    write(tmp_path, "DE", 2, 5, 10, own_hour=7)
    (batch, other) = read_batches(ParquetSource(tmp_path, SCHEMA, batch_size=10))
    assert not present(batch.events).features["country"].any()
    assert set(present(other.events).features["hour"].tolist()) == {7}
    (batch,) = read_batches(ParquetSource(next(tmp_path.rglob("dt=2024-01-02")) / "hour=5" / "part-0.parquet", SCHEMA))
    assert {rejected.reason for rejected in batch.rejected} == {"missing field 'dt'"}


def test_labels_in_files_below_partitions_are_labels_and_not_events(tmp_path: Path) -> None:
    path = tmp_path / "country=DE" / "dt=2024-01-01" / "hour=0"
    path.mkdir(parents=True)
    pq.write_table(pa.table({"event": [1, 2], "click": [0, 1]}), path / "labels.parquet")
    (batch,) = read_batches(ParquetSource(tmp_path, SCHEMA))
    assert batch.events is None
    assert present(batch.labels).ids.tolist() == [1, 2]


def test_a_new_partition_is_read_while_the_folder_is_followed_and_after_a_restart(folder: Path) -> None:
    source = ParquetSource(folder, SCHEMA, batch_size=10, follow=True, poll=0.001)
    batches: list[Batch] = []
    for batch in source:
        batches += [] if batch is None else [batch]
        if batch is None and len(batches) == 36:
            write(folder, "US", 3, 0, 370)
            write(folder, "AT", 3, 0, 360)
        if len(batches) == 37:
            break
    again = ParquetSource(folder, SCHEMA, batch_size=10)
    again.load_state_dict(source.state_dict())
    assert all_ids(batches + read_batches(again)) == list(range(380))


def learner(folder: Path) -> Learner:
    torch.manual_seed(0)
    model = models.build("linear", SCHEMA)
    loss = nn.functional.binary_cross_entropy_with_logits
    return Learner(model, CAdam(model.named_parameters(), lr=0.01), loss, checkpoint=folder)


def test_a_run_over_partitions_that_was_stopped_resumes_to_the_bit(folder: Path, tmp_path_factory: Any) -> None:
    states = tmp_path_factory.mktemp("states")
    whole = learner(states / "whole").run(ParquetSource(folder, SCHEMA, batch_size=7))
    first = learner(states / "parts").run(ParquetSource(folder, SCHEMA, batch_size=7), events=205)
    first.close()
    second = learner(states / "parts").run(ParquetSource(folder, SCHEMA, batch_size=7))
    assert whole.events == second.events == 360
    assert weights(whole) == weights(second)
    for one in (whole, second):
        one.close()


def test_partitions_are_offered_as_features_and_as_the_time(folder: Path) -> None:
    found = inferred(folder)
    assert found.schema.kinds["country"].name == "hash"
    assert "hour" in found.schema.features
    assert found.schema.time == "dt:iso"
    assert read(folder, found.schema) == (360, [])

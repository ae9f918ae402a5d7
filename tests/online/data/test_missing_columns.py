"""Columns that the data does not have any more: the run continues, warns once and counts the events."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cadam import CAdam
from cadam.online import Batch, KafkaSource, Learner, LinesSource, ParquetSource, RedisSource, Source, models
from cadam.online.data import text_columns
from cadam.online.data.validation import MismatchError, check_columns
from cadam.online.monitoring import prometheus_metrics
from tests.online.data.test_sources import (  # noqa: F401
    all_ids,
    kafka,
    read,
    rotate,
    server,
    write_csv,
    write_jsonl,
    write_parquet,
)
from tests.online.streams import SCHEMA, table, weights
from tests.optim.exact import present

OPTIONAL = replace(SCHEMA, features={**SCHEMA.features, "price": "number?"})
COUNT = 1200


def halves(label: str = "price") -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The columns of events that have all columns, and of events in which one was renamed."""
    renamed = {("cost" if name == label else name): values for name, values in table(COUNT, first=COUNT).items()}
    return table(COUNT), renamed


def read_changed(kind: str, folder: Path, request: pytest.FixtureRequest) -> list[Batch]:
    """Read a source whose column price is called cost from its second half on."""
    first, second = halves()
    path = folder / "a"
    if kind == "parquet":
        path.mkdir()
        write_parquet(path / "0.parquet", first)
        write_parquet(path / "1.parquet", second)
        return read(ParquetSource(path, OPTIONAL, batch_size=100))
    if kind == "jsonl":
        write_jsonl(path, first)
        write_jsonl(path, second, "a")
        return read(LinesSource(path, OPTIONAL, "jsonl", batch_size=100))
    if kind == "csv":
        write_csv(path, first)
        source = LinesSource(path, OPTIONAL, "csv", batch_size=100, follow=True, poll=0.005)
        batches: list[Batch] = []
        for batch in source:
            batches += [] if batch is None else [batch]
            if len(all_ids(batches)) == COUNT and batch is None:
                rotate(path, "rename")
                write_csv(path, second)
            if len(all_ids(batches)) == 2 * COUNT:
                break
        return batches
    if kind == "redis":
        redis = request.getfixturevalue("server")
        redis.fill("clicks", first, COUNT)
        redis.fill("clicks", second, COUNT)
        return read(RedisSource(redis.url, "clicks", OPTIONAL, batch_size=100))
    request.getfixturevalue("kafka")(first)
    return read(KafkaSource(request.getfixturevalue("kafka")(second), "clicks", OPTIONAL, batch_size=100))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "redis", "kafka"])
def test_a_renamed_column_is_taken_as_missing_reported_once_and_counted_in_every_source(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    batches = read_changed(kind, tmp_path, request)
    assert all_ids(batches) == list(range(2 * COUNT))
    price = np.concatenate([present(batch.events).features["price"] for batch in batches])
    assert np.isnan(price).tolist() == [False] * COUNT + [True] * COUNT
    assert sum(batch.missing_columns.get("price", 0) for batch in batches) == COUNT
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if "'price'" in text]) == 1
    if kind in ("csv", "parquet"):
        assert len([text for text in warnings if "'cost'" in text]) == 1


@pytest.mark.parametrize("is_compiled", [True, False])
def test_null_and_an_empty_field_are_not_a_missing_column(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(text_columns, "native_functions", lambda: None)
    lines = [
        '{"event": 1, "user": 2, "item": 3, "price": null, "at": 1}',
        '{"event": 1, "user": 2, "item": 3, "at": 1}',
    ]
    lines += ['{"event": 1, "user": 2, "item": 3, "price": null, "at": 1, "more": []}']  # Python reads this line.
    lines += ['{"event": 1, "user": 2, "item": 3, "at": 1, "more": []}', '{"event": 1, "click": 1}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines * 10) + "\n")
    (batch,) = read(LinesSource(tmp_path / "a.jsonl", OPTIONAL, "jsonl"))
    assert batch.missing_columns == {"price": 20}
    assert len(present(batch.events)) == 40
    (tmp_path / "a.csv").write_text("event,user,item,price,at\n" + "1,2,3,,1\n" * 40)
    (batch,) = read(LinesSource(tmp_path / "a.csv", OPTIONAL, "csv"))
    assert batch.missing_columns == {}


def test_a_field_that_only_some_records_have_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_price, without = table(3000), {name: values for name, values in table(3000).items() if name != "price"}
    for first in range(0, 3000, 500):
        write_jsonl(tmp_path / "a", {name: values[first : first + 250] for name, values in with_price.items()}, "a")
        write_jsonl(tmp_path / "a", {name: values[first : first + 250] for name, values in without.items()}, "a")
    batches = read(LinesSource(tmp_path / "a", OPTIONAL, "jsonl", batch_size=50))
    assert sum(batch.missing_columns.get("price", 0) for batch in batches) == 1500
    assert not caplog.records


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_required_column_that_a_later_file_does_not_have_rejects_its_events(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = halves("item")
    source: Source
    if form == "csv":
        write_csv(tmp_path / "a", first)
        source = LinesSource(tmp_path / "a", OPTIONAL, "csv", batch_size=COUNT)
        read(source)
        rotate(tmp_path / "a", "rename")
        write_csv(tmp_path / "a", second)
        again = LinesSource(tmp_path / "a", OPTIONAL, "csv", batch_size=COUNT, follow=True, poll=0.005)
        again.load_state_dict(source.state_dict())
        batch = next(batch for batch in again if batch is not None)
    else:
        write_parquet(tmp_path / "0.parquet", first)
        write_parquet(tmp_path / "1.parquet", second)
        *_, batch = read(ParquetSource(tmp_path, OPTIONAL, batch_size=COUNT))
    assert batch.events is None
    assert batch.missing_columns == {}
    assert len(batch.rejected) == COUNT
    assert {rejected.reason for rejected in batch.rejected} == {"missing field 'item'"}
    assert len([record for record in caplog.records if "'item'" in record.getMessage()]) == 1


def test_a_missing_label_is_reported_if_labels_cannot_arrive_separately(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "0.parquet", halves("click")[1])
    (batch,) = read(ParquetSource(tmp_path, replace(OPTIONAL, id=None), batch_size=COUNT))
    assert batch.missing_columns == {"click": COUNT}
    assert "'click'" in caplog.text
    caplog.clear()
    (batch,) = read(ParquetSource(tmp_path, OPTIONAL, batch_size=COUNT))
    assert batch.missing_columns == {}
    assert not caplog.records


def test_an_optional_column_must_be_there_when_a_run_begins_but_not_when_it_resumes(tmp_path: Path) -> None:
    write_csv(tmp_path / "a", halves()[1])
    source = LinesSource(tmp_path / "a", OPTIONAL, "csv")
    with pytest.raises(MismatchError, match="price"):
        check_columns(source, OPTIONAL)
    check_columns(source, OPTIONAL, is_resumed=True)
    with pytest.raises(MismatchError, match="price"):
        check_columns(source, SCHEMA, is_resumed=True)


def linear_learner(folder: Path) -> Learner:
    torch.manual_seed(0)
    model = models.build("linear", OPTIONAL)
    loss = nn.functional.binary_cross_entropy_with_logits
    return Learner(model, CAdam(model.named_parameters(), lr=0.01), loss, checkpoint=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for number, columns in enumerate(halves()):
        write_parquet(tmp_path / "data" / f"{number}.parquet", columns)
    return tmp_path


def test_the_counts_of_missing_columns_are_in_the_metrics_and_resume_to_the_bit(folder: Path) -> None:
    def source() -> Source:
        return ParquetSource(folder / "data", OPTIONAL, batch_size=100)

    whole = linear_learner(folder / "whole").run(source())
    stopped = linear_learner(folder / "parts").run(source(), events=COUNT + 500)
    stopped.close()
    resumed = linear_learner(folder / "parts").run(source())
    assert dict(whole.missing_columns) == dict(resumed.missing_columns) == {"price": COUNT}
    assert weights(whole) == weights(resumed)
    samples = [sample for family in prometheus_metrics.families(resumed) for sample in family.samples]
    values = {sample.name: sample.value for sample in samples if sample.labels.get("column") == "price"}
    # The counts of a chunk belong to its first batch, which the process before has read.
    assert values == {"cadam_missing_columns": COUNT, "cadam_missing_columns_total": 0, "cadam_missing_share": 0.5}
    for learner in (whole, resumed):
        learner.close()

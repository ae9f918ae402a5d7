"""Inference and schemas for data that is easily misread: large ids, row numbers, booleans, odd names and types."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.cli.main import main
from cadam.online import Schema, open_source
from cadam.online.data.inference import CannotInferError, ColumnOptions, infer_schema, take_sample
from cadam.online.data.sources.sample import MAX_COLUMNS, Sample, SamplingError, sample_records


def sampled_users(users: int, total: int | None, name: str = "user_id") -> Sample:
    """A sample of 20,000 rows, in which each user is equally likely, of a stream of `total` rows."""
    draw = np.random.default_rng(0)
    columns = {
        name: draw.integers(0, users, 20_000).tolist(),
        "request_id": draw.permutation(20_000).tolist(),
        "click": (np.arange(20_000) % 3 == 0).astype(int).tolist(),
        "device": (np.arange(20_000) % 5).tolist(),
    }
    return Sample(columns, 20_000, total, "a sample")


@pytest.mark.parametrize("total", [1_000_000, None])
@pytest.mark.parametrize("name", ["user_id", "item_id"])
def test_an_id_that_repeats_in_all_data_is_a_feature_even_if_it_rarely_repeats_in_the_sample(
    name: str, total: int | None
) -> None:
    inferred = infer_schema(sampled_users(100_000, total, name), ColumnOptions(label="click"))
    assert inferred.schema.features[name].startswith("hash:")
    assert "nearly unique" in inferred.ignored()["request_id"]
    assert any("'request_id'" in warning and "left out" in warning for warning in inferred.warnings)


def test_a_column_that_is_given_as_user_is_a_feature_even_if_it_is_unique() -> None:
    sample = sampled_users(100_000, 20_000)
    inferred = infer_schema(sample, ColumnOptions(label="click", user="request_id"))
    assert inferred.schema.features["request_id"].startswith("hash:")


def test_a_single_text_that_is_not_a_time_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    times = [f"2016-12-31T23:{row:02}:00Z" for row in range(59)] + ["2016-12-31T23:59:60Z"]
    path.write_text("at,x,y\n" + "".join(f"{at},{row % 7},{row % 2}\n" for row, at in enumerate(times)))
    with pytest.raises(CannotInferError, match=r"'2016-12-31T23:59:60Z' is not a time, .* --time at:iso"):
        infer_schema(take_sample(f"csv:{path}"), ColumnOptions(label="y", time="at"))
    assert infer_schema(take_sample(f"csv:{path}"), ColumnOptions(label="y", time="at:iso")).schema.time == "at:iso"


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_users_and_ids_that_are_unsigned_hashes_are_text_and_features(suffix: str, tmp_path: Path) -> None:
    path, users = tmp_path / f"a.{suffix}", np.uint64(2**63) + np.arange(200, dtype=np.uint64) % 9
    rows = [{"user": int(user), "event": 2**63 + n, "x": n % 7, "y": n % 2} for n, user in enumerate(users)]
    if suffix == "csv":
        path.write_text("user,event,x,y\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows))
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        types = {"user": pa.uint64(), "event": pa.uint64(), "x": pa.int64(), "y": pa.int64()}
        pq.write_table(pa.table({name: pa.array(columns[name], type_) for name, type_ in types.items()}), path)
    schema = infer_schema(take_sample(f"{suffix}:{path}"), ColumnOptions(label="y", id="event")).schema
    assert (schema.user, schema.id) == ("user:text", "event:text")
    (batch,) = [batch for batch in open_source(f"{suffix}:{path}", schema, batch_size=200) if batch is not None]
    assert not batch.rejected  # type: ignore[union-attr]
    events, encoded = batch.events, schema.encode(rows).events  # type: ignore[union-attr]
    assert events is not None
    assert encoded is not None
    assert events.ids is not None
    assert events.ids.tolist() == [str(row["event"]) for row in rows]
    assert events.features["user"].tolist() == encoded.features["user"].tolist()


@pytest.mark.parametrize(("yes", "no"), [("TRUE", "FALSE"), ("True", "False"), ("true", "false")])
@pytest.mark.parametrize("rows", [20, 200])
def test_labels_of_every_notation_of_booleans_are_accepted(yes: str, no: str, rows: int, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{row % 7},{yes if row % 2 else no}\n" for row in range(rows)))
    schema = infer_schema(take_sample(f"csv:{path}"), ColumnOptions(label="y")).schema
    batches = [batch for batch in open_source(f"csv:{path}", schema, batch_size=rows) if batch is not None]
    assert not any(batch.rejected for batch in batches)  # type: ignore[union-attr]
    labels = np.concatenate([batch.events.labels for batch in batches])  # type: ignore[union-attr]
    assert labels.tolist() == [row % 2 for row in range(rows)]


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_row_numbers_of_pandas_and_r_are_left_out_with_a_warning(name: str, first: int, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{name},x,y\n" + "".join(f"{first + row},{row % 7},{row % 2}\n" for row in range(300)))
    inferred = infer_schema(take_sample(f"csv:{path}"), ColumnOptions(label="y"))
    assert list(inferred.schema.features) == ["x"]
    assert any(repr(name) in warning for warning in inferred.warnings)


@pytest.mark.parametrize("label", ["rating", "rating>=4", "rating==good"])
def test_the_column_of_the_label_cannot_be_a_feature(label: str) -> None:
    with pytest.raises(ValueError, match="'rating'"):
        Schema({"rating": "number", "price": "number"}, label=label)


@pytest.mark.parametrize("role", ["id", "user", "time"])
def test_the_column_of_the_label_cannot_have_another_role(role: str) -> None:
    with pytest.raises(ValueError, match=f"'y' is the label, so it cannot also be the {role}"):
        Schema({"price": "number"}, label="y>=2", **{role: "y"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"features": ["a"]}, "features"),
        ({"features": {"a": 5}}, "features"),
        ({"missing": 5}, "missing"),
        ({"missing": {"a": [5]}}, "missing"),
        ({"id": 5}, "id"),
        ({"user": ["x"]}, "user"),
        ({"header": 5}, "header"),
        ({"lowest": "0"}, "lowest"),
        ({"lowest": 2}, "lowest"),
        ({"highest": math.nan}, "highest"),
        ({"binary": "no"}, "binary"),
        ({"separator": '"'}, "separator"),
        ({"features": {"a": "hash:9999999999999999999999"}}, "hash:9999999999999999999999"),
        ({"features": {"self": "number"}}, "self"),
    ],
)
def test_a_schema_with_a_wrong_type_is_refused_by_name(content: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"features": {"a": "number"}, "label": "y", **content}))
    with pytest.raises(ValueError, match=rf"schema\.json: .*{named}"):
        Schema.read(path)


def test_a_schema_without_features_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("{}")
    with pytest.raises(ValueError, match=r"schema\.json: .*object with features"):
        Schema.read(tmp_path / "schema.json")


def odd_names() -> Sample:
    columns = {
        "a:b": [row % 9 for row in range(200)],
        "x": list(range(200)),
        "rating>=4": [row % 2 for row in range(200)],
    }
    return Sample(columns, 200, 200, "a sample")


def test_a_label_whose_name_looks_like_a_comparison_is_refused_by_name() -> None:
    with pytest.raises(CannotInferError, match="'rating>=4'"):
        infer_schema(odd_names(), ColumnOptions(label="rating>=4"))


def test_a_column_with_a_colon_can_be_ignored_and_be_the_user_but_not_the_time() -> None:
    sample = odd_names()
    sample.columns["click"] = sample.columns.pop("rating>=4")
    assert "a:b" not in infer_schema(sample, ColumnOptions(label="click", ignore=("a:b",))).schema.features
    schema = infer_schema(sample, ColumnOptions(label="click", user="a:b")).schema
    assert schema.roles["user"][0] == "a:b"
    with pytest.raises(CannotInferError, match="a:b"):
        infer_schema(sample, ColumnOptions(label="click", time="a:b"))


@pytest.mark.parametrize("option", ["label", "user", "time", "id", "ignore"])
def test_an_option_that_is_given_twice_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["schema", "a.csv", f"--{option}", "click", f"--{option}", "buy"])
    assert exit_.value.code == 2
    assert f"--{option}" in capsys.readouterr().err


def test_records_with_very_many_fields_are_refused() -> None:
    records = [{f"key {row}": 1, "click": 0} for row in range(MAX_COLUMNS)]
    with pytest.raises(SamplingError, match="fields"):
        sample_records(records, None, "records", is_text=False)


def test_fewer_records_are_sampled_if_they_have_many_fields_in_total() -> None:
    records = [{f"key {row % 2_000}": 1, "click": 0} for row in range(40_000)]
    sample = sample_records(records, None, "records", is_text=False)
    assert sum(map(len, sample.columns.values())) <= 4_000_000


def test_lists_as_labels_are_refused_by_name() -> None:
    columns = {"x": list(range(100)), "y": [[row % 2, 1] for row in range(100)]}
    with pytest.raises(CannotInferError, match="'y' contains lists"):
        infer_schema(Sample(columns, 100, 100, "a sample"), ColumnOptions(label="y"))  # type: ignore[arg-type]


def test_columns_of_many_ids_get_a_row_for_each_value_on_request(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    lines = ["user_id,item,page,click", *(f"{n % 2000},i{n % 1500},{n % 7},{n % 2}" for n in range(6000))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    features = infer_schema(take_sample(f"csv:{path}"), ColumnOptions(label="click", uses_ids=True)).schema.features
    assert features["user_id"] == features["item"] == "id:max=100000?"
    assert features["page"].startswith("hash:")
    hashed = infer_schema(take_sample(f"csv:{path}"), ColumnOptions(label="click")).schema.features
    assert all(kind.startswith("hash:") for kind in hashed.values())

"""Schema inference: kinds, times, labels, roles and warnings."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.online import Schema, open_source, run_config
from cadam.online.data.conversion import convert
from cadam.online.data.events import Batch
from cadam.online.data.inference import CannotInferError, ColumnOptions, InferredSchema, infer_schema, take_sample
from cadam.online.data.inference.columns import split_words
from cadam.online.data.inference.features import choose_buckets
from cadam.online.data.kind import Kind
from cadam.online.data.schema import Target
from cadam.online.data.sources import line_sampling, resolve_uri
from cadam.online.data.sources.sample import SamplingError

START = datetime(2024, 3, 1, tzinfo=UTC)
ROWS = 600


def times(form: str) -> list[str]:
    return [(START + timedelta(minutes=47 * row)).strftime(form) for row in range(ROWS)]


def column(kind: str) -> list[Any]:
    chance = random.Random(kind)
    made: dict[str, Any] = {
        "user": lambda row: chance.randrange(1, 80),
        "price": lambda row: round(chance.lognormvariate(2, 1), 2),
        "device": lambda row: chance.choice(["android", "ios", "web"]),
        "click": lambda row: int(chance.random() < 0.3),
        "hex": lambda row: f"{chance.getrandbits(64):016x}",
        "one": lambda row: "x",
        "title": lambda row: f"the {chance.choice('abcdef')} of the {chance.random():.6f} day",
        "genres": lambda row: "|".join(chance.sample(["Action", "Comedy", "Drama", "War"], chance.randint(1, 3))),
        "rating": lambda row: chance.choice([0.5, 1, 2, 3, 4, 5]),
    }
    return [made[kind](row) for row in range(ROWS)]


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]], separator: str = ",", header: bool = True) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator)
    if header:
        writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def inferred(path: Path | str, **options: Any) -> InferredSchema:
    return infer_schema(take_sample(resolve_uri(str(path))), ColumnOptions(**options), str(path))


def read(path: Path, schema: Schema) -> tuple[int, list[str]]:
    """Return the number of events that fit the schema, and the reasons why others are rejected."""
    batches: list[Any] = list(open_source(resolve_uri(str(path)), schema))
    return sum(len(b.events) for b in batches if b.events), [r.reason for b in batches for r in b.rejected]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.csv.gz"])
def test_csv_is_read_with_every_separator_quotes_and_compression(name: str, separator: str, tmp_path: Path) -> None:
    quoted = [f'a "{value}"{separator} b' for value in column("device")]
    given = {"user_id": column("user"), "price": column("price"), "note": quoted, "click": column("click")}
    path = write_csv(tmp_path / name, given, separator)
    schema = inferred(path).schema
    assert schema.separator == separator
    assert schema.features["price"] == "number?"
    assert schema.features["user_id"].startswith("hash:")
    assert (schema.label, schema.user) == ("click", "user_id")
    assert read(path, schema) == (ROWS, [])


@pytest.mark.parametrize("is_adjacent", [True, False])
def test_copies_of_rows_are_named_instead_of_columns_that_predict_their_labels(
    is_adjacent: bool, tmp_path: Path
) -> None:
    order = sorted([*range(ROWS), *range(ROWS)]) if is_adjacent else [*range(ROWS), *range(ROWS)]
    once = {"note": column("hex"), "price": column("price"), "click": column("click")}
    twice = {name: [values[row] for row in order] for name, values in once.items()}
    (copied,) = [text for text in inferred(write_csv(tmp_path / "twice.csv", twice)).warnings if "copies" in text]
    assert copied.startswith("50.0% of the rows are copies of earlier rows, with their labels.")
    assert not any("alone predicts" in text for text in inferred(tmp_path / "twice.csv").warnings)
    assert not any("copies" in text for text in inferred(write_csv(tmp_path / "once.csv", once)).warnings)


def test_rows_that_repeat_by_chance_are_no_copies(tmp_path: Path) -> None:
    few_values = {"device": column("device"), "click": column("click")}
    assert not any("copies" in text for text in inferred(write_csv(tmp_path / "a.csv", few_values)).warnings)


TIME_FORMATS = (
    "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d", "%d/%m/%Y %H:%M", "%m/%d/%Y %I:%M:%S %p", "%d.%m.%Y",
    "%d-%b-%Y %H:%M:%S", "%Y/%m/%d %H:%M:%S", "%d/%b/%Y:%H:%M:%S %z", "%Y年%m月%d日", "%Y%m%d",
)  # fmt: skip


@pytest.mark.parametrize("form", TIME_FORMATS)
def test_common_formats_of_times_are_recognized(form: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"when": times(form), "item": column("device"), "click": column("click")})
    schema = inferred(path).schema
    assert schema.time is not None
    assert schema.time.partition(":")[0] == "when"
    batch = next(iter(open_source(resolve_uri(str(path)), schema)))
    expected = [datetime.strptime(text, form).replace(tzinfo=UTC).timestamp() for text in times(form)]
    assert batch.events.time.tolist() == expected  # type: ignore[union-attr]
    hour, day = batch.events.features["when"][100].tolist()  # type: ignore[union-attr]
    moment = datetime.fromtimestamp(expected[100], UTC)
    assert (hour, day) == (1 + moment.hour, 1 + 24 + moment.weekday())


@pytest.mark.parametrize(("scale", "form"), [(1, ""), (1_000, ":ms"), (1_000_000, ":us")])
def test_numbers_are_times_by_name_and_size(scale: int, form: str, tmp_path: Path) -> None:
    seconds = [int(START.timestamp()) + 60 * row for row in range(ROWS)]
    given = {"ts": [scale * one for one in seconds], "item": column("device"), "click": column("click")}
    path = write_csv(tmp_path / "a.csv", given)
    schema = inferred(path).schema
    assert schema.time == f"ts{form}"
    batch = next(iter(open_source(resolve_uri(str(path)), schema)))
    assert batch.events.time.tolist() == seconds  # type: ignore[union-attr]


def test_ambiguous_days_and_months_are_a_warning(tmp_path: Path) -> None:
    dates = [f"{1 + row % 12:02d}/{1 + row % 12:02d}/2024" for row in range(ROWS)]
    path = write_csv(tmp_path / "a.csv", {"date": dates, "item": column("device"), "click": column("click")})
    assert any("months" in warning and "'date'" in warning for warning in inferred(path).warnings)


def test_a_file_without_a_header_gets_names_that_are_saved_in_the_schema(tmp_path: Path) -> None:
    given = {"a": column("click"), "b": column("user"), "c": column("device")}
    path = write_csv(tmp_path / "a.csv", given, header=False)
    found = inferred(path, label="c1", user="c2")
    assert found.schema.header == ["c1", "c2", "c3"]
    assert read(path, found.schema) == (ROWS, [])
    found.schema.write(tmp_path / "schema.json", ignored=found.ignored())
    assert Schema.read(tmp_path / "schema.json") == found.schema


def test_names_may_be_in_any_script(tmp_path: Path) -> None:
    given = {
        "时间": times("%Y/%m/%d %H:%M:%S"),
        "用户": column("user"),
        "城市": column("device"),
        "点击": column("click"),
    }
    path = write_csv(tmp_path / "a.csv", given)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    schema = inferred(path).schema
    assert (schema.label, schema.user, schema.time) == ("点击", "用户", "时间:%Y/%m/%d %H:%M:%S")
    assert read(path, schema) == (ROWS, [])


def test_json_lines_may_contain_booleans_lists_nested_objects_and_missing_values(tmp_path: Path) -> None:
    chance = random.Random(0)
    lines = []
    for row, user in enumerate(column("user")):
        event = {
            "userId": f"u{user}",
            "mobile": row % 3 == 0,
            "geo": {"lat": 1},
            "price": row / 7,
            "label": row % 2 == 0,
        }
        event["tags"] = chance.sample("abcde", chance.randint(0, 4))
        if row % 4 == 0:
            del event["price"]
        lines.append(json.dumps(event))
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    found = inferred(path)
    assert found.schema.features["tags"].endswith("[4]?")
    assert found.schema.features["price"] == "number?"
    assert found.schema.user == "userId:text"
    assert list(found.ignored()) == ["geo.lat"]
    assert read(path, found.schema) == (ROWS, [])
    batch = next(iter(open_source(f"jsonl:{path}", found.schema)))
    price, mobile = batch.events.features["price"], batch.events.features["mobile"]  # type: ignore[union-attr]
    assert np.isnan(price[:8]).tolist() == [row % 4 == 0 for row in range(8)]
    assert len(set(mobile.tolist())) == 2


def test_parquet_may_contain_lists_nulls_timestamps_and_decimals(tmp_path: Path) -> None:
    moments = [START + timedelta(minutes=row) for row in range(ROWS)]
    history = [None if row % 9 == 0 else list(range(row % 25)) for row in range(ROWS)]
    table = pa.table(
        {
            "event_time": pa.array(moments, pa.timestamp("us", "UTC")),
            "user": column("user"),
            "vector": pa.array([[row * 0.5, 1.5] for row in range(ROWS)], pa.list_(pa.float32(), 2)),
            "history": pa.array(history, pa.list_(pa.int64())),
            "city": pa.array([["Oslo", "Rome", None][row % 3] for row in range(ROWS)]).dictionary_encode(),
            "cost": pa.array([f"{row}.25" for row in range(ROWS)]).cast(pa.decimal128(10, 2)),
            "paid": pa.array([row % 2 == 0 for row in range(ROWS)]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    schema = inferred(tmp_path / "a.parquet", label="paid").schema
    assert schema.features["vector"] == "number[2]?"
    assert schema.features["history"].endswith("[last 24]?")
    assert schema.features["cost"] == "number?"
    assert (schema.time, schema.user) == ("event_time", "user")
    assert read(tmp_path / "a.parquet", schema) == (ROWS, [])


def test_useless_columns_are_left_out_and_suspicious_data_is_a_warning(tmp_path: Path) -> None:
    click = column("click")
    given = {
        "id": column("hex"),
        "constant": column("one"),
        "when": times("%Y-%m-%d %H:%M:%S")[::-1],
        "title": column("title"),
        "genres": column("genres"),
        "seconds": [row % 50 + 1 if one else "" for row, one in enumerate(click)],
        "bid": ["NA" if row % 10 == 0 else row / 3 for row in range(ROWS)],
        "click": click,
    }
    path = write_csv(tmp_path / "a.csv", given)
    found = inferred(path)
    assert set(found.ignored()) == {"id", "constant"}
    assert found.schema.kinds["title"].name == "words"
    assert found.schema.features["genres"].endswith("[16]?")
    assert found.schema.features["bid"] == "number?"
    assert found.schema.missing == {name: ["NA"] for name in ("when", "seconds", "bid")}
    for word in ("not sorted", "--ignore seconds", "--user"):
        assert any(word in warning for warning in found.warnings), word
    assert not any("--ignore bid" in warning for warning in found.warnings)
    assert read(path, found.schema) == (ROWS, [])


def test_a_time_with_few_gaps_is_a_warning_with_their_share_and_is_checked_for_order(tmp_path: Path) -> None:
    when = ["" if row % 100 == 7 else text for row, text in enumerate(times("%Y-%m-%d %H:%M:%S")[::-1])]
    rare = [text if row % 2 else "" for row, text in enumerate(times("%Y-%m-%d %H:%M:%S")[::-1])]
    given = {"at": when, "price": column("price"), "click": column("click")}
    path = write_csv(tmp_path / "a.csv", given)
    found, with_option = inferred(path), inferred(path, time="at")
    assert found.schema.time is None
    assert read(path, found.schema) == (ROWS, [])
    assert any("1.0%" in warning and "'at'" in warning and "--time at" in warning for warning in found.warnings)
    assert any("1.0%" in warning and "will be rejected" in warning for warning in with_option.warnings)
    assert read(path, with_option.schema) == (ROWS - 6, ["missing field 'at'"] * 6)
    for report in (found, with_option):
        assert any("not sorted" in warning and "'at'" in warning for warning in report.warnings)
    sparse = inferred(write_csv(tmp_path / "b.csv", {**given, "at": rare}))
    assert not any("'at'" in warning for warning in sparse.warnings)


@pytest.mark.parametrize(
    ("form", "advice"),
    [
        (lambda price: f"{price:.2f}".replace(".", ","), '"decimal": ","'),
        (lambda price: f"{1000 * price:,.2f}", "decimal point"),
        (lambda price: f"${price:.2f}", "Remove the sign"),
        (lambda price: f"-{price:.2f} €".replace(".", ","), "Remove the sign"),
        (lambda price: f"{price:.0f}%", "Remove the sign"),
    ],
)
def test_numbers_with_a_comma_or_a_sign_are_a_warning(form: Any, advice: str, tmp_path: Path) -> None:
    prices = ["N/A" if row % 50 == 0 else form(price) for row, price in enumerate(column("price"))]
    genres = [",".join(str(number) for number in range(row % 5)) for row in range(ROWS)]
    path = write_csv(tmp_path / "a.csv", {"price": prices, "list": genres, "click": column("click")})
    found = inferred(path)
    (warning,) = [warning for warning in found.warnings if "look like numbers" in warning]
    assert repr(prices[1]) in warning
    assert "'price'" in warning
    assert advice in warning
    assert not any("look like numbers" in warning for warning in inferred(path, ignore=("price",)).warnings)


def test_a_missing_marker_of_one_column_is_a_value_in_text_and_in_the_label(tmp_path: Path) -> None:
    country = ["NA" if row % 4 == 0 else "DE" for row in range(ROWS)]
    given: dict[str, Sequence[Any]] = {
        "country": country,
        "balance": ["NA" if row % 50 == 0 else "None" if row % 50 == 1 else row / 3 for row in range(ROWS)],
        "fraud": ["card" if row % 10 == 0 else "None" for row in range(ROWS)],
        "device": column("device"),
    }
    path = write_csv(tmp_path / "a.csv", given)
    found = inferred(path, label="fraud==card")
    assert found.schema.missing == {"balance": ["NA", "None"]}
    (batch,) = open_source(resolve_uri(str(path)), found.schema, batch_size=ROWS)
    assert isinstance(batch, Batch)
    assert batch.events is not None
    assert batch.events.labels is not None
    assert batch.events.labels.tolist() == [float(row % 10 == 0) for row in range(ROWS)]
    assert (batch.events.features["country"] > 0).all(), "no country is missing"
    assert np.isnan(batch.events.features["balance"]).sum() == 2 * ROWS // 50


def test_a_label_that_is_compared_with_a_text_has_no_missing_values(tmp_path: Path) -> None:
    """Without the comparison, "-" would be a missing value."""
    given = {"device": column("device"), "flag": ["t" if row % 3 == 0 else "-" for row in range(ROWS)]}
    found = inferred(write_csv(tmp_path / "a.csv", given), label="flag==t")
    (batch,) = open_source(resolve_uri(str(tmp_path / "a.csv")), found.schema, batch_size=ROWS)
    assert isinstance(batch, Batch)
    assert batch.events is not None
    assert batch.events.labels is not None
    assert batch.events.labels.tolist() == [float(row % 3 == 0) for row in range(ROWS)]


def test_missing_markers_for_all_columns_exclude_a_label_that_is_compared_with_a_text() -> None:
    rows = [{"a": "NA", "sold": "NA"}, {"a": "1", "sold": "yes"}]
    compared = Schema({"a": "number?"}, label="sold==yes", missing=["NA"]).convert_records(rows, ["0", "1"], text=True)
    assert compared.events is not None
    assert compared.events.labels is not None
    assert compared.events.labels.tolist() == [0, 1]
    assert np.isnan(compared.events.features["a"][0])
    with pytest.raises(ValueError, match="missing"):
        Schema({"a": "number?"}, missing="NA")


def test_ignored_columns_are_left_out_and_unknown_columns_are_errors(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"a": column("price"), "b": column("device"), "click": column("click")})
    assert list(inferred(path, ignore=("a",)).schema.features) == ["b"]
    for options in ({"ignore": ("c",)}, {"label": "clicks"}, {"user": "c"}, {"time": "c"}):
        with pytest.raises(CannotInferError, match="a, b, click"):
            inferred(path, **options)
    with pytest.raises(CannotInferError, match="'click'"):
        inferred(path, ignore=("a", "b"))


@pytest.mark.parametrize(
    ("values", "wanted", "label", "share"),
    [
        ([0, 1], "y", "y", 0.5),
        ([-1, 1], "y", "y>0", 0.5),
        (["yes", "no"], "y", "y==yes", 0.5),
        (["True", "False"], "y", "y", 0.5),
        ([1, 2, 3, 4, 5], "y>=4", "y>=4", 0.4),
        (["sold", "lost", "open"], "y==sold", "y==sold", 1 / 3),
        (["sold", "lost", "open"], "y!=sold", "y!=sold", 2 / 3),
    ],
)
def test_a_label_is_derived_from_a_column(
    values: list[Any], wanted: str, label: str, share: float, tmp_path: Path
) -> None:
    y = [values[row % len(values)] for row in range(ROWS)]
    path = write_csv(tmp_path / "a.csv", {"item": column("device"), "y": y})
    schema = inferred(path, label=wanted).schema
    assert schema.label == label
    batch = next(iter(open_source(f"csv:{path}", schema)))
    assert batch.events.labels.mean() == pytest.approx(share, abs=0.01)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "advice"),
    [([0.5, 1, 2, 3, 4, 5], "--label 'y>=3'"), (["sold", "lost"], "--label y==sold"), ([7], "--label y")],
)
def test_an_unclear_label_is_an_error_that_suggests_an_option(values: list[Any], advice: str, tmp_path: Path) -> None:
    y = [values[row % len(values)] for row in range(ROWS)]
    path = write_csv(tmp_path / "a.csv", {"item": column("device"), "y": y})
    with pytest.raises(CannotInferError) as error:
        inferred(path, label="y")
    assert advice in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'[{"a": 1}]', "jq"),
        (b"PK\3\4" + bytes(40), "Excel"),
        ("a,click\n1,0\n".encode("utf-16"), "UTF-16"),
        (b"", "empty"),
        (b"a,b\n1,2\n", "--label"),
    ],
)
def test_unreadable_data_is_an_error_that_says_what_to_do(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.data"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        inferred(path)


def test_a_long_file_is_sampled_from_several_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The users change over time, so the beginning of the file contains only a tenth of them."""
    monkeypatch.setattr(line_sampling, "MAX_BYTES", 1 << 14)
    rows = 40_000
    given = {"user_id": [row // 40 for row in range(rows)], "item": [row % 7 for row in range(rows)]}
    path = write_csv(tmp_path / "a.csv", {**given, "click": [row % 3 == 0 for row in range(rows)]})
    taken = take_sample(f"csv:{path}")
    assert taken.rows < 3000
    assert taken.total == pytest.approx(rows, rel=0.1)
    users = taken.columns["user_id"]
    assert users[0] == "0"
    assert int(users[-1]) > 990
    kind = Kind.parse(infer_schema(taken, ColumnOptions("click")).schema.features["user_id"])
    assert kind.size > 2 * 1000


def test_there_are_more_buckets_than_distinct_values() -> None:
    for distinct in (2, 100, 5_000, 80_000, 1_000_000):
        assert choose_buckets(distinct) >= 4 * distinct
    assert choose_buckets(10**9) == 10_000_000


def test_names_are_split_into_words() -> None:
    assert split_words("userId") == split_words("user_id") == split_words("USER-ID") == ["user", "id"]


# Kinds ---------------------------------------------------------------------------------------------------------


def test_a_missing_value_is_0_and_the_others_move_up() -> None:
    given = [3, None, 0, 3]
    assert convert(given, Kind.parse("category:5?"))[0].tolist() == [4, 0, 1, 4]
    plain, optional = convert([3, 0], Kind.parse("hash:9"))[0], convert(given, Kind.parse("hash:10?"))[0]
    assert optional.tolist() == [plain[0] + 1, 0, plain[1] + 1, plain[0] + 1]
    numbers, bad = convert(["1.5", None, "x"], Kind.parse("number?"), text=True)
    assert numbers[0] == 1.5
    assert np.isnan(numbers[1])
    assert list(bad) == [2]
    assert convert([4], Kind.parse("category:5?"))[1]


def test_an_optional_list_may_be_shorter_and_only_its_first_values_are_used() -> None:
    array, bad = convert([[1, 2], None, [1, 2, 3, 4], "1|2"], Kind.parse("hash:50[3]?"))
    assert not bad
    assert array[0].tolist() == [*array[2][:2].tolist(), 0]
    assert array[1].tolist() == [0, 0, 0]
    assert array[3].tolist() == array[0].tolist()


@pytest.mark.parametrize(
    "text", ["number?", "hash:10?", "category:3[2]?", "clock", "clock:iso?", "clock:%d/%m/%Y %H:%M?"]
)
def test_a_kind_is_written_as_it_is_parsed(text: str) -> None:
    assert str(Kind.parse(text)) == text


@pytest.mark.parametrize("text", ["clock:nonsense", "hash:1?", "number??", "category?"])
def test_an_invalid_kind_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"kind|format"):
        Kind.parse(text)


def test_a_comparison_keeps_missing_values_and_is_exact_at_the_threshold() -> None:
    labels, bad = Target.parse("x>0.1").labels([0.1, 0.2, None], text=False)
    assert labels[:2].tolist() == [0, 1]
    assert np.isnan(labels[2])
    assert bad == {2: ""}
    with pytest.raises(ValueError, match="status>sold"):
        Target.parse("status>sold")


def infer_columns(tmp_path: Path, **columns: Sequence[Any]) -> InferredSchema:
    count = len(next(iter(columns.values())))
    label = {"click": [row % 3 % 2 for row in range(count)]}
    return inferred(write_csv(tmp_path / "a.csv", {**label, **columns}), label="click")


@pytest.mark.parametrize(
    "name", ["item", "movie", "productSku", "advertiser", "ad", "campaign_1", "Video", "songs", "store", "top_category"]
)
def test_integers_in_a_column_named_after_a_thing_are_ids(name: str, tmp_path: Path) -> None:
    chance = random.Random(0)
    found = infer_columns(tmp_path, **{name: [chance.randrange(3000) for _ in range(3000)]})
    assert found.schema.kinds[name].name == "hash"


def test_integers_that_may_be_ids_are_a_warning_and_amounts_are_not(tmp_path: Path) -> None:
    chance = random.Random(0)
    many = [chance.randrange(3000) for _ in range(3000)]
    found = infer_columns(
        tmp_path, foo=many, item_price=many, item_count=many, far=[chance.randrange(10**6) for _ in many]
    )
    assert set(found.schema.features.values()) == {"number?"}
    doubts = [warning for warning in found.warnings if "write hash:" in warning]
    assert len(doubts) == 1
    assert "'foo'" in doubts[0]


def test_a_few_texts_among_numbers_are_a_warning(tmp_path: Path) -> None:
    values: list[Any] = [round(row * 0.37, 2) for row in range(1000)]
    values[::100] = ["cheap"] * 10
    values[5] = ""
    found = infer_columns(tmp_path, price=values)
    assert found.schema.features["price"].startswith("hash:")
    reason = next(decision.reason for decision in found.decisions if decision.column == "price")
    assert "10 of 999" in reason
    assert "'cheap'" in reason
    assert "0.1% missing" in reason
    assert any("'price'" in warning and "\"missing\": ['cheap']" in warning for warning in found.warnings)
    found = infer_columns(tmp_path, device=["a" if row % 2 else "7" for row in range(1000)])
    assert not any("'device'" in warning for warning in found.warnings)


def test_the_share_of_missing_integers_is_reported(tmp_path: Path) -> None:
    found = infer_columns(tmp_path, count=["" if row % 4 == 0 else row for row in range(1000)])
    assert found.schema.features["count"] == "number?"
    assert found.decisions[1].reason.endswith("25.0% missing")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_file_that_is_not_utf8_is_an_error_that_shows_how_to_convert_it(suffix: str, tmp_path: Path) -> None:
    lines = ["name,click"] if suffix == "csv" else []
    lines += [
        f"caf\xe9 {row % 9},{row % 2}" if suffix == "csv" else f'{{"name": "\xe9", "click": {row % 2}}}'
        for row in range(99)
    ]
    lines.insert(1, lines[-1].replace("\xe9", "e"))
    path = tmp_path / f"a.{suffix}"
    path.write_bytes("\n".join(lines).encode("latin1"))
    with pytest.raises(SamplingError) as caught:
        inferred(path, label="click")
    assert f"not UTF-8 (line {3 if suffix == 'csv' else 1})" in str(caught.value)
    assert f"iconv -f latin1 -t utf8 {path} > " in str(caught.value)


def test_a_single_line_that_is_not_utf8_is_a_warning(tmp_path: Path) -> None:
    lines = [b"name,click", *(f"a{row % 9},{row % 2}".encode() for row in range(500)), b"\xe9,1", b""]
    (tmp_path / "a.csv").write_bytes(b"\n".join(lines))
    (warning,) = [warning for warning in inferred(tmp_path / "a.csv", label="click").warnings if "UTF-8" in warning]
    assert "1 of 501 lines" in warning
    assert "(line 502)" in warning


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,click\n", "no rows"),
        ("a click\n1 0\n2 1\n", "comma, semicolon, tab, bar"),
        ("1,0\n2,1\n3,0\n", "c1 to c2"),
        ("a,click\n1,not bought\n2,bought\n3,bought\n", "--label click==bought"),
        ("a,click\n1,stayed\n2,left\n3,stayed\n", "--label click==left"),
        ("a,clicked\n1,0\n2,1\n", "'clicked'?"),
        ("a,click\n1,\n2,\n", "'click'"),
    ],
)
def test_small_mistakes_are_errors_that_say_what_to_do(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises((CannotInferError, SamplingError)) as caught:
        inferred(tmp_path / "a.csv", label="click")
    assert words in str(caught.value)


def test_a_threshold_for_text_is_an_error_that_suggests_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,rating\n1,good\n2,4\n3,bad\n")
    with pytest.raises(CannotInferError, match=r"'rating'.*'good'.*rating=="):
        inferred(tmp_path / "a.csv", label="rating>=4")


@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_a_damaged_gzip_file_is_an_error_that_says_what_to_do(damage: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv.gz", {"item": column("device"), "click": column("click")})
    complete = path.read_bytes()
    path.write_bytes(complete[: len(complete) // 2] if damage == "cut off" else complete[:-8] + bytes(8))
    schema = Schema({"item": "hash:10"}, label="click")
    for reads in (lambda: inferred(path, label="click"), lambda: list(open_source(f"csv:{path}", schema))):
        with pytest.raises(OSError, match="gzip -t") as error:
            reads()
        assert f"zcat {path} > part-a.csv" in str(error.value)


def test_a_folder_without_parquet_files_is_an_error(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", {"item": column("device"), "click": column("click")})
    with pytest.raises(SamplingError, match="CSV or JSON lines"):
        inferred(tmp_path, label="click")


def test_fewer_bytes_are_read_if_lines_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_sampling, "MAX_ROWS", 160)
    monkeypatch.setattr(line_sampling, "MAX_BYTES", 1 << 16)
    rows = 20_000
    path = write_csv(tmp_path / "a.csv", {"n": list(range(rows)), "click": [row % 2 for row in range(rows)]})
    sampled = line_sampling.sample_lines(str(path))
    lines, total = sampled.lines, sampled.total
    assert 16 * 15 < len(lines) < 16 * 25, "about 20 lines from each of 16 positions, of 500 that fit"
    numbers = [int(line.split(b",")[0]) for line in lines[1:]]
    assert numbers[-1] > 0.999 * rows
    assert max(after - before for before, after in pairwise(numbers)) < rows / 10, "the lines are evenly spread"
    assert total == pytest.approx(rows, rel=0.1)


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("csv:data/clicks.csv", "data/clicks.csv"),
        ("redis://me:secret@host:6379/clicks?db=2", "redis://host:6379/clicks"),
        ("kafka://host:9092/clicks?sasl.password=secret", "kafka://host:9092/clicks"),
    ],
)
def test_a_stream_is_shown_without_settings_and_passwords(uri: str, name: str) -> None:
    assert run_config.displayed_uri(uri) == name


@pytest.mark.parametrize("value", [[1], {"a": 1}, True])
def test_a_value_that_cannot_be_a_time_is_rejected(value: object) -> None:
    array, problems = convert(["2020-01-01", value], Kind("time", time_format="iso"))
    assert array[0] == 1577836800
    assert set(problems) == {1}

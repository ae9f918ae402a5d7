"""How values are written: texts of many words, histories, decimal commas and nested objects."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadam import CAdam
from cadam.online import Learner, Schema, models, open_source
from cadam.online.data import text_columns
from cadam.online.data.conversion import convert, split_text
from cadam.online.data.kind import Kind
from cadam.online.data.sources.records import Message, convert_messages
from cadam.online.data.text_columns import Quoting
from cadam.online.data.validation import check_columns
from cadam.online.persistence.export import LoadedModel, export
from tests.online.data.test_inference import column, inferred, read, write_csv
from tests.online.data.test_text_columns import VALUES
from tests.online.data.test_text_columns import column as text_column
from tests.optim.exact import present

WORDS = [
    "the",
    "a",
    "of",
    "red",
    "blue",
    "small",
    "big",
    "old",
    "new",
    "Straße",
    "café",
    "日本",
    "x1",
    "cat",
    "dog",
    "house",
]


def features(path: Path, schema: Schema, scheme: str) -> dict[str, np.ndarray]:
    (batch,) = open_source(f"{scheme}:{path}", schema, batch_size=10_000)
    assert not batch.rejected  # type: ignore[union-attr]
    return present(batch.events).features  # type: ignore[union-attr]


# Words ---------------------------------------------------------------------------------------------------------


def test_words_are_lower_case_runs_of_word_characters_of_any_script() -> None:
    assert split_text("It's a CAFÉ, l'été_1 — 日本!") == ["it", "s", "a", "café", "l", "été_1", "日本"]


def test_a_text_becomes_the_buckets_of_its_first_words_and_zeros() -> None:
    kind = Kind.parse("words:1000[4]?")
    array, problems = convert(["Red, red CAR", "red car", None, "", "a b c d e"], kind)
    assert not problems
    plain = convert(["red", "car"], Kind.parse("hash:1000?"))[0].tolist()
    assert array[0].tolist() == [plain[0], plain[0], plain[1], 0]
    assert array[1].tolist() == [*plain, 0, 0]
    assert not array[2:4].any()
    assert array[4].all()
    assert array.max() < 1000


def test_a_required_text_may_have_few_words_but_must_be_there() -> None:
    array, problems = convert(["one", None, ["a"], 5], Kind.parse("words:1000[3]"))
    assert (array[0] > 0).tolist() == [True, False, False]
    assert problems[1] == ""
    assert "list" in problems[2]
    assert 3 not in problems


def test_numbers_and_booleans_have_the_words_that_csv_has() -> None:
    kind = Kind.parse("words:1000[3]")
    assert convert([5, 1.5, True], kind)[0].tolist() == convert(["5", "1.5", "true"], kind, text=True)[0].tolist()


def test_a_word_of_any_length_is_used() -> None:
    array, problems = convert(["x" * 5000 + " é\ud800b"], Kind.parse("words:1000[3]"))
    assert not problems
    assert (array > 0).all()


@pytest.mark.parametrize("text", ["words:1000", "words:1[3]", "words[3]", "number[last 3]", "hash:10[last 3]"])
def test_an_incomplete_kind_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        Kind.parse(text)


@pytest.mark.parametrize("text", ["words:1000[32]?", "words:1000[32]", "hash:10[last 50]?", "number[last 2]?"])
def test_a_kind_is_written_as_it_is_parsed(text: str) -> None:
    assert str(Kind.parse(text)) == text


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 30))) + f" {row}" for row in range(count)]


def test_texts_of_many_words_are_inferred_as_words_with_a_table_for_their_vocabulary(tmp_path: Path) -> None:
    columns = {"title": texts(600), "device": column("device"), "click": column("click")}
    found = inferred(write_csv(tmp_path / "a.csv", columns))
    kind = present(found.schema.kinds["title"])
    assert kind.name == "words"
    assert 20 <= kind.length <= 31
    assert kind.size >= 600
    assert read(tmp_path / "a.csv", found.schema) == (600, [])


@pytest.mark.parametrize("name", ["linear", "deepfm"])
def test_words_and_histories_are_trained_exported_and_read_alike_from_csv_and_json(name: str, tmp_path: Path) -> None:
    schema = Schema({"title": "words:500[8]", "seen": "hash:100[last 5]?", "n": "number"}, label="y")
    draw = random.Random(1)
    records: list[dict[str, Any]] = [
        {"title": text, "seen": [draw.randrange(90) for _ in range(draw.randint(0, 9))], "n": 0.5, "y": row % 2}
        for row, text in enumerate(texts(60))
    ]
    rows = [{**record, "seen": " ".join(map(str, record["seen"]))} for record in records]
    write_csv(tmp_path / "a.csv", {key: [row[key] for row in rows] for key in records[0]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    of_csv, of_json = features(tmp_path / "a.csv", schema, "csv"), features(tmp_path / "a.jsonl", schema, "jsonl")
    for key, values in of_csv.items():
        np.testing.assert_array_equal(values, of_json[key])
    torch.manual_seed(0)
    model = models.build(name, schema)
    tensors = {key: torch.from_numpy(values) for key, values in of_csv.items()}
    optimizer = CAdam(model.named_parameters(), lr=0.1)
    torch.nn.functional.binary_cross_entropy_with_logits(model(**tensors), torch.rand(60)).backward()
    optimizer.step()
    gradients = [param.grad for param in model.parameters()]
    loaded = LoadedModel(model.eval(), schema, tmp_path, 60)
    path, *_ = export(loaded, tmp_path / "model.pt2")
    assert all(param.grad is gradient for param, gradient in zip(model.parameters(), gradients, strict=True))
    served = torch.export.load(path).module()(tensors)
    np.testing.assert_allclose(served.detach().numpy(), loaded.predict(records), rtol=0, atol=1e-6)
    np.testing.assert_allclose(loaded.predict(rows, text=True), loaded.predict(records), rtol=0, atol=1e-6)


def test_compiled_per_event_training_learns_words_like_torch() -> None:
    schema = Schema({"title": "words:500[8]", "seen": "hash:100[last 5]?"}, label="y")
    records = [{"title": text, "seen": [row % 7] * (row % 9), "y": row % 2} for row, text in enumerate(texts(80))]
    events = present(schema.convert_records(records, [""] * 80).events)
    trained: dict[bool, dict[str, torch.Tensor]] = {}
    for per_event in (True, False):
        torch.manual_seed(0)
        model = models.build("linear", schema)
        optimizer, loss = CAdam(model.named_parameters(), lr=0.01), nn.functional.binary_cross_entropy_with_logits
        learner = Learner(model, optimizer, loss, per_event=per_event, batch_size=1)
        assert not per_event or learner.training_mode.endswith("compiled")
        for row in range(80):
            learner.learn(events.take(slice(row, row + 1)))
        trained[per_event] = dict(model.state_dict())
    for name, values in trained[True].items():
        torch.testing.assert_close(values, trained[False][name], rtol=1e-4, atol=1e-6)


# Histories -----------------------------------------------------------------------------------------------------


def test_a_history_keeps_its_last_values_in_every_format() -> None:
    kind = Kind.parse("hash:1000[last 3]?")
    array, problems = convert([[1, 2, 3, 4, 5], "1|2|3|4|5", np.array([3, 4, 5]), [5], None], kind)
    assert not problems
    assert array[0].tolist() == array[1].tolist() == array[2].tolist()
    assert array[0].tolist() == convert([3, 4, 5], Kind.parse("hash:1000?"))[0].tolist()
    assert array[3].tolist() == [array[0][2], 0, 0]
    assert not array[4].any()


@pytest.mark.parametrize(("longest", "length"), [(12, "[12]?"), (40, "[last 40]?"), (300, "[last 50]?")])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_long_lists_are_inferred_as_histories(form: str, longest: int, length: str, tmp_path: Path) -> None:
    draw = random.Random(2)
    seen = [[draw.choice("abcdefgh") for _ in range(longest if row == 3 else draw.randint(1, 9))] for row in range(600)]
    path = tmp_path / f"a.{form}"
    if form == "csv":
        write_csv(path, {"seen": ["|".join(one) for one in seen], "click": column("click")})
        length = length.replace("[12]", "[16]")
    else:
        rows = zip(seen, column("click"), strict=True)
        path.write_text("".join(json.dumps({"seen": one, "click": click}) + "\n" for one, click in rows))
    found = inferred(path)
    assert found.schema.features["seen"].endswith(length)
    assert read(path, found.schema) == (600, [])


# Decimal commas ------------------------------------------------------------------------------------------------


def with_comma(numbers: list[float]) -> list[str]:
    return [str(number).replace(".", ",") for number in numbers]


COMMAS = Schema(
    {"price": "number?", "n": "category:50", "code": "hash:1000", "pair": "number[2]?", "at": "clock"},
    label="rating>=3.5",
    user="user",
    time="at",
    separator=";",
    decimal=",",
)
LINES = [
    "price;n;code;pair;at;user;rating",
    "3,14;5;a,b;1,5 2,5;1700000000,5;7;3,5",
    ";5,0;5,0;1,5|2;1700003600;8,0;3,4",
    "1,234;0;1.000;;1700003600;8;4",
    "-0,5e1;0;1,000;;1700003600;8;4",
    "1.5;0;x;;1700003600;8;4",
    "1.234,5;0;x;;1700003600;8;4",
    "1,234,567;0;x;;1700003600;8;4",
    "2;1.0;x;;1700003600;8;4",
]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_numbers_with_a_decimal_comma_are_exact_and_numbers_with_a_point_are_rejected(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(text_columns, "native_functions", lambda: None)
    path = tmp_path / "a.csv"
    path.write_text("\n".join(LINES + [LINES[1]] * 20) + "\n")  # Compiled code is used for many lines.
    (batch,) = open_source(f"csv:{path}", COMMAS)
    events = present(batch.events)  # type: ignore[union-attr]
    price = events.features["price"][:4]
    assert price[[0, 2, 3]].tolist() == [3.14, 1.234, -5]
    assert np.isnan(price[1])
    assert events.features["n"][:2].tolist() == [5, 5]
    hashed = convert(["a,b", 5, "1.000", 1], Kind.parse("hash:1000"))[0]
    assert hashed[2] == hashed[3]  # With a decimal point these are the same number. Here the first is not a number.
    assert events.features["code"][[0, 1, 3]].tolist() == hashed[[0, 1, 3]].tolist()
    assert events.features["code"][2] != hashed[3]
    assert events.features["pair"][:2].tolist() == [[1.5, 2.5], [1.5, 2]]
    assert present(events.time)[:2].tolist() == [1700000000.5, 1700003600]
    assert present(events.users)[:2].tolist() == [7, 8]
    assert present(events.labels)[:2].tolist() == [1, 0]
    columns = [rejected.reason.partition(":")[0] for rejected in batch.rejected]  # type: ignore[union-attr]
    assert columns == ["price", "price", "price", "n"]


@pytest.mark.parametrize("kind", ["number", "number?", "hash:1000", "hash:1000?", "category:100?"])
def test_compiled_code_and_python_read_decimal_commas_alike(kind: str) -> None:
    written = [
        *VALUES,
        *(value.replace(".", ",") for value in VALUES),
        "1,0.0",
        "1.000",
        "1,234",
        ",",
        ",5",
        "5,",
        "7,0",
    ]
    comma = replace(Kind.parse(kind), decimal=",")
    array, problems = convert(text_column(written, Quoting.NONE), comma, text=True)
    for row, value in enumerate(written):
        (expected,), problem = convert([value], comma, text=True)
        assert array[row].tobytes() == expected.tobytes()
        assert problems.get(row) == problem.get(0)


@pytest.mark.parametrize("header", [True, False])
def test_a_decimal_comma_is_inferred_and_stored_in_the_schema(header: bool, tmp_path: Path) -> None:
    columns = {"price": with_comma(column("price")), "weight": with_comma(column("rating")), "click": column("click")}
    path = write_csv(tmp_path / "a.csv", columns, ";", header)
    found = inferred(path, label="click" if header else "c3")
    assert found.schema.decimal == ","
    assert next(iter(found.schema.features.values())) == "number?"
    found.schema.write(tmp_path / "schema.json")
    schema = Schema.read(tmp_path / "schema.json")
    assert schema == found.schema
    values = features(path, schema, "csv")[next(iter(schema.features))]
    assert values.tolist() == column("price")


def test_a_column_with_decimal_commas_that_reveals_the_label_is_a_warning(tmp_path: Path) -> None:
    ratings = [row % 10 / 2 for row in range(600)]
    columns = {"leak": with_comma([rating + 0.25 for rating in ratings]), "rating": with_comma(ratings)}
    found = inferred(write_csv(tmp_path / "a.csv", columns, ";"), label="rating>=3.5")
    assert any("'leak'" in warning for warning in found.warnings)
    assert read(tmp_path / "a.csv", found.schema) == (600, [])


@pytest.mark.parametrize(
    ("values", "other"),
    [
        ([f"{row % 9 + 1},{row % 50:03}" for row in range(600)], ["5"] * 600),
        (["2,5", "1,75"] * 300, ["2.5", "1.75"] * 300),
    ],
)
def test_a_comma_that_may_separate_thousands_is_not_read_as_a_decimal_comma(
    values: list[str], other: list[str], tmp_path: Path
) -> None:
    found = inferred(write_csv(tmp_path / "a.csv", {"n": values, "other": other, "click": column("click")}, ";"))
    assert found.schema.decimal == "."
    assert found.schema.kinds["n"].name == "hash"
    assert any("decimal" in warning and "'n'" in warning for warning in found.warnings)


def test_a_list_separated_by_commas_is_not_a_decimal_number(tmp_path: Path) -> None:
    draw = random.Random(0)
    lists = [",".join(str(draw.randrange(30)) for _ in range(draw.randint(1, 5))) for _ in range(600)]
    found = inferred(write_csv(tmp_path / "a.csv", {"seen": lists, "click": column("click")}, ";"))
    assert found.schema.decimal == "."
    assert found.schema.kinds["seen"].length


@pytest.mark.parametrize("wrong", [{"decimal": ","}, {"decimal": "'", "separator": ";"}])
def test_a_decimal_separator_is_a_point_or_a_comma_that_does_not_separate_fields(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="decimal"):
        Schema({"a": "number"}, **wrong)


# Nested objects ------------------------------------------------------------------------------------------------

NESTED = Schema(
    {"user.geo.city": "hash:1000?", "item.price": "number?"}, label="out.click", user="user.id", id="i:text"
)


def nested(row: int) -> dict[str, Any]:
    user = {"id": row % 7, "geo": {"city": f"c{row % 5}"} if row % 3 else None}
    return {"i": f"e{row}", "user": user, "item": {"price": row / 4}, "out": {"click": row % 2}}


def flat(row: int) -> dict[str, Any]:
    city = {"user.geo.city": f"c{row % 5}"} if row % 3 else {}
    return {"i": f"e{row}", "user.id": row % 7, **city, "item.price": row / 4, "out.click": row % 2}


def test_a_dotted_name_is_a_field_of_a_nested_object() -> None:
    ours = NESTED.convert_records(list(map(nested, range(40))), [""] * 40)
    theirs = NESTED.convert_records(list(map(flat, range(40))), [""] * 40)
    assert not ours.rejected
    for name, values in present(ours.events).columns().items():
        np.testing.assert_array_equal(values, present(theirs.events).columns()[name])
    encoded = NESTED.encode([nested(1), {"user": {"id": 3}}])
    assert len(present(encoded.events)) == 1
    assert [rejected.where for rejected in encoded.rejected] == ["1"]


def test_a_field_of_the_very_name_takes_precedence_over_a_nested_one() -> None:
    schema = Schema({"a.b": "number?", "c.d.e": "number?"})
    records: list[dict[str, Any]] = [
        {"a": {"b": 1}, "a.b": 2, "c": {"d.e": 3}},
        {"a.b": None, "a": {"b": 1}, "c": {"x": 1}, "c.d": {"e": 4}},
    ]
    events = present(schema.encode(records).events)
    np.testing.assert_array_equal(events.features["a.b"], [2, np.nan])
    assert events.features["c.d.e"].tolist() == [3, 4]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_lines_with_and_without_nested_objects_are_read_alike(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(text_columns, "native_functions", lambda: None)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps((nested if row % 2 else flat)(row)) + "\n" for row in range(50)))
    source = open_source(f"jsonl:{path}", NESTED, batch_size=20)
    check_columns(source, NESTED)
    batches: list[Any] = [next(iter(source))]
    again = open_source(f"jsonl:{path}", NESTED, batch_size=20)
    again.load_state_dict(source.state_dict())
    batches += list(again)
    expected = present(NESTED.convert_records(list(map(flat, range(50))), [""] * 50).events)
    for name, values in expected.columns().items():
        np.testing.assert_array_equal(np.concatenate([batch.events.columns()[name] for batch in batches]), values)


def test_messages_may_have_nested_objects() -> None:
    messages = [Message("", text=json.dumps(nested(row)).encode()) for row in range(5)]
    events = present(convert_messages(messages, NESTED, 1 << 20).events)
    assert present(events.users).tolist() == [0, 1, 2, 3, 4]
    assert present(events.labels).tolist() == [0, 1, 0, 1, 0]


def test_the_fields_of_nested_objects_are_inferred_as_features_within_bounds(tmp_path: Path) -> None:
    deep: dict[str, Any] = {"end": 1}
    for _ in range(10):
        deep = {"in": deep}
    draw = random.Random(0)
    records = [
        {
            "user": {"id": draw.randrange(50), "geo": {"city": draw.choice("abc")}} if row % 5 else None,
            "prices": {f"sku{draw.randrange(500)}": 1.5},
            "deep": deep,
            "empty": {},
            "click": draw.randrange(2),
        }
        for row in range(600)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = inferred(path)
    assert set(found.schema.features) == {"user.id", "user.geo.city"}
    assert {"prices", "deep.in.in.in.in.in.in.in"} == set(found.ignored())
    assert read(path, found.schema) == (600, [])

"""Compiled code parses lines and values exactly like Python, or leaves them to Python."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadam.online import Schema
from cadam.online.data import text_columns
from cadam.online.data.conversion import convert, fnv1a, hash_text, mix_splitmix64
from cadam.online.data.kind import Kind
from cadam.online.data.sources.lines import Format, LinesSource
from cadam.online.data.text_columns import ParseAs, Quoting, TextColumn

pytestmark = pytest.mark.skipif(text_columns.native_functions() is None, reason="no compiled kernels")

PLAIN = """5 05 5.0 5.00 -5 -0 0 0.0 00 true True false TRUE 1e3 1E3 1e400 nan NaN inf -inf Infinity abc é 日本 +5 1_000
    123456789012345678 1234567890123456789 12345678901234567890 -9223372036854775808 9223372036854775808 3e38 1.1e19
    9007199254740993.0 9007199254740992.0 123456789012345.0 0.30000000000000004 2.2250738585072014e-308 0x10
    1111111111111111a .5 5. -.5 - . e5 1e 1e+ NA null [1] {} 'a' tru"""
LONG = ["x" * 16, "x" * 17, "x" * 128, "x" * 129, "x" * 1025, "é" * 513, "9" * 120]
VALUES = [*PLAIN.split(), *LONG, "", " 5", "5 ", "a b", "\x00", "a\x00b", "\ufeffx"]
SCHEMAS = [
    Schema({"a": "hash:97", "b": "category:20", "c": "number"}, label="y"),
    Schema({"a": "hash:97?", "b": "category:20?", "c": "number?"}, label="y", missing=["NA", "nan"]),
    Schema({"a": "hash:1000003", "b": "hash:7[2]?", "c": "number"}, label="y", id="i:text", user="u"),
    Schema({"a": "hash:1000003", "c": "number?", "t": "clock?"}, label="y>=1", id="i", time="t"),
    Schema({"b": "hash:3"}, label="a==abc"),
    Schema({"a": "words:97[3]?", "b": "hash:7[last 2]?", "c": "words:50[2]"}, label="y", id="i:text"),
]
NAMES = ["a", "b", "c", "y", "i", "u", "t", "z"]


def value(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.4:
        return draw.choice(VALUES)
    if kind < 0.5:
        return repr(draw.uniform(-1, 1) * 10.0 ** draw.randint(-25, 25))
    if kind < 0.6:
        return str(draw.randint(-(10 ** draw.randint(1, 20)), 10 ** draw.randint(1, 20)))
    if kind < 0.7:
        return "".join(draw.choice("abc01-. é") for _ in range(draw.randint(0, 20)))
    return str(draw.randint(0, 30))


def csv_line(draw: random.Random) -> bytes:
    values = [value(draw) for _ in NAMES]
    damage = draw.random()
    if damage < 0.05:
        values.pop()
    elif damage < 0.1:
        values = [f'"{one}"' for one in values]
    line = ",".join(values).encode()
    endings = {0.12: b"\xff", 0.14: b"\r", 0.16: b"\r\r", 0.18: b"\ra"}
    if damage > 0.96:
        return draw.choice([b"", b"   ", b"\t"])
    return line + next((end for limit, end in endings.items() if 0.1 < damage < limit), b"")


def json_line(draw: random.Random) -> bytes:
    names = [name for name in NAMES if draw.random() < 0.95]
    if draw.random() < 0.2:
        draw.shuffle(names)
    if draw.random() < 0.05:
        names.append(draw.choice(NAMES))
    odd = ["null", "true", "false", "True", "[1,2]", '["a","b"]', '{"q":1}', "NaN", '"\\ud800"', '"a\\nb"', '"\x01"']
    members = []
    for name in names:
        kind = draw.random()
        one = value(draw)
        shown = json.dumps(one, ensure_ascii=draw.random() < 0.2) if kind < 0.4 else one or "null"
        shown = draw.choice(odd) if kind > 0.9 else shown
        space = draw.choice(["", "", " ", "\t"])
        written = '"\\u0061"' if draw.random() < 0.01 else json.dumps(name)
        members.append(f"{space}{written}{space}:{space}{shown}")
    line, damage = "{" + ",".join(members) + "}", draw.random()
    changed = [line[:-1], f"{line} {line}", line[: len(line) // 2], f"  {line} \r", f"{line[:-1]},}}", "[]", "", "{}"]
    line = changed[int(damage * 100) % len(changed)] if damage < 0.16 else line
    return line.encode("utf-16" if 0.98 < damage < 0.99 else "utf-8") + b"\xff" * (damage > 0.99)


def everything(path: Path, schema: Schema, form: Format, size: int) -> tuple[list[Any], dict[str, Any]]:
    """Return all batches of a source in a comparable form, and its last position."""
    source, found = LinesSource(path, schema, form, batch_size=size), []
    for batch in source:
        assert batch is not None
        events = {} if batch.events is None else batch.events.columns()
        columns = {name: (column.dtype.str, column.shape, column.tolist()) for name, column in events.items()}
        labels = None if batch.labels is None else (batch.labels.ids.tolist(), batch.labels.labels.tolist())
        found.append((repr(columns), labels, batch.rejected, batch.missing_columns))
    return found, source.state_dict()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("seed", range(30))
def test_compiled_code_and_python_convert_lines_to_the_same_events_and_reasons(
    form: Format, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    lines = [",".join(NAMES).encode()] if form == "csv" else []
    lines += [(csv_line if form == "csv" else json_line)(draw).replace(b"\n", b"") for _ in range(150)]
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(lines) + b"\n")
    schema, size = SCHEMAS[seed % len(SCHEMAS)], draw.choice([1, 40, 64, 1000])
    ours = everything(path, schema, form, size)
    with monkeypatch.context() as patch:
        patch.setattr(text_columns, "native_functions", lambda: None)
        theirs = everything(path, schema, form, size)
    assert ours == theirs


def column(values: list[str], quoting: Quoting) -> TextColumn:
    encoded = [one.encode() for one in values]
    ends = np.cumsum([len(one) for one in encoded])
    begin = ends - [len(one) for one in encoded]
    return TextColumn(np.frombuffer(b"".join(encoded) + b" ", np.uint8), begin, ends, quoting)


def test_compiled_code_and_python_give_texts_of_any_length_the_same_hash() -> None:
    draw = random.Random(0)
    given = [
        "".join(draw.choice("abcdef é-") for _ in range(length)) for length in [*range(140), 500, 900] for _ in range(4)
    ]
    size = 2**31 - 1
    array, fine = column(given, Quoting.ALL).parse(ParseAs.HASH, size) or ((), ())
    expected = [hash_text(one.encode(), size) for one in given]
    read = np.flatnonzero(fine)
    assert len(read) > 0.8 * len(given)
    assert [array[row] for row in read] == [expected[row] for row in read]
    assert convert(column(given, Quoting.ALL), Kind("hash", size))[0].tolist() == expected


def test_numbers_are_rounded_like_in_python() -> None:
    draw = random.Random(1)
    given = [repr(draw.uniform(-1, 1) * 10.0 ** draw.randint(-12, 12)) for _ in range(20_000)]
    given += [f"{draw.randint(2**53, 10**19)}e{draw.randint(-22, 22)}" for _ in range(20_000)]
    given += [
        f"{2**53 + 1 + 2 * draw.randint(0, 2**40)}.{draw.choice(['5', '0', '50', '49999'])}" for _ in range(2_000)
    ]
    array, fine = column(given, Quoting.NONE).parse(ParseAs.NUMBER) or (np.empty(0), np.empty(0))
    assert fine.mean() > 0.3  # The share is higher where long double has 64 bits.
    expected = np.array(list(map(float, given)))
    assert array[fine].tobytes() == expected[fine].tobytes()


def test_values_that_equal_a_marker_are_missing() -> None:
    given = column(["NA", "NB", "", "N", "NAN", "NA"], Quoting.NONE).mark_missing(["NA", "N"])
    assert given.is_missing.tolist() == [True, False, False, True, False, True]
    assert [given[row] for row in range(1, 4)] == ["NB", "", None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)],
)
def test_fnv1a_gives_the_published_hashes(text: bytes, expected: int) -> None:
    assert fnv1a(text) == expected


def test_the_finalizer_gives_the_published_outputs_of_splitmix64() -> None:
    states = 1234567 + np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix_splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_hashed_texts_are_spread_evenly_over_the_buckets() -> None:
    buckets = [hash_text(f"item {number}".encode(), 64) for number in range(64_000)]
    counts = np.bincount(buckets, minlength=64)
    assert ((counts - 1000) ** 2 / 1000).sum() < 120, "chi-squared with 63 degrees of freedom, p < 1e-5"

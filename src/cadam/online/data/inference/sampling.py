"""A sample of a stream, from several places of it: what there is to see before anything is declared."""

from __future__ import annotations

import csv
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...monitoring.reject_limit import CONVERT, MAX_REJECTED
from ..schema import Schema
from ..sources import KafkaSource, ParquetSource, RedisSource, open_source
from ..sources.lines import MARK, csv_names, is_compressed, open_binary, split
from ..sources.parquet import parquet_files, read_values
from ..sources.records import Record, json_record, repeated
from ..sources.uri import MAGIC

ROWS = 100_000
CELLS = 4_000_000
"""Rows that are looked at, and values in all: fewer rows where there are many columns."""
PLACES = 16
BYTES = 48 << 20
"""Of lines that are read; a file that is not longer is read as a whole."""
MESSAGES = 10_000
SECONDS = 10.0
"""How long a Kafka topic is read for a sample."""
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
ANY = Schema({"any": "number"})
"""Where a source has to be given a schema before there is one."""


class UnreadableError(ValueError):
    """Data of which no sample can be taken: why, and what to do."""


@dataclass
class Sample:
    """Columns with None where a value is missing, in the order of the stream, and how they were found."""

    columns: dict[str, list[Any]]
    rows: int
    total: int | None
    """Rows of the whole, about; None: it grows."""
    how: str
    text: bool = False
    """Whether numbers are written as text."""
    separator: str = ","
    header: list[str] | None = None
    """Names that were given to the columns of a file without."""
    times: frozenset[str] = frozenset()
    """Columns that the data itself says are times."""
    warnings: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ()
    """All names of the columns, where some may be there more than once."""


def take(uri: str) -> Sample:
    """A sample of the source that a URI names."""
    kind, _, rest = uri.partition(":")
    if kind == "parquet":
        return _parquet(Path(rest))
    if kind in ("csv", "jsonl"):
        if rest == "-":
            raise UnreadableError(
                "standard input can be read only once, and its schema must be known before: write the beginning to a "
                "file, run `cadam schema` on that, and give --schema schema.json"
            )
        if not Path(rest).is_file():
            raise UnreadableError(f"{rest} is not a file")
        return _csv(rest) if kind == "csv" else _json_lines(rest)
    source = open_source(uri, ANY)
    return _redis(source) if isinstance(source, RedisSource) else _kafka(source, uri)


# Parquet -------------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Sample:
    """From row groups all over the files; a Parquet file says itself how many rows it has."""
    ParquetSource(path, ANY)  # says what is missing
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [path] if path.is_file() else sorted(parquet_files(path))
    if not files:
        raise UnreadableError(
            f"{path} holds no Parquet files (*.parquet), and nothing else is read from a folder: give a file of CSV or "
            "JSON lines by its own name"
        )
    chosen = files if len(files) <= PLACES else [files[i * (len(files) - 1) // (PLACES - 1)] for i in range(PLACES)]
    tables, total = [], 0
    try:
        names = pq.read_schema(chosen[0]).names
        if twice := repeated(names):
            raise UnreadableError(f"{path} has more than one column {twice}: give each a name of its own")
        rows = max(1000, min(ROWS, CELLS // max(1, len(names))) // len(chosen))
        for one in chosen:
            with pq.ParquetFile(one) as file:
                total += file.metadata.num_rows
                tables += _spread(file, rows)
        table = pa.concat_tables(tables, promote_options="default")
    except (pa.ArrowException, OSError) as error:
        raise UnreadableError(f"{path} cannot be read as Parquet: {error}") from error
    total = total * len(files) // len(chosen)
    columns = {name: _listed(read_values(table.column(i))) for i, name in enumerate(table.column_names)}
    many = f"{len(files):,} Parquet files" if len(files) > 1 else "Parquet"
    times = frozenset(part.name for part in table.schema if pa.types.is_timestamp(part.type))
    how = _how(many, total, table.num_rows, min(PLACES, len(tables)))
    return Sample(columns, table.num_rows, total, how, times=times)


def _listed(values: Any) -> list[Any]:
    listed: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return listed


def _spread(file: Any, rows: int) -> list[Any]:
    """About so many rows of a file, from up to `PLACES` places: whole where it has not more."""
    import pyarrow as pa

    groups, total = file.num_row_groups, file.metadata.num_rows
    if total <= rows:
        return [file.read()]
    each = -(-rows // PLACES)
    if groups >= PLACES:
        wanted = [i * (groups - 1) // (PLACES - 1) for i in range(PLACES)]
        batches = (next(file.iter_batches(each, row_groups=[group])) for group in wanted)
        return [pa.Table.from_batches([batch]) for batch in batches]
    starts = {i * (total - each) // (PLACES - 1) // each for i in range(PLACES)}  # in batches
    found = (batch for number, batch in enumerate(file.iter_batches(each)) if number in starts)
    return [pa.Table.from_batches([batch]) for batch in found]


# Lines ---------------------------------------------------------------------------------------------------------


def _lines(path: str) -> tuple[list[bytes], int, bool, int]:
    """Lines from several places of a file, about how many it has, whether these are all, and from how many places."""
    size = os.path.getsize(path)
    with open_binary(path, buffered=True) as file:
        if is_compressed(path):
            text = file.read(BYTES)
            whole = not file.read(1)
            read = size if whole else max(1, file.fileobj.tell())
            lines = text.split(b"\n")[: None if whole else -1]
            lines = [line for line in lines if line.strip()]
            return lines, len(lines) * size // max(1, read), whole, 1
        if size <= BYTES:
            lines = [line for line in file.read().split(b"\n") if line.strip()]
            return lines, len(lines), True, 1
        lines, each = [], BYTES // PLACES
        for place in range(PLACES):
            file.seek(place * (size - each) // (PLACES - 1))
            part = file.read(each).split(b"\n")[:-1]
            lines += [line for line in part[1 if place else 0 :] if line.strip()]
            if len(lines) > (enough := 2 * ROWS // PLACES) and place == 0:  # lines are short: read less
                each, lines = each * enough // len(lines), lines[:enough]
    mean = sum(map(len, lines)) / len(lines) + 1 if lines else 1
    return lines, int(size / mean), False, PLACES


def _thinned(lines: list[bytes], columns: int) -> list[bytes]:
    """As many as are looked at, runs of them evenly spread."""
    most = max(1000, min(ROWS, CELLS // max(1, columns)))
    if len(lines) <= most:
        return lines
    each = most // PLACES
    starts = (i * (len(lines) - each) // (PLACES - 1) for i in range(PLACES))
    return [line for start in starts for line in lines[start : start + each]]


def _csv(path: str) -> Sample:
    lines, total, whole, places = _lines(path)
    if not lines:
        raise UnreadableError(f"{path} is empty")
    first = lines[0] = lines[0].removeprefix(MARK)
    _refuse_binary(path, first)
    if not _is_utf8(first):
        raise UnreadableError(_not_utf8(path))
    try:
        separator = _separator(lines[:100])
        names = csv_names(first, separator)
        header = None
        if not _names_columns(names, [csv_names(line, separator) for line in lines[1:100]]):
            header = names = [f"c{number}" for number in range(1, len(names) + 1)]
        else:
            lines, total = lines[1:], total - 1
    except (ValueError, csv.Error) as error:
        raise UnreadableError(f"{path}: {error}") from error
    if not lines:
        raise UnreadableError(f"{path} has a header and no rows")
    chosen = _thinned(lines, len(names))
    other = sum(not _is_utf8(line) for line in chosen)
    if other > MAX_REJECTED * len(chosen):
        raise UnreadableError(_not_utf8(path))
    records, bad = [], 0
    for line in chosen:
        try:
            values = split(line.decode().rstrip("\r"), separator)
        except (ValueError, csv.Error):
            bad += 1
            continue
        if len(values) == len(names):
            records.append(values)
        else:
            bad += 1
    if not records:
        raise UnreadableError(f"{path}: no line has {len(names)} fields as the first has, with {separator!r} between")
    columns = {
        name: [v or None for v in values] for name, values in zip(names, zip(*records, strict=True), strict=True)
    }
    how = (
        f"CSV, separated by {SEPARATORS[separator]}"
        + (", without a header" if header else "")
        + (", gzip" if is_compressed(path) else "")
    )
    all_of_it = whole and len(chosen) == len(lines)
    sample = Sample(
        columns, len(records), total, _how(how, total, len(records), PLACES if len(chosen) < len(lines) else places),
        True, separator, header, names=tuple(names),
    )  # fmt: skip
    if all_of_it:
        sample.total = len(records) + bad
    if header:
        sample.warnings.append(
            f"the first line is data, so columns are called c1 to c{len(names)}; name them in schema.json under header"
        )
    if other:
        sample.warnings.append(f"{other:,} of {len(chosen):,} lines will be rejected: {_not_utf8(path)}")
    if bad := bad - other:
        sample.warnings.append(
            f"{bad:,} of {len(chosen):,} lines do not have {len(names)} fields and will be rejected: quoted text with "
            "line breaks in it cannot be read"
        )
    return sample


def _separator(lines: Sequence[bytes]) -> str:
    """The one with which most lines have as many fields as the first, more than one; a comma if none has."""

    def fit(separator: str) -> tuple[float, int]:
        counts = Counter(len(csv_names(line, separator)) for line in lines)
        wide = len(csv_names(lines[0], separator))
        return (counts[wide] / len(lines), wide) if wide > 1 else (0.0, 0)

    best = max(SEPARATORS, key=fit)
    return best if fit(best)[1] else ","


def _names_columns(first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool:
    """Whether a first line is names: no number is among them, none is there twice or empty."""
    if any(_is_number(name) or not name.strip() for name in first) or len(set(first)) < len(first):
        return not any(_is_number(name) for name in first)  # two columns of one name are said elsewhere
    if any(_is_number(value) for values in rest for value in values):
        return True
    # All is text: names are not found again among the values below them.
    return not any(name in {values[i] for values in rest if i < len(values)} for i, name in enumerate(first))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _refuse_binary(path: str, first: bytes) -> None:
    for begins, what in MAGIC.items():
        if first.startswith(begins):
            raise UnreadableError(f"{path} is {what}")
    if b"\0" in first:
        raise UnreadableError(f"{path} is no text in UTF-8: is it UTF-16, or of another kind? Convert it to UTF-8 CSV")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _not_utf8(path: str) -> str:
    """That a file is not UTF-8, from which line on, and what to do."""
    with open_binary(path, buffered=True) as file:
        number = next((number for number, line in enumerate(file, 1) if not _is_utf8(line)), 0)
    return f"{path} is not UTF-8 (line {number:,}). {CONVERT.format(path=shlex.quote(path))}"


def _json_lines(path: str) -> Sample:
    lines, total, _, places = _lines(path)
    if not lines:
        raise UnreadableError(f"{path} is empty")
    if lines[0].lstrip().startswith(b"["):
        raise UnreadableError(f"{path} is one JSON array; write an object a line (jq -c '.[]' {path} > lines.jsonl)")
    chosen = _thinned(lines, lines[0].count(b":"))
    other = sum(not _is_utf8(line) for line in chosen if json.detect_encoding(line) == "utf-8")
    if other > MAX_REJECTED * len(chosen):
        raise UnreadableError(_not_utf8(path))
    records, bad = _read(chosen, json_record)
    sample = _of_records(records, total, _how("JSON lines", total, len(records), places), text=False)
    if bad:
        sample.warnings.append(f"{bad:,} of {len(chosen):,} lines are no JSON objects and will be rejected")
    return sample


def _read(items: Iterable[Any], read: Any) -> tuple[list[Mapping[str, Any]], int]:
    found, bad = [], 0
    for item in items:
        try:
            found.append(read(item))
        except (ValueError, RecursionError):
            bad += 1
    return found, bad


def _of_records(records: Sequence[Mapping[str, Any]], total: int | None, how: str, text: bool) -> Sample:
    if not records:
        raise UnreadableError(f"no event can be read ({how})")
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    if text:
        columns = {name: [None if v == "" else v for v in values] for name, values in columns.items()}
    return Sample(columns, len(records), total, how, text)


# Streams -------------------------------------------------------------------------------------------------------


def _redis(source: RedisSource) -> Sample:
    import redis

    try:
        total: Any = source.client.xlen(source.stream)
        first: Any = source.client.xrange(source.stream, count=MESSAGES)
        last: Any = source.client.xrevrange(source.stream, count=MESSAGES)
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise UnreadableError(
            f"Redis cannot be reached, so there is nothing to infer a schema from: {error}"
        ) from error
    except redis.ResponseError as error:
        raise UnreadableError(source.refused(error)) from error
    if not first:
        raise UnreadableError(source.absent())
    entries = dict([*first, *reversed(last)])
    records = [source._record(key, fields) for key, fields in entries.items()]
    return _messages(records, source.longest, _how("Redis stream", total, len(records), 1 + (len(entries) > MESSAGES)))


def _kafka(source: Any, uri: str) -> Sample:
    import time

    import confluent_kafka as kafka

    assert isinstance(source, KafkaSource)
    records: list[Record] = []
    try:
        for _ in source._assign():
            pass
        until = time.monotonic() + SECONDS
        ended: set[int] = set()
        while len(records) < MESSAGES and time.monotonic() < until and len(ended) < len(source.offsets):
            for message in source.consumer.consume(MESSAGES - len(records), 0.5):
                error = message.error()
                if error is None:
                    records.append(Record(f"offset {message.offset()}", text=message.value() or b""))
                elif error.code() == kafka.KafkaError._PARTITION_EOF:
                    ended.add(message.partition() or 0)
    finally:
        source.close()
    if not records:
        raise UnreadableError(f"the topic of {uri} holds no messages yet, so there is nothing to infer a schema from")
    return _messages(records, source.longest, f"Kafka topic; looked at the first {len(records):,} messages")


def _messages(records: Sequence[Record], longest: int, how: str) -> Sample:
    found, bad = _read(records, lambda record: record.read(longest))
    sample = _of_records(found, None, how, text=all(record.text is None for record in records))
    if bad:
        sample.warnings.append(f"{bad:,} of {len(records):,} messages cannot be read and will be rejected")
    return sample


def _how(what: str, total: int, rows: int, places: int) -> str:
    if rows >= total:
        return f"{what}, {rows:,} rows, all looked at"
    where = f" from {places} places" if places > 1 else ", its first"
    return f"{what}, about {total:,} rows; looked at {rows:,}{where}"


def dumped(value: Any) -> str:
    """A value for people, in a line."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)

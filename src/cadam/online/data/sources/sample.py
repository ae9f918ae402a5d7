"""Samples of a source, from which a schema is inferred."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..nested import flatten_records

MAX_ROWS = 100_000
"""The most rows of a sample."""
MAX_VALUES = 4_000_000
"""The most values of a sample: with many columns it has fewer rows."""
MIN_ROWS = 1_000
"""The rows that are sampled even if there are very many columns."""
MAX_COLUMNS = 5_000
"""The most different fields of JSON objects and messages for which a schema is inferred."""
POSITIONS = 16
"""The number of positions in a file from which rows are read."""
MAX_MESSAGES = 10_000
"""The most messages that are read from a message broker."""


class SamplingError(ValueError):
    """No sample of the data can be taken; the message says why, and what to do."""


@dataclass
class Sample:
    """Some rows of a source, in the order of the stream."""

    columns: dict[str, list[Any]]
    """The values by column, None where one is missing."""
    rows: int
    total: int | None
    """The approximate number of rows of all the data, None if the data grows."""
    description: str
    """The format of the data and how much of it was sampled, for the report."""
    is_text: bool = False
    """Whether numbers are written as text."""
    separator: str = ","
    decimal: str = "."
    """The decimal separator of the file. Numbers of the sample have a point in any case."""
    header: list[str] | None = None
    """The generated names of the columns if the file has no header."""
    time_columns: frozenset[str] = frozenset()
    """Columns whose type in the file is a time."""
    warnings: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ()
    """All names of the header, with repetitions if several columns have the same name."""


def max_rows(columns: int) -> int:
    """Return how many rows with this number of columns are sampled."""
    return max(MIN_ROWS, min(MAX_ROWS, MAX_VALUES // max(1, columns)))


def spread(count: int, last: int) -> list[int]:
    """Return `count` integers, evenly spread from 0 to `last`."""
    return [index * last // (count - 1) for index in range(count)]


def describe(kind: str, total: int, rows: int, positions: int) -> str:
    """Return the description of a sample: the format of the data, its size, and how much of it was read.

    Args:
        kind: The format of the data.
        total: The number of rows of all the data.
        rows: The number of rows of the sample.
        positions: The number of positions from which rows were read.
    """
    if rows >= total:
        return f"{kind}, {rows:,} rows, all sampled"
    origin = f"{rows:,} sampled from {positions} positions" if positions > 1 else f"the first {rows:,} sampled"
    return f"{kind}, about {total:,} rows, {origin}"


def read_records(items: Iterable[Any], read: Callable[[Any], Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """Return the records that `read` makes of items, and the number of items that are not readable."""
    records, unreadable = [], 0
    for item in items:
        try:
            records.append(read(item))
        except (ValueError, RecursionError):
            unreadable += 1
    return records, unreadable


def sample_records(records: Sequence[Mapping[str, Any]], total: int | None, description: str, is_text: bool) -> Sample:
    """Return a sample of records, which may have different columns and nested objects.

    Raises:
        SamplingError: If there are no records.
    """
    if not records:
        raise SamplingError(f"no event is readable ({description})")
    records = flatten_records(records)
    names = dict.fromkeys(name for record in records for name in record)
    if len(names) > MAX_COLUMNS:
        examples = ", ".join(map(repr, list(names)[-3:]))
        raise SamplingError(
            f"the records have {len(names):,} different fields, such as {examples}, and at most {MAX_COLUMNS:,} fit. "
            "If names of fields contain values, move the values into fields with fixed names; otherwise name "
            "the columns to use in a schema, and give --schema schema.json"
        )
    records = records[:: -(-len(records) // max_rows(len(names)))]
    columns = {name: [record.get(name) for record in records] for name in names}
    # An object that is null in some records is not a separate column.
    objects = {name[:position] for name in names for position, character in enumerate(name) if character == "."}
    columns = {
        name: values
        for name, values in columns.items()
        if name not in objects or any(value is not None for value in values)
    }
    if is_text:
        columns = {name: [None if value == "" else value for value in values] for name, values in columns.items()}
    return Sample(columns, len(records), total, description, is_text)

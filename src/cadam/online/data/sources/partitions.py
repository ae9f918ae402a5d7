"""Hive partitions: folders such as ``country=DE/dt=2024-01-01`` that hold the values of columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote

from ..kind import UNITS
from ..schema import Schema

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The name that Hive writes for a missing value."""
TIME_NAMES = {
    "year", "month", "week", "day", "hour", "minute", "dt", "ds", "date", "datetime", "time", "timestamp", "ts",
}  # fmt: skip
"""Names of partitions that are times. Others are times if their values look like dates."""
_DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?([T _].*)?")


def partition_values(path: PurePath) -> dict[str, str | None]:
    """Return the values in the folders of a relative path, by column; None where one is missing.

    >>> partition_values(PurePath("country=DE/dt=2024-01-01/part-0.parquet"))
    {'country': 'DE', 'dt': '2024-01-01'}
    """
    pairs = [part.partition("=") for part in path.parent.parts]
    return {unquote(name): None if value == NULL else unquote(value) for name, sign, value in pairs if name and sign}


def time_order(path: PurePath, time_column: str | None) -> tuple[Any, ...]:
    """Return a key that sorts the files of a folder by their partitions of time, and then by path.

    Args:
        path: The path relative to the folder.
        time_column: The column of the schema's time, which is a time by whatever name.
    """
    times = [
        # Digits are compared as numbers: month=10 comes after month=9.
        [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", value or "") if part]
        for name, value in partition_values(path).items()
        if name == time_column or name.lower() in TIME_NAMES or _DATE.fullmatch(value or "")
    ]
    return times, str(path)


def read_partition(name: str, value: str | None, schema: Schema) -> Any:
    """Return the value of a partition as a number if the schema uses its column as one, else as text."""
    uses = [kind for column, kind in [*schema.kinds.items(), *schema.roles.values()] if column == name]
    is_number = name == schema.target.column and not schema.target.compares_text
    for kind in uses:
        is_number |= kind.name in ("number", "category", "integer")
        is_number |= kind.name in ("time", "clock") and kind.time_format in ("", *UNITS)
    if value is not None and is_number and value.isascii() and "_" not in value:
        for parse in (int, float):
            with suppress(ValueError):
                return parse(value)
    return value


def sample_partitions(values: Sequence[str | None]) -> list[Any]:
    """Return sampled values of a partition: as integers if all of them are written like integers, else as text."""
    is_integer = all(value is None or re.fullmatch(r"0|-?[1-9]\d{0,17}", value, re.ASCII) for value in values)
    return [int(value) if is_integer and value is not None else value for value in values]

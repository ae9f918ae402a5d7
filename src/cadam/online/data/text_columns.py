"""Columns of text, stored as byte ranges of a buffer, which compiled code splits and parses.

The compiled code handles only values in a plain notation. Python handles the others one by one, so the result does not
depend on which values are in the same batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from ...native.loader import UnavailableError, package_library
from ...native.structs import TEXT_LINES, TEXT_VALUES
from .events import Array

MISSING, NOT_A_RANGE = -1, -2
"""Used instead of the start of a byte range: the value is missing, or it is in `TextColumn.other_values`. In JSON, the
latter is also used for null, and only a field that the object does not have is `MISSING`."""


_SWAPPED = np.arange(256, dtype=np.uint8)
_SWAPPED[[ord("."), ord(",")]] = ord(","), ord(".")


class Quoting(IntEnum):
    """The quoting of values, which makes them text: none (CSV), all (columns of text), or some (JSON)."""

    NONE, ALL, SOME = range(3)


class ParseAs(IntEnum):
    """The type that compiled code parses a value as."""

    HASH, INTEGER, NUMBER = range(3)


class LineStatus(IntEnum):
    """The result of splitting one line: left to Python, split, or blank."""

    UNREAD, READ, BLANK = range(3)


@dataclass(frozen=True)
class UnreadableValue:
    """A placeholder for a value that a source could not read."""

    reason: str


@dataclass(frozen=True)
class TextColumn:
    """A column of values that are byte ranges of a buffer.

    Its elements are text, or in JSON also numbers and booleans, and None where a value is missing.
    """

    data: Array
    """The buffer, which other columns share."""
    begin: Array
    end: Array
    quoting: Quoting
    quoted: Array | None = None
    """Whether each value is quoted, only with `Quoting.SOME`."""
    other_values: Mapping[int, Any] = field(default_factory=dict)
    """Values that are not byte ranges, by row."""

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, row: int) -> Any:
        begin = int(self.begin[row])
        if begin < 0:
            return self.other_values.get(row) if begin == NOT_A_RANGE else None
        text = self.data[begin : self.end[row]].tobytes()
        if self.quoted is not None and not self.quoted[row]:
            return json.loads(text)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            return UnreadableValue(f"a value of type string that cannot be read: {error}")

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def take(self, rows: Array) -> TextColumn:
        """Return the column of some rows."""
        others = {new: self.other_values[old] for new, old in enumerate(rows.tolist()) if old in self.other_values}
        quoted = None if self.quoted is None else self.quoted[rows]
        return replace(self, begin=self.begin[rows], end=self.end[rows], quoted=quoted, other_values=others)

    @property
    def is_missing(self) -> Array:
        """A mask of the rows whose value is missing."""
        mask: Array = self.begin < 0
        for row, value in self.other_values.items():
            mask[row] = value is None
        return mask

    def mark_missing(self, markers: Sequence[str]) -> TextColumn:
        """Return the column in which values that equal one of the markers are missing."""
        begin = self.begin.copy()
        for marker in map(str.encode, markers):
            rows = np.flatnonzero((begin >= 0) & (self.end - begin == len(marker)))
            for index, byte in enumerate(marker):
                rows = rows[self.data[begin[rows] + index] == byte]
            begin[rows] = MISSING
        return replace(self, begin=begin)

    def swap_points_and_commas(self) -> TextColumn:
        """Return the column with points instead of commas and commas instead of points."""
        return replace(self, data=_SWAPPED[self.data])

    def contains(self, characters: str) -> Array:
        """Return a mask of the rows whose text contains one of some ASCII characters."""
        counts = np.concatenate([[0], np.cumsum(np.isin(self.data, np.frombuffer(characters.encode(), np.uint8)))])
        is_range = self.begin >= 0
        mask: Array = is_range & (counts[np.where(is_range, self.end, 0)] > counts[np.where(is_range, self.begin, 0)])
        return mask

    def parse(self, parse_as: ParseAs, buckets: int = 1, accepts_booleans: bool = False) -> tuple[Array, Array] | None:
        """Parse the values with compiled code.

        Args:
            parse_as: The type of the result.
            buckets: The number of buckets, for `ParseAs.HASH`.
            accepts_booleans: Whether true is parsed as the number 1 and false as 0.

        Returns:
            The parsed values and a mask of the rows that could be parsed. None if there is no compiled code.
        """
        functions = native_functions()
        if functions is None:
            return None
        parsed = np.zeros(len(self), np.float64 if parse_as == ParseAs.NUMBER else np.int64)
        is_parsed = np.empty(len(self), np.bool_)
        begin, end = np.ascontiguousarray(self.begin), np.ascontiguousarray(self.end)
        quoted = None if self.quoted is None else np.ascontiguousarray(self.quoted)
        _call(
            functions.cadam_read_values,
            TEXT_VALUES,
            data=self.data,
            begin=begin,
            end=end,
            quoted=quoted,
            n=len(self),
            quoting=self.quoting,
            parse_as=parse_as,
            buckets=buckets,
            accepts_booleans=accepts_booleans,
            out=parsed,
            is_parsed=is_parsed,
        )
        return parsed, is_parsed


@dataclass(frozen=True)
class DictionaryColumn:
    """A dictionary-encoded column: each distinct value is stored, and converted, only once."""

    dictionary: Sequence[Any] | TextColumn
    indices: Array
    """For each row, the index of its value in the dictionary."""

    @classmethod
    def encode(cls, values: list[Any]) -> DictionaryColumn | None:
        """Encode a list of texts, or return None if values are not repeated twice or more on average."""
        if len(values) < 64 or not set(map(type, values)) <= {str, type(None)}:
            return None
        index_of = {value: index for index, value in enumerate(dict.fromkeys(values))}
        if 2 * len(index_of) > len(values):
            return None
        return cls(tuple(index_of), np.fromiter(map(index_of.__getitem__, values), np.int64, len(values)))

    def problems_by_row(self, problems: Mapping[int, str]) -> dict[int, str]:
        """Return the problems of dictionary entries for every row that has such a value."""
        has_problem = np.zeros(len(self.dictionary), dtype=bool)
        has_problem[list(problems)] = True
        rows = np.flatnonzero(has_problem[self.indices]) if problems else ()
        return {int(row): problems[int(self.indices[row])] for row in rows}

    def __iter__(self) -> Iterator[Any]:
        return map(self.dictionary.__getitem__, self.indices.tolist())

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, row: int) -> Any:
        return self.dictionary[self.indices[row]]


def split_lines(
    data: Array, begin: Array, end: Array, names: Sequence[str], fields: Sequence[str] | None, separator: str
) -> tuple[Array, dict[str, TextColumn]] | None:
    """Split lines of CSV or JSON into columns with compiled code.

    Args:
        data: The bytes of all lines.
        begin: The start of each line.
        end: The end of each line.
        names: The columns to return.
        fields: The names of all fields of a CSV line. None: the lines are JSON.
        separator: The separator between fields of CSV.

    Returns:
        The `LineStatus` of each line and the columns, whose values are undefined for lines that were not split. None if
        there is no compiled code for this format.
    """
    functions = native_functions()
    is_json = fields is None
    if functions is None or not (is_json or (separator.isascii() and separator != '"')):
        return None
    count = len(begin)
    # Columns whose distance is a power of two would compete for the same lines of the processor's cache.
    stride = count + 8
    ranges = np.full((2, len(names), stride), MISSING, np.int64)
    quoted = np.zeros((len(names), stride), np.uint8)
    status = np.empty(count, np.uint8)
    index_of = {name: index for index, name in enumerate(names)}
    column_of_field = np.array([index_of.get(name, -1) for name in fields or ()], np.int64)
    encoded = [name.encode() for name in names]
    all_names = np.frombuffer(b"".join(encoded) + b" ", np.uint8)
    name_ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    _call(
        functions.cadam_split_lines,
        TEXT_LINES,
        data=data,
        line_begin=begin,
        line_end=end,
        n=count,
        begin=ranges[0],
        end=ranges[1],
        quoted=quoted,
        status=status,
        columns=len(names),
        stride=stride,
        fields=len(column_of_field),
        column_of=column_of_field,
        separator=ord(separator),
        names=all_names,
        name_ends=name_ends,
    )
    columns = {}
    for index, name in enumerate(names):
        begin, end = ranges[0, index, :count], ranges[1, index, :count]
        if is_json:
            columns[name] = TextColumn(data, begin, end, Quoting.SOME, quoted[index, :count])
        else:
            columns[name] = TextColumn(data, begin, end, Quoting.NONE)
    return status, columns


@cache
def native_functions() -> Any:
    """Return the compiled functions, or None if there is no compiled library."""
    try:
        return package_library().c
    except UnavailableError:
        return None


def _call(function: Any, dtype: np.dtype[np.void], **fields: Any) -> None:
    """Call a C function with a struct, whose fields are numbers and addresses of arrays."""
    struct = np.zeros((), dtype)
    for name, value in fields.items():
        if value is not None:
            struct[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    function(struct.ctypes.data)

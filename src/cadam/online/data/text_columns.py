"""Columns of text as a source has them: spans of bytes, read by compiled code where they are plain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import Any, overload

import numpy as np

from ...engines.base import UnavailableError
from ...native.loader import package_library
from .events import Array

MISSING, ANOTHER = -1, -2
"""In place of where a value begins: there is none, or it is not a span."""


class Quotes(IntEnum):
    """Whether values were quoted: not in CSV, always in columns of text, and JSON's own way."""

    NONE, ALL, SOME = range(3)


class Reading(IntEnum):
    """What becomes of a value."""

    HASH, INTEGER, NUMBER = range(3)


class Became(IntEnum):
    """What became of a line."""

    LEFT, READ, BLANK = range(3)


@dataclass(frozen=True)
class Unreadable:
    """In place of a value that a source could not read: why."""

    reason: str


@dataclass(frozen=True)
class Texts(Sequence[Any]):
    """A column, a value in each row: text, or of JSON also a number, true or false; None where it is missing."""

    data: Array
    """The bytes that it lies in, among others."""
    begin: Array
    end: Array
    quotes: Quotes
    quoted: Array | None = None
    """By row, with `Quotes.SOME`."""
    others: Mapping[int, Any] = field(default_factory=dict)
    """By row: values that are not spans."""
    truths: bool = False
    """Whether true is 1 and false is 0 where a number is wanted."""

    def __len__(self) -> int:
        return len(self.begin)

    @overload
    def __getitem__(self, row: int) -> Any: ...
    @overload
    def __getitem__(self, row: slice) -> Texts: ...
    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return self.rows(np.arange(len(self))[row])
        begin = int(self.begin[row])
        if begin < 0:
            return self.others.get(row) if begin == ANOTHER else None
        text = self.data[begin : self.end[row]].tobytes()
        if self.quoted is not None and not self.quoted[row]:
            return json.loads(text)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            return Unreadable(f"a value of type string that cannot be read: {error}")

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def rows(self, rows: Array) -> Texts:
        """Some of them."""
        others = {new: self.others[old] for new, old in enumerate(rows.tolist()) if old in self.others}
        quoted = None if self.quoted is None else self.quoted[rows]
        return replace(self, begin=self.begin[rows], end=self.end[rows], quoted=quoted, others=others)

    @property
    def missing(self) -> Array:
        gone: Array = self.begin == MISSING
        for row, value in self.others.items():
            gone[row] = value is None
        return gone

    def without(self, blanks: Sequence[str]) -> Texts:
        """What is written like one of the blanks is missing."""
        begin = self.begin.copy()
        for blank in map(str.encode, blanks):
            rows = np.flatnonzero((begin >= 0) & (self.end - begin == len(blank)))
            for place, byte in enumerate(blank):
                rows = rows[self.data[begin[rows] + place] == byte]
            begin[rows] = MISSING
        return replace(self, begin=begin)

    def read(self, reading: Reading, size: int = 1) -> tuple[Array, Array] | None:
        """Values, and which of them were plain enough; None where there is no compiled code."""
        c = native()
        if c is None:
            return None
        out = np.zeros(len(self), np.float64 if reading == Reading.NUMBER else np.int64)
        fine = np.empty(len(self), np.bool_)
        begin, end, quoted = _contiguous(self.begin), _contiguous(self.end), _contiguous(self.quoted)
        _call(
            *(c.cadam_read_values, self.data, begin, end, quoted, len(self), self.quotes, reading, size, self.truths),
            *(out, fine),
        )
        return out, fine


def split(
    data: Array,
    begin: Array,
    end: Array,
    names: Sequence[str],
    *,
    fields: Sequence[str] | None = None,
    separator: str = "",
) -> tuple[Array, dict[str, Texts]] | None:
    """Lines of CSV, whose fields are given, or of JSON as columns, and what became of each line: `Became`.

    Lines that are left have values that mean nothing. None where there is no compiled code for it.
    """
    c = native()
    if c is None or not separator.isascii() or separator == '"':
        return None
    count = len(begin)
    stride = count + 8  # columns at a power of two from each other would share places of the cache
    spans = np.full((2, len(names), stride), MISSING, np.int64)
    quoted = np.zeros((len(names), stride), np.uint8)
    became = np.empty(count, np.uint8)
    place = {name: column for column, name in enumerate(names)}
    column_of = np.array([place.get(name, -1) for name in fields or ()], np.int64)
    encoded = [name.encode() for name in names]
    together = np.frombuffer(b"".join(encoded) + b" ", np.uint8)
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    _call(
        *(c.cadam_split_lines, data, begin, end, count, spans[0], spans[1], quoted, became, len(names), stride),
        *(len(column_of), column_of, ord(separator or ","), together, ends),
    )
    kind = Quotes.SOME if fields is None else Quotes.NONE
    return became, {
        name: Texts(data, spans[0, i, :count], spans[1, i, :count], kind, quoted[i, :count] if fields is None else None)
        for i, name in enumerate(names)
    }


@cache
def native() -> Any:
    """The compiled functions; None where there are none."""
    try:
        return package_library().c
    except UnavailableError:
        return None


def _call(function: Any, *arguments: Any) -> None:
    """Call with a struct of 64-bit words: addresses of arrays, and numbers."""
    words = np.array(
        [0 if one is None else one.ctypes.data if isinstance(one, np.ndarray) else int(one) for one in arguments],
        np.int64,
    )
    function(words.ctypes.data)


def _contiguous(array: Array | None) -> Array | None:
    return None if array is None else np.ascontiguousarray(array)

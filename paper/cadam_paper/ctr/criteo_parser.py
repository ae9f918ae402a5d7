"""Text of Criteo's format to numbers: read as a whole, by C if there is a compiler, else by pyarrow in blocks; where
these balk, lines are looked at one by one.

A line is a label (0 or 1), 13 integers and 26 categories of 8 lower-case hexadecimal digits, tab separated; integers
and categories may be empty. Lines that are not like this are left out, and told with their numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cadam.native import build
from cadam.statistics.intervals import Array

from .fields import CATEGORIES, FIELDS, INTEGERS

if TYPE_CHECKING:
    import pyarrow

SOURCE = Path(__file__).with_name("criteo_parser.c")

BLOCK = 2 << 20
"""Bytes of text that are looked at at once: what stays in a core's cache is read more than twice as fast."""

LARGEST = (1 << 31) - 1
SHOWN = 200


@dataclass(frozen=True)
class BadLine:
    """A line that is not of the format: its number in the file, counted from 1, what is wrong, and how it starts."""

    number: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


def require_pyarrow() -> None:
    if find_spec("pyarrow") is None:
        raise ModuleNotFoundError("reading Criteo's file needs pyarrow: pip install ./paper")


def count_lines(text: bytes) -> int:
    """How many lines end in a text."""
    characters = np.frombuffer(text, np.uint8)
    starts = range(0, len(text), BLOCK)
    return sum(int(np.count_nonzero(characters[start : start + BLOCK] == ord("\n"))) for start in starts)


def parse(text: bytes, first_line: int, ends_early: bool = False) -> tuple[pyarrow.Table, list[BadLine]]:
    """The good lines of a text as a table of label, integers and categories, and the bad ones.

    The text is whole lines, but that the very last line of a file may lack its end: `ends_early`.
    """
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    table = None if ends_early else _table(text)
    if table is not None:
        return table, []
    good, bad = [], []
    lines = text.split(b"\n")
    if not lines[-1]:
        del lines[-1]
    for number, line in enumerate(lines, first_line):
        reason = what_is_wrong(line)
        if ends_early and number == first_line + len(lines) - 1 and (reason or line.endswith(b"\t")):
            reason = f"the file ends within it ({reason or 'after a tab'})"
        if reason is None:
            good.append(line)
        else:
            bad.append(BadLine(number, reason, line[:SHOWN].decode("utf-8", "backslashreplace")))
    table = _table(b"".join(line + b"\n" for line in good))
    if table is None:
        raise AssertionError(f"lines {first_line} to {first_line + len(lines) - 1}: good one by one but not together")
    return table, bad


_LINE = re.compile(rb"[01](?:\t(?:-?[0-9]{1,9})?){13}(?:\t(?:[0-9a-f]{8})?){26}")
_INTEGER, _CATEGORY = re.compile(rb"(-?)0*([0-9]+)"), re.compile(rb"[0-9a-f]{8}")


def what_is_wrong(line: bytes) -> str | None:
    """Why a line is not of the format, or None if it is."""
    if _LINE.fullmatch(line):
        return None
    columns = line.split(b"\t")
    if len(columns) != 1 + len(FIELDS):
        return f"{len(columns)} columns instead of {1 + len(FIELDS)}" if line else "it is empty"
    if columns[0] not in (b"0", b"1"):
        return f"the label is {_shown(columns[0])}, not 0 or 1"
    for name, column in zip(FIELDS, columns[1:], strict=True):
        if not column:
            continue
        if name in CATEGORIES:
            if not _CATEGORY.fullmatch(column):
                return f"{name} is {_shown(column)}, not 8 hexadecimal digits"
        elif not (integer := _INTEGER.fullmatch(column)):
            return f"{name} is {_shown(column)}, not an integer"
        elif len(integer[2]) > 10 or not -LARGEST - 1 <= int(integer[1] + integer[2]) <= LARGEST:
            return f"{name} is {_shown(column)}, beyond 32 bits"
    return None


def _shown(column: bytes) -> str:
    return repr(column if len(column) <= 40 else column[:40] + b"...")[1:]


@cache
def compiled() -> ctypes.CDLL | str:
    """criteo_parser.c, compiled on first use and kept in the user's cache; or why it cannot be used."""
    fingerprint = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    try:
        path = build.cached(f"criteo-{fingerprint}.so", lambda path: build.link(path, [(SOURCE, ())]))
        c = ctypes.CDLL(str(path))
    except (build.BuildError, OSError) as reason:
        return str(reason)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    c.read_criteo.argtypes = [ctypes.c_char_p, number, number, pointer, pointer, pointer, pointer]
    return c


def _table(text: bytes) -> pyarrow.Table | None:
    """A table of uint8, int32 and uint32 if every line is good, else None: the same whoever reads it."""
    c = compiled()
    return _by_pyarrow(text) if isinstance(c, str) else _by_c(c, text)


def _schema() -> pyarrow.Schema:
    import pyarrow

    integers = [(name, pyarrow.int32()) for name in INTEGERS]
    return pyarrow.schema([("label", pyarrow.uint8()), *integers, *((name, pyarrow.uint32()) for name in CATEGORIES)])


def _by_c(c: ctypes.CDLL, text: bytes) -> pyarrow.Table | None:
    import pyarrow

    rows = count_lines(text)
    labels, values = np.empty(rows, np.uint8), np.empty((len(FIELDS), rows), np.uint32)
    valid, missing = np.empty((len(FIELDS), (rows + 7) // 8), np.uint8), np.empty(len(FIELDS), np.int64)
    if not c.read_criteo(text, len(text), rows, *(array.ctypes.data for array in (labels, values, valid, missing))):
        return None
    schema, buffer = _schema(), pyarrow.py_buffer
    columns = [pyarrow.array(labels)]
    for field, column, bits, nulls in zip(list(schema)[1:], values, valid, missing.tolist(), strict=True):
        buffers = [buffer(bits) if nulls else None, buffer(column)]
        columns.append(pyarrow.Array.from_buffers(field.type, rows, buffers, nulls))
    return pyarrow.Table.from_arrays(columns, schema=schema)


_TOLERATED = (b"\r", b" ", b"x", b"X", b"+")
"""What pyarrow takes within an integer and the format does not have."""


def _by_pyarrow(text: bytes) -> pyarrow.Table | None:
    import pyarrow

    if any(character in text for character in _TOLERATED):
        return None
    parts = []
    for start, end in _blocks(text):
        part = _read(pyarrow.py_buffer(text).slice(start, end - start))
        if part is None:
            return None
        parts.append(part)
    return pyarrow.concat_tables(parts) if parts else _schema().empty_table()


def _blocks(text: bytes) -> Iterator[tuple[int, int]]:
    """Where blocks of whole lines begin and end."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + BLOCK) + 1 or len(text)
        yield start, end
        start = end


def _read(block: pyarrow.Buffer) -> pyarrow.Table | None:
    import pyarrow
    from pyarrow import csv

    types = {"label": pyarrow.binary(1), **dict.fromkeys(INTEGERS, pyarrow.int32())}
    types |= dict.fromkeys(CATEGORIES, pyarrow.binary(8))
    try:
        table = csv.read_csv(
            pyarrow.BufferReader(block),
            csv.ReadOptions(use_threads=False, column_names=["label", *FIELDS], block_size=block.size + 1),
            csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
        ).combine_chunks()
    except pyarrow.ArrowInvalid:
        return None
    label = table.column("label").combine_chunks()
    labels = np.frombuffer(label.buffers()[1], np.uint8)[label.offset : label.offset + len(label)] - ord("0")
    if label.null_count or (labels > 1).any():
        return None
    columns = [pyarrow.array(labels), *table.columns[1 : 1 + len(INTEGERS)]]
    for name in CATEGORIES:
        column = table.column(name).combine_chunks()
        values, good = hexadecimal(_texts(column))
        if not good:
            return None
        columns.append(pyarrow.Array.from_buffers(pyarrow.uint32(), len(column), _kept(column, values)))
    return pyarrow.Table.from_arrays(columns, schema=_schema())


def _texts(column: pyarrow.Array) -> Array:
    """The eight characters of each value as one integer; a missing value as eight zeros."""
    texts: Array = np.frombuffer(column.buffers()[1], np.uint64)[column.offset : column.offset + len(column)]
    if column.null_count:
        texts = np.where(column.is_null().to_numpy(zero_copy_only=False), _EACH * np.uint64(ord("0")), texts)
    return texts


def _kept(column: pyarrow.Array, values: Array) -> list[pyarrow.Buffer | None]:
    """The buffers of an array of these values that is missing what the column is missing."""
    import pyarrow

    if not column.null_count:
        return [None, pyarrow.py_buffer(values)]
    return [
        pyarrow.py_buffer(np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little")),
        pyarrow.py_buffer(values),
    ]


_EACH = np.uint64(0x0101010101010101)


def hexadecimal(texts: Array) -> tuple[Array, bool]:
    """The numbers that eight hexadecimal digits each stand for, and whether they are that.

    All eight characters at once: a letter has bit 6 set and its value is 9 more than its low four bits; then the
    digits, one in each byte, are pushed together.
    """
    digits = texts & (_EACH * np.uint64(0x0F))
    digits += (texts >> np.uint64(6) & _EACH) * np.uint64(9)
    letters = (digits + _EACH * np.uint64(6)) >> np.uint64(4) & _EACH
    wrong = digits + _EACH * np.uint64(ord("0")) + letters * np.uint64(ord("a") - ord("9") - 1)
    wrong ^= texts
    wrong |= digits & (_EACH * np.uint64(0x10))
    if wrong.any():
        return digits.astype(np.uint32), False
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF)):
        digits = (digits << np.uint64(shift) | digits >> np.uint64(2 * shift)) & np.uint64(mask)
    return (digits << np.uint64(16) | digits >> np.uint64(32)).astype(np.uint32), True

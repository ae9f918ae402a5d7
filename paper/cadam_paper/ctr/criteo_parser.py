"""Parser of the Criteo text format (train.txt).

A line has tab-separated columns: a label (0 or 1), 13 integers and 26 categories of 8 lowercase hexadecimal digits.
Integers and categories may be empty. Invalid lines are skipped and returned with their line numbers.

A text is first parsed as a whole, by C code if there is a compiler, otherwise by pyarrow. Both only accept texts
without invalid lines. If they fail, every line is checked separately, and the valid lines are parsed again.
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
"""Bytes of text that are processed at once. Blocks that fit into the cache of a core are processed twice as fast."""

LARGEST = (1 << 31) - 1
"""The largest valid integer."""
MAX_SHOWN = 200
"""Number of bytes of an invalid line that are kept for messages."""


@dataclass(frozen=True)
class BadLine:
    """An invalid line: its number in the file, counted from 1, the reason, and the beginning of its text."""

    number: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


def require_pyarrow() -> None:
    """Raise ModuleNotFoundError with installation advice if pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise ModuleNotFoundError("reading Criteo's train.txt needs pyarrow: pip install pyarrow")


def count_lines(text: bytes) -> int:
    """Count the newline characters of a text."""
    characters = np.frombuffer(text, np.uint8)
    starts = range(0, len(text), BLOCK)
    return sum(int(np.count_nonzero(characters[start : start + BLOCK] == ord("\n"))) for start in starts)


def parse(text: bytes, first_line: int, ends_early: bool = False) -> tuple[pyarrow.Table, list[BadLine]]:
    """Parse a text of complete lines.

    Args:
        text: The text.
        first_line: The number of its first line in the file.
        ends_early: Whether the text is the end of a file without a final newline. Its last line may then be incomplete.

    Returns:
        A table of the valid lines (label, integers and categories), and the invalid lines.
    """
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    table = None if ends_early else _parse_valid(text)
    if table is not None:
        return table, []
    good, bad = [], []
    lines = text.split(b"\n")
    if not lines[-1]:
        del lines[-1]
    for number, line in enumerate(lines, first_line):
        reason = find_error(line)
        if ends_early and number == first_line + len(lines) - 1 and (reason or line.endswith(b"\t")):
            reason = f"the file ends within this line ({reason or 'after a tab'})"
        if reason is None:
            good.append(line)
        else:
            bad.append(BadLine(number, reason, line[:MAX_SHOWN].decode("utf-8", "backslashreplace")))
    table = _parse_valid(b"".join(line + b"\n" for line in good))
    if table is None:
        raise AssertionError(
            f"lines {first_line} to {first_line + len(lines) - 1} are valid separately but not together"
        )
    return table, bad


_LINE = re.compile(rb"[01](?:\t(?:-?[0-9]{1,9})?){13}(?:\t(?:[0-9a-f]{8})?){26}")
_INTEGER, _CATEGORY = re.compile(rb"(-?)0*([0-9]+)"), re.compile(rb"[0-9a-f]{8}")


def find_error(line: bytes) -> str | None:
    """Return the reason why a line is invalid, or None if it is valid."""
    if _LINE.fullmatch(line):
        return None
    columns = line.split(b"\t")
    if len(columns) != 1 + len(FIELDS):
        return f"{len(columns)} columns instead of {1 + len(FIELDS)}" if line else "the line is empty"
    if columns[0] not in (b"0", b"1"):
        return f"the label is {_abbreviate(columns[0])}, not 0 or 1"
    for name, column in zip(FIELDS, columns[1:], strict=True):
        if not column:
            continue
        if name in CATEGORIES:
            if not _CATEGORY.fullmatch(column):
                return f"{name} is {_abbreviate(column)}, not 8 hexadecimal digits"
        elif not (integer := _INTEGER.fullmatch(column)):
            return f"{name} is {_abbreviate(column)}, not an integer"
        elif len(integer[2]) > 10 or not -LARGEST - 1 <= int(integer[1] + integer[2]) <= LARGEST:
            return f"{name} is {_abbreviate(column)}, beyond 32 bits"
    return None


def _abbreviate(column: bytes) -> str:
    return repr(column if len(column) <= 40 else column[:40] + b"...")[1:]


@cache
def compiled() -> ctypes.CDLL | str:
    """Return the compiled criteo_parser.c, or the reason why it cannot be used.

    It is compiled on first use and stored in the user's cache folder.
    """
    fingerprint = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    try:
        path = build.cached(f"criteo-{fingerprint}.so", lambda path: build.link(path, [(SOURCE, ())]))
        c = ctypes.CDLL(str(path))
    except (build.BuildError, OSError) as reason:
        return str(reason)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    c.read_criteo.argtypes = [ctypes.c_char_p, number, number, pointer, pointer, pointer, pointer]
    return c


def _parse_valid(text: bytes) -> pyarrow.Table | None:
    """Parse a text into columns of uint8, int32 and uint32, or return None if it has an invalid line.

    The C code and pyarrow return equal tables.
    """
    c = compiled()
    return _parse_with_pyarrow(text) if isinstance(c, str) else _parse_with_c(c, text)


def _schema() -> pyarrow.Schema:
    import pyarrow

    integers = [(name, pyarrow.int32()) for name in INTEGERS]
    return pyarrow.schema([("label", pyarrow.uint8()), *integers, *((name, pyarrow.uint32()) for name in CATEGORIES)])


def _parse_with_c(c: ctypes.CDLL, text: bytes) -> pyarrow.Table | None:
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


_INVALID_CHARACTERS = (b"\r", b" ", b"x", b"X", b"+")
"""Characters that pyarrow accepts in an integer but that are invalid in this format."""


def _parse_with_pyarrow(text: bytes) -> pyarrow.Table | None:
    import pyarrow

    if any(character in text for character in _INVALID_CHARACTERS):
        return None
    parts = []
    for start, end in _blocks(text):
        part = _read_block(pyarrow.py_buffer(text).slice(start, end - start))
        if part is None:
            return None
        parts.append(part)
    return pyarrow.concat_tables(parts) if parts else _schema().empty_table()


def _blocks(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of blocks of complete lines."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + BLOCK) + 1 or len(text)
        yield start, end
        start = end


def _read_block(block: pyarrow.Buffer) -> pyarrow.Table | None:
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
        values, good = hexadecimal(_packed_texts(column))
        if not good:
            return None
        columns.append(pyarrow.Array.from_buffers(pyarrow.uint32(), len(column), _with_nulls_of(column, values)))
    return pyarrow.Table.from_arrays(columns, schema=_schema())


def _packed_texts(column: pyarrow.Array) -> Array:
    """Return the eight characters of each value as the bytes of an integer. A missing value becomes "00000000"."""
    texts: Array = np.frombuffer(column.buffers()[1], np.uint64)[column.offset : column.offset + len(column)]
    if column.null_count:
        texts = np.where(column.is_null().to_numpy(zero_copy_only=False), _EACH_BYTE * np.uint64(ord("0")), texts)
    return texts


def _with_nulls_of(column: pyarrow.Array, values: Array) -> list[pyarrow.Buffer | None]:
    """Return the buffers of an array with these values and the nulls of a column."""
    import pyarrow

    if not column.null_count:
        return [None, pyarrow.py_buffer(values)]
    return [
        pyarrow.py_buffer(np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little")),
        pyarrow.py_buffer(values),
    ]


_EACH_BYTE = np.uint64(0x0101010101010101)
"""Multiplying by this constant copies a byte to all eight bytes of an integer."""


def hexadecimal(texts: Array) -> tuple[Array, bool]:
    """Convert texts of eight hexadecimal digits, packed into 64-bit integers, to numbers.

    All eight characters are converted at once. A letter has bit 6 set, and its value is its low four bits plus 9. The
    digits, one per byte, are then combined pairwise.

    Returns:
        The numbers, and whether all texts are valid. The numbers are meaningless otherwise.
    """
    digits = texts & (_EACH_BYTE * np.uint64(0x0F))
    digits += (texts >> np.uint64(6) & _EACH_BYTE) * np.uint64(9)
    letters = (digits + _EACH_BYTE * np.uint64(6)) >> np.uint64(4) & _EACH_BYTE
    wrong = digits + _EACH_BYTE * np.uint64(ord("0")) + letters * np.uint64(ord("a") - ord("9") - 1)
    wrong ^= texts
    wrong |= digits & (_EACH_BYTE * np.uint64(0x10))
    if wrong.any():
        return digits.astype(np.uint32), False
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF)):
        digits = (digits << np.uint64(shift) | digits >> np.uint64(2 * shift)) & np.uint64(mask)
    return (digits << np.uint64(16) | digits >> np.uint64(32)).astype(np.uint32), True

"""Samples of CSV files and JSON lines, from which a schema is inferred."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....printable import shell_word
from .line_files import BYTE_ORDER_MARK, CONVERT_TO_UTF8, is_compressed, open_binary, parse_header, split_fields
from .records import parse_json_record
from .sample import MAX_ROWS, POSITIONS, Sample, SamplingError, describe, max_rows, read_records, sample_records, spread

MAX_BYTES = 48 << 20
"""The number of bytes that are read for a sample; a smaller file is read completely."""
MAX_INVALID_SHARE = 0.01
"""If more lines than this fraction are not UTF-8, no sample is taken."""
MOSTLY_NUMBERS = 0.9
"""From this fraction of numbers on, the distinct values of a column show how numbers are written."""
_INTEGER = re.compile(r"[-+]?\d+")
_FRACTION_WITH_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
_FRACTION_WITH_POINT = re.compile(r"[-+]?\d+\.\d+(?:[eE][-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2},\d{3}")
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
"""The separators that are recognized in CSV, with their names."""
BINARY_FORMATS = {
    b"PAR1": "a Parquet file: give it as parquet:PATH",
    b"PK\3\4": "a zip archive or an Excel file: unpack it, or save it as CSV",
    b"\x1f\x8b": "compressed with gzip: give it a name that ends in .gz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it (zstd -d), or compress it with gzip",
    b"BZh": "compressed with bzip2: decompress it (bunzip2), or compress it with gzip",
    b"\xfd7zXZ": "compressed with xz: decompress it (unxz), or compress it with gzip",
    b"SQLite format 3": "an SQLite database: export the table as CSV",
}
"""The first bytes of files that are not text, with a description and advice."""


@dataclass
class SampledLines:
    """Lines from several positions of a file."""

    lines: list[bytes]
    total: int
    """The approximate number of lines of the file."""
    positions: int
    """The number of positions from which lines were read."""

    def thin_out(self, columns: int) -> list[bytes]:
        """Return as many lines as are sampled with this number of columns, as evenly spread runs of lines."""
        limit = max_rows(columns)
        if len(self.lines) <= limit:
            return self.lines
        size = limit // POSITIONS
        starts = spread(POSITIONS, len(self.lines) - size)
        return [line for start in starts for line in self.lines[start : start + size]]


def sample_lines(path: str) -> SampledLines:
    """Read lines from several positions of a file, or only from the beginning of a compressed file.

    Raises:
        SamplingError: If the file is empty.
    """
    size = os.path.getsize(path)
    total, positions = None, 1
    with open_binary(path, buffered=True) as file:
        if is_compressed(path):
            lines = file.read(MAX_BYTES).split(b"\n")
            if file.read(1):
                lines = _without_blanks(lines[:-1])
                total = len(lines) * size // max(1, file.fileobj.tell())
        elif size <= MAX_BYTES:
            lines = file.read().split(b"\n")
        else:
            positions = POSITIONS
            lines = _read_positions(file, size)
            mean = sum(map(len, lines)) / len(lines) + 1 if lines else 1
            total = int(size / mean)
    lines = _without_blanks(lines)
    if not lines:
        raise SamplingError(f"{path} is empty")
    return SampledLines(lines, len(lines) if total is None else total, positions)


def _read_positions(file: Any, size: int) -> list[bytes]:
    lines: list[bytes] = []
    length = MAX_BYTES // POSITIONS
    enough = 2 * MAX_ROWS // POSITIONS
    for position in range(POSITIONS):
        file.seek(position * (size - length) // (POSITIONS - 1))
        part = file.read(length).split(b"\n")[:-1]
        # All but the first part begin in the middle of a line.
        lines += _without_blanks(part[1 if position else 0 :])
        if position == 0 and len(lines) > enough:  # The lines are short, so fewer bytes are read from now on.
            length, lines = length * enough // len(lines), lines[:enough]
    return lines


def _without_blanks(lines: list[bytes]) -> list[bytes]:
    return [line for line in lines if line.strip()]


def sample_csv(path: str) -> Sample:
    """Return a sample of a CSV file, whose separator and header are recognized.

    Raises:
        SamplingError: If the file is not CSV in UTF-8, or has no rows.
    """
    sampled = sample_lines(path)
    first = sampled.lines[0] = sampled.lines[0].removeprefix(BYTE_ORDER_MARK)
    _check_is_text(path, first)
    header = None
    try:
        separator = _guess_separator(sampled.lines[:100])
        names = parse_header(first, separator)
        if _is_header(names, [parse_header(line, separator) for line in sampled.lines[1:100]]):
            sampled.lines, sampled.total = sampled.lines[1:], sampled.total - 1
        else:
            header = names = [f"c{number}" for number in range(1, len(names) + 1)]
    except (ValueError, csv.Error) as error:
        raise SamplingError(f"{path}: {error}") from error
    if not sampled.lines:
        raise SamplingError(f"{path} has a header and no rows")
    chosen = sampled.thin_out(len(names))
    not_utf8 = _count_not_utf8(path, chosen)
    rows = []
    for line in chosen:
        try:
            values = split_fields(line.decode().rstrip("\r"), separator)
        except (ValueError, csv.Error):
            values = []
        if len(values) == len(names):
            rows.append(values)
    if not rows:
        raise SamplingError(f"{path}: no line has {len(names)} fields like the first, separated by {separator!r}")
    columns = {
        name: [value or None for value in values] for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
    kind = f"CSV, separated by {SEPARATORS[separator]}"
    if header:
        kind += ", without a header"
    if is_compressed(path):
        kind += ", gzip"
    positions = POSITIONS if len(chosen) < len(sampled.lines) else sampled.positions
    sample = Sample(columns, len(rows), sampled.total, describe(kind, sampled.total, len(rows), positions), True)
    sample.separator, sample.header, sample.names = separator, header, tuple(names)
    if separator != ",":
        _detect_decimal_comma(sample)
    if header:
        sample.warnings.append(
            f"the first line is data, so columns are called c1 to c{len(names)}; name them in schema.json under header"
        )
    if not_utf8:
        sample.warnings.append(f"{not_utf8:,} of {len(chosen):,} lines will be rejected: {_describe_not_utf8(path)}")
    if malformed := len(chosen) - len(rows) - not_utf8:
        sample.warnings.append(
            f"{malformed:,} of {len(chosen):,} lines do not have {len(names)} fields and will be rejected; quoted text "
            "must not contain line breaks"
        )
    return sample


def sample_json_lines(path: str) -> Sample:
    """Return a sample of a file with one JSON object per line.

    Raises:
        SamplingError: If the file does not contain JSON lines in UTF-8.
    """
    sampled = sample_lines(path)
    first = sampled.lines[0]
    if first.lstrip().startswith(b"["):
        raise SamplingError(f"{path} is one JSON array; write one object per line (jq -c '.[]' {path} > lines.jsonl)")
    chosen = sampled.thin_out(first.count(b":"))
    _count_not_utf8(path, [line for line in chosen if json.detect_encoding(line) == "utf-8"])
    records, invalid = read_records(chosen, parse_json_record)
    description = describe("JSON lines", sampled.total, len(records), sampled.positions)
    sample = sample_records(records, sampled.total, description, is_text=False)
    if invalid:
        sample.warnings.append(f"{invalid:,} of {len(chosen):,} lines are not JSON objects and will be rejected")
    return sample


def _detect_decimal_comma(sample: Sample) -> None:
    """Recognize a decimal comma, and write the numbers of the sample with a point instead.

    A comma in 1,234 may also separate thousands. So some number must have a comma that can only be a decimal one, and
    no column may have numbers with a point.
    """
    with_comma: dict[str, list[str]] = {}
    has_point = False
    for name, values in sample.columns.items():
        distinct = [value for value in dict.fromkeys(values) if value is not None]
        fractions = [value for value in distinct if _FRACTION_WITH_COMMA.fullmatch(value)]
        integers = sum(1 for value in distinct if _INTEGER.fullmatch(value))
        if fractions and len(fractions) + integers >= MOSTLY_NUMBERS * len(distinct):
            with_comma[name] = fractions
        points = sum(1 for value in distinct if _FRACTION_WITH_POINT.fullmatch(value))
        has_point |= points > 0 and points + integers >= MOSTLY_NUMBERS * len(distinct)
    if not with_comma:
        return
    is_certain = any(not _THOUSANDS.fullmatch(value) for values in with_comma.values() for value in values)
    if has_point or not is_certain:
        name, (example, *_) = next(iter(with_comma.items()))
        cause = "other columns have a decimal point" if has_point else "a comma may also separate thousands"
        sample.warnings.append(
            f"values such as {example!r} of {name!r} are used as text, because {cause}. If they are numbers with a "
            'decimal comma, write "decimal": "," in the schema, and number? as the kind of the column'
        )
        return
    sample.decimal = ","
    sample.description += ", decimal comma"
    for name, fractions in with_comma.items():
        points_of = {value: value.replace(",", ".") for value in fractions}
        sample.columns[name] = [points_of.get(value, value) for value in sample.columns[name]]


def _guess_separator(lines: Sequence[bytes]) -> str:
    """Return the separator with which most lines have as many fields (at least two) as the first; else a comma."""

    def fit(separator: str) -> tuple[float, int]:
        counts = Counter(len(parse_header(line, separator)) for line in lines)
        width = len(parse_header(lines[0], separator))
        return (counts[width] / len(lines), width) if width > 1 else (0.0, 0)

    best = max(SEPARATORS, key=fit)
    if best == "," and fit(";")[0] == 1:  # The commas may be decimal commas between semicolons.
        fields = [field for line in lines for field in parse_header(line, ";") if "," in field]
        best = ";" if all(map(_FRACTION_WITH_COMMA.fullmatch, fields)) else best
    return best if fit(best)[1] else ","


def _is_header(first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool:
    """Whether the first line of a file contains names of columns rather than values."""
    if any(_is_number(name) for name in first):
        return False
    if any(not name.strip() for name in first) or len(set(first)) < len(first):
        return True  # Duplicate names are reported later.
    if any(_is_number(value) for values in rest for value in values):
        return True
    # All values are text. Names do not occur as values in their own column.
    return not any(name in {values[i] for values in rest if i < len(values)} for i, name in enumerate(first))


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True


def _check_is_text(path: str, first: bytes) -> None:
    """Raise `SamplingError` if the first line of a file is not text in UTF-8."""
    for start, description in BINARY_FORMATS.items():
        if first.startswith(start):
            raise SamplingError(f"{path} is {description}")
    if b"\0" in first:
        raise SamplingError(f"{path} is not text in UTF-8; it may be UTF-16 or binary. Convert it to CSV in UTF-8")
    if not _is_utf8(first):
        raise SamplingError(_describe_not_utf8(path))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _count_not_utf8(path: str, lines: Sequence[bytes]) -> int:
    """Return the number of lines that are not UTF-8, or raise `SamplingError` if they are too many."""
    count = sum(not _is_utf8(line) for line in lines)
    if count > MAX_INVALID_SHARE * len(lines):
        raise SamplingError(_describe_not_utf8(path))
    return count


def _describe_not_utf8(path: str) -> str:
    with open_binary(path, buffered=True) as file:
        number = next((number for number, line in enumerate(file, 1) if not _is_utf8(line)), 0)
    return f"{path} is not UTF-8 (line {number:,}). {CONVERT_TO_UTF8.format(path=shell_word(path))}"

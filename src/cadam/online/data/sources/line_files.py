"""Opening files of lines, and splitting lines of CSV into fields."""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zlib
from pathlib import Path
from typing import Any

from ....printable import shell_word

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The mark of UTF-8 that some programs write before the first line of a file."""
CONVERT_TO_UTF8 = "Convert it, as in: iconv -f latin1 -t utf8 {path} > converted"
"""Advice for a file that is not UTF-8."""


def is_compressed(path: Path | str) -> bool:
    """Whether the name of a file ends in .gz."""
    return str(path).endswith(".gz")


def open_binary(path: Path | str, buffered: bool = False) -> Any:
    """Open a file for reading bytes, decompressed if its name ends in .gz. The path ``-`` is standard input."""
    if str(path) == "-":
        return io.FileIO(sys.stdin.fileno(), closefd=False)
    if is_compressed(path):
        return GzipReader(path)
    return open(path, "rb") if buffered else io.FileIO(path)


class GzipReader(gzip.GzipFile):
    """A gzip file whose error messages name the file and say what to do."""

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes, or raise OSError if the file is damaged."""
        try:
            return super().read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            problem = "is cut off" if isinstance(error, EOFError) else f"is not a complete gzip file ({error})"
            name, part = shell_word(str(self.name)), shell_word(f"part-{Path(self.name).stem}")
            raise OSError(
                f"{self.name} {problem}: copy it again (gzip -t {name} tests it), or use its readable part: "
                f"zcat {name} > {part}"
            ) from error


def split_fields(line: str, separator: str) -> list[str]:
    """Split a line of CSV into its fields, or raise csv.Error if its quotes are not balanced."""
    if '"' not in line:
        return line.split(separator)
    values = next(csv.reader([line], delimiter=separator, strict=True))
    if line.count('"') % 2:  # The csv module accepts the second half of a quoted field that contains a line break.
        raise csv.Error("a quote that closes nothing")
    return values


def parse_header(line: bytes, separator: str = ",") -> list[str]:
    """Return the names of the fields from the first line of CSV, or raise ValueError if it cannot be parsed."""
    try:
        text = line.decode(errors="replace").strip("\r\n ").lstrip("\ufeff")
        return next(csv.reader([text], delimiter=separator), [""])
    except csv.Error as error:
        raise ValueError(f"the first line, which names the fields, cannot be parsed: {error}") from error

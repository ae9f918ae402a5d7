"""Events from lines of text: CSV or JSON, from files (which may grow) and from standard input."""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import io
import json
import logging
import os
import select
import shlex
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..events import Array, Batch, Rejected
from ..schema import KEPT, Schema
from ..text_columns import ANOTHER, Became, Texts
from ..text_columns import split as split_lines
from .base import Source, check_state
from .records import json_record, repeated, unreadable

logger = logging.getLogger("cadam.online")

Format = Literal["csv", "jsonl"]
READ = 1 << 18
FEW = 16  # lines for which a call of compiled code is not worth it
KNOWN_BY = 4096  # bytes before the position, by which a file is known again
MARK = b"\xef\xbb\xbf"  # of UTF-8, before the first line of a file


Line = tuple[bytes, int]
"""Its text, and its size with the line break. Of one that is too long the text has only beginning and end."""


@dataclass(frozen=True)
class Places:
    """Says where a line is, by its number among those that were read together."""

    path: str
    offset: int
    line: int
    lines: Sequence[Line]

    def __call__(self, row: int) -> str:
        return f"{self.path}, line {self.line + row + 1} at byte {self._offsets[row]}"

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate((size for _, size in self.lines), initial=self.offset))


class LinesSource(Source):
    """A line is an event. A line that is too long, or cannot be read, is rejected.

    CSV has its field names in the first line unless `fields` or the schema's header gives them, the schema's separator
    between fields, numbers are written as usual, an empty field is a missing one, and quoted fields cannot hold line
    breaks. A file whose name ends in .gz is decompressed; it cannot be followed.

    The last line of a file may still be in the writing while it has no line break at its end. Such a line is left for a
    later run, with a warning, unless it is a whole JSON object: of CSV nobody can tell a number from half of it.
    Standard input that has ended has ended, and its last line is read.

    Args:
        path: a file, or ``-`` for standard input. A pipe cannot be read again: after a restart it goes on with what
            comes.
        follow: at the end wait for more instead of ending, and go on with the new file where the file is rotated.
            Standard input ends when it is closed.
        patience: how many seconds to wait for a full batch before a short one is given; None: for ever, so that batches
            do not depend on time.
        longest: bytes of the longest line that is looked at.
    """

    share: float | None = None

    def __init__(
        self,
        path: Path | str,
        schema: Schema,
        format: Format,
        *,
        fields: list[str] | None = None,
        batch_size: int = 1024,
        follow: bool = False,
        patience: float | None = 1.0,
        longest: int = 1 << 20,
        poll: float = 0.2,
    ) -> None:
        if format not in ("csv", "jsonl"):
            raise ValueError(f"format must be 'csv' or 'jsonl', got {format!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.path, self.schema, self.format = str(path), schema, format
        if fields is None and format == "csv" and schema.header is not None:
            fields = list(schema.header)
        self.fields, self.batch_size, self.follow = fields, batch_size, follow
        self.patience, self.longest, self.poll = patience, longest, poll
        self.pipe = self.path == "-"
        if not self.pipe and not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not a file")
        if follow and is_compressed(path):
            raise ValueError(
                f"{path} is compressed and cannot be followed: follow the file that is written, or read "
                "it without follow"
            )
        self._check_fields()
        self.headless = fields is not None or format == "jsonl"
        self.file = 0 if self.pipe else os.stat(path).st_ino  # by which the system knows it
        self.opened = self.path  # or where the file that was under the path is now
        self.over = False  # whether all was read that is to be had of the file that is open
        self.offset = self.line = 0  # bytes and lines of what was given so far
        self.before = b""  # the last of these bytes
        self.unfinished = 0  # bytes of the last line, if it was left

    def __iter__(self) -> Iterator[Batch | None]:
        anew = False
        while True:
            try:
                file = open_binary(self.opened)
            except FileNotFoundError:
                if not anew:
                    raise
                yield None  # the old one is gone, and the new one still to come
                time.sleep(self.poll)
                continue
            self.over = False
            try:
                if not self.pipe:
                    self._go_to_position(file, anew)
                yield from self._batches(file)
            finally:
                file.close()
            if not self.over:
                return
            self.opened, anew = self.path, True

    def _go_to_position(self, file: Any, anew: bool) -> None:
        """A new file that begins as the old one did is the old one with more at its end; another is read as a whole."""
        if _before(file, self.offset) != self.before:
            if not anew:
                raise ValueError(self._another(self.offset))
            self.offset = self.line = 0
            self.before = b""
            if not self.headless:
                self.fields = None
        self.file = os.fstat(file.fileno()).st_ino
        file.seek(self.offset)

    def _batches(self, file: Any) -> Iterator[Batch | None]:
        lines: list[Line] = []
        since = time.monotonic()
        for more in self._lines(file):
            if more and self.format == "csv" and self.fields is None:
                self._header(*more.pop(0))
                if not more:
                    continue
            if more and not lines:
                since = time.monotonic()
            lines += more
            start = 0
            while len(lines) - start >= self.batch_size:
                yield self._batch(lines[start : start + self.batch_size])
                start += self.batch_size
            if start:
                lines, since = lines[start:], time.monotonic()
            if not more:
                late = self.patience is not None and time.monotonic() - since > self.patience
                yield self._batch(lines) if lines and late else None
                lines = [] if late else lines
        if lines:
            yield self._batch(lines)
        if self.unfinished:
            logger.warning(
                "%s: line %d, the last, of %d bytes, was left unread: it has no line break at its end, so it may "
                "still be in the writing; once it has one (echo >> FILE adds it), the same command reads it",
                *(self.opened, self.line + 1, self.unfinished),
            )

    def _lines(self, file: Any) -> Iterator[list[Line]]:
        """Lines; none when there is nothing at the moment."""
        held, size = b"", 0  # of a line that is not complete
        self.unfinished, place, before = 0, self.offset, self.before
        replaced = False
        while True:
            if self.pipe and not select.select([file], [], [], self.poll)[0]:
                yield []
                continue
            follow = self.follow and not self.pipe
            if follow and _before(file, place) != before:
                logger.error(
                    "%s was cut off or written anew after byte %d, where it had been read up to: it is read from its "
                    "beginning, and what was not read by then is lost",
                    *(self.opened, place),
                )
                self.over = True
                return
            data = file.read(READ) or b""
            if not data:
                if follow and not replaced:
                    replaced = self._replaced(file)
                    if not replaced:
                        yield []
                        time.sleep(self.poll)
                    continue  # what it was given up to now is read first
                if size and (self.pipe or (self.format == "jsonl" and size <= self.longest and _whole(held))):
                    yield [(held, size)]
                    size = 0
                if replaced:
                    left = f"; its last line, of {size} bytes without a line break, is lost" if size else ""
                    logger.warning("%s is another file now, which is read after the end of the old%s", self.path, left)
                    self.over = True
                elif size:
                    self.unfinished = size
                return
            if not self.pipe and not self.follow:
                raw = getattr(file, "fileobj", file)  # of a compressed file
                self.share = raw.tell() / max(1, os.fstat(file.fileno()).st_size)
            place, before = place + len(data), (before + data)[-KNOWN_BY:]
            *complete, rest = data.split(b"\n")
            if complete:
                found = [(part, len(part) + 1) for part in complete]
                found[0] = held + complete[0], size + len(complete[0]) + 1
                held, size = b"", 0
                yield found
            size, held = size + len(rest), held + rest
            if size > self.longest:
                held = held[: self.longest] + held[self.longest :][-KNOWN_BY:]

    def _replaced(self, file: Any) -> bool:
        """Whether another file is under the path by now, and not an empty one: until then the old may get more."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        return there.st_size > 0 and not os.path.samestat(there, os.fstat(file.fileno()))

    def _went_by(self, lines: Sequence[Line]) -> None:
        """The position moves behind the lines."""
        end: list[bytes] = []
        known = 0
        for text, size in reversed(lines):
            end.append(text[-KNOWN_BY:] + b"\n" * (size > len(text)))
            known += len(end[-1])
            if known >= KNOWN_BY:
                break
        self.before = (self.before + b"".join(reversed(end)))[-KNOWN_BY:]
        self.offset += sum([size for _, size in lines])
        text, size = lines[-1]
        self.line += len(lines) - (size == len(text))  # a line break that is still to come is counted when it comes

    def _header(self, text: bytes, size: int) -> None:
        """The first line of CSV: the names of the fields."""
        self._went_by([(text, size)])
        self.fields = csv_names(text, self.schema.separator)
        missing = [name for name in self.schema.features if name not in self.fields]
        if missing:
            raise ValueError(f"{self.path} has no column {', '.join(missing)}; it has {', '.join(self.fields)}")
        self._check_fields()

    def _check_fields(self) -> None:
        """That the schema's fields are named once: of two columns of one name nobody can tell which is meant."""
        if twice := repeated(name for name in self.fields or () if name in self.schema.fields()):
            raise ValueError(f"{self.path} has more than one column {twice}: give each a name of its own")

    def _batch(self, lines: list[Line]) -> Batch:
        place = Places(self.opened, self.offset, self.line, lines)
        first = self.offset == 0
        self._went_by(lines)
        if first and self.format == "csv":  # JSON's own reader takes the mark
            (text, size), *rest = lines
            lines = [(text.removeprefix(MARK), size), *rest]
        found = self._columns(lines)
        if found is None:
            return self._records(lines, place)
        became, columns = found
        rejected: list[Rejected] = []
        others: dict[int, Mapping[str, Any]] = {}
        for row in np.flatnonzero(became == Became.LEFT).tolist():
            record = self._record_or_reason(*lines[row], place(row))
            if isinstance(record, Rejected):
                rejected.append(record)
                became[row] = Became.BLANK
            else:
                others[row] = record
        rows = np.flatnonzero(became != Became.BLANK)
        if not len(rows):
            return Batch(rejected=rejected)
        if others:
            columns = {name: self._with(column, name, others) for name, column in columns.items()}
        if len(rows) < len(lines):
            columns = {name: column.rows(rows) for name, column in columns.items()}
        shown = lambda row: lines[rows[row]][0].decode(errors="replace")  # noqa: E731
        where = lambda row: place(int(rows[row]))  # noqa: E731
        batch = self.schema.columns(columns, len(rows), where, text=self.format == "csv", raw=shown)
        batch.rejected = rejected + batch.rejected
        return batch

    def _columns(self, lines: list[Line]) -> tuple[Array, dict[str, Texts]] | None:
        """What became of each line, and columns of those that compiled code reads; None to go line by line."""
        if len(lines) < FEW:
            return None
        texts = [text for text, _ in lines]
        data = np.frombuffer(b"".join(texts) + b"\n", np.uint8)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        ends = np.cumsum(sizes)
        begins = ends - sizes
        csv_only: dict[str, Any] = {"fields": self.fields, "separator": self.schema.separator}
        found = split_lines(*(data, begins, ends, self.schema.fields()), **(csv_only if self.format == "csv" else {}))
        if found is None:
            return None
        became, columns = found
        for row in np.flatnonzero(sizes >= self.longest).tolist():
            if lines[row][1] > self.longest:
                became[row] = Became.LEFT
        for row in np.flatnonzero(became == Became.BLANK).tolist():
            if not self._blank(texts[row]):
                became[row] = Became.LEFT
        if self.format == "csv" and self.schema.missing:
            columns = {name: column.without(self.schema.blanks(name)) for name, column in columns.items()}
        return became, columns

    def _blank(self, text: bytes) -> bool:
        """Whether a line says nothing. One of separators alone, be they tabs, has fields: all are missing."""
        return not text.strip() and not (self.format == "csv" and self.schema.separator.encode() in text)

    def _with(self, column: Texts, name: str, records: Mapping[int, Mapping[str, Any]]) -> Texts:
        """A column with the values of further records, by row."""
        values = self.schema.values(list(records.values()), text=self.format == "csv")[name]
        begin = column.begin.copy()
        begin[list(records)] = ANOTHER
        return replace(column, begin=begin, others=dict(zip(records, values, strict=True)))

    def _records(self, lines: list[Line], place: Places) -> Batch:
        """As `_batch`, line by line."""
        records: list[Mapping[str, Any]] = []
        rows: list[int] = []
        rejected: list[Rejected] = []
        for row, line in enumerate(lines):
            if self._blank(line[0]):
                continue
            record = self._record_or_reason(*line, place(row))
            if isinstance(record, Rejected):
                rejected.append(record)
            else:
                records.append(record)
                rows.append(row)
        where, raw = [place(row) for row in rows], [lines[row][0] for row in rows]
        batch = self.schema.records(records, where, text=self.format == "csv", raw=raw) if records else Batch()
        batch.rejected = rejected + batch.rejected
        return batch

    def _record_or_reason(self, text: bytes, size: int, place: str) -> Mapping[str, Any] | Rejected:
        try:
            return self._record(text, size)
        except (ValueError, RecursionError, csv.Error) as error:
            return Rejected(unreadable(error), place, text[:KEPT].decode(errors="replace"), size)

    def _record(self, text: bytes, size: int) -> Mapping[str, Any]:
        if size > self.longest:
            raise ValueError(f"a line of {size} bytes, more than {self.longest}")
        if self.format == "jsonl":
            return json_record(text)
        line = text.decode().rstrip("\r")
        values = split(line, self.schema.separator)
        assert self.fields is not None
        if len(values) != len(self.fields):
            raise ValueError(f"{len(values)} fields, not {len(self.fields)}")
        return dict(zip(self.fields, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"fields": self.fields} if self.fields is not None else {}
        if not self.pipe:
            fields |= {"before": hashlib.sha256(self.before).hexdigest(), "file": self.file}
        return {"source": self.format, "offset": self.offset, "line": self.line, **fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, source=self.format)
        self.fields = state.get("fields", self.fields)
        self._check_fields()
        if self.pipe:
            logger.warning(
                "standard input cannot be read again: what was in flight when the last run stopped is not seen"
            )
            return
        offset = state["offset"]
        found = self._find(offset, state["before"], state.get("file"))  # older states do not have the last
        if found is None:
            raise ValueError(self._another(offset))
        if found != self.path:
            logger.warning(
                "%s is another file than before: the rest of the old one is in %s and read first, then the new one; "
                "files that were there in between are not read",
                *(self.path, found),
            )
        self.opened, self.offset, self.line = found, offset, state["line"]
        self.before, self.file = _before_in(found, offset), os.stat(found).st_ino

    def _find(self, offset: int, before: str, file: int | None) -> str | None:
        """Where the file is that was read up to the offset: under the path or, if it is followed, rotated away.

        Of files that are rotated the old one lies beside the new, under the same name with something after it. All may
        look alike up to the position, if that is at the beginning or behind the names of the fields.
        """
        beside = sorted(glob.glob(f"{glob.escape(self.path)}?*")) if self.follow else []
        paths = [self.path, *filter(os.path.isfile, beside)]
        for path in sorted(paths, key=lambda path: os.stat(path).st_ino != file):
            if hashlib.sha256(_before_in(path, offset)).hexdigest() == before:
                return path
        return None

    def _another(self, offset: int) -> str:
        return (
            f"{self.opened} is not what it was before the position, byte {offset}: it is another file, or was cut off "
            "or written anew. If the old one was rotated away, to the same folder and a name that begins with "
            f"{os.path.basename(self.path)}, follow (--follow) reads its rest and then the new one; without, give the "
            "old one's name. To read this one from its beginning, begin with another checkpoint"
        )


def is_compressed(path: Path | str) -> bool:
    return str(path).endswith(".gz")


def open_binary(path: Path | str, buffered: bool = False) -> Any:
    """A file of lines, decompressed where its name says so; ``-`` is standard input."""
    if str(path) == "-":
        return io.FileIO(sys.stdin.fileno(), closefd=False)
    return Unzipped(path) if is_compressed(path) else open(path, "rb") if buffered else io.FileIO(path)


class Unzipped(gzip.GzipFile):
    """A gzip file that says, where it is damaged, which it is and what to do."""

    def read(self, size: int | None = -1) -> bytes:
        try:
            return super().read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            what = "is cut off" if isinstance(error, EOFError) else f"is no whole gzip file ({error})"
            name, part = (shlex.quote(text) for text in (str(self.name), f"part-{Path(self.name).stem}"))
            raise OSError(
                f"{self.name} {what}: copy it anew (gzip -t {name} tests it), or use what can be read of it: "
                f"zcat {name} > {part}"
            ) from error


def split(line: str, separator: str) -> list[str]:
    """The fields of a line of CSV; csv.Error if its quotes do not end, or one ends what no other began."""
    if '"' not in line:
        return line.split(separator)
    values = next(csv.reader([line], delimiter=separator, strict=True))
    if line.count('"') % 2:  # as in the rest of a quoted field that holds a line break
        raise csv.Error("a quote that closes nothing")
    return values


def csv_names(line: bytes, separator: str = ",") -> list[str]:
    """The names of the fields, from the first line of CSV; ValueError if it cannot be read."""
    try:
        text = line.decode(errors="replace").strip("\r\n ").lstrip("\ufeff")
        return next(csv.reader([text], delimiter=separator), [""])
    except csv.Error as error:
        raise ValueError(f"the first line, the names of the fields, cannot be read: {error}") from error


def _before(file: Any, offset: int) -> bytes:
    """The bytes of a file before an offset, by which it is known again; the place in the file stays."""
    start, place = max(0, offset - KNOWN_BY), file.tell()
    file.seek(start)
    found = file.read(offset - start) or b""
    file.seek(place)
    return found


def _before_in(path: str, offset: int) -> bytes:
    with open_binary(path) as file:
        return _before(file, offset)


def _whole(text: bytes) -> bool:
    """Whether it is a JSON object: the beginning of one is none."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

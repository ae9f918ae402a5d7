"""Events from lines of text: CSV or JSON, from files (which may grow) and from standard input."""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import logging
import os
import select
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..events import Array, Batch, Rejected
from ..nested import MAX_LISTED_DEPTH, flatten
from ..schema import MAX_REJECTED_TEXT, Schema
from ..text_columns import MISSING, NOT_A_RANGE, LineStatus, TextColumn, split_lines
from .base import ColumnNames, Source, check_batch_size, check_state
from .column_watch import ColumnWatch
from .line_files import BYTE_ORDER_MARK, is_compressed, open_binary, parse_header, split_fields
from .line_sampling import sample_csv, sample_json_lines
from .prefetch import prefetch
from .records import list_duplicates, parse_json_record, unreadable_reason
from .sample import Sample, SamplingError, read_records

logger = logging.getLogger("cadam.online")

Format = Literal["csv", "jsonl"]
Line = tuple[bytes, int]
"""The text of a line, and its size with the line break. If a line is too long, only parts of the text are kept."""

READ_BYTES = 1 << 18
BATCHES_PER_CHUNK = 16
"""The number of batches that the second thread hands over together."""
MAX_CHUNK_LINES = 1 << 17
"""With large batches, fewer are handed over together, so that they do not take much memory: at most this many lines, or
one batch."""
POSITION = ("inode", "current_path", "offset", "line", "bytes_before", "fields", "unfinished_bytes", "share")
"""The attributes of the position in the file."""
MIN_COMPILED_LINES = 16
"""With fewer lines, calling compiled code takes longer than Python does."""
FINGERPRINT_BYTES = 4096
"""The number of bytes before the position by which a file is recognized."""
INSPECTED_LINES = 1000
"""The number of JSON lines whose column names are read for validation."""


class LinesSource(Source):
    """Lines of CSV or JSON, each of which is one event. Lines that are too long or cannot be parsed are rejected.

    In CSV the first line contains the names of the fields, unless the schema's header does. Fields are
    separated by the schema's separator, an empty field is a missing value, and a quoted field cannot contain a line
    break. A file whose name ends in .gz is decompressed and cannot be followed.

    A last line without a line break may still be written. It is left for a later run, with a warning, unless it is a
    complete JSON object: an incomplete number in CSV looks like a complete one. When standard input is closed, its last
    line is complete.

    A file that is not followed is read and converted in a second thread, some batches ahead.

    Args:
        path: A file, or ``-`` for standard input, which cannot be read again: after a restart, a source continues with
            the lines that come then.
        schema: The schema of the events.
        format: Either ``csv`` or ``jsonl``.
        batch_size: The number of lines per batch.
        follow: Whether to wait for more lines at the end, and to continue with the new file when the file is rotated.
            Standard input ends when it is closed.
        patience: The number of seconds to wait for a full batch before a smaller one is produced. None: wait as long as
            it takes, so that batches do not depend on time.
        max_bytes: The size of the longest line; longer ones are rejected.
        poll: The number of seconds between checks for more lines.
    """

    share: float | None = None

    def __init__(
        self,
        path: Path | str,
        schema: Schema,
        format: Format,
        *,
        batch_size: int = 1024,
        follow: bool = False,
        patience: float | None = 1.0,
        max_bytes: int = 1 << 20,
        poll: float = 0.2,
    ) -> None:
        if format not in ("csv", "jsonl"):
            raise ValueError(f"format must be 'csv' or 'jsonl', got {format!r}")
        check_batch_size(batch_size)
        self.path = self.location = str(path)
        self.schema, self.format = schema, format
        self.has_header = format == "csv" and schema.header is None
        self.fields = list(schema.header) if format == "csv" and schema.header is not None else None
        self.batch_size, self.follow = batch_size, follow
        self.patience, self.max_bytes, self.poll = patience, max_bytes, poll
        self.is_pipe = self.path == "-"
        if not self.is_pipe and not Path(path).is_file():
            is_pipe = Path(path).exists() and not Path(path).is_dir()
            advice = f": give {format}:- and pipe the data to standard input" if is_pipe else ""
            raise FileNotFoundError(f"{path} is not a file{advice}")
        if follow and is_compressed(path):
            raise ValueError(
                f"{path} is compressed and cannot be followed: follow the uncompressed file, or read this one without "
                "follow"
            )
        self._check_fields()
        self._watch, self._has_read_header = ColumnWatch(schema, self.path), False
        self.inode = 0 if self.is_pipe else os.stat(path).st_ino
        self.current_path = self.path
        """The path of the file that is read, which differs from `path` after a rotation."""
        self._file_is_replaced = False
        """Whether the current file was read to its end and another file has to be opened."""
        self.offset = self.line = 0
        """The position: the bytes and lines of the file that are part of earlier batches."""
        self.bytes_before = b""
        """The last bytes before the position."""
        self.unfinished_bytes = 0
        """The size of a last line that was left unread because it has no line break."""

    @classmethod
    def from_uri(cls, uri: str, schema: Schema, **options: Any) -> LinesSource | None:
        """Open ``csv:PATH`` or ``jsonl:PATH``."""
        scheme, _, path = uri.partition(":")
        if not path:
            return None
        format: Format = "csv" if scheme == "csv" else "jsonl"
        return cls(path, schema, format, **options)

    # Reading lines ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch | None]:
        if self.is_pipe or self.follow:
            yield from self._read_files()
        else:
            reader = copy(self)  # This object has the position of the consumer.
            for chunk in prefetch(reader._read_chunks()):
                for batch, position in chunk:
                    self.__dict__.update(position)
                    yield batch
            self.__dict__.update(reader._position())
        if self.unfinished_bytes:
            logger.warning(
                "%s: line %d, the last, of %d bytes was left unread. It has no line break at its end, so it may be "
                "incomplete. Add a line break (echo >> FILE) and run the same command to read it",
                *(self.current_path, self.line + 1, self.unfinished_bytes),
            )

    def _position(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in POSITION}

    def _read_chunks(self) -> Generator[list[tuple[Batch | None, dict[str, Any]]]]:
        """Yield lists of batches, each with the position after it."""
        size = max(1, min(BATCHES_PER_CHUNK, MAX_CHUNK_LINES // self.batch_size))
        chunk: list[tuple[Batch | None, dict[str, Any]]] = []
        try:
            for batch in self._read_files():
                chunk.append((batch, self._position()))
                if len(chunk) == size:
                    yield chunk
                    chunk = []
        except Exception:
            yield chunk  # The consumer gets the batches before the error.
            raise
        yield chunk

    def _read_files(self) -> Iterator[Batch | None]:
        """Yield the remaining batches of the file, and of the files that replace it while it is followed."""
        is_next_file = False
        while True:
            try:
                file = open_binary(self.current_path)
            except FileNotFoundError:
                if not is_next_file:
                    raise
                yield None  # The old file was moved away, and its writer has not created the new one yet.
                time.sleep(self.poll)
                continue
            self._file_is_replaced = False
            with file:
                if not self.is_pipe:
                    self._seek_position(file, is_next_file)
                yield from self._read_batches(file)
            if not self._file_is_replaced:
                return
            self.current_path, is_next_file = self.path, True

    def _seek_position(self, file: Any, is_next_file: bool) -> None:
        """Move to the position if the file has the same bytes before it, else to the beginning of a new file."""
        if _read_before(file, self.offset) != self.bytes_before:
            if not is_next_file:
                raise ValueError(self._describe_other_file(self.offset))
            self.offset = self.line = 0
            self.bytes_before = b""
            if self.has_header:
                self.fields = None
        self.inode = os.fstat(file.fileno()).st_ino
        file.seek(self.offset)

    def _read_batches(self, file: Any) -> Iterator[Batch | None]:
        lines: list[Line] = []
        waiting_since = time.monotonic()
        for more in self._read_lines(file):
            if more and self.format == "csv" and self.fields is None:
                self._read_header(*more.pop(0))
                if not more:
                    continue
            if more and not lines:
                waiting_since = time.monotonic()
            lines += more
            start = 0
            while len(lines) - start >= self.batch_size:
                yield self._convert(lines[start : start + self.batch_size])
                start += self.batch_size
            if start:
                lines, waiting_since = lines[start:], time.monotonic()
            if not more:
                is_late = self.patience is not None and time.monotonic() - waiting_since > self.patience
                yield self._convert(lines) if lines and is_late else None
                lines = [] if is_late else lines
        if lines:
            yield self._convert(lines)

    def _read_lines(self, file: Any) -> Iterator[list[Line]]:
        """Yield lists of lines, which are empty while there is nothing to read."""
        partial, size = b"", 0  # The text and the size of a line whose end was not read yet.
        self.unfinished_bytes, offset, before = 0, self.offset, self.bytes_before
        is_rotated = False
        follow = self.follow and not self.is_pipe
        while True:
            if self.is_pipe and not select.select([file], [], [], self.poll)[0]:
                yield []
                continue
            if follow and _read_before(file, offset) != before:
                logger.error(
                    "%s was truncated or rewritten after byte %d, up to which it had been read. It is read again from "
                    "its beginning, and lines that were not read before are lost",
                    *(self.current_path, offset),
                )
                self._file_is_replaced = True
                return
            data = file.read(READ_BYTES) or b""
            if not data:
                if follow and not is_rotated:
                    is_rotated = self._is_rotated(file)
                    if not is_rotated:
                        yield []
                        time.sleep(self.poll)
                    continue  # Lines may have been added to the old file just before it was rotated.
                is_json_object = self.format == "jsonl" and size <= self.max_bytes and _is_json_object(partial)
                if size and (self.is_pipe or is_json_object):
                    yield [(partial, size)]
                    size = 0
                if is_rotated:
                    lost = f"; its last line, {size} bytes without a line break, is lost" if size else ""
                    logger.warning("%s is a new file, which is read after the end of the old one%s", self.path, lost)
                    self._file_is_replaced = True
                elif size:
                    self.unfinished_bytes = size
                return
            if not self.is_pipe and not self.follow:
                compressed = getattr(file, "fileobj", file)
                self.share = compressed.tell() / max(1, os.fstat(file.fileno()).st_size)
            offset, before = offset + len(data), (before + data)[-FINGERPRINT_BYTES:]
            *complete, rest = data.split(b"\n")
            if complete:
                lines = [(text, len(text) + 1) for text in complete]
                lines[0] = partial + complete[0], size + len(complete[0]) + 1
                partial, size = b"", 0
                yield lines
            size, partial = size + len(rest), partial + rest
            if size > self.max_bytes:
                partial = partial[: self.max_bytes] + partial[self.max_bytes :][-FINGERPRINT_BYTES:]

    def _is_rotated(self, file: Any) -> bool:
        """Whether the path is another file now. While that is empty, lines may still be added to the old one."""
        try:
            current = os.stat(self.path)
        except FileNotFoundError:
            return False
        return current.st_size > 0 and not os.path.samestat(current, os.fstat(file.fileno()))

    def _advance(self, lines: Sequence[Line]) -> None:
        """Move the position past these lines."""
        ends: list[bytes] = []
        count = 0
        for text, size in reversed(lines):
            ends.append(text[-FINGERPRINT_BYTES:] + b"\n" * (size > len(text)))
            count += len(ends[-1])
            if count >= FINGERPRINT_BYTES:
                break
        self.bytes_before = (self.bytes_before + b"".join(reversed(ends)))[-FINGERPRINT_BYTES:]
        self.offset += sum([size for _, size in lines])
        text, size = lines[-1]
        self.line += len(lines) - (size == len(text))  # A line without a line break is counted when the break is read.

    def _read_header(self, text: bytes, size: int) -> None:
        self._advance([(text, size)])
        is_first, self.fields = not self._has_read_header, parse_header(text, self.schema.separator)
        missing = [name for name in self.schema.features if name not in self.fields]
        if missing and is_first:
            raise ValueError(f"{self.path} has no column {', '.join(missing)}; it has {', '.join(self.fields)}")
        self._check_fields()
        self._watch.check_names(self.fields, self.path)
        self._has_read_header = True

    def _check_fields(self) -> None:
        """Raise ValueError if two columns of the file have the same name, and the schema uses it."""
        needed = self.schema.column_names()
        if duplicates := list_duplicates(name for name in self.fields or () if name in needed):
            raise ValueError(f"{self.path} has more than one column {duplicates}: rename one of them")

    # Converting lines ------------------------------------------------------------------------------------------------

    def _convert(self, lines: list[Line]) -> Batch:
        path, first_line, start = self.current_path, self.line, self.offset
        sizes = [size for _, size in lines]

        @cache
        def offsets() -> list[int]:
            return list(accumulate(sizes, initial=start))

        def where(row: int) -> str:
            return f"{path}, line {first_line + row + 1} at byte {offsets()[row]}"

        self._advance(lines)
        if start == 0 and self.format == "csv":  # The JSON decoder removes the mark itself.
            (text, size), *rest = lines
            lines = [(text.removeprefix(BYTE_ORDER_MARK), size), *rest]
        status, columns = self._split(lines)
        rejected: list[Rejected] = []
        records: dict[int, Mapping[str, Any]] = {}
        for row in np.flatnonzero(status == LineStatus.UNREAD).tolist():
            text, size = lines[row]
            try:
                records[row] = self._parse(text, size)
            except (ValueError, RecursionError, csv.Error) as error:
                beginning = text[:MAX_REJECTED_TEXT].decode(errors="replace")
                rejected.append(Rejected(unreadable_reason(error), where(row), beginning, size))
                status[row] = LineStatus.BLANK  # Rejected lines are skipped below like blank ones.
        rows = np.flatnonzero(status != LineStatus.BLANK)
        if not len(rows):
            return Batch(rejected=rejected)

        def show(index: int) -> str:
            text: bytes = lines[rows[index]][0]
            return text.decode(errors="replace")

        is_text = self.format == "csv"
        absent: dict[str, Array] = {}
        if columns is None:
            values: Mapping[str, Any] = self.schema.columns_of_records(list(records.values()), text=is_text)
            absent = self.schema.find_absent(list(records.values()), values)
        else:
            values = self._add_records(columns, records) if records else columns
            if len(rows) < len(lines):
                values = {name: column.take(rows) for name, column in values.items()}
            if not is_text:
                absent = {name: values[name].begin == MISSING for name in self.schema.optional_columns()}
        batch = self.schema.convert_columns(
            values, len(rows), lambda index: where(int(rows[index])), text=is_text, show=show, absent=absent
        )
        batch.rejected = rejected + batch.rejected
        if not is_text:
            self._watch.check_batch(batch)
        return batch

    def _split(self, lines: list[Line]) -> tuple[Array, dict[str, TextColumn] | None]:
        """Return the status of each line, and the columns of lines that compiled code split (None without it)."""
        texts = [text for text, _ in lines]
        split = None
        if len(lines) >= MIN_COMPILED_LINES:
            data = np.frombuffer(b"".join(texts) + b"\n", np.uint8)
            sizes = np.fromiter(map(len, texts), np.int64, len(texts))
            ends = np.cumsum(sizes)
            names = [name for name in self.schema.column_names() if self.fields is None or name in self.fields]
            split = split_lines(data, ends - sizes, ends, names, self.fields, self.schema.separator)
        if split is None:
            is_blank = [self._is_blank(text) for text in texts]
            return np.where(is_blank, LineStatus.BLANK, LineStatus.UNREAD).astype(np.uint8), None
        status, columns = split
        status[sizes >= self.max_bytes] = LineStatus.UNREAD  # The line may be too long, which `_parse` checks.
        for row in np.flatnonzero(status == LineStatus.BLANK).tolist():
            if not self._is_blank(texts[row]):
                status[row] = LineStatus.UNREAD
        if self.format == "csv" and self.schema.missing:
            columns = {name: column.mark_missing(self.schema.missing_markers(name)) for name, column in columns.items()}
        return status, columns

    def _is_blank(self, text: bytes) -> bool:
        """Whether a line contains no values. A CSV line of separators, even of tabs, contains missing values."""
        return not text.strip() and not (self.format == "csv" and self.schema.separator.encode() in text)

    def _add_records(
        self, columns: Mapping[str, TextColumn], records: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, TextColumn]:
        """Return the columns with the values of records (by row) that Python parsed."""
        values = self.schema.columns_of_records(list(records.values()), text=self.format == "csv")
        absent = self.schema.find_absent(list(records.values()), values)
        rows = np.fromiter(records, np.int64, len(records))
        combined = {}
        for name, column in columns.items():
            begin = column.begin.copy()
            begin[rows] = np.where(absent[name], MISSING, NOT_A_RANGE) if name in absent else NOT_A_RANGE
            combined[name] = replace(column, begin=begin, other_values=dict(zip(records, values[name], strict=True)))
        return combined

    def _parse(self, text: bytes, size: int) -> Mapping[str, Any]:
        if size > self.max_bytes:
            raise ValueError(f"the line has {size} bytes, more than {self.max_bytes}")
        if self.format == "jsonl":
            return parse_json_record(text)
        values = split_fields(text.decode().rstrip("\r"), self.schema.separator)
        assert self.fields is not None
        if len(values) != len(self.fields):
            raise ValueError(f"{len(values)} fields, not {len(self.fields)}")
        return dict(zip(self.fields, values, strict=True))

    # Inspecting the file ---------------------------------------------------------------------------------------------

    def columns(self) -> ColumnNames | None:
        """Return the fields of CSV, or of the first JSON lines; None for standard input, which is read only once."""
        if self.fields is not None:
            return ColumnNames(self.fields, are_complete=self.format == "csv")
        if self.is_pipe:
            return None
        with open_binary(self.path, buffered=True) as file:
            if self.format == "csv":
                first_line = file.readline(self.max_bytes)
                return ColumnNames(parse_header(first_line, self.schema.separator), are_complete=True)
            lines = iter(lambda: file.readline(self.max_bytes), b"")
            records, _ = read_records(islice(lines, INSPECTED_LINES), parse_json_record)
        names = [name for record in records for name in flatten(record, MAX_LISTED_DEPTH)]
        return ColumnNames(names, are_complete=False)

    def sample(self) -> Sample:
        """Return lines from several positions of the file."""
        if self.is_pipe:
            raise SamplingError(
                "standard input can be read only once, so its schema must be known before: write its beginning to a "
                "file, run `cadam schema` on the file, and give --schema schema.json"
            )
        return sample_csv(self.path) if self.format == "csv" else sample_json_lines(self.path)

    # The position ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the file, and a fingerprint by which the file is recognized."""
        state: dict[str, Any] = {"source": self.format, "offset": self.offset, "line": self.line}
        if self.fields is not None:
            state["fields"] = self.fields
        if not self.is_pipe:
            state |= {"fingerprint": hashlib.sha256(self.bytes_before).hexdigest(), "inode": self.inode}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        check_state(state, source=self.format)
        self.fields = state.get("fields", self.fields)
        self._check_fields()
        if self.fields is not None:
            self._watch.check_names(self.fields, self.path)
            self._has_read_header = True
        if self.is_pipe:
            logger.warning(
                "standard input cannot be read again: lines that were in flight when the last run stopped are lost"
            )
            return
        offset = state["offset"]
        path, self.bytes_before = self._find_file(offset, state["fingerprint"], state["inode"])
        if path != self.path:
            logger.warning(
                "%s is a new file: the rest of the old one is in %s and is read first. Files that were rotated in "
                "between are not read",
                *(self.path, path),
            )
        self.current_path, self.offset, self.line = path, offset, int(state["line"])
        self.inode = os.stat(path).st_ino

    def _find_file(self, offset: int, fingerprint: str, inode: int) -> tuple[str, bytes]:
        """Return the path of the file that was read up to the offset, and the bytes before the offset.

        A rotated file is in the same folder, under its old name with a suffix. At the beginning of a file, or after its
        header, several files may have the same fingerprint, so the one with the same inode is preferred.

        Raises:
            ValueError: If there is no such file.
        """
        rotated = sorted(glob.glob(f"{glob.escape(self.path)}?*")) if self.follow else []
        paths = [self.path, *filter(os.path.isfile, rotated)]
        for path in sorted(paths, key=lambda path: os.stat(path).st_ino != inode):
            with open_binary(path) as file:
                before = _read_before(file, offset)
            if hashlib.sha256(before).hexdigest() == fingerprint:
                return path, before
        raise ValueError(self._describe_other_file(offset))

    def _describe_other_file(self, offset: int) -> str:
        return (
            f"{self.current_path} is not the file that was read up to byte {offset}: it is another file, or it was "
            "truncated or rewritten. If the old file was rotated within its folder, to a name that begins with "
            f"{os.path.basename(self.path)}, --follow reads its rest and then the new file. Otherwise name the old "
            "file, or use another checkpoint to read this file from its beginning"
        )


def _read_before(file: Any, offset: int) -> bytes:
    """Return the bytes before an offset, by which a file is recognized, and keep the file's position."""
    start, position = max(0, offset - FINGERPRINT_BYTES), file.tell()
    file.seek(start)
    data = file.read(offset - start) or b""
    file.seek(position)
    return data


def _is_json_object(text: bytes) -> bool:
    """Whether a text is a complete JSON object, which no part of an object is."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

"""Events from lines of text: CSV or JSON, from files (which may grow) and from standard input."""

from __future__ import annotations

import csv
import logging
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ..events import Batch, Poison
from ..schema import KEPT, Schema
from .record import json_record
from .source import check_state, digest

logger = logging.getLogger("cadam.online")

Format = Literal["csv", "jsonl"]
READ = 1 << 18
KNOWN_BY = 4096  # bytes before the position, by which a file is known again


class LinesSource:
    """A line is an event. A line that is too long, or cannot be read, is set aside.

    CSV has its field names in the first line unless `fields` gives them, numbers are written as usual, an empty field
    is a missing one, and quoted fields cannot hold line breaks.

    The last line of a file may still be in the writing while it has no line break at its end. Such a line is left for a
    later run, with a warning, unless it is a whole JSON object: of CSV nobody can tell a number from half of it.
    Standard input that has ended has ended, and its last line is read.

    Args:
        path: a file, or ``-`` for standard input. A pipe cannot be read again: after a restart it goes on with what
            comes.
        follow: at the end wait for more instead of ending. Standard input ends when it is closed.
        patience: how many seconds to wait for a full batch before a short one is given; None: for ever, so that batches
            do not depend on time.
        longest: bytes of the longest line that is looked at.
    """

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
        self.fields, self.batch_size, self.follow = fields, batch_size, follow
        self.patience, self.longest, self.poll = patience, longest, poll
        self.pipe = self.path == "-"
        if not self.pipe and not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not a file")
        self.offset = self.line = 0  # bytes and lines of what was given so far
        self.unfinished = 0  # bytes of the last line, if it was left

    def __iter__(self) -> Iterator[Batch | None]:
        descriptor = sys.stdin.fileno() if self.pipe else os.open(self.path, os.O_RDONLY)
        try:
            if not self.pipe:
                os.lseek(descriptor, self.offset, os.SEEK_SET)
            lines: list[tuple[bytes, int]] = []
            since = time.monotonic()
            for line in self._lines(descriptor):
                if line is not None and self.format == "csv" and self.fields is None:
                    self._header(*line)
                    continue
                if line is not None:
                    if not lines:
                        since = time.monotonic()
                    lines.append(line)
                late = self.patience is not None and time.monotonic() - since > self.patience
                if len(lines) == self.batch_size or (lines and line is None and late):
                    yield self._batch(lines)
                    lines = []
                elif line is None:
                    yield None
            if lines:
                yield self._batch(lines)
            if self.unfinished:
                logger.warning(
                    "%s: line %d, the last, of %d bytes, was left unread: it has no line break at its end, so it may "
                    "still be in the writing; once it has one (echo >> FILE adds it), the same command reads it",
                    *(self.path, self.line + 1, self.unfinished),
                )
        finally:
            if not self.pipe:
                os.close(descriptor)

    def _lines(self, descriptor: int) -> Iterator[tuple[bytes, int] | None]:
        """Lines with their sizes, of too long ones only the beginning; None when there is nothing at the moment."""
        held, size = b"", 0  # of a line that is not complete; once it is too long only its beginning is held
        self.unfinished = 0
        while True:
            if self.pipe and not select.select([descriptor], [], [], self.poll)[0]:
                yield None
                continue
            data = os.read(descriptor, READ)
            if not data:
                if self.follow and not self.pipe:
                    yield None
                    time.sleep(self.poll)
                    continue
                if size and (self.pipe or (self.format == "jsonl" and _whole(held))):
                    yield held, size
                elif size:
                    self.unfinished = size
                return
            *complete, rest = data.split(b"\n")
            for part in complete:
                yield (held + part, size + len(part) + 1) if size else (part, len(part) + 1)
                held, size = b"", 0
            size += len(rest)
            held = held + rest if size <= self.longest else (held + rest)[: self.longest + 1]

    def _header(self, text: bytes, size: int) -> None:
        """The first line of CSV: the names of the fields."""
        self.offset, self.line = self.offset + size, self.line + 1
        self.fields = next(csv.reader([text.decode(errors="replace").strip().lstrip("\ufeff")]), [""])
        missing = [name for name in self.schema.features if name not in self.fields]
        if missing:
            raise ValueError(f"{self.path} has no column {', '.join(missing)}; it has {', '.join(self.fields)}")

    def _batch(self, lines: list[tuple[bytes, int]]) -> Batch:
        records: list[Mapping[str, Any]] = []
        where: list[str] = []
        raw: list[bytes] = []
        poison: list[Poison] = []
        for text, size in lines:
            place = f"{self.path}, line {self.line + 1} at byte {self.offset}"
            self.offset += size
            self.line += size > len(text)  # a line break that is still to come is counted when it comes
            if not text.strip():
                continue
            try:
                records.append(self._record(text, size))
            except (ValueError, RecursionError, csv.Error) as error:
                shown = text[:KEPT].decode(errors="replace")
                poison.append(Poison(f"not readable: {error}", place, shown, size))
                continue
            where.append(place)
            raw.append(text)
        batch = self.schema.records(records, where, text=self.format == "csv", raw=raw) if records else Batch()
        batch.poison = poison + batch.poison
        return batch

    def _record(self, text: bytes, size: int) -> Mapping[str, Any]:
        if size > self.longest:
            raise ValueError(f"a line of {size} bytes, more than {self.longest}")
        if self.format == "jsonl":
            return json_record(text)
        line = text.decode().rstrip("\r")
        values = next(csv.reader([line], strict=True)) if '"' in line else line.split(",")
        assert self.fields is not None
        if len(values) != len(self.fields):
            raise ValueError(f"{len(values)} fields, not {len(self.fields)}")
        return dict(zip(self.fields, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"fields": self.fields} if self.fields is not None else {}
        if not self.pipe:
            fields["before"] = digest(self.path, self.offset - KNOWN_BY, self.offset)
        return {"source": self.format, "offset": self.offset, "line": self.line, **fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, source=self.format)
        self.fields = state.get("fields", self.fields)
        if self.pipe:
            logger.warning(
                "standard input cannot be read again: what was in flight when the last run stopped is not seen"
            )
            return
        if os.path.getsize(self.path) < state["offset"]:
            raise ValueError(f"{self.path} is shorter than the position, byte {state['offset']}: is it another file?")
        if digest(self.path, state["offset"] - KNOWN_BY, state["offset"]) != state["before"]:
            raise ValueError(f"{self.path} is not what it was before the position, byte {state['offset']}")
        self.offset, self.line = state["offset"], state["line"]


def _whole(text: bytes) -> bool:
    """Whether it is a JSON object: the beginning of one is none."""
    try:
        json_record(text)
    except (ValueError, RecursionError):
        return False
    return True

"""Rejected events: counted by reason, and written to a file.

The size of the file is part of the checkpoint. When a run resumes, the events after the checkpoint are rejected again.
Those whose lines are in the file already are not written twice. The file is not cut to its size at the checkpoint,
because the lines after it may belong to another learner that writes to the same file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoint_files import check_like
from ..data.events import Rejected
from ..monitoring.rejection_reasons import generalize_reason

logger = logging.getLogger("cadam.online")

MAX_REASONS = 100
"""The number of different reasons that are counted separately."""
OTHER_REASONS = "other reasons"
SECONDS_BETWEEN_WARNINGS = 60.0
LINE_START = b'{"reason": '
"""The first bytes of every line."""


class RejectFile:
    """A file of rejected events, one JSON object per line: reason, position, size and the start of the event.

    The path may also be a device or a pipe, to which lines are only written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path, self.count = Path(path), 0
        self.lost = self.lost_at_start = 0
        self._time_of_warning = -math.inf
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self.size = self._current_size()
        """All lines before this position belong to events before the checkpoint."""
        self._lines_after_checkpoint: Counter[int] = Counter()
        """Hashes of the lines that were in the file after the checkpoint from which the run resumed, until the same
        events are rejected again."""

    def _current_size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def add(self, rejected: Sequence[Rejected]) -> None:
        """Append events. If the disk is full, the events are only counted, and a warning is logged once a minute."""
        self.count += len(rejected)
        lines = [json.dumps(vars(event)).encode() + b"\n" for event in rejected]
        lines = [line for line in lines if not self._is_written(line)]
        size = self._current_size()
        try:
            self._write(b"".join(lines))
        except OSError as error:
            self.lost += len(lines)
            if time.monotonic() - self._time_of_warning > SECONDS_BETWEEN_WARNINGS:
                logger.error("%s cannot be written, %d events are only counted: %s", self.path, self.lost, error)
                self._time_of_warning = time.monotonic()
            if self._is_regular:
                self._file.truncate(size)  # removes a partial line

    def _is_written(self, line: bytes) -> bool:
        """Return whether an earlier attempt wrote a line, which is then forgotten."""
        if not self._lines_after_checkpoint or (key := hash(line)) not in self._lines_after_checkpoint:
            return False
        self._lines_after_checkpoint[key] -= 1
        if not self._lines_after_checkpoint[key]:
            del self._lines_after_checkpoint[key]
        return True

    def _write(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            rest = rest[self._file.write(rest) :]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the size of the file, after flushing it to disk."""
        if self._is_regular:
            os.fsync(self._file.fileno())
        if not self._lines_after_checkpoint:
            self.size = self._current_size()
        return {"count": self.count, "size": self.size, "lost": self.lost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts, and remember the lines that were written after the state was saved.

        If the file was deleted, rotated or replaced meanwhile, a warning is logged and new lines are added to it.
        """
        check_like(state, {"count": 0, "size": 0, "lost": 0}, "rejected")
        self.count = state["count"]
        self.lost = self.lost_at_start = state["lost"]
        if not self._is_regular:
            return
        if self.size < state["size"]:
            logger.warning(
                "%s has %d bytes, but had %d at the checkpoint: it was deleted or rotated. New lines are added to it",
                *(self.path, self.size, state["size"]),
            )
            return
        self.size = state["size"]
        with open(self.path, "rb") as file:
            file.seek(max(0, self.size - 1))
            if self.size and file.read(1) != b"\n":
                logger.warning("%s is not the file of the checkpoint. New lines are added to it", self.path)
            line = b"\n"
            for line in file:
                self._lines_after_checkpoint[hash(line)] += 1
        if line.endswith(b"\n"):
            return
        del self._lines_after_checkpoint[hash(line)]
        if LINE_START.startswith(line[: len(LINE_START)]):  # The learner was killed while it wrote the line.
            self._file.truncate(self._current_size() - len(line))
        else:
            self._write(b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Rejections:
    """Counts rejected events by reason, writes them to a file, and logs the 1st, 2nd, 4th, 8th, ... of them.

    Args:
        path: the file for rejected events; None if they are only counted.
    """

    def __init__(self, path: Path | str | None) -> None:
        self.file = RejectFile(path) if path is not None else None
        self.count = self.count_at_start = 0
        self.reasons: Counter[str] = Counter()

    def add(self, rejected: Sequence[Rejected]) -> None:
        """Count and write rejected events."""
        previous, self.count = self.count, self.count + sum(event.events for event in rejected)
        for event in rejected:
            reason = generalize_reason(event.reason)
            has_room = reason in self.reasons or len(self.reasons) < MAX_REASONS
            self.reasons[reason if has_room else OTHER_REASONS] += event.events
        if self.file is not None:
            self.file.add(rejected)
        if previous.bit_length() != self.count.bit_length():
            where = self.file.path if self.file is not None else "not written to a file; rejected= names one"
            last = rejected[-1]
            logger.warning("events rejected: %d (%s); the last, %s: %s", self.count, where, last.where, last.reason)

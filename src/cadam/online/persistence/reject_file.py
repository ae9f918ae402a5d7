"""Rejected events: counted by reason, and written to a file.

The size of the file is part of the checkpoint. When a run resumes, lines that were written after the checkpoint are
removed, because the same events are rejected and written again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..data.events import Rejected
from ..monitoring.rejection_reasons import generalize_reason

logger = logging.getLogger("cadam.online")

MAX_REASONS = 100
"""The number of different reasons that are counted separately."""
OTHER_REASONS = "other reasons"
SECONDS_BETWEEN_WARNINGS = 60.0


class RejectFile:
    """A file of rejected events, one JSON object per line: reason, position, size and the start of the event."""

    def __init__(self, path: Path | str) -> None:
        self.path, self.count, self.size, self.lost = Path(path), 0, 0, 0
        self._time_of_warning = -math.inf
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115
        self.size = self._file.tell()

    def add(self, rejected: Sequence[Rejected]) -> None:
        """Append events. If the disk is full, the events are only counted, and a warning is logged once a minute."""
        self.count += len(rejected)
        text = "".join(json.dumps(vars(event)) + "\n" for event in rejected).encode()
        try:
            self._file.write(text)
            self._file.flush()
            self.size += len(text)
        except OSError as error:
            self.lost += len(rejected)
            if time.monotonic() - self._time_of_warning > SECONDS_BETWEEN_WARNINGS:
                logger.error("%s cannot be written, %d events are only counted: %s", self.path, self.lost, error)
                self._time_of_warning = time.monotonic()
            self._truncate()

    def _truncate(self) -> None:
        """Cut the file to its known size and open it again, which removes a partial line after a failed write."""
        with suppress(OSError):  # closing flushes the buffer, whose events are counted as lost already
            self._file.close()
        os.truncate(self.path, self.size)
        self._file = open(self.path, "ab")  # noqa: SIM115

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the size of the file, after flushing it to disk."""
        os.fsync(self._file.fileno())
        return {"count": self.count, "size": self.size, "lost": self.lost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts, and cut the file to the size it had when the state was saved.

        Raises:
            ValueError: if the file is shorter than it was then.
        """
        if self.size < state["size"]:
            raise ValueError(f"{self.path} has {self.size} bytes, but had {state['size']} at the checkpoint")
        self.count, self.size, self.lost = state["count"], state["size"], state["lost"]
        self._truncate()

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
        previous, self.count = self.count, self.count + len(rejected)
        for event in rejected:
            reason = generalize_reason(event.reason)
            has_room = reason in self.reasons or len(self.reasons) < MAX_REASONS
            self.reasons[reason if has_room else OTHER_REASONS] += 1
        if self.file is not None:
            self.file.add(rejected)
        if previous.bit_length() != self.count.bit_length():
            where = self.file.path if self.file is not None else "not written to a file; rejected= names one"
            last = rejected[-1]
            logger.warning("events rejected: %d (%s); the last, %s: %s", self.count, where, last.where, last.reason)

"""Files that grow with the stream, and that a resumed run continues as if it had never stopped.

Their positions are part of the checkpoint. What was written after it is taken back on resuming, and written again.
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

import numpy as np

from ...atomic_write import write_with
from ..data.events import FEATURE_PREFIX, Columns, Rejected, concatenate_columns
from ..monitoring.reject_limit import alike

logger = logging.getLogger("cadam.online")

OUTCOMES = ("label", "assumed", "dropped")
LABEL, ASSUMED, DROPPED = range(3)
REASONS, OTHER = 100, "other reasons"  # so many are counted apart
RETRY = 60.0  # seconds between attempts to write to a disk that is full, and between messages that it is
NEEDS = "the prediction log and Parquet streams need pyarrow: pip install pyarrow"


class PredictionLog:
    """Every prediction with its label, as Parquet parts of `rows` rows, in the order in which labels were settled.

    Columns: id, user and time where the events have them, score, label (null if dropped), outcome: `label` if a label
    came, `assumed` if it was taken for negative after the horizon, `dropped` if not.
    A part is cut by the number of rows alone, so parts do not depend on when checkpoints were made. Old parts may be
    moved away, from the first on; the newest finished one stays, by which the log is known.
    """

    def __init__(self, folder: Path | str, rows: int = 50_000, most: int = 1_000_000) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise ImportError(NEEDS) from error
        if rows < 1:
            raise ValueError(f"log_rows must be at least 1, got {rows}")
        self.folder, self.rows, self.most = Path(folder), rows, most
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.glob("part-*.parquet")):
            self.fresh = False  # to be taken over by load_state_dict, else an error
        else:
            self.fresh = True
        self.part, self.waiting, self.parts_waiting, self.lost = 0, 0, [], 0  # type: int, int, list[Columns], int
        self.failed, self.tried = False, 0.0  # whether the disk did not take the last write, and when

    def check(self) -> None:
        """That the folder is this run's."""
        if not self.fresh:
            raise FileExistsError(f"{self.folder} has the log of another run: resume that run, or log elsewhere")

    def add(self, columns: Columns, outcome: int) -> None:
        self.check()
        count = len(columns["score"])
        kept = {name: values for name, values in columns.items() if not name.startswith(FEATURE_PREFIX)}
        kept["outcome"] = np.full(count, outcome, dtype=np.int8)
        self.parts_waiting.append(kept)
        self.waiting += count
        if self.waiting >= self.rows and (not self.failed or time.monotonic() - self.tried > RETRY):
            self._write_full()
        if self.waiting > self.most:
            self._lose(self.waiting - self.most)

    def _write_full(self) -> None:
        """Write what fills parts; rows that the disk does not take wait for another attempt."""
        rows = concatenate_columns(self.parts_waiting)
        start = 0
        try:
            while self.waiting - start >= self.rows:
                self._write({name: values[start : start + self.rows] for name, values in rows.items()})
                start += self.rows
                self.part += 1
            self.failed = False
        except OSError as error:
            self._say(error)
        self.parts_waiting = [{name: values[start:].copy() for name, values in rows.items()}]
        self.waiting -= start

    def _say(self, error: OSError) -> None:
        """The disk did not take rows: as often as it is tried, which is once a minute."""
        self.failed, self.tried = True, time.monotonic()
        lost = f", {self.lost} more are lost so far" if self.lost else ""
        logger.error(
            "the prediction log cannot be written, rows are held in memory and in checkpoints%s: %s", lost, error
        )

    def _lose(self, count: int) -> None:
        """Give up the oldest rows that wait."""
        self.lost, self.waiting = self.lost + count, self.waiting - count
        while count:
            first = self.parts_waiting[0]
            size = len(first["score"])
            if size > count:
                self.parts_waiting[0] = {name: values[count:] for name, values in first.items()}
                return
            del self.parts_waiting[0]
            count -= size

    def _write(self, rows: Columns) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        arrays: dict[str, Any] = {
            name: pa.array(rows[name]) for name in ("id", "user", "time", "score") if name in rows
        }
        arrays["label"] = pa.array(rows["label"], mask=np.isnan(rows["label"]))
        arrays["outcome"] = pa.DictionaryArray.from_arrays(pa.array(rows["outcome"]), pa.array(OUTCOMES))
        schema = pa.schema([pa.field(name, a.type, nullable=name == "label") for name, a in arrays.items()])
        path = self.folder / _name(self.part)

        def write(new: Path) -> None:
            table = pa.table(list(arrays.values()), schema=schema)
            pq.write_table(table, new, use_dictionary=["outcome"], compression="lz4", write_statistics=False)

        write_with(path, write, f".{path.name}.new")

    def flush(self) -> None:
        """Write the rows that do not fill a part as a short one. A run that goes on replaces it by a full one."""
        if self.waiting >= self.rows:
            self._write_full()
        if 0 < self.waiting < self.rows:
            try:
                self._write(concatenate_columns(self.parts_waiting))
                self.failed = False
            except OSError as error:
                self._say(error)
        if self.lost:
            logger.error("%d rows of the prediction log are lost: the disk did not take them in time", self.lost)

    @property
    def unwritten(self) -> int:
        """Rows that the disk did not take: they are in memory, and in the checkpoint alone."""
        return self.waiting if self.failed else 0

    def state_dict(self) -> dict[str, Any]:
        waiting = concatenate_columns(self.parts_waiting) if self.parts_waiting else {}
        return {"part": self.part, "rows": self.rows, "waiting": waiting, "lost": self.lost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: parts written since are removed."""
        if state["rows"] != self.rows:
            raise ValueError(f"the log was begun with parts of {state['rows']} rows, not {self.rows}")
        parts = {int(path.stem.removeprefix("part-")): path for path in self.folder.glob("part-*.parquet")}
        finished = range(state["part"])
        first = min(parts.keys() & set(finished), default=0)
        for number in finished[first:]:
            if number not in parts:
                raise FileNotFoundError(
                    f"{self.folder} lacks {_name(number)} of the log: bring it back; parts may go from the first on, "
                    f"and the newest finished one, {_name(finished[-1])}, must stay"
                )
            if not _is_whole(parts[number]):
                raise ValueError(f"{parts[number]}, a part of the log, is cut short: bring back the whole file")
        for number, path in parts.items():
            if number not in finished:
                path.unlink()
        self.fresh, self.part, self.lost = True, state["part"], state["lost"]
        self.parts_waiting = [dict(state["waiting"])] if state["waiting"] else []
        self.waiting = len(state["waiting"]["score"]) if state["waiting"] else 0


def _name(part: int) -> str:
    return f"part-{part:08d}.parquet"


def _is_whole(path: Path) -> bool:
    """Whether a Parquet file has its end, where it says what is in it."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4))
        return file.read() == b"PAR1"


class RejectFile:
    """Rejected events, as lines of JSON: reason, where, size and the beginning of the event."""

    def __init__(self, path: Path | str) -> None:
        self.path, self.count, self.size, self.lost = Path(path), 0, 0, 0
        self.said = -math.inf  # when, that it cannot be written
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115
        self.size = self._file.tell()

    def add(self, rejected: Sequence[Rejected]) -> None:
        self.count += len(rejected)
        text = "".join(json.dumps(vars(one)) + "\n" for one in rejected).encode()
        try:
            self._file.write(text)
            self._file.flush()
            self.size += len(text)
        except OSError as error:
            self.lost += len(rejected)
            if time.monotonic() - self.said > RETRY:
                logger.error("%s cannot be written, %d events are only counted: %s", self.path, self.lost, error)
                self.said = time.monotonic()
            self._reopen()

    def _reopen(self) -> None:
        """After a failed write: what is half written is taken back."""
        with suppress(OSError):  # what was left in its buffer is counted as lost already
            self._file.close()
        os.truncate(self.path, self.size)
        self._file = open(self.path, "ab")  # noqa: SIM115

    def state_dict(self) -> dict[str, Any]:
        os.fsync(self._file.fileno())
        return {"count": self.count, "size": self.size, "lost": self.lost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: lines written since are taken back."""
        if self.size < state["size"]:
            raise ValueError(f"{self.path} has {self.size} bytes, the checkpoint says {state['size']}")
        self.count, self.size, self.lost = state["count"], state["size"], state["lost"]
        self._reopen()

    def close(self) -> None:
        self._file.close()


class Rejections:
    """Counts rejected events, writes them to a file if there is one, and says so at the 1st, 2nd, 4th, 8th..."""

    def __init__(self, path: Path | str | None) -> None:
        self.file = RejectFile(path) if path is not None else None
        self.count = self.at_start = 0
        self.reasons: Counter[str] = Counter()  # without the values that differ

    def add(self, rejected: Sequence[Rejected]) -> None:
        before, self.count = self.count, self.count + len(rejected)
        for one in rejected:
            reason = alike(one.reason)
            self.reasons[reason if reason in self.reasons or len(self.reasons) < REASONS else OTHER] += 1
        if self.file is not None:
            self.file.add(rejected)
        if before.bit_length() != self.count.bit_length():
            where = self.file.path if self.file is not None else "no file, rejected= names one"
            last = rejected[-1]
            logger.warning("events rejected: %d (%s); the last, %s: %s", self.count, where, last.where, last.reason)

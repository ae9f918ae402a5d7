"""The prediction log: every prediction with its label, in Parquet files.

The position in the log is part of the checkpoint. When a run resumes, files that were written after the checkpoint are
deleted, because the same rows are written again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...atomic_write import write_with
from ...checkpoint_files import check_like
from ..data.events import FEATURE_PREFIX, Array, Columns, concatenate_columns

logger = logging.getLogger("cadam.online")

OUTCOME_NAMES = ("label", "assumed", "dropped")
"""The values of the column `outcome`, by `Outcome`."""
SECONDS_BETWEEN_ATTEMPTS = 60.0
"""The time between two attempts to write to a full disk, and between two messages about it."""
PYARROW_REQUIRED = "the prediction log and Parquet streams need pyarrow: pip install pyarrow"


@dataclass(frozen=True)
class LogOptions:
    """The folder and the file size of a prediction log.

    Args:
        folder: the folder of the log.
        rows: rows per Parquet file.
        probabilities: computes a column ``probability`` from the scores, such as `Schema.probabilities`, which corrects
            for downsampled negatives; None for no such column.
    """

    folder: Path | str
    rows: int = 50_000
    probabilities: Callable[[Array], Array] | None = None


class PredictionLog:
    """Writes predictions to Parquet files of equal length, in the order in which their labels were resolved.

    Columns: ``id``, ``user``, ``time`` and ``weight`` if the events have them, ``score``, ``label`` (null if dropped)
    and ``outcome``: ``label`` if a label arrived, ``assumed`` if the event was assumed to be negative after the
    horizon, ``dropped`` if it was dropped after the horizon. With `probabilities` also ``probability``.

    Files are cut by the number of rows alone, so they do not depend on when checkpoints were written. Old files may be
    moved away, oldest first; the newest complete file must stay, because a resumed run recognizes the log by it.

    Args:
        folder: the folder of the log. It must not contain the log of another run.
        rows: rows per file.
        max_buffered: how many rows are held in memory while the disk is full; older rows are lost.
        probabilities: computes the column ``probability`` from the scores; None for no such column.
    """

    def __init__(
        self,
        folder: Path | str,
        rows: int = 50_000,
        max_buffered: int = 1_000_000,
        probabilities: Callable[[Array], Array] | None = None,
    ) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise ImportError(PYARROW_REQUIRED) from error
        if rows < 1:
            raise ValueError(f"the files of the prediction log need at least 1 row, got {rows}")
        self.folder, self.rows, self.max_buffered = Path(folder), rows, max_buffered
        self.probabilities = probabilities
        self.folder.mkdir(parents=True, exist_ok=True)
        # A folder with files is accepted only if load_state_dict finds that they belong to this run.
        self._is_ours = not any(self.folder.glob("part-*.parquet"))
        self.part = 0
        self.buffer: list[Columns] = []
        self.buffered_rows = self.lost_rows = 0
        self.write_failed, self._time_of_attempt = False, 0.0

    def check_folder(self) -> None:
        """Raise FileExistsError if the folder contains the log of another run."""
        if not self._is_ours:
            raise FileExistsError(f"{self.folder} has the log of another run: resume that run, or log elsewhere")

    def add(self, columns: Columns, outcomes: Array) -> None:
        """Append predictions with their outcomes."""
        self.check_folder()
        count = len(columns["score"])
        rows = {name: values for name, values in columns.items() if not name.startswith(FEATURE_PREFIX)}
        rows["outcome"] = outcomes
        self.buffer.append(rows)
        self.buffered_rows += count
        may_write = not self.write_failed or time.monotonic() - self._time_of_attempt > SECONDS_BETWEEN_ATTEMPTS
        if self.buffered_rows >= self.rows and may_write:
            self._write_complete_files()
        if self.buffered_rows > self.max_buffered:
            self._discard_oldest(self.buffered_rows - self.max_buffered)

    def _write_complete_files(self) -> None:
        """Write as many complete files as the buffer has rows for; rows that cannot be written stay in the buffer."""
        rows = concatenate_columns(self.buffer)
        start = 0
        try:
            while self.buffered_rows - start >= self.rows:
                self._write({name: values[start : start + self.rows] for name, values in rows.items()})
                start += self.rows
                self.part += 1
            self.write_failed = False
        except OSError as error:
            self._log_failure(error)
        self.buffer = [{name: values[start:].copy() for name, values in rows.items()}]
        self.buffered_rows -= start

    def _log_failure(self, error: OSError) -> None:
        self.write_failed, self._time_of_attempt = True, time.monotonic()
        lost = f", {self.lost_rows} older rows are lost" if self.lost_rows else ""
        logger.error(
            "the prediction log cannot be written; rows are kept in memory and in checkpoints%s: %s", lost, error
        )

    def _discard_oldest(self, count: int) -> None:
        self.lost_rows, self.buffered_rows = self.lost_rows + count, self.buffered_rows - count
        while count:
            first = self.buffer[0]
            size = len(first["score"])
            if size > count:
                self.buffer[0] = {name: values[count:] for name, values in first.items()}
                return
            del self.buffer[0]
            count -= size

    def _write(self, rows: Columns) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        arrays: dict[str, Any] = {
            name: pa.array(rows[name]) for name in ("id", "user", "time", "weight", "score") if name in rows
        }
        if self.probabilities is not None:
            arrays["probability"] = pa.array(self.probabilities(rows["score"]))
        arrays["label"] = pa.array(rows["label"], mask=np.isnan(rows["label"]))
        arrays["outcome"] = pa.DictionaryArray.from_arrays(pa.array(rows["outcome"]), pa.array(OUTCOME_NAMES))
        schema = pa.schema([pa.field(name, a.type, nullable=name == "label") for name, a in arrays.items()])
        path = self.folder / _file_name(self.part)

        def write(new: Path) -> None:
            table = pa.table(list(arrays.values()), schema=schema)
            pq.write_table(table, new, use_dictionary=["outcome"], compression="lz4", write_statistics=False)

        write_with(path, write, f".{path.name}.new")

    def flush(self) -> None:
        """Write the remaining rows as a short file. A resumed run replaces it by a complete one."""
        if self.buffered_rows >= self.rows:
            self._write_complete_files()
        if 0 < self.buffered_rows < self.rows:
            try:
                self._write(concatenate_columns(self.buffer))
                self.write_failed = False
            except OSError as error:
                self._log_failure(error)
        if self.lost_rows:
            logger.error("%d rows of the prediction log are lost because the disk was full", self.lost_rows)

    @property
    def unwritten_rows(self) -> int:
        """Rows that could not be written to disk. They exist in memory and in the checkpoint only."""
        return self.buffered_rows if self.write_failed else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the log and the rows that are not in a complete file yet."""
        buffer = concatenate_columns(self.buffer) if self.buffer else {}
        return {"part": self.part, "rows": self.rows, "buffer": buffer, "lost_rows": self.lost_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the log from a saved position, and delete files that were written after it.

        Raises:
            ValueError: if the files have another number of rows, or if a file is cut short.
            FileNotFoundError: if a file is missing.
        """
        columns = dict.fromkeys(("score", "label", "outcome") if state["buffer"] else (), np.empty(0))
        check_like(state, {"part": 0, "rows": 0, "lost_rows": 0, "buffer": columns}, "log")
        if state["rows"] != self.rows:
            raise ValueError(f"the log was started with {state['rows']} rows per file, not {self.rows}")
        files = {int(path.stem.removeprefix("part-")): path for path in self.folder.glob("part-*.parquet")}
        complete = range(state["part"])
        first = min(files.keys() & set(complete), default=0)
        for number in complete[first:]:
            if number not in files:
                raise FileNotFoundError(
                    f"{self.folder} lacks {_file_name(number)} of the log: restore it. Files may be moved away oldest "
                    f"first, but the newest complete one, {_file_name(complete[-1])}, must stay"
                )
            if not _is_complete_parquet(files[number]):
                raise ValueError(f"{files[number]}, a file of the prediction log, is cut short: restore the whole file")
        for number, path in files.items():
            if number not in complete:
                path.unlink()
        self._is_ours, self.part, self.lost_rows = True, state["part"], state["lost_rows"]
        self.buffer = [dict(state["buffer"])] if state["buffer"] else []
        self.buffered_rows = len(state["buffer"]["score"]) if state["buffer"] else 0


def _file_name(part: int) -> str:
    return f"part-{part:08d}.parquet"


def _is_complete_parquet(path: Path) -> bool:
    """Whether a Parquet file ends with its magic number, which follows the description of its content."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4))
        return file.read() == b"PAR1"

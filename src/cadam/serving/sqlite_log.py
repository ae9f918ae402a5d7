"""The event log as a SQLite database in WAL mode, which is the default.

A transaction is on disk when `SqliteLog.append` returns (``synchronous=FULL``), and other processes see it only then.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .event_log import ROWS_PER_DELETION, Entry, EventLog, LogUnavailableError, Promotion, Rollback

FORMAT = 1
"""The number of the table layout, which is stored as `user_version` of the database."""
MAX_WAL_BYTES = 64 << 20
"""From this size on, writers wait for a moment while the write-ahead log is emptied."""
SECONDS_TO_WAIT_FOR_LOCK = 10.0

TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id NOT NULL,
    time REAL NOT NULL,
    body TEXT NOT NULL,
    score REAL,
    version TEXT
);
CREATE UNIQUE INDEX IF NOT EXISTS entries_by_id ON entries (kind, id);
CREATE TABLE IF NOT EXISTS batches (last INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS rollbacks (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    version TEXT NOT NULL,
    position INTEGER NOT NULL,
    until INTEGER NOT NULL,
    time REAL NOT NULL
);
"""

PROMOTIONS = """
CREATE TABLE IF NOT EXISTS promotions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    challenger TEXT NOT NULL,
    position INTEGER,
    time REAL NOT NULL
);
"""


class SqliteLog(EventLog):
    """A connection to the database, for one thread.

    Args:
        path: the database.
        is_durable: whether commits are flushed to disk before they return. The learner records how it groups entries
            into batches without waiting for the disk, because losing that costs nothing but the grouping.
        creates: whether the database is created if it does not exist.

    Raises:
        LogUnavailableError: if the database cannot be opened.
        ValueError: if the file is not a log, or the log of a newer version.
    """

    def __init__(self, path: Path | str, *, is_durable: bool = True, creates: bool = True) -> None:
        self.path = Path(path)
        self.location = str(path)
        self._synchronous = "FULL" if is_durable else "NORMAL"
        uri = f"{self.path.absolute().as_uri()}?mode={'rwc' if creates else 'rw'}"
        with self._errors():
            self._connection = sqlite3.connect(uri, timeout=SECONDS_TO_WAIT_FOR_LOCK, isolation_level=None, uri=True)
        try:
            self._prepare()
            self._files = self._identify_files()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        with self._errors():
            execute = self._connection.execute
            execute("PRAGMA auto_vacuum = INCREMENTAL")
            if execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise ValueError(f"{self.path} is on a file system that does not support SQLite's write-ahead log")
            execute(f"PRAGMA synchronous = {self._synchronous}")
            # The learner calls `checkpoint` to copy the write-ahead log to the database. If the learner does not run,
            # SQLite copies it in a commit, once the log has twice this size.
            execute(f"PRAGMA wal_autocheckpoint = {2 * MAX_WAL_BYTES // 4096}")
            number = execute("PRAGMA user_version").fetchone()[0]
            if number not in (0, FORMAT):
                raise ValueError(f"{self.path} was written by another version of cadam (format {number}, not {FORMAT})")
            if not number:
                self._connection.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
            execute(PROMOTIONS)  # the logs of earlier versions do not have this table

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise LogUnavailableError for errors of the disk and of locks, ValueError for a file that is not a log."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise LogUnavailableError(f"the event log {self.path} is not available: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} is damaged or not an event log: {error}") from error

    def _identify_files(self) -> list[tuple[int, int]]:
        """Return the device and the inode of the database and of its write-ahead log.

        Both stay the same as long as this connection is open.

        Raises:
            LogUnavailableError: if one of the files is missing.
        """
        try:
            files = [os.stat(path) for path in (self.path, self._wal_path)]
        except OSError as error:
            raise LogUnavailableError(f"the event log {error.filename} is missing: {error.strerror}") from error
        return [(file.st_dev, file.st_ino) for file in files]

    @property
    def _wal_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}-wal")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what the block executes, or roll all of it back."""
        with self._errors():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    # A full disk may already have ended the transaction.
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _durable_transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what the block executes, and flush it to disk, also in a connection that is not durable."""
        with self._errors():
            self._connection.execute("PRAGMA synchronous = FULL")
            try:
                with self._transaction() as connection:
                    yield connection
            finally:
                self._connection.execute(f"PRAGMA synchronous = {self._synchronous}")

    # Entries ------------------------------------------------------------------------------------------------------

    def append(self, entries: Iterable[Entry]) -> None:
        """Write entries; see `EventLog.append`. If it fails, none of them was written."""
        with self._transaction() as connection:
            # SQLite also writes to files that were deleted, and what it writes there is lost when they are closed.
            if self._identify_files() != self._files:
                raise LogUnavailableError(
                    f"the event log {self.path} was replaced while the service ran: restore it, and start the service "
                    "again"
                )
            for entry in entries:
                row = (entry.kind, entry.id, entry.time, entry.body, entry.score, entry.version)
                cursor = connection.execute(
                    "INSERT INTO entries (kind, id, time, body, score, version) VALUES (?, ?, ?, ?, ?, ?) "
                    "ON CONFLICT DO NOTHING",
                    row,
                )
                entry.number = cursor.lastrowid or 0 if cursor.rowcount else 0

    def find_unknown(self, ids: Iterable[int | str]) -> list[int | str]:
        """Return the ids that no event of the log has."""
        query = "SELECT 1 FROM entries WHERE kind = 'event' AND id = ?"
        with self._errors():
            return [key for key in ids if self._connection.execute(query, (key,)).fetchone() is None]

    def read(self, after: int, *, last: int | None = None, limit: int = -1) -> list[Entry]:
        """Return the entries after a position; see `EventLog.read`."""
        query = (
            "SELECT kind, id, body, time, score, version, number FROM entries WHERE number > ? AND number <= ? "
            "ORDER BY number LIMIT ?"
        )
        with self._errors():
            rows = self._connection.execute(query, (after, (1 << 62) if last is None else last, limit))
            return [Entry(*row) for row in rows]

    def last_number(self) -> int:
        """Return the number of the last entry, or the largest number that was ever given if all were deleted.

        Numbers are not always consecutive: a repeated entry may use up a number.
        """
        with self._errors():
            row = self._connection.execute("SELECT max(number) FROM entries").fetchone()
            if row[0] is None:
                row = self._connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'entries'").fetchone()
        return int(row[0] or 0)

    def oldest_label_time(self, after: int) -> float | None:
        """Return the time of the first label after a position, None if there is none."""
        query = "SELECT time FROM entries WHERE number > ? AND kind = 'label' ORDER BY number LIMIT 1"
        with self._errors():
            row = self._connection.execute(query, (after,)).fetchone()
        return None if row is None else float(row[0])

    # Batches of the learner ---------------------------------------------------------------------------------------

    def add_batch(self, last: int) -> None:
        """Record that the learner takes all entries up to number `last` as its next batch."""
        with self._transaction() as connection:
            connection.execute("INSERT INTO batches (last) VALUES (?)", (last,))

    def next_batch(self, after: int) -> int | None:
        """Return the end of the first recorded batch after a position, None if there is none."""
        with self._errors():
            row = self._connection.execute("SELECT min(last) FROM batches WHERE last > ?", (after,)).fetchone()
        return None if row[0] is None else int(row[0])

    # Rollbacks ----------------------------------------------------------------------------------------------------

    def add_rollback(self, version: str, position: int) -> Rollback:
        """Record that the learner shall continue from an earlier version, whose position in the log is given."""
        with self._transaction() as connection:
            until = self.last_number()
            cursor = connection.execute(
                "INSERT INTO rollbacks (version, position, until, time) VALUES (?, ?, ?, ?)",
                (version, position, until, time.time()),
            )
        return Rollback(cursor.lastrowid or 0, version, position, until)

    def rollbacks(self) -> list[Rollback]:
        """Return all rollbacks, oldest first."""
        with self._errors():
            rows = self._connection.execute("SELECT number, version, position, until FROM rollbacks ORDER BY number")
            return [Rollback(*row) for row in rows]

    # Promotions ---------------------------------------------------------------------------------------------------

    # The learner's checkpoint has the number of the last promotion, so the log must not lose it in a power failure.

    def add_promotion(self, challenger: str, position: int | None = None) -> None:
        """Record that a challenger becomes the champion, after an entry or as soon as the learner notices it."""
        with self._durable_transaction() as connection:
            connection.execute(
                "INSERT INTO promotions (challenger, position, time) VALUES (?, ?, ?)",
                (challenger, position, time.time()),
            )

    def set_promotion_position(self, number: int, position: int) -> None:
        """Record the entry after which the learner has made a challenger the champion."""
        with self._durable_transaction() as connection:
            connection.execute("UPDATE promotions SET position = ? WHERE number = ?", (position, number))

    def promotions(self, after: int = 0) -> list[Promotion]:
        """Return the promotions after a number, oldest first."""
        query = "SELECT number, challenger, position FROM promotions WHERE number > ? ORDER BY number"
        with self._errors():
            return [Promotion(*row) for row in self._connection.execute(query, (after,))]

    # Size ---------------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the size of the database and its write-ahead log in bytes."""
        return sum(os.path.getsize(path) for path in (self.path, self._wal_path) if path.exists())

    def checkpoint(self) -> None:
        """Copy the write-ahead log to the database. Writers wait only if the write-ahead log has become large."""
        with self._errors():
            _, frames, _ = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if frames * 4096 > MAX_WAL_BYTES:
                self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()

    def delete_old(self, position: int, *, seconds: float | None = None, size: int | None = None) -> int:
        """Delete old entries; see `EventLog.delete_old`."""
        deleted = 0
        if seconds is not None:
            deleted += self._delete(position, time.time() - seconds, None)
        while size is not None and self._used_bytes() > size:
            count = self._delete(position, None, ROWS_PER_DELETION)
            deleted += count
            if not count:
                break
        if deleted:
            with self._transaction() as connection:
                connection.execute("DELETE FROM batches WHERE last <= (SELECT min(number) FROM entries)")
            with self._errors():
                self._connection.execute("PRAGMA incremental_vacuum").fetchall()
        return deleted

    def _delete(self, position: int, before: float | None, limit: int | None) -> int:
        """Delete entries up to a position that are older than a time, at most `limit` of them, oldest first."""
        deleted = 0
        while limit is None or deleted < limit:
            with self._transaction() as connection:
                cursor = connection.execute(
                    "DELETE FROM entries WHERE number <= (SELECT max(number) FROM "
                    "(SELECT number, time FROM entries WHERE number <= ? ORDER BY number LIMIT ?) WHERE time < ?)",
                    (position, ROWS_PER_DELETION, time.time() + 1 if before is None else before),
                )
            if not cursor.rowcount:
                break
            deleted += cursor.rowcount
        return deleted

    def _used_bytes(self) -> int:
        """Return the size of the pages that are in use."""
        with self._errors():
            pages, free, page_size = (
                self._connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * page_size)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

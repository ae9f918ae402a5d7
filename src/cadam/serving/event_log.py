"""The durable log of events and labels, from which the learner learns.

`SqliteLog` is the default, and `RedisLog` keeps the log in a Redis server. Entries are numbered in the order in which
they were written, so a reader that has seen entry n has seen all entries before it. An id occurs at most once per kind
of entry, which makes repeated requests harmless.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LOG_FILE = "events.db"
"""The name of a SQLite log in the folder of a service."""
URI_FILE = "log-uri"
"""The file in the folder of a service with the URI of its log, if it is not a SQLite log. It may have a password."""
ROWS_PER_DELETION = 2_000
"""Old entries are deleted in transactions of this size, so that writers do not wait for long."""

EntryKind = Literal["event", "label"]


class LogUnavailableError(OSError):
    """The log cannot be written or read now, for example because the disk is full. Nothing was changed."""


@dataclass(slots=True)
class Entry:
    """One entry of the log.

    Args:
        kind: an event, which was predicted, or the label of an event.
        id: the id of the event, an integer or a text.
        body: the event as JSON without its label, or the value of the label as JSON.
        time: the time of the request in seconds since 1970.
        score: the score of an event that the client received.
        version: the version of the model that computed the score.
        number: the position in the log; 0 before the entry is written.
    """

    kind: EntryKind
    id: int | str
    body: str
    time: float
    score: float | None = None
    version: str | None = None
    number: int = 0


@dataclass(frozen=True)
class Rollback:
    """A request to continue from an earlier version: labels after `position` up to entry `until` are not learned."""

    number: int
    version: str
    position: int
    until: int


@dataclass(frozen=True)
class Promotion:
    """A challenger that becomes the champion after the entry `position`; None if the learner has not noticed it yet."""

    number: int
    challenger: str
    position: int | None


class EventLog(ABC):
    """A connection to a log, for one thread. All methods raise `LogUnavailableError` if the log cannot be used now."""

    location: str
    """The place of the log, for messages."""

    # Entries ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def append(self, entries: Iterable[Entry]) -> None:
        """Write entries in one transaction, and set their numbers. The number of a repeated entry stays 0.

        The entries are on disk when the method returns, and readers see all of them or none.

        Raises:
            LogUnavailableError: if the entries could not be written.
        """

    @abstractmethod
    def find_unknown(self, ids: Iterable[int | str]) -> list[int | str]:
        """Return the ids that no event of the log has."""

    @abstractmethod
    def read(self, after: int, *, last: int | None = None, limit: int = -1) -> list[Entry]:
        """Return the entries after a position, in their order.

        Args:
            after: the number of the entry before the first one.
            last: the number of the last entry.
            limit: the largest number of entries; -1 for all.
        """

    @abstractmethod
    def last_number(self) -> int:
        """Return the number of the last entry, or the largest number that was ever given if all were deleted.

        Numbers are not always consecutive.
        """

    @abstractmethod
    def oldest_label_time(self, after: int) -> float | None:
        """Return the time of the first label after a position, None if there is none."""

    # Batches of the learner ---------------------------------------------------------------------------------------

    @abstractmethod
    def add_batch(self, last: int) -> None:
        """Record that the learner takes all entries up to number `last` as its next batch."""

    @abstractmethod
    def next_batch(self, after: int) -> int | None:
        """Return the end of the first recorded batch after a position, None if there is none."""

    # Rollbacks and promotions -------------------------------------------------------------------------------------

    @abstractmethod
    def add_rollback(self, version: str, position: int) -> Rollback:
        """Record that the learner shall continue from an earlier version, whose position in the log is given."""

    @abstractmethod
    def rollbacks(self) -> list[Rollback]:
        """Return all rollbacks, oldest first."""

    @abstractmethod
    def add_promotion(self, challenger: str, position: int | None = None) -> None:
        """Record that a challenger becomes the champion, after an entry or as soon as the learner notices it."""

    @abstractmethod
    def set_promotion_position(self, number: int, position: int) -> None:
        """Record the entry after which the learner has made a challenger the champion."""

    @abstractmethod
    def promotions(self, after: int = 0) -> list[Promotion]:
        """Return the promotions after a number, oldest first."""

    # Size ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def size(self) -> int:
        """Return the size of the log in bytes."""

    def checkpoint(self) -> None:  # noqa: B027
        """Do what keeps the log fast; the learner calls this every few seconds."""

    @abstractmethod
    def delete_old(self, position: int, *, seconds: float | None = None, size: int | None = None) -> int:
        """Delete old entries.

        Args:
            position: only entries up to this number may be deleted.
            seconds: entries that are older are deleted.
            size: if the log is larger than this number of bytes, its oldest entries are deleted.

        Returns:
            The number of deleted entries.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


def open_log(folder: Path, *, is_durable: bool = True, creates: bool = False) -> EventLog:
    """Open the log of a service.

    Args:
        folder: the folder of the service.
        is_durable: whether entries are flushed to disk before `append` returns. The learner records how it groups
            entries into batches without waiting for the disk, because losing that costs nothing but the grouping.
        creates: whether a SQLite log is created if it does not exist. Only the start of a service does this: if the
            file was deleted while the service ran, an empty one would hide the loss.

    Raises:
        LogUnavailableError: if the log cannot be opened.
        ValueError: if it is not a log, or the log of another version.
    """
    if (folder / URI_FILE).is_file():
        return open_uri((folder / URI_FILE).read_text(encoding="utf-8").strip())
    from .sqlite_log import SqliteLog

    return SqliteLog(folder / LOG_FILE, is_durable=is_durable, creates=creates)


def open_uri(uri: str) -> EventLog:
    """Open the log that a URI names: redis://HOST/STREAM. Raises the errors of `open_log`."""
    from .redis_log import RedisLog

    return RedisLog(uri)

"""Events from a Redis stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ..events import Batch
from ..nested import MAX_LISTED_DEPTH, flatten
from ..schema import Schema
from .base import ColumnNames, Source, check_batch_size, check_state, is_power_of_two
from .column_watch import ColumnWatch
from .records import Message, convert_messages, sample_messages
from .sample import MAX_MESSAGES, Sample, SamplingError, describe, read_records

logger = logging.getLogger("cadam.online")

PAGE_SIZE = 256
"""The number of entries per request."""
INSPECTED_ENTRIES = 1000
"""The number of entries whose column names are read for validation."""
START = "0-0"
"""The position before the first entry."""


class RedisSource(Source):
    """The entries of a Redis stream in order. The position is the id of the last entry.

    The fields of an entry are the columns of the event, with numbers written as text. Alternatively an entry has a
    single field ``json`` with the event as a JSON object. If the connection is lost, the source waits for the server.
    If the server cannot be reached at first, this is an error, unless the source follows the stream.

    Args:
        url: The address of the server in the form of redis-py: ``redis://host:6379/0``.
        stream: The key of the stream.
        schema: The schema of the events.
        batch_size: The number of entries per batch.
        follow: Whether to wait for new entries at the end of the stream.
        patience: The number of seconds to wait for a full batch before a smaller one is produced. None: wait as long as
            it takes, so that batches do not depend on time.
        max_bytes: The size of the largest entry; larger ones are rejected.
        poll: The number of seconds that one request waits for new entries.
        retry: The number of seconds between attempts to reach the server.
    """

    def __init__(
        self,
        url: str,
        stream: str,
        schema: Schema,
        *,
        batch_size: int = 1024,
        follow: bool = False,
        patience: float | None = 1.0,
        max_bytes: int = 1 << 20,
        poll: float = 0.2,
        retry: float = 0.5,
    ) -> None:
        try:
            import redis
        except ImportError as error:
            raise ImportError("Redis streams need redis-py: pip install redis") from error
        check_batch_size(batch_size)
        self.client = redis.Redis.from_url(url, socket_timeout=30, socket_connect_timeout=5)
        self.stream, self.schema, self.batch_size, self.follow = stream, schema, batch_size, follow
        self.patience, self.max_bytes, self.poll, self.retry = patience, max_bytes, poll, retry
        self.position, self.location = START, stream
        self._watch = ColumnWatch(schema, stream)
        self.entries_read: int | None = None
        """The number of entries up to the position that were ever added to the stream, None if it is unknown. Servers
        before Redis 7 do not know it, so it is counted from the entry `first_entry`."""
        self.first_entry = START
        self._was_reached = self._was_checked = self._is_away = False
        self._trimmed_count = 0

    @classmethod
    def from_uri(cls, uri: str, schema: Schema, **options: Any) -> RedisSource | None:
        """Open ``redis://HOST[:PORT]/STREAM[?db=N]``."""
        parsed = parse_uri(uri)
        return None if parsed is None else cls(*parsed, schema, **options)

    def __iter__(self) -> Iterator[Batch | None]:
        import redis

        messages: list[Message] = []
        last, waiting_since = self.position, time.monotonic()
        while True:
            try:
                self._check_for_new_stream()
                page = self._read_page(last, min(PAGE_SIZE, self.batch_size - len(messages)))
                if page and last != START:
                    self._check_for_trimming(last)
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if not (self.follow or self._was_reached):
                    raise ConnectionError(
                        f"Redis cannot be reached: {error} Check the address, or wait for the server with follow"
                    ) from error
                if not self._is_away:
                    logger.error("Redis is away, waiting for it: %s", error)
                self._is_away, self._was_checked = True, False
                yield None
                time.sleep(self.retry)
                continue
            except redis.ResponseError as error:
                raise ValueError(self._describe_refusal(error)) from error
            self._was_reached = True
            if self._is_away:
                logger.warning("Redis is back, continuing after entry %s", last)
                self._is_away = False
            if page:
                if not messages:
                    waiting_since = time.monotonic()
                    if self.position == START:
                        self.backlog()  # It is computed from the number of entries at the start.
                messages += [self._message(key, fields) for key, fields in page]
                last = page[-1][0].decode()
            is_late = self.patience is not None and time.monotonic() - waiting_since > self.patience
            if len(messages) == self.batch_size or (messages and not page and (is_late or not self.follow)):
                self.position = last
                self.entries_read = None if self.entries_read is None else self.entries_read + len(messages)
                batch = convert_messages(messages, self.schema, self.max_bytes)
                self._watch.check_batch(batch)
                yield batch
                messages = []
            elif not page and not self.follow:
                return
            elif not page:
                yield None

    def columns(self) -> ColumnNames | None:
        """Return the columns of the first entries.

        Raises:
            ValueError: If there is no such stream, and the source does not wait for it.
        """
        import redis

        try:
            entries: Any = self.client.xrange(self.stream, count=INSPECTED_ENTRIES)
            if not entries and not self.client.exists(self.stream):
                if not self.follow:
                    raise ValueError(self._describe_absence())
                logger.warning("%s; waiting for it", self._describe_absence())
        except (redis.ConnectionError, redis.TimeoutError):
            return None
        except redis.ResponseError as error:
            raise ValueError(self._describe_refusal(error)) from error
        records, _ = read_records(entries, lambda entry: self._message(*entry).parse(self.max_bytes))
        names = [name for record in records for name in flatten(record, MAX_LISTED_DEPTH)]
        return ColumnNames(names, are_complete=False)

    def sample(self) -> Sample:
        """Return the first and the last entries."""
        import redis

        try:
            total: Any = self.client.xlen(self.stream)
            first: Any = self.client.xrange(self.stream, count=MAX_MESSAGES)
            last: Any = self.client.xrevrange(self.stream, count=MAX_MESSAGES)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise SamplingError(f"no schema can be inferred, because Redis cannot be reached: {error}") from error
        except redis.ResponseError as error:
            raise SamplingError(self._describe_refusal(error)) from error
        if not first:
            raise SamplingError(self._describe_absence())
        entries = dict([*first, *reversed(last)])
        messages = [self._message(key, fields) for key, fields in entries.items()]
        positions = 2 if len(entries) > MAX_MESSAGES else 1
        return sample_messages(messages, self.max_bytes, describe("Redis stream", total, len(messages), positions))

    def _describe_refusal(self, error: Exception) -> str:
        return f"Redis does not return the stream {self.stream!r}: {error}. Check the key and the rights of the user"

    def _describe_absence(self) -> str:
        streams = sorted(key.decode(errors="replace") for key in islice(self.client.scan_iter(_type="stream"), 1000))
        if similar := get_close_matches(self.stream, streams, 1, 0.5):
            advice = f"did you mean {similar[0]}?"
        elif streams:
            advice = f"its streams are {', '.join(streams[:10])}"
        else:
            advice = "it has no streams at all"
        return f"Redis has no stream {self.stream!r}; {advice}"

    def _read_page(self, after: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        block = max(1, int(1000 * self.poll)) if self.follow else None
        answer: Any = self.client.xread({self.stream: after}, count=count, block=block)
        if isinstance(answer, dict):  # The protocol RESP3 returns a dict.
            answer = [(key, entries[0] if entries else []) for key, entries in answer.items()]
        return list(answer[0][1]) if answer else []

    def _message(self, key: bytes, fields: Mapping[bytes, bytes] | None) -> Message:
        where = f"{self.stream}, entry {key.decode()}"
        fields = fields or {}
        if list(fields) == [b"json"]:
            return Message(where, text=fields[b"json"])
        return Message(where, fields=fields)

    def _check_for_new_stream(self) -> None:
        """Once per connection, log if the newest entry is older than the position."""
        if self._was_checked or self.position == START:
            return
        self._was_checked = True
        newest = self._boundary_id(newest=True)
        if newest is not None and _sort_key(newest) < _sort_key(self.position):
            logger.error(
                "the newest entry of the stream %s is %s, older than the position %s: it is another stream or has lost "
                "entries, and entries up to the position are not read",
                *(self.stream, newest, self.position),
            )

    def _check_for_trimming(self, last: str) -> None:
        """Log if the stream may have been trimmed between the entry `last` and the page after it."""
        first = self._boundary_id(newest=False)
        if first is not None and _sort_key(first) <= _sort_key(last):
            return
        self._trimmed_count += 1
        if is_power_of_two(self._trimmed_count):
            logger.warning(
                "the stream %s was trimmed beyond entry %s, the last one that was read: entries after it may have been "
                "removed before they were read, because the stream is trimmed faster than the learner reads it "
                "(seen %d times)",
                *(self.stream, last, self._trimmed_count),
            )

    def _boundary_id(self, newest: bool) -> str | None:
        """Return the id of the newest or the oldest entry, None if the stream is empty."""
        read = self.client.xrevrange if newest else self.client.xrange
        entries: Any = read(self.stream, count=1)
        return entries[0][0].decode() if entries else None

    def backlog(self) -> int | None:
        """Return the number of entries after the position, None if it is unknown.

        Redis 7 counts the entries that were ever added. With older servers, the number is unknown after the stream was
        trimmed, until all entries were read.
        """
        import redis

        if self._is_away:
            return None  # The server cannot be reached, so a request could block the learner until it times out.
        try:
            info: Any = self.client.xinfo_stream(self.stream)
        except redis.RedisError:
            return None
        length = int(info["length"])
        added = int(info.get("entries-added", length))
        first = info["first-entry"][0].decode() if info["first-entry"] else START
        is_start = self.position == START
        if is_start or _sort_key(info["last-generated-id"].decode()) <= _sort_key(self.position):
            self.first_entry, self.entries_read = first, added - length if is_start else added
            return length if is_start else 0
        if self.entries_read is None or ("entries-added" not in info and first != self.first_entry):
            return None
        return max(0, min(length, added - self.entries_read))

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the last entry that was read, and what the backlog is computed from."""
        counted = {"entries_read": self.entries_read, "first_entry": self.first_entry}
        return {"source": "redis", "stream": self.stream, "position": self.position, **counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        check_state(state, source="redis", stream=self.stream)
        self.position, self._was_checked = state["position"], False
        self.entries_read, self.first_entry = state.get("entries_read"), state.get("first_entry", START)


def parse_uri(uri: str) -> tuple[str, str] | None:
    """Split ``redis://HOST[:PORT]/STREAM[?db=N]`` into the server's address and the stream, None if one is missing.

    Raises:
        ValueError: If the URI has other fields than ``db``.
    """
    parts = urlsplit(uri)
    stream, query = parts.path.lstrip("/"), dict(parse_qsl(parts.query))
    if not parts.netloc or not stream:
        return None
    url = f"{parts.scheme}://{parts.netloc}/{query.pop('db', '0')}"
    if query:
        raise ValueError(f"{uri}: unknown fields {', '.join(query)}")
    return url, stream


def _sort_key(entry_id: str) -> tuple[int, int]:
    """Return the milliseconds and the sequence number of an entry's id, by which entries are ordered."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)

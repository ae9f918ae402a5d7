"""The event log as a stream of a Redis server: `cadam serve --log redis://HOST/STREAM`.

The entry with number n has the id ``n-0`` in the stream. Other keys begin with the name of the stream:

- ``{STREAM}:last`` is the number of the last entry;
- ``{STREAM}:event`` and ``{STREAM}:label`` are hashes from the id of each event or label, as JSON, to its number;
- ``{STREAM}:batches`` is a sorted set of the ends of the learner's batches;
- ``{STREAM}:rollbacks`` and ``{STREAM}:promotions`` are lists of JSON arrays.

A script writes all entries of a transaction; Redis runs it as a whole. With ``appendonly yes`` and ``appendfsync
always``, which are checked, its answer comes when the entries are on the server's disk.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..online.data.sources.redis_stream import parse_uri
from .event_log import ROWS_PER_DELETION, Entry, EventLog, LogUnavailableError, Promotion, Rollback

logger = logging.getLogger("cadam.serving")

SECONDS_TO_CONNECT = 5.0
SECONDS_TO_ANSWER = 10.0
FIELDS = ("kind", "id", "body", "time", "score", "version")
"""The fields of an entry of the stream. An absent score or version is an empty text."""
PAGE = 500
"""Entries per request while labels are searched."""
REQUIRED = {"appendonly": "yes", "appendfsync": "always"}
"""The configuration with which an answer of the server means that the entries are on its disk."""
FINAL_ERRORS = ("WRONGTYPE", "NOPERM", "NOAUTH", "WRONGPASS", "unknown command")
"""Errors of the server that waiting does not cure."""

APPEND = """
local numbers, count = {}, #ARGV / 6
for entry = 0, count - 1 do
    local kind, id = ARGV[6 * entry + 1], ARGV[6 * entry + 2]
    local ids = kind == 'event' and KEYS[3] or KEYS[4]
    numbers[entry + 1] = 0
    if redis.call('HEXISTS', ids, id) == 0 then
        local number = redis.call('INCR', KEYS[2])
        redis.call('XADD', KEYS[1], number .. '-0', 'kind', kind, 'id', id, 'body', ARGV[6 * entry + 3],
            'time', ARGV[6 * entry + 4], 'score', ARGV[6 * entry + 5], 'version', ARGV[6 * entry + 6])
        redis.call('HSET', ids, id, number)
        numbers[entry + 1] = number
    end
end
return numbers
"""
"""Add the entries that are not repeated, and return their numbers; 0 for a repeated one."""
ROLL_BACK = """
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local number = redis.call('RPUSH', KEYS[1], cjson.encode({ARGV[1], tonumber(ARGV[2]), last, tonumber(ARGV[3])}))
return {number, last}
"""
"""Record a rollback up to the last entry, and return its number and that of the entry."""


class RedisLog(EventLog):
    """A connection to the server of a log.

    Args:
        uri: ``redis://HOST[:PORT]/STREAM[?db=N]``, as for `cadam run`; with ``USER:PASSWORD@`` before the host if the
            server needs it.

    Raises:
        LogUnavailableError: if the server cannot be reached.
        ValueError: if the URI is invalid, if the key is not a stream, or if the server would lose entries in a crash.
        ImportError: if redis-py is not installed.
    """

    def __init__(self, uri: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError("--log redis://... needs redis-py: pip install redis") from error
        parsed = parse_uri(uri)
        if parsed is None or not uri.startswith(("redis://", "rediss://")):
            raise ValueError("the URI of a log in Redis is redis://HOST[:PORT]/STREAM[?db=N]")
        url, name = parsed
        self.location = f"Redis stream {name}"
        self._error, self._response_error = redis.RedisError, redis.ResponseError
        # A repeated attempt to append would find its entries from the first one and report them as repeated.
        self._client = redis.Redis.from_url(
            url,
            socket_connect_timeout=SECONDS_TO_CONNECT,
            socket_timeout=SECONDS_TO_ANSWER,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
        self._stream = name
        self._last, self._batches, self._rollbacks, self._promotions = (
            f"{{{name}}}:{key}" for key in ("last", "batches", "rollbacks", "promotions")
        )
        self._ids = {kind: f"{{{name}}}:{kind}" for kind in ("event", "label")}
        with self._errors():
            self._append = self._client.register_script(APPEND)
            self._roll_back = self._client.register_script(ROLL_BACK)
            self._check_server()

    def _check_server(self) -> None:
        """Raise ValueError if the server is known to lose acknowledged entries in a crash, or if the key is taken."""
        kind: Any = self._client.type(self._stream)
        if kind not in ("none", "stream"):
            raise ValueError(f"the key {self._stream!r} of the Redis server is a {kind}, not a stream")
        if kind == "stream" and not self._client.exists(self._last):
            raise ValueError(f"the {self.location} exists, but is not the log of a service: give another name")
        try:
            settings: Any = {name: self._client.config_get(name).get(name) for name in REQUIRED}
        except self._response_error:  # managed servers refuse it
            logger.warning(
                "the configuration of the Redis server cannot be read: it must be %s", _as_settings(REQUIRED)
            )
            return
        if settings != REQUIRED:
            raise ValueError(
                f"the Redis server would lose labels in a crash, because it has {_as_settings(settings)}: "
                f"it needs {_as_settings(REQUIRED)}"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise LogUnavailableError for errors that may pass, ValueError for others."""
        try:
            yield
        except self._error as error:
            if isinstance(error, self._response_error) and any(text in str(error) for text in FINAL_ERRORS):
                raise ValueError(f"the {self.location} cannot be used: {error}") from error
            raise LogUnavailableError(f"the {self.location} is not available: {error}") from error

    # Entries ------------------------------------------------------------------------------------------------------

    def append(self, entries: Iterable[Entry]) -> None:
        """Write entries; see `EventLog.append`. If the connection is lost, they may have been written nevertheless."""
        written = list(entries)
        if not written:
            return
        arguments: list[str] = []
        for entry in written:
            score, version = "" if entry.score is None else repr(entry.score), entry.version or ""
            arguments += [entry.kind, json.dumps(entry.id), entry.body, repr(entry.time), score, version]
        keys = [self._stream, self._last, self._ids["event"], self._ids["label"]]
        with self._errors():
            numbers: Any = self._append(keys=keys, args=arguments)
        for entry, number in zip(written, numbers, strict=True):
            entry.number = int(number)

    def find_unknown(self, ids: Iterable[int | str]) -> list[int | str]:
        """Return the ids that no event of the log has."""
        keys = list(ids)
        if not keys:
            return []
        with self._errors():
            numbers: Any = self._client.hmget(self._ids["event"], [json.dumps(key) for key in keys])
        return [key for key, number in zip(keys, numbers, strict=True) if number is None]

    def read(self, after: int, *, last: int | None = None, limit: int = -1) -> list[Entry]:
        """Return the entries after a position; see `EventLog.read`."""
        end = "+" if last is None else f"{last}-0"
        with self._errors():
            rows: Any = self._client.xrange(self._stream, f"{after + 1}-0", end, limit if limit >= 0 else None)
        return [_entry(*row) for row in rows]

    def last_number(self) -> int:
        """Return the largest number that was ever given."""
        with self._errors():
            value: Any = self._client.get(self._last)
        return int(value or 0)

    def oldest_label_time(self, after: int) -> float | None:
        """Return the time of the first label after a position, None if there is none."""
        while entries := self.read(after, limit=PAGE):
            for entry in entries:
                if entry.kind == "label":
                    return entry.time
            after = entries[-1].number
        return None

    # Batches of the learner ---------------------------------------------------------------------------------------

    def add_batch(self, last: int) -> None:
        """Record that the learner takes all entries up to number `last` as its next batch."""
        with self._errors():
            self._client.zadd(self._batches, {str(last): last})

    def next_batch(self, after: int) -> int | None:
        """Return the end of the first recorded batch after a position, None if there is none."""
        with self._errors():
            ends: Any = self._client.zrangebyscore(self._batches, after + 1, "+inf", start=0, num=1)
        return int(ends[0]) if ends else None

    # Rollbacks and promotions -------------------------------------------------------------------------------------

    def add_rollback(self, version: str, position: int) -> Rollback:
        """Record that the learner shall continue from an earlier version, whose position in the log is given."""
        with self._errors():
            keys, arguments = [self._rollbacks, self._last], [version, str(position), repr(time.time())]
            number, until = self._roll_back(keys=keys, args=arguments)
        return Rollback(int(number), version, position, int(until))

    def rollbacks(self) -> list[Rollback]:
        """Return all rollbacks, oldest first."""
        rows = self._list(self._rollbacks)
        return [Rollback(n, version, int(start), int(end)) for n, (version, start, end, _) in enumerate(rows, start=1)]

    def add_promotion(self, challenger: str, position: int | None = None) -> None:
        """Record that a challenger becomes the champion, after an entry or as soon as the learner notices it."""
        with self._errors():
            self._client.rpush(self._promotions, json.dumps([challenger, position, time.time()]))

    def set_promotion_position(self, number: int, position: int) -> None:
        """Record the entry after which the learner has made a challenger the champion."""
        challenger, _, seconds = self._list(self._promotions)[number - 1]
        with self._errors():
            self._client.lset(self._promotions, number - 1, json.dumps([challenger, position, seconds]))

    def promotions(self, after: int = 0) -> list[Promotion]:
        """Return the promotions after a number, oldest first."""
        rows = self._list(self._promotions)
        return [Promotion(n, name, position) for n, (name, position, _) in enumerate(rows, start=1) if n > after]

    def _list(self, key: str) -> Sequence[Any]:
        with self._errors():
            texts: Any = self._client.lrange(key, 0, -1)
        return [json.loads(text) for text in texts]

    # Size ---------------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the memory of the stream in bytes, as the server estimates it."""
        with self._errors():
            value: Any = self._client.memory_usage(self._stream)
        return int(value or 0)

    def delete_old(self, position: int, *, seconds: float | None = None, size: int | None = None) -> int:
        """Delete old entries; see `EventLog.delete_old`."""
        deleted = 0
        if seconds is not None:
            while count := self._delete(position, time.time() - seconds):
                deleted += count
        while size is not None and self.size() > size and (count := self._delete(position, None)):
            deleted += count
        if deleted and (first := self.read(0, limit=1)):
            with self._errors():
                self._client.zremrangebyscore(self._batches, "-inf", first[0].number)
        return deleted

    def _delete(self, position: int, before: float | None) -> int:
        """Delete some of the oldest entries up to a position that are older than a time, and return their number."""
        entries = self.read(0, last=position, limit=ROWS_PER_DELETION)
        old = [number for number, entry in enumerate(entries, 1) if before is None or entry.time < before]
        entries = entries[: old[-1]] if old else []
        if entries:
            with self._errors():
                pipeline = self._client.pipeline(transaction=True)
                for entry in entries:
                    pipeline.hdel(self._ids[entry.kind], json.dumps(entry.id))
                pipeline.xdel(self._stream, *(f"{entry.number}-0" for entry in entries))
                pipeline.execute()
        return len(entries)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _entry(key: str, fields: dict[str, str]) -> Entry:
    kind, identity, body, seconds, score, version = (fields[name] for name in FIELDS)
    return Entry(
        "event" if kind == "event" else "label",
        json.loads(identity),
        body,
        float(seconds),
        float(score) if score else None,
        version or None,
        int(key.partition("-")[0]),
    )


def _as_settings(values: dict[str, str]) -> str:
    return " and ".join(f"{name} {value}" for name, value in values.items())

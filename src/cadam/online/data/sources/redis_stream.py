"""Events from a Redis stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from ..events import Batch
from ..schema import Schema
from .base import Source, check_state, is_power_of_two
from .records import Record, batch_of

logger = logging.getLogger("cadam.online")

NEEDS = "Redis streams need redis-py: pip install redis"
PAGE = 256  # entries asked for at one go


class RedisSource(Source):
    """The entries of a Redis stream, in order. The position is the id of the last entry given.

    An entry's fields are the event's, with numbers written as text; or the event is one field named ``json``.
    A server that goes away is waited for; with `follow` also one that was never there, which is an error otherwise.

    Args:
        url: of the server, as redis-py has it: ``redis://host:6379/0``.
        stream: the key of the stream.
        follow: at the end wait for more instead of ending.
        patience: how many seconds to wait for a full batch before a short one is given; None: for ever, so that batches
            do not depend on time.
        longest: bytes of the longest entry that is looked at.
        retry: seconds between attempts to reach the server.
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
        longest: int = 1 << 20,
        poll: float = 0.2,
        retry: float = 0.5,
    ) -> None:
        try:
            import redis
        except ImportError as error:
            raise ImportError(NEEDS) from error
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.client = redis.Redis.from_url(url, socket_timeout=30, socket_connect_timeout=5)
        self.stream, self.schema, self.batch_size, self.follow = stream, schema, batch_size, follow
        self.patience, self.longest, self.poll, self.retry = patience, longest, poll, retry
        self.position = "0-0"
        self._reached = self._looked_at = False
        self._gaps = 0

    def __iter__(self) -> Iterator[Batch | None]:
        """Batches; None while there is nothing new, or no server."""
        import redis

        held: list[Record] = []
        last, since, away = self.position, time.monotonic(), False
        while True:
            try:
                self._look_for_gap()
                page = self._page(last, min(PAGE, self.batch_size - len(held)))
                if page and last != "0-0":
                    self._look_for_trimming(last)
            except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError) as error:
                if not (self.follow or self._reached):
                    raise ConnectionError(
                        f"Redis cannot be reached: {error} Check the address; with follow it is waited for"
                    ) from error
                if not away:
                    logger.error("Redis is away, waiting for it: %s", error)
                away, self._looked_at = True, False
                yield None
                time.sleep(self.retry)
                continue
            except redis.ResponseError as error:
                raise ValueError(self.refused(error)) from error
            self._reached = True
            if away:
                logger.warning("Redis is back, going on after entry %s", last)
                away = False
            if page:
                if not held:
                    since = time.monotonic()
                held += [self._record(key, fields) for key, fields in page]
                last = page[-1][0].decode()
            late = self.patience is not None and time.monotonic() - since > self.patience
            if len(held) == self.batch_size or (held and not page and (late or not self.follow)):
                self.position = last
                yield batch_of(held, self.schema, self.longest)
                held = []
            elif not page and not self.follow:
                return
            elif not page:
                yield None

    def refused(self, error: Exception) -> str:
        """What Redis says to a key that is no stream, or to a user who may not read it."""
        return f"Redis does not give the stream {self.stream!r}: {error}. Check the key and the rights of the user"

    def absent(self) -> str:
        """What to say where there is no such stream, with those that there are."""
        found = sorted(key.decode(errors="replace") for key in islice(self.client.scan_iter(_type="stream"), 1000))
        near = get_close_matches(self.stream, found, 1, 0.5)
        meant = f"; is {near[0]} meant?" if near else ""
        there = f"; there are {', '.join(found[:10])}" if found else "; there is no stream at all"
        return f"Redis has no stream {self.stream!r}{meant or there}"

    def _page(self, after: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        block = max(1, int(1000 * self.poll)) if self.follow else None
        answer: Any = self.client.xread({self.stream: after}, count=count, block=block)
        if isinstance(answer, dict):  # as RESP3 has it
            answer = [(key, entries[0] if entries else []) for key, entries in answer.items()]
        return list(answer[0][1]) if answer else []

    def _record(self, key: bytes, fields: Mapping[bytes, bytes] | None) -> Record:
        where = f"{self.stream}, entry {key.decode()}"
        fields = fields or {}
        if list(fields) == [b"json"]:
            return Record(where, text=fields[b"json"])
        return Record(where, fields=fields)

    def _look_for_gap(self) -> None:
        """Once a connection: say so if the stream was cut past the position."""
        if self._looked_at:
            return
        if self.position != "0-0":
            first: Any = self.client.xrange(self.stream, count=1)
            here = self.client.xrange(self.stream, self.position, self.position)
            if not here and (not first or _order(first[0][0].decode()) > _order(self.position)):
                begins = first[0][0].decode() if first else "nowhere, it is empty"
                logger.warning(
                    "the stream %s begins at %s, past the position %s: entries in between, if any, were removed unread",
                    self.stream,
                    begins,
                    self.position,
                )
            newest: Any = self.client.xrevrange(self.stream, count=1)
            if newest and _order(newest[0][0].decode()) < _order(self.position):
                logger.error(
                    "the newest entry of the stream %s is %s, older than the position %s: it is another stream, or has "
                    "lost entries, and those up to the position are not read",
                    self.stream,
                    newest[0][0].decode(),
                    self.position,
                )
        self._looked_at = True

    def _look_for_trimming(self, last: str) -> None:
        """After a page: say so if the stream may have been cut between it and the entry read before it."""
        first: Any = self.client.xrange(self.stream, count=1)
        if first and _order(first[0][0].decode()) <= _order(last):
            return
        self._gaps += 1
        if is_power_of_two(self._gaps):
            logger.warning(
                "the stream %s was cut past entry %s, the last one read: entries after it may be removed unread; "
                "the stream is trimmed faster than it is learnt from (seen %d times)",
                self.stream,
                last,
                self._gaps,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"source": "redis", "stream": self.stream, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, source="redis", stream=self.stream)
        self.position, self._looked_at = state["position"], False


def _order(key: str) -> tuple[int, int]:
    milliseconds, _, number = key.partition("-")
    return int(milliseconds), int(number)

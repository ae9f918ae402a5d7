"""The HTTP connections of a front process, with limits that uvicorn does not have.

A client that sends its headers slowly, sends huge headers, or opens many connections must not keep others from an
answer. `cadam.serving.app` limits the time and the size of bodies.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 32 << 10
MAX_BYTES_PER_BODY_BYTE = 8
"""A chunked body that comes byte by byte needs six bytes for each of its bytes."""
SECONDS_FOR_HEADERS = 10.0
SECONDS_BETWEEN_SWEEPS = 1.0
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """A connection with limits on the size and the time of its headers.

    If there are more than `max_connections`, the oldest idle connection is closed.
    """

    max_connections = 10_000
    _open: dict[BoundedProtocol, None] = {}
    """All open connections, oldest first."""
    _sweeper: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_bytes, self._waits_since = 0, 0.0
        self._is_in_body, self._overhead = False, 0
        """Whether a body is being received, and the number of bytes that were received since its headers, less those
        that the body justifies."""
        self._is_refused = False
        """Whether the headers were too large. What the client still sends is then read and ignored."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register a connection, and close the oldest idle one if there are too many."""
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        if len(self._open) >= self.max_connections:
            oldest = next((other for other in self._open if other._is_idle()), next(iter(self._open)))
            oldest._abort()
        self._open[self] = None
        if BoundedProtocol._sweeper is None:
            BoundedProtocol._sweeper = self.loop.call_later(SECONDS_BETWEEN_SWEEPS, _sweep, self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._open.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, unless the headers are too large."""
        if self._is_refused:
            return
        if self._is_idle():
            if not self._header_bytes:
                self._waits_since = self.loop.time()
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and self._headers_end_late(data):
                self._refuse()
                return
        if self.transport.is_closing():
            return
        was_in_body = self._is_in_body
        super().data_received(data)
        if was_in_body and self._is_in_body:
            self._overhead += len(data)
            if self._overhead > MAX_HEADER_BYTES:  # headers after a chunked body would fill the memory
                self._abort()

    def _refuse(self) -> None:
        """Answer that the headers are too large.

        The connection stays open for reading until the client closes it or its time is over. If it were closed with
        unread data, TCP would reset it, and the client could lose the answer.
        """
        self._is_refused = True
        self.transport.write(TOO_LARGE)
        self.transport.write_eof()

    def _headers_end_late(self, data: bytes) -> bool:
        """Whether the headers do not end within the allowed bytes. Later bytes may belong to the body."""
        return b"\r\n\r\n" not in data[:MAX_HEADER_BYTES]

    def on_headers_complete(self) -> None:
        """Start a request."""
        self._header_bytes, self._is_in_body, self._overhead = 0, True, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a part of the body to the request."""
        self._overhead -= MAX_BYTES_PER_BODY_BYTE * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body of a request."""
        self._is_in_body = False
        super().on_message_complete()

    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _is_late(self, now: float) -> bool:
        """Whether the headers of a request take too long. Idle connections between requests are closed by uvicorn."""
        is_waiting = self.cycle is None or self._header_bytes > 0
        return self._is_idle() and is_waiting and now - self._waits_since > SECONDS_FOR_HEADERS

    def _abort(self) -> None:
        self._open.pop(self, None)
        self.transport.abort()


def _sweep(loop: asyncio.AbstractEventLoop) -> None:
    """Close connections whose headers take too long, and repeat this while there are connections."""
    now = loop.time()
    for connection in list(BoundedProtocol._open):
        if connection._is_late(now):
            connection._abort()
    has_open = bool(BoundedProtocol._open)
    BoundedProtocol._sweeper = loop.call_later(SECONDS_BETWEEN_SWEEPS, _sweep, loop) if has_open else None

"""The process behind `--status`: answers HTTP with what it was last told, and knows nothing else.

    python -I status_server.py DESCRIPTOR HOST

A process of its own, with the standard library alone: whatever clients do, the learner neither waits nor fails. It
reads lines of JSON from standard input, and ends with it. No path is looked for on the disk. A request has a bounded
size, a client a bounded time, and there is a bounded number of clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

LONGEST = 16_384  # bytes of a request
PATIENCE = 5.0  # seconds for a client to send a request, and to take the answer
MOST = 64  # clients at once
SILENT = 60.0  # seconds without a word from the learner after which it is not well
POINTS = 600  # of the history
SCRIPTS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
HEADERS = (
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    f"Content-Security-Policy: {SCRIPTS}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
)
LOCAL = ("localhost", "127.0.0.1", "[::1]")

Answer = tuple[HTTPStatus, str, bytes]


class Status:
    """What the learner said last, and points of what it said before."""

    def __init__(self) -> None:
        self.metrics = b""
        self.told: dict[str, Any] = {}
        self.heard = time.monotonic()
        self.points: list[dict[str, Any]] = []
        self.every, self.count = 1, 0

    def take(self, line: bytes) -> None:
        told = json.loads(line)
        self.metrics, self.told, self.heard = told["metrics"].encode(), told["status"], time.monotonic()
        if self.count % self.every == 0:
            self.points.append({"at": time.time(), **told["point"]})
        self.count += 1
        if len(self.points) > POINTS:  # keep the whole of the past, in fewer points
            self.points, self.every = self.points[::2], 2 * self.every

    def page(self) -> bytes:
        return json.dumps({**self.told, "silent": time.monotonic() - self.heard, "points": self.points}).encode()

    def health(self) -> Answer:
        silent = time.monotonic() - self.heard
        well = silent < SILENT
        body = json.dumps({"status": "ok" if well else "silent", "seconds_since_report": round(silent, 3)})
        return HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, "application/json", body.encode()


class Server:
    def __init__(self, local: bool) -> None:
        self.status, self.local, self.clients = Status(), local, 0
        self.html = Path(__file__).with_name("status.html").read_bytes()

    def answer(self, head: bytes) -> Answer:
        """To a request's first lines."""
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return _problem(HTTPStatus.BAD_REQUEST)
        if words[0] not in ("GET", "HEAD"):
            return _problem(HTTPStatus.METHOD_NOT_ALLOWED)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        host = headers.get("host", "localhost").lower()
        if self.local and (host if host.endswith("]") else host.rpartition(":")[0] or host) not in LOCAL:
            return _problem(HTTPStatus.FORBIDDEN)  # a page of another site that has this address given as its own
        path = words[1].partition("?")[0]
        if path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", self.html
        if path == "/status.json":
            return HTTPStatus.OK, "application/json", self.status.page()
        if path == "/metrics":
            return HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", self.status.metrics
        return self.status.health() if path == "/healthz" else _problem(HTTPStatus.NOT_FOUND)

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients += 1
        try:
            with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                while await self._request(reader, writer):
                    pass
        finally:
            self.clients -= 1
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the client may send another."""
        head, more = b"", False
        try:
            async with asyncio.timeout(PATIENCE):
                head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
            answer = self.answer(head) if self.clients <= MOST else _problem(HTTPStatus.SERVICE_UNAVAILABLE)
            bare = head.lower()
            more = answer[0] == HTTPStatus.OK and b"http/1.1" in bare and b"connection: close" not in bare
            more = more and b"content-length" not in bare and b"transfer-encoding" not in bare
        except asyncio.LimitOverrunError:
            answer = _problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        status, kind, body = answer
        allow = "Allow: GET, HEAD\r\n" if status == HTTPStatus.METHOD_NOT_ALLOWED else ""
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"{allow}{HEADERS}Connection: {'keep-alive' if more else 'close'}\r\n\r\n"
        )
        writer.write(lines.encode() + (b"" if head.startswith(b"HEAD ") else body))
        async with asyncio.timeout(PATIENCE):
            await writer.drain()
            if not more:  # let the client finish sending what nobody wants, so that it gets to read the answer
                writer.write_eof()
                while await reader.read(LONGEST):
                    pass
        return more


def _problem(status: HTTPStatus) -> Answer:
    return status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode()


async def serve(descriptor: int, host: str) -> None:
    server = Server(local=host in ("127.0.0.1", "::1", "localhost"))
    lines = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    listening = socket.socket(fileno=descriptor)
    async with await asyncio.start_server(server.client, sock=listening, limit=LONGEST):
        while line := await lines.readline():
            if line.endswith(b"\n"):
                server.status.take(line)
        os._exit(0)  # with the learner; clients that are still there are not waited for


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the console: the learner ends well, and this ends with it
    with suppress(OSError):
        os.nice(5)
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))

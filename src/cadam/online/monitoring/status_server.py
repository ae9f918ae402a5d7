"""The process behind the status page: an HTTP server that knows only what the learner has sent.

    python -I status_server.py DESCRIPTOR

DESCRIPTOR is a listening socket. Messages of the learner arrive on standard input, one JSON object per line, and the
process ends when standard input is closed. Only the standard library is imported, so the process starts quickly.

No path of a request is looked up on the disk. The size of a request, the time of a connection and the number of
connections are bounded, and every connection is closed after one answer. A new connection beyond the limit replaces the
oldest one, so that idle clients cannot keep others, such as a health check, from an answer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECONDS_PER_CONNECTION = 5.0
MAX_CONNECTIONS = 64
SECONDS_UNTIL_UNHEALTHY = 60.0
"""/healthz reports a failure if the learner has been silent for longer."""
MAX_HISTORY_POINTS = 600
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class Status:
    """The last message of the learner, and a history of points for the curves of the page."""

    def __init__(self) -> None:
        self.metrics = b""
        self.content: dict[str, Any] = {}
        self.last_message: dict[str, Any] = {}
        self.time_of_message = time.monotonic()
        self.points: list[dict[str, Any]] = []
        self._messages_per_point, self._messages = 1, 0

    def add(self, line: bytes) -> None:
        """Add a message of the learner."""
        message = self.last_message = json.loads(line)
        self.metrics, self.content = message["metrics"].encode(), message["status"]
        self.time_of_message = time.monotonic()
        if self._messages % self._messages_per_point == 0:
            self.points.append({"at": time.time(), **message["point"]})
        self._messages += 1
        if len(self.points) > MAX_HISTORY_POINTS:  # halve the resolution, so that the whole history is kept
            self.points, self._messages_per_point = self.points[::2], 2 * self._messages_per_point

    @property
    def seconds_silent(self) -> float:
        """The time since the last message of the learner."""
        return time.monotonic() - self.time_of_message

    def page_data(self) -> bytes:
        """Return what the page shows, as JSON."""
        return json.dumps({**self.content, "silent": self.seconds_silent, "points": self.points}).encode()

    def health(self) -> tuple[HTTPStatus, bytes]:
        """Return the status code and the body of /healthz."""
        is_healthy = self.seconds_silent < SECONDS_UNTIL_UNHEALTHY
        text = "ok" if is_healthy else "silent"
        body = json.dumps({"status": text, "seconds_since_report": round(self.seconds_silent, 3)}).encode()
        return HTTPStatus.OK if is_healthy else HTTPStatus.SERVICE_UNAVAILABLE, body


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version, sys_version = "cadam", ""
    default_request_version = "HTTP/1.0"  # the default, HTTP/0.9, would answer invalid requests without a status line

    def do_GET(self) -> None:
        """Answer a GET request."""
        path = self.path.partition("?")[0]
        status = self.server.status
        if not path.startswith("/"):
            self.send_error(HTTPStatus.BAD_REQUEST)
        elif self.server.is_local and not self._has_local_host():
            # A website could let its own name resolve to 127.0.0.1, to read this page in a visitor's browser.
            self.send_error(HTTPStatus.FORBIDDEN)
        elif path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif path == "/status.json":
            self._send(HTTPStatus.OK, "application/json", status.page_data())
        elif path == "/metrics":
            self._send(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", status.metrics)
        elif path == "/healthz":
            code, body = status.health()
            self._send(code, "application/json", body)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        """Answer a HEAD request; `_send` leaves out the body."""
        self.do_GET()

    def parse_request(self) -> bool:
        """Read the request, and reject all methods except GET and HEAD."""
        if not super().parse_request():
            return False
        if self.command in ("GET", "HEAD"):
            return True
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        return False

    def _has_local_host(self) -> bool:
        """Whether the Host header names this machine."""
        host = self.headers.get("Host", "localhost").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return name in LOCAL_HOSTS

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        """Add the headers that every answer has."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the standard error of this process is that of the learner."""


class Server(ThreadingHTTPServer):
    """An HTTP server with one thread per connection, and limits for their number and duration."""

    def __init__(self, listener: socket.socket) -> None:
        host = listener.getsockname()[0]
        super().__init__((host, 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.status = Status()
        self.is_local = host in ("127.0.0.1", "::1")
        self.page = Path(__file__).with_name("status.html").read_bytes()
        self._free_connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._start_times: dict[socket.socket, float] = {}
        """When each open connection was accepted, oldest first."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection. If there are too many, the oldest one is closed first."""
        if not self._free_connections.acquire(blocking=False):
            for oldest in list(self._start_times)[:1]:
                self._disconnect(oldest)
            self._free_connections.acquire()  # the thread of a closed connection ends at once
        self._start_times[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._start_times.pop(request, None)
            self._free_connections.release()

    def service_actions(self) -> None:
        """Close connections whose time is over. The loop of the server calls this method at least twice a second."""
        for request, start in list(self._start_times.items()):
            if time.monotonic() - start > SECONDS_PER_CONNECTION:
                self._disconnect(request)

    def _disconnect(self, request: socket.socket) -> None:
        """End all waiting for a client, after which the thread of its connection closes the socket."""
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of a connection, such as a client that disconnects too early."""


def main() -> None:
    """Serve until standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C goes to the learner, which closes standard input when it ends
    with suppress(OSError):
        os.nice(5)
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):
            server.status.add(line)
    os._exit(0)  # ends the process without waiting for open connections


if __name__ == "__main__":
    main()

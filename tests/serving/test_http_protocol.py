"""Connections of hostile and slow clients: they are refused or closed, and others get their answers meanwhile."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from cadam.serving import http_protocol
from cadam.serving.app import Api
from cadam.serving.http_protocol import BoundedProtocol
from tests.serving.service_process import logged, running, wait_for
from tests.serving.test_app import EVENT, build

MAX_CONNECTIONS = 40


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a front in this process that accepts few connections."""
    monkeypatch.setattr(http_protocol, "SECONDS_BETWEEN_SWEEPS", 0.05)
    monkeypatch.setattr(BoundedProtocol, "max_connections", MAX_CONNECTIONS)
    monkeypatch.setattr(BoundedProtocol, "_open", {})
    monkeypatch.setattr(BoundedProtocol, "_sweeper", None)
    state = build(tmp_path)
    state.start()
    options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None}
    server = uvicorn.Server(uvicorn.Config(Api(state).app(), http=BoundedProtocol, **options))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    wait_for(lambda: server.started, 60)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(60)
    state.close()
    listener.close()


def talk(port: int, *parts: bytes) -> bytes:
    """Send bytes on a new connection, and return everything that comes back until it is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


def is_answered(port: int) -> bool:
    return httpx.post(f"http://127.0.0.1:{port}/predict", json=EVENT, timeout=60).status_code == 200


def test_huge_headers_are_refused(port: int) -> None:
    start, line = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b"X-Filler: " + b"a" * 1000 + b"\r\n"
    assert talk(port, start, b"X-Filler: " + b"a" * (8 << 20)).startswith(b"HTTP/1.1 431")
    assert talk(port, start, *[line] * 40).startswith(b"HTTP/1.1 431")
    assert talk(port, b"GET /" + b"a" * (1 << 20)).startswith(b"HTTP/1.1 431")
    assert b"HTTP/1.1 200" in talk(port, start, *[line] * 20, b"Connection: close\r\n\r\n")
    assert is_answered(port)


def test_a_client_that_keeps_sending_huge_headers_is_disconnected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "SECONDS_FOR_HEADERS", 0.3)

    def send_until_disconnected() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            for _ in range(100_000):
                connection.sendall(b"X-Filler: " + b"a" * 10_000)

    with pytest.raises(ConnectionError):
        send_until_disconnected()
    assert is_answered(port)


def test_headers_after_a_chunked_body_are_limited(port: int) -> None:
    start = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = json.dumps(EVENT).encode()
    line = b"X-Filler: " + b"a" * 1000 + b"\r\n"

    def send(*parts: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            for part in (start, b"%x\r\n%b\r\n0\r\n" % (len(body), body), *parts):
                connection.sendall(part)

    for parts in ([line] * 20_000, [b"X-Filler: ", *[b"a" * 1000] * 20_000]):
        with pytest.raises(ConnectionError):
            send(*parts)
    byte_by_byte = b"".join(b"1\r\n%c\r\n" % character for character in body + b" " * 60_000) + b"0\r\n\r\n"
    close = start.replace(b"Host", b"Connection: close\r\nHost")
    assert talk(port, close, *(byte_by_byte[at : at + 1000] for at in range(0, len(byte_by_byte), 1000))).startswith(
        b"HTTP/1.1 200"
    )


def test_headers_that_arrive_too_slowly_close_the_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "SECONDS_FOR_HEADERS", 0.3)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(20)]
        for number, connection in enumerate(slow):
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"[: 2 * number])
        assert is_answered(port), "others are answered meanwhile"
        for connection in slow:
            with suppress(ConnectionResetError):
                assert connection.recv(100) == b""
    assert wait_for(lambda: not BoundedProtocol._open, 60)


def test_idle_connections_beyond_the_limit_make_room_for_new_ones(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=60)))
        assert is_answered(port)
        assert len(BoundedProtocol._open) <= MAX_CONNECTIONS


@pytest.mark.parametrize("path", ["/../events.db", "/../../etc/passwd", "/%2e%2e%2fevents.db", "/..\\events.db"])
def test_raw_paths_lead_to_no_file(port: int, path: str) -> None:
    answer = talk(port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))
    assert b"SQLite" not in answer
    assert b"root:" not in answer


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET /model HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", b"403"),
        (b"POST /learn HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", b"403"),
        (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n", b"400"),
    ],
)
def test_malformed_requests_and_wrong_hosts_are_refused(
    port: int, tmp_path: Path, request_text: bytes, status: bytes
) -> None:
    assert talk(port, request_text).startswith(b"HTTP/1.1 " + status)
    assert is_answered(port)
    assert len(logged(tmp_path, "event")) == 1


@pytest.mark.slow
def test_10000_connections_of_slow_clients_do_not_keep_others_from_an_answer(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 10_500:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 10_500), hard))
    with running(tmp_path / "service") as service, ExitStack() as stack:
        address = ("127.0.0.1", int(service.url.rstrip("/").rpartition(":")[2]))
        for number in range(10_000):
            connection = stack.enter_context(closing(socket.create_connection(address, timeout=60)))
            with suppress(ConnectionError):
                connection.sendall(b"POST /predict HTTP/1.1\r\n"[: number % 24])
            if number % 1000 == 999:
                answer = httpx.post(service.url + "predict", json={"item": "a", "price": 1}, timeout=60)
                assert answer.status_code == 200
        assert httpx.get(service.url + "healthz", timeout=60).status_code == 200
        assert len(service.children("front")) == 1
        assert "has ended" not in (service.folder / "output.txt").read_text()
        service.stop()

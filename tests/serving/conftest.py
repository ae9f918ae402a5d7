"""Tests in one process exchange no files through shared memory, where they would stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cadam.serving import config

if TYPE_CHECKING:
    from tests.online.redis_server import Server


@pytest.fixture(autouse=True)
def _private_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "SHARED_MEMORY", tmp_path)


@pytest.fixture(scope="session")
def _shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.online.redis_server import Server

    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_server(_shared_redis: Server) -> Server:
    """An empty Redis server whose answers mean that the data are on disk."""
    client = _shared_redis.client
    client.flushall()
    client.config_set("appendfsync", "always")
    client.config_set("maxmemory", "0")
    return _shared_redis

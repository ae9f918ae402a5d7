"""A service in its own processes, and an independent look at what it has stored."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import torch

from cadam.online.persistence.checkpoints import read_newest
from cadam.serving.config import ServiceConfig
from cadam.serving.event_log import URI_FILE, open_log
from cadam.serving.learner_process import build_learner
from cadam.serving.log_source import LogSource

FREQUENT_CHECKPOINTS = """
import sys
from dataclasses import replace
from cadam.cli import serve
from cadam.cli.main import main
read_config = serve.read_config
serve.read_config = lambda options: replace(read_config(options), checkpoint_seconds=0.3)
sys.exit(main(sys.argv[1:]))
"""
"""A `cadam` whose services save a checkpoint several times a second, so that a restart finds one from the middle."""
SCHEMA = {"features": {"item": "hash:50", "price": "number?"}, "label": "click"}


class Service:
    """A running `cadam serve`."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        schema: dict[str, Any] | None = None,
        program: Sequence[str] = ("-m", "cadam"),
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "schema.json").exists():
            (folder / "schema.json").write_text(json.dumps(schema or SCHEMA))
        self.command = [sys.executable, *program, "serve", str(folder), "--address", "0", *options]
        if "--schema" not in options:
            self.command += ["--schema", str(folder / "schema.json"), "--model", "linear"]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.log = open(self.folder / "output.txt", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self.log, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line.startswith("serving "), (self.folder / "output.txt").read_text()
        self.url = line.split()[1]
        port = self.url.rstrip("/").rpartition(":")[2]  # a restart has the same address
        self.command[self.command.index("--address") + 1] = port
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        wait_for(lambda: is_ready(self.url), 60)

    def child(self, name: str) -> int:
        """Return the id of a process: learner_process or front."""
        return wait_for(lambda: self._find_child(name), 30)

    def _find_child(self, name: str) -> int | None:
        return next(iter(self.children(name)), None)

    def children(self, name: str) -> list[int]:
        """Return the ids of all processes of a name."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = []
        for child in map(int, children):
            with suppress(OSError):
                if f"cadam.serving.{name}".encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
        return found

    def kill(self, name: str) -> None:
        os.kill(self.child(name), signal.SIGKILL)

    def config(self) -> ServiceConfig:
        """Return the configuration that the learner was started with."""
        words = Path(f"/proc/{self.child('learner_process')}/cmdline").read_bytes().split(b"\0")
        return ServiceConfig.from_json(words[3].decode())

    def wait_until_learned(self) -> None:
        """Wait until the learner has read the whole log."""
        log = open_log(self.folder)
        last = log.last_number()
        log.close()
        wait_for(lambda: f"cadam_log_position {last:.1f}" in httpx.get(self.url + "metrics").text, 60)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, (self.folder / "output.txt").read_text()
        self.log.close()

    def abandon(self) -> None:
        """End the service if a test has not done so, and delete what it has left in shared memory."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(ServiceConfig(str(self.folder), "linear", {}).runtime_folder(), ignore_errors=True)


@contextmanager
def running(folder: Path, *options: str, **arguments: Any) -> Iterator[Service]:
    service = Service(folder, *options, **arguments)
    try:
        yield service
    finally:
        service.abandon()


def is_ready(url: str) -> bool:
    """Whether a service answers predictions. Connections wait until it has started."""
    try:
        return httpx.get(f"{url.rstrip('/')}/readyz", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for(condition: Any, seconds: float) -> Any:
    """Return the first true value of a condition."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def logged(folder: Path, kind: str) -> list[tuple[Any, str]]:
    """Read ids and bodies of the log without the code of the service."""
    if (folder / URI_FILE).exists():
        import redis

        server, _, stream = (folder / URI_FILE).read_text().strip().rpartition("/")
        with redis.Redis.from_url(server, decode_responses=True) as client:
            fields: Any = [fields for _, fields in cast(Any, client.xrange(stream))]
        return [(json.loads(entry["id"]), entry["body"]) for entry in fields if entry["kind"] == kind]
    connection = sqlite3.connect(f"file:{folder / 'events.db'}?mode=ro", uri=True)
    try:
        return connection.execute("SELECT id, body FROM entries WHERE kind = ? ORDER BY number", (kind,)).fetchall()
    finally:
        connection.close()


def replay(config: ServiceConfig, folder: Path) -> None:
    """Learn the log of a service again in another folder, from its beginning and without a disturbance."""
    folder.mkdir()
    for name in ("schema.json", "model.json", "events.db", "events.db-wal", URI_FILE):
        if (config.path / name).exists():
            shutil.copy(config.path / name, folder / name)
    copy = replace(config, folder=str(folder))
    learner = build_learner(copy)
    try:
        log = open_log(copy.path, is_durable=False)
        learner.run(LogSource(log, copy.schema(), follow=False, rollbacks=log.rollbacks()))
        log.close()
    finally:
        learner.close()


def assert_same_state(folder: Path, other: Path) -> dict[str, Any]:
    """Compare the newest checkpoints of two folders bit by bit, and return the first."""
    (_, saved), (_, state) = read_newest(folder), read_newest(other)
    assert saved["source"] == state["source"]
    same = {name: value for name, value in saved["counts"].items() if name != "saves"}
    assert same == {name: state["counts"][name] for name in same}
    for name, value in saved["model"].items():
        assert torch.equal(value, state["model"][name]), name
    assert saved["optimizer"]["state"].keys() == state["optimizer"]["state"].keys()
    for key, values in saved["optimizer"]["state"].items():
        for name, value in values.items():
            expected = state["optimizer"]["state"][key][name]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected)), (key, name)
    assert saved["arms"]["champion"] == state["arms"]["champion"]
    assert saved["arms"]["challengers"].keys() == state["arms"]["challengers"].keys()
    for name, challenger in saved["arms"]["challengers"].items():
        other_challenger = state["arms"]["challengers"][name]
        for weight, value in challenger["learner"]["model"].items():
            assert torch.equal(value, other_challenger["learner"]["model"][weight]), (name, weight)
        assert repr(challenger["scores"]) == repr(other_challenger["scores"])
    assert saved["pending"]["number_of"]["keys"].tolist() == state["pending"]["number_of"]["keys"].tolist()
    return dict(saved)

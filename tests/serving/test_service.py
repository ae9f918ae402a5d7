"""A service as its users meet it: it predicts, learns, survives kill -9, and refuses what it cannot use."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadam.online.models.model_file import UsageError
from cadam.serving import front
from cadam.serving.client import AsyncClient, Client, Retries, ServiceError
from cadam.serving.config import ServiceConfig
from cadam.serving.supervisor import Supervisor
from tests.serving.service_process import (
    FREQUENT_CHECKPOINTS,
    Service,
    assert_same_state,
    logged,
    replay,
    running,
    wait_for,
)

EVENT = {"item": "a", "price": 2.0}
PATIENT = Retries(attempts=600, pause=0.05, longest_pause=0.2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("shared") / "service", "--refresh", "50ms", "--workers", "2") as started:
        yield started


def test_a_label_changes_the_next_prediction(service: Service) -> None:
    with Client(service.url) as client:
        [before] = client.predict([EVENT])
        assert client.feedback({before.id: 1}) == {"repeated": [], "accepted": 1, "unknown": []}
        wait_for(lambda: client.model()["version"] != before.model_version, 60)
        [after] = client.predict([EVENT])
        assert after.score > before.score
        assert after.probability is not None
        assert 0 < after.probability < 1
        assert client.feedback({before.id: 0})["repeated"] == [before.id], "the first label counts"


def test_clients_for_threads_and_for_asyncio_agree(service: Service) -> None:
    async def use() -> None:
        async with AsyncClient(service.url) as client:
            [learned] = await client.learn([{**EVENT, "event_id": "asynchronous", "click": 1}])
            assert learned.id == "asynchronous"
            assert (await client.feedback({"asynchronous": 1}))["repeated"] == ["asynchronous"]
            assert (await client.model())["model"] == "linear"
            with pytest.raises(ServiceError, match="none of the model's columns"):
                await client.predict([{"prize": 1}])

    asyncio.run(use())
    with Client(service.url) as client, pytest.raises(ServiceError) as caught:
        client.learn([{**EVENT, "click": 1}, {**EVENT, "click": 2}])
    assert caught.value.status == 422
    assert caught.value.details == [{"index": 1, "column": "click", "error": "click: 2.0 is not from 0 to 1"}]


def test_metrics_and_the_status_page_are_there(service: Service) -> None:
    names = ["cadam_staleness_seconds", "cadam_learner_up 1", "cadam_learned", "cadam_request_seconds_bucket"]
    names += ["cadam_guard_enabled 1", 'cadam_served_version{version="']

    def missing() -> list[str]:
        text = httpx.get(service.url + "metrics").text
        return [name for name in names if name not in text]

    wait_for(lambda: not missing(), 60)  # the learner reports its metrics soon after the service is ready
    assert "<title>cadam</title>" in httpx.get(service.url).text
    assert wait_for(lambda: httpx.get(service.url + "status.json").json().get("samples"), 60)


def test_two_front_processes_share_requests_and_metrics(service: Service) -> None:
    assert len(service.children("front")) == 2

    def count_predictions() -> float:
        line = r'cadam_requests_total\{path="/predict",status="200"\} (\S+)'
        return float(next(iter(re.findall(line, httpx.get(service.url + "metrics").text)), 0))

    before = count_predictions()
    for number in range(20):  # each on a new connection, which either process may accept
        event = {**EVENT, "event_id": f"shared {number}"}
        assert httpx.post(service.url + "predict", json=event).status_code == 200
        repeated = httpx.post(service.url + "predict", json=event).json()
        assert repeated["repeated"] == [f"shared {number}"], "the log is shared"
    assert [count_predictions() for _ in range(6)] == [before + 40] * 6


def test_the_files_of_metrics_have_no_holes(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that writes to a hole of a mapped file is killed if the shared memory is full."""
    httpx.get(service.url + "metrics")
    environment = Path(f"/proc/{service.child('front')}/environ").read_text().split("\0")
    [folder] = [words.partition("=")[2] for words in environment if words.startswith("PROMETHEUS_MULTIPROC_DIR=")]
    files = list(Path(folder).glob("*.db"))
    assert {path.name.rpartition("_")[0] for path in files} == set(front.METRIC_FILES)
    assert [path.stat().st_blocks * 512 for path in files] == [front.METRIC_FILE_BYTES] * 2 * len(front.METRIC_FILES)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(service.folder / "absent"))
    front.reserve_metric_files()
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ


def test_a_second_service_in_the_folder_is_refused(service: Service) -> None:
    with pytest.raises(UsageError, match="another cadam serve runs"):
        Supervisor(service.config(), "127.0.0.1", 0)


class Load:
    """Threads that predict and send labels to a service, across its restarts, and record what was acknowledged."""

    def __init__(self, service: Service, threads: int = 2) -> None:
        self.service, self._stop = service, threading.Event()
        self.count = 0
        """The number of acknowledged requests with labels, more or less."""
        self._pool = ThreadPoolExecutor(threads)
        self._loads = [self._pool.submit(self._send, random.Random(seed)) for seed in range(threads)]

    def _send(self, generator: random.Random) -> dict[Any, int]:
        acknowledged: dict[Any, int] = {}
        with Client(self.service.url, retries=PATIENT, timeout=5) as client:
            while not self._stop.is_set():
                events = [{"item": generator.randrange(20), "price": generator.random()} for _ in range(3)]
                predictions = client.predict(events)
                labels = {prediction.id: generator.randrange(2) for prediction in predictions[:2]}
                client.feedback(labels)
                acknowledged |= labels
                self.count += 1
                time.sleep(0.002)
        return acknowledged

    def end(self) -> dict[Any, int]:
        """Return the labels that were acknowledged."""
        self._stop.set()
        acknowledged = {key: label for load in self._loads for key, label in load.result(120).items()}
        self._pool.shutdown()
        return acknowledged


def check_kills(folder: Path, lives: int, kills: int, seed: int = 0, redis: Any = None) -> None:
    """Kill processes under load, then compare what was acknowledged with the log, and the state with a replay.

    In each life of the service, fronts and learners are killed a number of times, and at last the supervisor. More
    kills in one life would wait for the pauses that the supervisor makes before it starts a process that died soon. If
    the log is in Redis, its server is killed too.
    """
    generator = random.Random(seed)
    options = ["--refresh", "50ms", "--challenger", "adam"]
    options += [] if redis is None else ["--log", f"{redis.url}/clicks"]
    program = ("-c", FREQUENT_CHECKPOINTS)
    with running(folder / "service", *options, program=program) as service:
        config, load = service.config(), Load(service)
        for _ in range(lives):
            for _ in range(kills):
                time.sleep(generator.uniform(0.05, 2.5))
                name = generator.choice(["front", "learner_process", *([] if redis is None else ["redis"])])
                if name == "redis":
                    redis.kill()
                    time.sleep(generator.uniform(0, 0.5))
                    redis.start()
                else:
                    service.kill(name)
            time.sleep(generator.uniform(0.05, 2.5))
            service.process.kill()  # its processes notice this and end
            service.process.wait()
            service.start()
        acknowledged = load.end()
        service.wait_until_learned()
        service.stop()
    check_log_and_state(config, acknowledged, folder / "replayed")


def check_log_and_state(config: ServiceConfig, acknowledged: dict[Any, int], replayed: Path) -> None:
    """Check that acknowledged labels are in the log, and that the service has learned all of the log exactly once."""
    entries = logged(config.path, "label")
    labels = {key: float(body) for key, body in entries}
    assert len(acknowledged) > 10
    assert len(entries) == len(labels)
    assert {key: labels.get(key) for key in acknowledged} == acknowledged
    events = {key for key, _ in logged(config.path, "event")}
    replay(config, replayed)
    saved = assert_same_state(config.path, replayed)
    assert saved["counts"]["learned_events"] == len(events & labels.keys())
    assert saved["pending"]["counts"]["repeated_labels"] == 0, "the log removes repeated labels before the learner"


def test_killed_processes_lose_nothing_and_learn_nothing_twice(tmp_path: Path) -> None:
    check_kills(tmp_path, lives=1, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_processes_killed_at_50_moments_lose_nothing_and_learn_nothing_twice(tmp_path: Path, seed: int) -> None:
    check_kills(tmp_path, lives=2, kills=4, seed=seed)


@pytest.mark.slow
def test_with_a_log_in_redis_killed_processes_lose_nothing_and_learn_nothing_twice(tmp_path: Path) -> None:
    from tests.online.redis_server import Server

    server = Server(tmp_path, "--appendfsync", "always")
    try:
        check_kills(tmp_path, lives=3, kills=4, redis=server)
    finally:
        server.stop()


@pytest.mark.slow
def test_a_full_disk_loses_nothing_and_what_was_accepted_is_learned_once(tmp_path: Path) -> None:
    disk, filler = tmp_path / "disk", tmp_path / "disk" / "filler"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs the right to mount it")
    options = ("--refresh", "50ms", "--challenger", "adam", "--challenger", "cadam:lr=0.01")
    try:
        with running(disk / "service", *options, program=("-c", FREQUENT_CHECKPOINTS)) as service:
            config, load = service.config(), Load(service)
            for free, victim in ((0, None), (200_000, "learner_process"), (500_000, "front")):
                count = load.count
                wait_for(lambda count=count: load.count > count + 50, 60)
                fill(filler, free)
                wait_for(lambda: httpx.post(service.url + "predict", json=EVENT).status_code == 503, 60)
                if victim is not None:
                    service.kill(victim)
                time.sleep(3)
                filler.unlink()
            count = load.count
            wait_for(lambda: load.count > count + 50, 60)
            acknowledged = load.end()
            service.wait_until_learned()
            service.stop()
        check_log_and_state(config, acknowledged, tmp_path / "replayed")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(path: Path, free: int) -> None:
    """Fill a disk with a file, and leave a number of bytes free."""
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(path, max(0, path.stat().st_size - free))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("st") is None, reason="st of schemathesis, from any environment, is not on the path")
def test_schemathesis_finds_no_error(tmp_path: Path) -> None:
    features = {
        "item": "hash:50",
        "price": "number?",
        "shop": "category:4",
        "title": "words:20[3]",
        "tags": "hash:9[2]?",
    }
    (tmp_path / "token").write_text("0123456789abcdef")
    options = ("--token-file", str(tmp_path / "token"), "--challenger", "adam")
    with running(tmp_path / "service", *options, schema={"features": features, "label": "rating>=4"}) as service:
        header = ["-H", "Authorization: Bearer 0123456789abcdef"]
        command = ["st", "run", f"{service.url}openapi.json", *header, "--checks", "all", "--warnings", "off"]
        # The description does not tell every text and every item that a list may have.
        command += ["--exclude-checks", "negative_data_rejection,positive_data_acceptance"]
        command += ["--max-time", "90", "--seed", "1", "--continue-on-failure"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-6000:]
        service.stop()


def test_a_front_that_is_started_again_has_the_token_of_the_start(tmp_path: Path) -> None:
    path, token = tmp_path / "token", {"Authorization": "Bearer 0123456789abcdef"}
    path.write_text("0123456789abcdef")
    with running(tmp_path / "service", "--token-file", str(path)) as service:
        for change in (lambda: path.write_text("another token of 16 and more"), path.unlink):
            change()
            first = service.child("front")
            service.kill("front")
            wait_for(lambda first=first: service.child("front") != first, 30)
            service.wait_until_ready()
            learned = {**EVENT, "click": 1}
            assert httpx.post(service.url + "learn", json=learned).status_code == 401
            assert httpx.post(service.url + "learn", json=learned, headers=token).status_code == 200
        service.stop()
    assert len(logged(tmp_path / "service", "label")) == 2


def test_rollback_forgets_labels_and_keeps_events(service: Service) -> None:
    with Client(service.url) as client:
        versions = httpx.get(service.url + "versions").json()["versions"]
        assert versions[0]["name"] == "0"
        client.learn([{**EVENT, "click": 1}])
        wait_for(lambda: client.model()["learned"] > 0, 60)
        event = {"item": "rolled back", "price": 1.0}
        [before] = client.predict([event])
        client.learn([{**event, "click": 1} for _ in range(100)])
        wait_for(lambda: client.predict([event])[0].score > before.score, 60)
        assert httpx.post(service.url + "rollback", json={"version": "17"}).status_code == 404
        assert httpx.post(service.url + "rollback", json={"version": "0"}).status_code == 200
        wait_for(lambda: client.model()["version"].endswith("-r1"), 30)
        assert client.model()["learned"] == 0
        client.feedback({before.id: 1})  # the event before the rollback still waits for its label
        wait_for(lambda: client.model()["learned"] == 1, 60)

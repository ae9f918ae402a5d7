"""A service as its users meet it: it predicts, learns, survives kill -9, and refuses what it cannot use."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadam.serving.client import AsyncClient, Client, Retries, ServiceError
from tests.serving.service_process import Service, assert_same_state, logged, replay, running, wait_for

EVENT = {"item": "a", "price": 2.0}
PATIENT = Retries(attempts=200, pause=0.05, longest_pause=0.2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("shared") / "service", "--refresh", "50ms") as started:
        yield started


def test_a_label_changes_the_next_prediction(service: Service) -> None:
    with Client(service.url) as client:
        [before] = client.predict([EVENT])
        assert client.feedback({before.id: 1}) == {"repeated": [], "accepted": 1, "unknown": []}
        wait_for(lambda: client.model()["version"] != before.model_version, 20)
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
    text = httpx.get(service.url + "metrics").text
    for name in ("cadam_staleness_seconds", "cadam_learner_up 1", "cadam_learned", "cadam_request_seconds_bucket"):
        assert name in text
    assert "<title>cadam</title>" in httpx.get(service.url).text
    assert wait_for(lambda: httpx.get(service.url + "status.json").json().get("samples"), 20)


def test_a_second_service_in_the_folder_is_refused(service: Service) -> None:
    import subprocess

    done = subprocess.run([*service.command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "another cadam serve runs" in done.stderr


def load(service: Service, seconds: float, seed: int) -> dict[str, Any]:
    """Predict and send labels until the time is over; return the labels that were acknowledged."""
    generator = random.Random(seed)
    acknowledged = {}
    end = time.monotonic() + seconds
    with Client(service.url, retries=PATIENT, timeout=5) as client:
        while time.monotonic() < end:
            events = [{"item": generator.randrange(20), "price": generator.random()} for _ in range(3)]
            predictions = client.predict(events)
            labels = {prediction.id: generator.randrange(2) for prediction in predictions[:2]}
            client.feedback(labels)
            acknowledged |= labels
    return acknowledged


def check_kills(folder: Path, kills: int, seconds_between: float) -> None:
    """Kill processes under load, then compare what was acknowledged with the log, and the state with a replay."""
    generator = random.Random(0)
    with running(folder / "service", "--refresh", "50ms") as service, ThreadPoolExecutor(2) as pool:
        config = service.config()
        seconds = 2 + kills * seconds_between
        loads = [pool.submit(load, service, seconds, seed) for seed in range(2)]
        for _ in range(kills):
            time.sleep(seconds_between * generator.uniform(0.5, 1))
            service.kill(generator.choice(["front", "learner_process"]))
        acknowledged = loads[0].result() | loads[1].result()
        service.wait_until_ready()
        service.wait_until_learned()
        service.stop()
    labels = {key: float(body) for key, body in logged(service.folder, "label")}
    assert len(acknowledged) > 10
    assert {key: labels.get(key) for key in acknowledged} == acknowledged
    events = {key for key, _ in logged(service.folder, "event")}
    replay(config, folder / "replayed")
    saved = assert_same_state(service.folder, folder / "replayed")
    assert saved["counts"]["learned_events"] == len(events & labels.keys())
    assert saved["pending"]["counts"]["repeated_labels"] == 0, "the log removes repeated labels before the learner"


def test_killed_processes_lose_nothing_and_learn_nothing_twice(tmp_path: Path) -> None:
    check_kills(tmp_path, kills=3, seconds_between=2)


@pytest.mark.slow
def test_processes_killed_at_50_moments_lose_nothing_and_learn_nothing_twice(tmp_path: Path) -> None:
    check_kills(tmp_path, kills=50, seconds_between=3)


def test_a_killed_supervisor_takes_its_processes_along_and_the_service_continues(tmp_path: Path) -> None:
    with running(tmp_path / "service") as service:
        with Client(service.url) as client:
            client.learn([{**EVENT, "event_id": "first", "click": 1}])
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
        service.start()
        with Client(service.url) as client:
            assert client.feedback({"first": 1})["repeated"] == ["first"]
            wait_for(lambda: client.model()["learned"] == 1, 20)
        service.stop()


def test_rollback_forgets_labels_and_keeps_events(tmp_path: Path) -> None:
    with running(tmp_path / "service", "--refresh", "50ms") as service:
        with Client(service.url) as client:
            [before] = client.predict([EVENT])
            versions = httpx.get(service.url + "versions").json()["versions"]
            assert [version["name"] for version in versions] == ["0"]
            client.learn([{**EVENT, "click": 1} for _ in range(100)])
            wait_for(lambda: client.predict([EVENT])[0].score > before.score, 20)
            assert httpx.post(service.url + "rollback", json={"version": "17"}).status_code == 404
            assert httpx.post(service.url + "rollback", json={"version": "0"}).status_code == 200
            wait_for(lambda: client.model()["version"].endswith("-r1"), 30)
            [rolled_back] = client.predict([EVENT])
            assert rolled_back.score == pytest.approx(before.score, abs=1e-6)
            [pending] = client.predict([EVENT])
            client.feedback({pending.id: 1})
            wait_for(lambda: client.model()["learned"] == 1, 20)
        service.stop()


def test_the_token_is_needed_and_a_wrong_one_teaches_nothing(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef0123\n")
    with running(tmp_path / "service", "--token-file", str(token_file)) as service:
        for headers in ({}, {"Authorization": "Bearer 0123456789abcdef012"}, {"Authorization": "Basic OjAx"}):
            answer = httpx.post(service.url + "learn", json={**EVENT, "click": 1}, headers=headers)
            assert answer.status_code == 401
            assert httpx.get(service.url + "metrics", headers=headers).status_code == 401
        assert logged(service.folder, "label") == []
        with Client(service.url, token="0123456789abcdef0123") as client:
            assert len(client.learn([{**EVENT, "click": 1}])) == 1
        assert httpx.get(service.url, auth=("me", "0123456789abcdef0123")).status_code == 200
        assert len(logged(service.folder, "label")) == 1
        service.stop()


def test_threads_of_a_client_share_a_connection_pool(service: Service) -> None:
    results: list[int] = []

    def use() -> None:
        with Client(service.url) as client:
            results.append(len(client.predict([EVENT] * 10)))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [10] * 8

"""The HTTP interface in one process, without a learner: what it refuses, and that nothing makes it fail."""

from __future__ import annotations

import asyncio
import json
import math
import random
import resource
import string
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from cadam.online import models
from cadam.online.data.schema import Schema
from cadam.online.run_config import RunConfig
from cadam.serving import front_state
from cadam.serving.app import Api
from cadam.serving.client import Retries, _Requests
from cadam.serving.config import Limits, ServiceConfig
from cadam.serving.event_log import EventLog, LogUnavailableError
from cadam.serving.front_state import FrontState
from cadam.serving.log_source import LogSource
from cadam.serving.snapshots import SNAPSHOT_FILE, SnapshotInfo, write_snapshot
from cadam.serving.sqlite_log import SqliteLog
from tests.serving.service_process import logged

SCHEMA = Schema(
    {"item": "hash:50", "price": "number?", "shop": "category:4", "title": "words:20[3]", "tags": "hash:9[2]?"},
    label="rating>=4",
    id="key",
    highest=1,
)
EVENT = {"key": 1, "item": "a", "price": 2.0, "shop": 3, "title": "red shoes", "tags": ["x"]}


def build(folder: Path, schema: Schema = SCHEMA, **options: Any) -> FrontState:
    """Create the state of a front process whose learner has published one snapshot."""
    torch.manual_seed(0)
    RunConfig("", schema, "linear", lambda: models.build("linear", schema), torch.nn.BCEWithLogitsLoss(), {}).write(
        folder
    )
    config = ServiceConfig(str(folder), "linear", {}, **options)
    SqliteLog(folder / "events.db").close()
    info = SnapshotInfo(0, 0, 0, 0, 0, time.time())
    weights = models.build("linear", config.schema()).state_dict()
    write_snapshot(config.runtime_folder() / SNAPSHOT_FILE, weights, info)
    state = FrontState(config)
    assert state.model.refresh()
    return state


@pytest.fixture
def state(tmp_path: Path) -> Iterator[FrontState]:
    state = build(tmp_path)
    state.start()
    yield state
    state.close()


def client_of(state: FrontState) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Api(state).app(), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def talk(state: FrontState, conversation: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with client_of(state) as client:
            await conversation(client)

    asyncio.run(run())


def post(state: FrontState, path: str, content: Any, **options: Any) -> httpx.Response:
    answers: list[httpx.Response] = []

    async def conversation(client: httpx.AsyncClient) -> None:
        answers.append(await client.post(path, json=content, **options))

    talk(state, conversation)
    return answers[0]


@pytest.mark.parametrize(
    ("change", "column", "reason"),
    [
        ({"price": "cheap"}, "price", "is not a number"),
        ({"shop": 4}, "shop", "4"),
        ({"shop": None}, "shop", "missing field 'shop'"),
        ({"key": "x"}, "key", "key"),
        ({"tags": 3}, "tags", "tags"),
    ],
)
def test_an_event_that_does_not_fit_names_its_column(
    state: FrontState, change: dict[str, Any], column: str, reason: str
) -> None:
    answer = post(state, "/predict", [EVENT, {**EVENT, "key": 2, **change}])
    assert answer.status_code == 422
    [detail] = answer.json()["details"]
    assert (detail["index"], detail["column"]) == (1, column)
    assert reason in detail["error"]
    assert post(state, "/predict", EVENT).status_code == 200
    assert [key for key, _ in logged(state.config.path, "event")] == [1]


def test_a_request_is_used_as_a_whole_or_not_at_all(state: FrontState) -> None:
    assert post(state, "/learn", [{**EVENT, "rating": 5}]).status_code == 200
    assert post(state, "/learn", [{**EVENT, "key": 2, "rating": 5}, {**EVENT, "key": 3}]).status_code == 422
    assert [key for key, _ in logged(state.config.path, "event")] == [1]
    assert logged(state.config.path, "label") == [(1, "5")]


def test_a_challenger_is_promoted_by_its_name(state: FrontState) -> None:
    assert post(state, "/promote", {"version": "1"}).status_code == 400
    answer = post(state, "/promote", {"challenger": "adam"})
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True), "the learner has not reported yet"
    state.status.last_message["challengers"] = []
    answer = post(state, "/promote", {"challenger": "adam"})
    assert answer.status_code == 404
    assert "the challengers: none" in answer.json()["error"]
    state.status.last_message["challengers"] = ["Adam:lr=0.003", "CAdam:lr=0.01", "CAdam:lr=0.1"]
    assert post(state, "/promote", {"challenger": "cadam"}).status_code == 404, "there are two"
    for name in ("adam", "CAdam:lr=0.1"):
        assert post(state, "/promote", {"challenger": name}).status_code == 200
    log = SqliteLog(state.config.path / "events.db")
    assert [promotion.challenger for promotion in log.promotions()] == ["Adam:lr=0.003", "CAdam:lr=0.1"]
    log.close()


def test_a_promotion_counts_before_the_learner_has_reported_it(state: FrontState) -> None:
    state.status.last_message |= {"champion": "CAdam:lr=0.003", "challengers": ["Adam:lr=0.003", "Lion:lr=0.001"]}
    state.status.last_message |= {"promotions": 0, "failed": ["Lion:lr=0.001"]}
    assert post(state, "/promote", {"challenger": "adam"}).json() == {"champion": "Adam:lr=0.003"}
    answer = post(state, "/promote", {"challenger": "adam"})
    assert answer.status_code == 404
    assert "the challengers: CAdam:lr=0.003, Lion:lr=0.001" in answer.json()["error"]
    assert post(state, "/promote", {"challenger": "cadam"}).json() == {"champion": "CAdam:lr=0.003"}
    assert "has failed" in post(state, "/promote", {"challenger": "lion"}).json()["error"]


def test_a_label_among_the_columns_of_a_prediction_is_not_stored(state: FrontState) -> None:
    assert post(state, "/predict", {**EVENT, "rating": "anything"}).status_code == 200
    [(_, body)] = logged(state.config.path, "event")
    assert "rating" not in json.loads(body)
    assert logged(state.config.path, "label") == []


def test_the_time_of_a_request_is_that_of_the_service(state: FrontState) -> None:
    name = state.batcher.time_column
    assert name is not None
    assert post(state, "/predict", {**EVENT, name: 1e12}).status_code == 200
    [(_, body)] = logged(state.config.path, "event")
    assert abs(json.loads(body)[name] - time.time()) < 3600
    assert name not in Api(state)._openapi["components"]["schemas"]["Event"]["properties"]


def test_the_id_of_a_nested_object_is_the_id_of_the_event(tmp_path: Path) -> None:
    state = build(tmp_path, Schema({"item": "hash:50"}, label="click", id="request.id:text"))
    state.start()
    event = {"item": "a", "request": {"id": "r1"}}
    assert post(state, "/learn", {**event, "click": 1}).json()["predictions"][0]["id"] == "r1"
    assert post(state, "/predict", event).json()["repeated"] == ["r1"]
    for value in ({}, {"id": None}):
        assert len(post(state, "/predict", {"item": "a", "request": value}).json()["predictions"][0]["id"]) == 32
    assert "the id is empty" in post(state, "/predict", {**event, "request.id": ""}).json()["error"]
    assert logged(state.config.path, "label") == [("r1", "1")]
    state.close()


def test_clients_give_ids_only_to_events_without_one() -> None:
    requests = _Requests("http://localhost", None, "request.id", Retries(), 1)
    events: list[dict[str, Any]] = [{"request": {"id": 5}}, {"request.id": "a"}]
    assert requests.with_ids(events) == events
    new = requests.with_ids([{"request": {}}, {"request.id": None}, {"request": "id"}])
    assert len({event["request.id"] for event in new}) == 3


def test_columns_that_the_schema_does_not_have_are_named(state: FrontState, caplog: pytest.LogCaptureFixture) -> None:
    misspelled = {"key": 1, "item": "a", "prize": 2.0, "shop": 3, "title": "red shoes", "tag\n": ["x"], "rating": 5}
    expected = [f"the schema has no column {name}: it is not used" for name in ("'prize'", r"'tag\\n'")]
    for _ in range(2):
        answer = post(state, "/predict", [{**misspelled, "key": 2}, EVENT, misspelled]).json()
        assert answer["warnings"] == expected
    assert post(state, "/learn", misspelled).json()["warnings"] == expected
    assert [record.message.partition(": ")[2] for record in caplog.records if "unknown" in record.message] == expected
    for path, event in (("/predict", EVENT), ("/learn", {**EVENT, "rating": 5})):
        assert "warnings" not in post(state, path, event).json()
    warnings = post(state, "/predict", [{**EVENT, f"column {n}": 1} for n in range(300)]).json()["warnings"]
    assert warnings[-1] == "the schema does not have 280 more columns"
    assert len(warnings) == 21
    assert len([record for record in caplog.records if "unknown" in record.message]) == 200


def test_the_columns_of_the_service_and_of_nested_objects_are_known(tmp_path: Path) -> None:
    state = build(tmp_path, Schema({"shop.city": "hash:50", "price": "number?"}, label="click"))
    state.start()
    for event in (
        {"shop": {"city": "Rome", "country": "it"}},
        {"shop.city": "Rome", "event_id": "e", "received_at": 1},
    ):
        assert "warnings" not in post(state, "/predict", {**event, "click": 1}).json()
    assert post(state, "/predict", {"shop": {"city": "Rome"}, "city": "Rome"}).json()["warnings"]
    state.close()


def test_repeated_ids_are_stored_once(state: FrontState) -> None:
    first = post(state, "/predict", [EVENT, EVENT]).json()
    again = post(state, "/predict", EVENT).json()
    assert first["repeated"] == again["repeated"] == [1]
    assert post(state, "/feedback", {"id": 1, "label": 5}).json()["accepted"] == 1
    assert post(state, "/feedback", [{"id": 1, "label": 2}, {"id": 9, "label": 2}]).json() == {
        "repeated": [1],
        "accepted": 1,
        "unknown": [9],
    }
    assert logged(state.config.path, "label") == [(1, "5"), (9, "2")]


def test_unknown_fields_of_a_label_are_refused(state: FrontState) -> None:
    assert post(state, "/feedback", {"id": 1, "click": 1}).json()["details"][0]["column"] is None
    assert post(state, "/feedback", {"id": 1}).json()["details"][0]["column"] == "label"
    assert post(state, "/feedback", {"label": 1}).json()["details"][0]["column"] == "id"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"3", b"[3]", b"{", b"\xff", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[" * 9999]
)
def test_a_body_that_is_not_events_is_refused(state: FrontState, body: bytes) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await client.post("/predict", content=body)).status_code == 400

    talk(state, conversation)


def test_limits_of_size_and_number(tmp_path: Path) -> None:
    state = build(tmp_path, limits=Limits(body=2000, events=3, waiting=5, seconds=0.5))

    async def conversation(client: httpx.AsyncClient) -> None:
        async def endless() -> Any:
            for _ in range(100):
                yield b" " * 100

        async def slow() -> Any:
            yield b"["
            await asyncio.sleep(1.5)
            yield b"]"

        assert (await client.post("/predict", content=b" " * 3000)).status_code == 413
        assert (await client.post("/predict", content=endless())).status_code == 413
        assert (await client.post("/predict", json=[EVENT] * 4)).status_code == 413
        assert (await client.post("/predict", content=slow())).status_code == 408
        # The thread that answers is not running, so requests wait until their number is too large.
        waiting = [asyncio.create_task(client.post("/predict", json=[EVENT] * 3)) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        [refused] = [task.result() for task in done]
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        await asyncio.sleep(0.7)
        state.batcher.start()
        statuses = [answer.status_code for answer in await asyncio.gather(*waiting)]
        assert statuses == [503, 503], "the other request has waited longer than the limit"
        assert (await client.post("/predict", json=EVENT)).status_code == 200

    talk(state, conversation)
    assert len(logged(tmp_path, "event")) == 1


def test_a_full_disk_is_answered_with_503_and_recovered_from(
    state: FrontState, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert post(state, "/predict", EVENT).status_code == 200
    original = SqliteLog.append

    def full(self: EventLog, entries: Any) -> None:
        raise LogUnavailableError("database or disk is full")

    monkeypatch.setattr(SqliteLog, "append", full)
    answer = post(state, "/predict", {**EVENT, "key": 2})
    assert answer.status_code == 503
    assert "disk is full" in answer.json()["error"]
    monkeypatch.setattr(SqliteLog, "append", original)
    assert post(state, "/predict", {**EVENT, "key": 2}).json()["repeated"] == []


def test_hosts_and_origins_of_websites_are_refused(state: FrontState) -> None:
    assert post(state, "/predict", EVENT, headers={"Host": "evil.example"}).status_code == 403
    assert post(state, "/predict", EVENT, headers={"Origin": "http://evil.example"}).status_code == 403
    assert post(state, "/predict", EVENT, headers={"Origin": "http://localhost"}).status_code == 200
    assert len(logged(state.config.path, "event")) == 1


def test_without_the_token_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123")
    state = build(tmp_path, token_file=str(tmp_path / "token"))
    state.start()
    right = {"Authorization": "Bearer 0123456789abcdef0123"}
    for headers in (
        {},
        {"Authorization": "Bearer 0123456789abcdef012"},
        {"Authorization": "Basic !"},
        {"Authorization": ""},
    ):
        answer = post(state, "/learn", {**EVENT, "rating": 5}, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic")
    assert post(state, "/learn", {**EVENT, "rating": 5}, headers=right).status_code == 200
    assert len(logged(tmp_path, "label")) == 1
    basic = httpx.BasicAuth("anyone", "0123456789abcdef0123")

    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await client.get("/status.json", auth=basic)).status_code == 200
        assert (await client.get("/model")).status_code == 401
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.post("/predict", json=EVENT, auth=basic)).status_code == 401

    talk(state, conversation)
    state.close()


def test_a_host_that_looks_like_an_open_path_does_not_replace_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123")
    state = build(tmp_path, token_file=str(tmp_path / "token"))
    state.start()
    for host in ("x/healthz?", "x/readyz#", "localhost/healthz?a="):
        assert post(state, "/learn", {**EVENT, "rating": 5}, headers={"Host": host}).status_code == 401
    assert logged(tmp_path, "label") == []
    state.close()


def test_numbers_that_json_does_not_have_are_refused(state: FrontState) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        event = json.dumps(EVENT)[:-1]
        for path, body, reason in (
            ("/predict", f'{event}, "other": [1e999]}}', "not finite"),
            ("/predict", json.dumps(EVENT).replace("2.0", "1e999"), "price: inf is not finite"),
            ("/learn", f'{event}, "rating": 1e999}}', "rating"),
            ("/feedback", '{"id": 1, "label": -1e999}', "label"),
        ):
            answer = await client.post(path, content=body)
            assert answer.status_code in (400, 422), (body, answer.content)
            assert reason in answer.json()["error"]

    talk(state, conversation)
    assert logged(state.config.path, "event") == logged(state.config.path, "label") == []


def test_what_is_nested_deeply_is_refused_or_learned(state: FrontState) -> None:
    """An event that a front accepts and a learner cannot read would end each learner that is started."""
    accepted = 0

    async def conversation(client: httpx.AsyncClient) -> None:
        nonlocal accepted
        for depth in (*range(10, 1200, 30), 20_000):
            for start, end in (("[", "]"), ('{"a":', "}")):
                body = json.dumps({**EVENT, "key": depth, "tags": 0}).replace("0}", f"{start * depth}0{end * depth}}}")
                other = json.dumps({**EVENT, "key": depth + 1}).replace(
                    "}", f', "other": {start * depth}0{end * depth}}}'
                )
                assert (await client.post("/predict", content=body)).status_code in (400, 422)
                status = (await client.post("/predict", content=other)).status_code
                assert status in (200, 400, 422)
                accepted += status == 200

    talk(state, conversation)
    assert accepted > 10
    log = SqliteLog(state.config.path / "events.db")
    learned = 0
    for batch in LogSource(log, state.config.schema(), follow=False):
        assert batch is not None
        assert batch.events is not None
        assert batch.events.ids is not None
        assert not batch.rejected
        learned += len(batch.events.ids)
    assert learned == len(logged(state.config.path, "event")) > 10
    log.close()


@pytest.mark.parametrize("path", ["/../events.db", "/%2e%2e/events.db", "/events.db", "//etc/passwd", "/predict/"])
def test_no_path_leads_to_a_file(state: FrontState, path: str) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        answer = await client.get(path)
        assert answer.status_code in (404, 405, 307)
        assert b"SQLite" not in answer.content

    talk(state, conversation)


def test_a_front_that_is_started_again_predicts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_state, "POLL_SECONDS", 60.0)
    state = FrontState(build(tmp_path).config)
    state.start()
    assert post(state, "/predict", EVENT).status_code == 200
    state.close()


def test_before_the_first_snapshot_the_service_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = build(tmp_path)
    state.model.info = None
    state.batcher.start()

    async def conversation(client: httpx.AsyncClient) -> None:
        for answer in (
            await client.get("/readyz"),
            await client.get("/model"),
            await client.post("/predict", json=EVENT),
        ):
            assert answer.status_code == 503
            assert "retry-after" in answer.headers

    talk(state, conversation)


def test_metrics_are_answered_without_the_folder_in_which_fronts_share_them(
    state: FrontState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(state.config.path / "deleted"))

    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await client.post("/predict", json=EVENT)).status_code == 200
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert 'cadam_requests_total{path="/predict",status="200"}' in answer.text

    talk(state, conversation)


def test_probabilities_are_corrected_for_downsampled_negatives(tmp_path: Path) -> None:
    state = build(tmp_path, replace(SCHEMA, negative_rate=0.1))
    state.start()
    [prediction] = post(state, "/predict", EVENT).json()["predictions"]
    state.close()
    sampled = 1 / (1 + math.exp(-prediction["score"]))
    assert prediction["probability"] == pytest.approx(sampled / (sampled + (1 - sampled) / 0.1))


def test_the_description_has_the_columns(state: FrontState) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        description = (await client.get("/openapi.json")).json()
        event = description["components"]["schemas"]["Event"]
        assert event["properties"]["shop"] == {"type": ["integer"], "minimum": 0, "maximum": 3}
        assert event["properties"]["title"] == {"type": ["string", "number", "boolean"]}
        assert set(event["required"]) == {"item", "shop", "title"}
        predictions = description["components"]["schemas"]["Predictions"]
        assert predictions["properties"]["warnings"] == {"type": "array", "items": {"type": "string"}}
        assert "warnings" not in predictions["required"]
        assert {"/predict", "/learn", "/feedback", "/model", "/rollback", "/promote"} <= description["paths"].keys()

    talk(state, conversation)


# Random bodies ---------------------------------------------------------------------------------------------------


def random_value(generator: random.Random, depth: int = 0) -> Any:
    choices: list[Callable[[], Any]] = [
        lambda: None,
        lambda: generator.choice([True, False]),
        lambda: generator.randrange(-5, 60),
        lambda: generator.choice([10**30, -(2**63), 2**64, 1e308, -1e-300, 0.5, 3.0]),
        lambda: "".join(generator.choice(string.printable + "\ud800\0é") for _ in range(generator.randrange(9))),
        lambda: generator.choice(["5", "nan", "2013-01-31", "true", ""]),
    ]
    if depth < 3:
        choices += [
            lambda: [random_value(generator, depth + 1) for _ in range(generator.randrange(4))],
            lambda: {
                str(random_value(generator, 3)): random_value(generator, depth + 1)
                for _ in range(generator.randrange(3))
            },
        ]
    return generator.choice(choices)()


def random_body(generator: random.Random) -> bytes:
    records = []
    for _ in range(generator.randrange(4)):
        record: dict[str, Any] = dict(EVENT, key=generator.randrange(100_000), rating=5)
        for name in generator.sample([*record, "id", "label", "extra"], generator.randrange(4)):
            record[name] = random_value(generator)
        if generator.random() < 0.4:
            record = {"id": random_value(generator), "label": random_value(generator)}
        records.append(record)
    content = generator.choice([records, records[0] if records else {}, random_value(generator)])
    body = json.dumps(content).encode()
    if generator.random() < 0.2:
        position = generator.randrange(len(body) + 1)
        body = body[:position] + bytes(generator.randrange(256) for _ in range(2)) + body[position + 1 :]
    return body


def check_random_bodies(state: FrontState, count: int, seed: int = 1) -> None:
    generator, statuses = random.Random(seed), dict[int, int]()

    async def conversation(client: httpx.AsyncClient) -> None:
        for _ in range(count):
            path = generator.choice(["/predict", "/learn", "/feedback", "/rollback", "/promote"])
            answer = await client.post(path, content=random_body(generator))
            assert answer.status_code in (200, 400, 404, 422), (path, answer.content)
            if answer.status_code != 200:
                assert answer.json()["error"]
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

    talk(state, conversation)
    assert {200, 400, 422} <= statuses.keys()
    assert state.is_alive()


def test_random_bodies_never_fail_the_service(state: FrontState) -> None:
    check_random_bodies(state, 1000)


@pytest.mark.slow
def test_many_random_bodies_neither_fail_the_service_nor_fill_its_memory(state: FrontState) -> None:
    check_random_bodies(state, 20_000)
    before = resident_bytes()
    check_random_bodies(state, 80_000, seed=2)
    assert resident_bytes() < before + (20 << 20)


def resident_bytes() -> int:
    """Return the memory of this process."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        pytest.skip("only Linux tells the memory of a process in this file")
    return int(statistics.read_text().split()[1]) * resource.getpagesize()

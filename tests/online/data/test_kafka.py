"""A real Kafka broker and the learner are killed alternately: no message is lost, and none is used twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest

from cadam.cli import main
from cadam.online import Schema
from tests.online.kafka_broker import Broker, Named, fill, settings
from tests.online.learner_process import BATCH, COUNT, records
from tests.online.streams import ITEMS

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
pytestmark = pytest.mark.slow
KILLS = 12


@pytest.fixture(scope="module", params=["started here", "named"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker | Named]:
    if request.param == "named":
        yield Named()
        return
    started = Broker(tmp_path_factory.mktemp("kafka"))
    yield started
    started.stop()


class Killer(threading.Thread):
    """Kill a broker that was started here at random times, and restart it; an external broker is left alone."""

    def __init__(self, broker: Broker | Named) -> None:
        super().__init__()
        self.broker, self.over, self.kills = broker, threading.Event(), 0
        self.failed: BaseException | None = None

    def run(self) -> None:
        chance = random.Random(0)
        while isinstance(self.broker, Broker) and not self.over.wait(chance.uniform(0.5, 4)):
            try:
                self.broker.kill()
                self.kills += 1
                time.sleep(chance.uniform(0, 2))
                self.broker.start()
            except BaseException as error:  # The test reports it.
                self.failed = error
                return


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_schema_is_inferred_from_the_first_messages_of_a_topic_and_all_messages_are_learned_from(
    broker: Broker | Named, partitions: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(0)
    topic = f"inferred-{partitions}-{os.getpid()}-{time.time_ns()}"
    broker.create(topic, partitions)
    uri = f"kafka://{broker.servers}/{topic}" + (f"?{urlencode(settings())}" if settings() else "")
    rows = [
        {
            "time": 1_700_000_000 + 60 * row,
            "user_id": chance.randrange(40),
            "item_id": f"item-{chance.randrange(30)}",
            "price": round(chance.lognormvariate(0, 1), 2),
            "tags": chance.sample(["new", "sale", "far", "red"], chance.randrange(4)),
            "click": chance.randrange(2),
        }
        for row in range(3000)
    ]
    if partitions == 1:
        assert main.main(["schema", uri, "--label", "click", "--output", str(tmp_path / "none.json")]) == 2
        assert "no messages yet" in capsys.readouterr().err
    fill(broker.servers, topic, rows, partitions)
    assert main.main(["schema", uri, "--label", "click", "--output", str(tmp_path / "schema.json")]) == 0
    print(shown := capsys.readouterr().out)
    assert shown.startswith(f"kafka://{broker.servers}/{topic}: Kafka topic, the first 3,000 messages")
    schema = Schema.read(tmp_path / "schema.json")
    assert (schema.label, schema.user, schema.time) == ("click", "user_id", "time")
    assert {name: str(kind).partition(":")[0] for name, kind in schema.features.items()} == {
        "time": "clock?", "user_id": "hash", "item_id": "hash", "price": "number?", "tags": "hash",
    }  # fmt: skip
    assert schema.kinds["tags"].length == 3
    folder = tmp_path / "state"
    assert main.main(["run", uri, "--label", "click", "--checkpoint", str(folder), "--log", str(tmp_path / "log")]) == 0
    assert pq.read_table(tmp_path / "log").num_rows == len(rows)
    missing = uri.replace(topic, "no-such-topic-here")
    if isinstance(broker, Broker):  # This broker creates topics on request.
        return
    assert main.main(["schema", missing, "--label", "click", "--output", str(tmp_path / "none.json")]) == 2
    assert "no-such-topic-here" in capsys.readouterr().err


@pytest.mark.parametrize("partitions", [1, 3])
def test_no_message_is_lost_or_used_twice_while_broker_and_learner_are_killed(
    broker: Broker | Named, partitions: int, tmp_path: Path
) -> None:
    topic = f"clicks-{partitions}-{os.getpid()}-{time.time_ns()}"
    broker.create(topic, partitions)
    rows = records()
    rows += [rows[-1]] * (-len(rows) % BATCH)  # The last batch must be full, or the source would wait for it.
    fill(broker.servers, topic, rows, partitions)
    killer = Killer(broker)
    script = Path(__file__).parents[1] / "learner_process.py"
    command: list[str | Path] = [
        sys.executable,
        script,
        "kafka",
        f"{broker.servers}/{topic}",
        tmp_path / "runs",
        str(KILLS),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    lines = [process.stdout.readline()]  # The run that is not killed.
    killer.start()
    try:
        rest, errors = process.communicate(timeout=600)
    finally:
        process.kill()
        killer.over.set()
        killer.join()
    assert process.returncode == 0, errors
    assert killer.failed is None
    whole, *killed = map(json.loads, [*lines, *rest.splitlines()])
    dealt = sum(run["kills"] for run in killed)
    print(
        f"\npartitions {partitions}, messages {len(rows)}, events {COUNT}: {len(killed)} runs were killed {dealt} times"
    )
    print(f"  while the broker was killed {killer.kills} times")
    assert sum(run.pop("kills") for run in [whole, *killed]) >= KILLS
    assert killer.kills >= (2 if isinstance(broker, Broker) else 0)
    if partitions == 1:  # Messages have one order, so runs are bitwise equal.
        assert all(run == whole for run in killed)
    usable = {row["event"]: 1 for row in rows if "user" in row and row["item"] < ITEMS}
    for folder in sorted((tmp_path / "runs").iterdir()):
        seen = Counter(pq.read_table(folder / "log")["id"].to_pylist())
        assert seen == usable, f"{folder}: {len(usable)} events, {sum(seen.values())} in the log"

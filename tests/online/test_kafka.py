"""A real Kafka broker, killed in turn with the learner: no message is lost, none counts twice."""

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

import pyarrow.parquet as pq
import pytest
from online_kafka import Broker, Named, fill
from online_process import BATCH, COUNT, records
from online_streams import ITEMS

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
    """Kills a broker now and then, and starts it again; one that was only named goes on."""

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
            except BaseException as error:  # the test says it
                self.failed = error
                return


@pytest.mark.parametrize("partitions", [1, 3])
def test_broker_and_learner_are_killed_in_turn_and_nothing_is_lost_or_comes_twice(
    broker: Broker | Named, partitions: int, tmp_path: Path
) -> None:
    topic = f"clicks-{partitions}-{os.getpid()}-{time.time_ns()}"
    broker.create(topic, partitions)
    rows = records()
    rows += [rows[-1]] * (-len(rows) % BATCH)  # whole batches, so that the last one is not waited for
    fill(broker.servers, topic, rows, partitions)
    killer = Killer(broker)
    script = Path(__file__).with_name("online_process.py")
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
    lines = [process.stdout.readline()]  # the run that nobody disturbs
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
    if partitions == 1:  # there is one order, so every bit is the same
        assert all(run == whole for run in killed)
    usable = {row["event"]: 1 for row in rows if "user" in row and row["item"] < ITEMS}
    for folder in sorted((tmp_path / "runs").iterdir()):
        seen = Counter(pq.read_table(folder / "log")["id"].to_pylist())
        assert seen == usable, f"{folder}: {len(usable)} events, {sum(seen.values())} in the log"

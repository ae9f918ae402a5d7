"""Events from a Kafka topic."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ..events import Batch
from ..schema import Schema
from .base import Source, check_batch_size, check_state, is_power_of_two
from .column_watch import ColumnWatch
from .records import Message, convert_messages, sample_messages
from .sample import MAX_MESSAGES, Sample, SamplingError

logger = logging.getLogger("cadam.online")

PREFETCH_KILOBYTES = 65_536
"""The amount of data that the client may fetch in advance."""
PARTITION_CHECK_SECONDS = 60.0
"""The time between checks for new partitions."""
ELECTION_SECONDS = 30.0
"""The time to wait for a topic without a leader, which is normal after a restart of its broker."""
SAMPLE_SECONDS = 10.0
"""The time for which a topic is read for a sample."""
IS_ANOTHER_TOPIC = "it is another topic of the same name, or it has lost messages"


class ClientLog:
    """A logger for librdkafka, which repeats each problem many times: its lines are logged as debug messages."""

    last_problem = ""
    """The last line that was a warning or worse."""

    def log(self, level: int, message: str, *arguments: Any) -> None:
        """Log a line as a debug message."""
        logger.debug(message, *arguments)
        if level >= logging.WARNING:
            text = message % arguments if arguments else message
            self.last_problem = text.rpartition("]: ")[2].strip()


class KafkaSource(Source):
    """The messages of a Kafka topic, which must be JSON objects. The position is one offset per partition.

    Offsets are not committed to Kafka. The learner's checkpoint alone determines the position, so each message is used
    exactly once. Messages of one partition keep their order. The order between partitions depends on time, so repeated
    runs over several partitions are not bitwise equal.

    If the brokers go away, the source waits for them. If they were never there, that is an error unless the source
    follows the topic. Messages that were removed before they were read cause a warning. If the offsets of a topic have
    gone back below the position, this is logged as an error, and the topic is read from its new beginning.

    Args:
        servers: The value of Kafka's ``bootstrap.servers``.
        topic: The name of the topic.
        schema: The schema of the events.
        batch_size: The number of messages per batch.
        follow: Whether to wait for new messages at the end of all partitions. New partitions are detected within about
            a minute and read from their beginning.
        patience: The number of seconds to wait for a full batch before a smaller one is produced. None: wait as long as
            it takes.
        max_bytes: The size of the largest message; larger ones are rejected.
        poll: The number of seconds that one request waits for messages.
        settings: Further settings of librdkafka's consumer, for example for security.
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        schema: Schema,
        *,
        batch_size: int = 1024,
        follow: bool = False,
        patience: float | None = 1.0,
        max_bytes: int = 1 << 20,
        poll: float = 0.2,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import confluent_kafka as kafka
        except ImportError as error:
            raise ImportError("Kafka needs confluent-kafka: pip install confluent-kafka") from error
        check_batch_size(batch_size)
        self.servers, self.topic, self.schema, self.batch_size, self.follow = servers, topic, schema, batch_size, follow
        self.patience, self.max_bytes, self.poll, self.location = patience, max_bytes, poll, topic
        self.offsets: dict[int, int] = {}
        """The offset of the next message by partition."""
        self._gap_count = self._error_count = 0
        self._is_assigned = False
        self._client_log = ClientLog()
        self._watch = ColumnWatch(schema, topic)
        defaults = {
            "bootstrap.servers": servers,
            # Kafka requires a group, but it has no effect because partitions are assigned explicitly.
            "group.id": "cadam",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "queued.max.messages.kbytes": PREFETCH_KILOBYTES,
            "error_cb": self._log_error,
        }
        try:
            self.consumer = kafka.Consumer({**defaults, **(settings or {})}, logger=self._client_log)
        except (kafka.KafkaException, TypeError, ValueError) as error:
            names = ", ".join(settings or ()) or "only the defaults"
            raise ValueError(f"Kafka does not accept the settings ({names}): {_message_of(error)}") from error

    @classmethod
    def from_uri(cls, uri: str, schema: Schema, **options: Any) -> KafkaSource | None:
        """Open ``kafka://HOST[:PORT]/TOPIC[?servers=...&setting=...]``."""
        parts = urlsplit(uri)
        topic, query = parts.path.lstrip("/"), dict(parse_qsl(parts.query))
        if not parts.netloc or not topic:
            return None
        servers = ",".join(filter(None, [parts.netloc, query.pop("servers", None)]))
        return cls(servers, topic, schema, settings=query, **options)

    def __iter__(self) -> Iterator[Batch | None]:
        import confluent_kafka as kafka

        yield from self._assign()
        held: list[Message] = []
        offsets, ended = dict(self.offsets), set[int]()
        waiting_since = last_check = time.monotonic()
        while True:
            if self.follow and time.monotonic() - last_check > PARTITION_CHECK_SECONDS:
                self._add_new_partitions(offsets)
                last_check = time.monotonic()
            messages = self.consumer.consume(self.batch_size - len(held), self.poll)
            for message in messages:
                error, partition, offset = message.error(), message.partition() or 0, message.offset()
                is_end = error is not None and error.code() == kafka.KafkaError._PARTITION_EOF
                if (error is None or is_end) and offset is not None and offset < offsets[partition]:
                    logger.error(
                        "%s, partition %d continues at offset %d, before the position %d: %s, and is read from there",
                        *(self.topic, partition, offset, offsets[partition], IS_ANOTHER_TOPIC),
                    )
                    offsets[partition] = offset
                    if not held:
                        self.offsets = dict(offsets)
                if error is None:
                    assert offset is not None
                    if not held:
                        waiting_since = time.monotonic()
                    if offset > offsets[partition] > 0:
                        self._warn_of_gap(partition, offsets[partition], offset)
                    where = f"{self.topic}, partition {partition}, offset {offset}"
                    held.append(Message(where, text=message.value() or b""))
                    offsets[partition] = offset + 1
                    ended.discard(partition)
                elif is_end:
                    ended.add(partition)
                elif error.fatal():
                    raise ConnectionError(
                        f"Kafka at {self.servers} stopped reading {self.topic!r} with a fatal error: {error.str()}. "
                        "Check the brokers and the settings, then start again"
                    )
                else:
                    logger.error("Kafka: %s", error)
            is_over = not self.follow and ended == offsets.keys()
            is_late = self.patience is not None and time.monotonic() - waiting_since > self.patience
            if len(held) == self.batch_size or (held and not messages and is_late) or (held and is_over):
                self.offsets = dict(offsets)
                batch = convert_messages(held, self.schema, self.max_bytes)
                self._watch.check_batch(batch)
                yield batch
                held = []
            elif is_over:
                return
            elif not messages:
                yield None

    def sample(self) -> Sample:
        """Return the first messages of the topic."""
        import confluent_kafka as kafka

        messages: list[Message] = []
        ended: set[int] = set()
        try:
            for _ in self._assign():
                pass
            deadline = time.monotonic() + SAMPLE_SECONDS
            while len(messages) < MAX_MESSAGES and time.monotonic() < deadline and len(ended) < len(self.offsets):
                for message in self.consumer.consume(MAX_MESSAGES - len(messages), 0.5):
                    error = message.error()
                    if error is None:
                        messages.append(Message(f"offset {message.offset()}", text=message.value() or b""))
                    elif error.code() == kafka.KafkaError._PARTITION_EOF:
                        ended.add(message.partition() or 0)
        finally:
            self.close()
        if not messages:
            raise SamplingError(f"no schema can be inferred, because the topic {self.topic!r} has no messages yet")
        return sample_messages(messages, self.max_bytes, f"Kafka topic, the first {len(messages):,} messages sampled")

    def _assign(self) -> Iterator[None]:
        """Assign every partition at its position. Waits for the brokers if necessary."""
        import confluent_kafka as kafka

        start, attempts = time.monotonic(), 0
        while True:
            attempts += 1
            try:
                partitions = self._list_partitions()
            except kafka.KafkaException as error:
                is_electing = error.args[0].code() == kafka.KafkaError.LEADER_NOT_AVAILABLE
                if not self.follow and not (is_electing and time.monotonic() - start < ELECTION_SECONDS):
                    raise ConnectionError(
                        f"Kafka cannot be reached at {self.servers}: {self._describe(error)}. Check the address, or "
                        "wait for the brokers with follow"
                    ) from error
                if is_power_of_two(attempts):
                    logger.error("Kafka is away, waiting for it: %s", self._describe(error))
                time.sleep(self.poll)
                yield None
                continue
            removed = sorted(self.offsets.keys() - set(partitions))
            if removed:
                logger.error("%s no longer has the partitions %s: %s", self.topic, removed, IS_ANOTHER_TOPIC)
            self.offsets = {partition: self.offsets.get(partition, 0) for partition in partitions}
            self.consumer.assign(
                [
                    kafka.TopicPartition(self.topic, partition, offset or kafka.OFFSET_BEGINNING)
                    for partition, offset in self.offsets.items()
                ]
            )
            self._is_assigned = True
            return

    def _describe(self, error: Exception) -> str:
        """Return the description of an error, with the last problem that the client logged, which names the cause."""
        self.consumer.poll(0)  # The client passes on what it logged, and it calls `_log_error`.
        cause = f" ({self._client_log.last_problem})" if self._client_log.last_problem else ""
        return f"{_message_of(error)}{cause}"

    def _log_error(self, error: Any) -> None:
        """Log the 1st, 2nd, 4th, ... error of the client, once a broker was reached. `_assign` reports those before."""
        self._error_count += self._is_assigned
        if self._is_assigned and is_power_of_two(self._error_count):
            logger.error("Kafka: %s (seen %d times)", error.str(), self._error_count)

    def _list_partitions(self) -> list[int]:
        """Return the current partitions of the topic.

        A broker that was just restarted has no leader for a topic yet, or does not know the topic yet. This is reported
        as a KafkaException, for which `_assign` waits; an unknown topic only if the topic existed before.
        """
        import confluent_kafka as kafka

        topic = self.consumer.list_topics(self.topic, timeout=5).topics[self.topic]
        temporary = {kafka.KafkaError.LEADER_NOT_AVAILABLE}
        if self.follow and self.offsets:
            temporary.add(kafka.KafkaError.UNKNOWN_TOPIC_OR_PART)
        if topic.error is not None and topic.error.code() in temporary:
            raise kafka.KafkaException(topic.error)
        if topic.error is not None or not topic.partitions:
            raise FileNotFoundError(f"Kafka has no topic {self.topic!r}: {topic.error}")
        return sorted(topic.partitions)

    def _add_new_partitions(self, offsets: dict[int, int]) -> None:
        """Assign partitions that were added to the topic, from their beginning."""
        import confluent_kafka as kafka

        try:
            new = [partition for partition in self._list_partitions() if partition not in offsets]
        except (kafka.KafkaException, FileNotFoundError) as error:
            logger.error("the check for new Kafka partitions failed: %s", error)
            return
        if new:
            self.consumer.incremental_assign([kafka.TopicPartition(self.topic, p, kafka.OFFSET_BEGINNING) for p in new])
            for positions in (offsets, self.offsets):
                positions.update(dict.fromkeys(new, 0))
            logger.info("%s has new partitions, which are read from their beginning: %s", self.topic, new)

    def _warn_of_gap(self, partition: int, expected: int, offset: int) -> None:
        self._gap_count += 1
        if is_power_of_two(self._gap_count):
            logger.warning(
                "%s, partition %d continues at offset %d after %d: the messages between them were removed by retention "
                "or compaction before they were read, or are markers of transactions (seen %d times)",
                *(self.topic, partition, offset, expected - 1, self._gap_count),
            )

    def backlog(self) -> int:
        """Return the number of messages that the brokers had at the last fetch and that were not read yet."""
        import confluent_kafka as kafka

        total = 0
        for partition, offset in self.offsets.items():
            _, end = self.consumer.get_watermark_offsets(kafka.TopicPartition(self.topic, partition), cached=True)
            total += max(0, end - offset)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the offsets of the next messages."""
        return {"source": "kafka", "topic": self.topic, "offsets": dict(self.offsets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        check_state(state, source="kafka", topic=self.topic)
        self.offsets = dict(state["offsets"])

    def close(self) -> None:
        """Close the connection to the brokers."""
        self.consumer.close()


def _message_of(error: Exception) -> str:
    """Return librdkafka's description of an error."""
    inner = error.args[0] if error.args else error
    return inner.str() if hasattr(inner, "str") else str(inner)

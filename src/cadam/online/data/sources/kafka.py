"""Events from a Kafka topic."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..events import Batch
from ..schema import Schema
from .base import Source, check_state, is_power_of_two
from .records import Record, batch_of

logger = logging.getLogger("cadam.online")

NEEDS = "Kafka needs confluent-kafka: pip install confluent-kafka"
QUEUED = 65_536  # kilobytes that the client may fetch ahead
MADE_ANEW = "it is another topic of that name, or has lost messages"
LOOK_EVERY = 60.0  # seconds between looks for new partitions
ELECTION = 30.0  # seconds that a topic without a leader is waited for, as after its broker was restarted


def _said(error: Exception) -> str:
    """What librdkafka says."""
    inner = error.args[0] if error.args else error
    return inner.str() if hasattr(inner, "str") else str(inner)


class KafkaSource(Source):
    """The messages of a Kafka topic: JSON objects. The position is an offset per partition, kept by the learner.

    Offsets are not committed to Kafka: the checkpoint alone says what has been learnt, so each message counts once. The
    order is that of Kafka within a partition; between partitions it depends on time, so a run over several partitions
    is not the same to the bit when it is repeated. Brokers that go away are waited for; with `follow` also those that
    were never there, which is an error otherwise. Messages that were removed before they were read are a warning.
    A topic whose offsets have gone back below the position is logged as an error, and read from where it now begins.

    Args:
        servers: as Kafka's ``bootstrap.servers``.
        follow: at the end of all partitions wait for more instead of ending; partitions that are added are found
            within a minute or so, and read from their beginning.
        patience: how many seconds to wait for a full batch before a short one is given; None: for ever.
        longest: bytes of the longest message that is looked at.
        settings: further settings of librdkafka's consumer, for security and the like.
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
        longest: int = 1 << 20,
        poll: float = 0.2,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import confluent_kafka as kafka
        except ImportError as error:
            raise ImportError(NEEDS) from error
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.servers, self.topic, self.schema, self.batch_size, self.follow = servers, topic, schema, batch_size, follow
        self.patience, self.longest, self.poll = patience, longest, poll
        self.offsets: dict[int, int] = {}  # of the next message, by partition
        self._gaps = 0
        own = {
            "bootstrap.servers": servers,
            "group.id": "cadam",  # named because it must be, not used: partitions are assigned by hand
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "queued.max.messages.kbytes": QUEUED,
        }
        try:
            self.consumer = kafka.Consumer({**own, **(settings or {})}, logger=logger)
        except (kafka.KafkaException, TypeError, ValueError) as error:
            given = ", ".join(settings or ()) or "none of its own"
            raise ValueError(f"Kafka does not take the settings ({given}): {_said(error)}") from error

    def __iter__(self) -> Iterator[Batch | None]:
        import confluent_kafka as kafka

        yield from self._assign()
        held: list[Record] = []
        offsets, ended = dict(self.offsets), set[int]()
        since = looked = time.monotonic()
        while True:
            if self.follow and time.monotonic() - looked > LOOK_EVERY:
                self._take_new(offsets)
                looked = time.monotonic()
            messages = self.consumer.consume(self.batch_size - len(held), self.poll)
            for message in messages:
                error, partition, offset = message.error(), message.partition() or 0, message.offset()
                at_end = error is not None and error.code() == kafka.KafkaError._PARTITION_EOF
                if (error is None or at_end) and offset is not None and offset < offsets[partition]:
                    self._say_it_went_back(partition, offsets[partition], offset)
                    offsets[partition] = offset
                    if not held:
                        self.offsets = dict(offsets)
                if error is None:
                    assert offset is not None  # a message has one
                    if not held:
                        since = time.monotonic()
                    if offset > offsets[partition] > 0:
                        self._warn_of_gap(partition, offsets[partition], offset)
                    where = f"{self.topic}, partition {partition}, offset {offset}"
                    held.append(Record(where, text=message.value() or b""))
                    offsets[partition] = offset + 1
                    ended.discard(partition)
                elif at_end:
                    ended.add(partition)
                elif error.fatal():
                    raise ConnectionError(
                        f"Kafka at {self.servers} ended reading {self.topic!r} with a fatal error: {error.str()}. "
                        "Check the brokers and the settings, then start again"
                    )
                else:
                    logger.error("Kafka: %s", error)
            over = not self.follow and ended == offsets.keys()
            late = self.patience is not None and time.monotonic() - since > self.patience
            if len(held) == self.batch_size or (held and not messages and late) or (held and over):
                self.offsets = dict(offsets)
                yield batch_of(held, self.schema, self.longest)
                held = []
            elif over:
                return
            elif not messages:
                yield None

    def _assign(self) -> Iterator[None]:
        """Take every partition, each from its position; wait for the brokers if need be."""
        import confluent_kafka as kafka

        began, attempts = time.monotonic(), 0
        while True:
            attempts += 1
            try:
                partitions = self._partitions()
            except kafka.KafkaException as error:
                electing = error.args[0].code() == kafka.KafkaError.LEADER_NOT_AVAILABLE
                if not self.follow and not (electing and time.monotonic() - began < ELECTION):
                    raise ConnectionError(
                        f"Kafka cannot be reached at {self.servers}: {error}. Check the address; with follow it is "
                        "waited for"
                    ) from error
                if is_power_of_two(attempts):
                    logger.error("Kafka is away, waiting for it: %s", _said(error))
                time.sleep(self.poll)
                yield None
                continue
            gone = sorted(self.offsets.keys() - set(partitions))
            if gone:
                logger.error("%s no longer has the partitions %s: %s", self.topic, gone, MADE_ANEW)
            self.offsets = {p: self.offsets.get(p, 0) for p in partitions}
            self.consumer.assign(
                [kafka.TopicPartition(self.topic, p, o or kafka.OFFSET_BEGINNING) for p, o in self.offsets.items()]
            )
            return

    def _partitions(self) -> list[int]:
        """Those of the topic, as the brokers have them now.

        A broker that has just come back has no leader for a topic, or does not know yet what it had: that is no reason
        to end, where the topic was there before.
        """
        import confluent_kafka as kafka

        topic = self.consumer.list_topics(self.topic, timeout=5).topics[self.topic]
        passing = {kafka.KafkaError.LEADER_NOT_AVAILABLE}
        if self.follow and self.offsets:
            passing.add(kafka.KafkaError.UNKNOWN_TOPIC_OR_PART)
        if topic.error is not None and topic.error.code() in passing:
            raise kafka.KafkaException(topic.error)
        if topic.error is not None or not topic.partitions:
            raise FileNotFoundError(f"Kafka has no topic {self.topic!r}: {topic.error}")
        return sorted(topic.partitions)

    def _take_new(self, offsets: dict[int, int]) -> None:
        """Take the partitions that were added, from their beginning."""
        import confluent_kafka as kafka

        try:
            new = [p for p in self._partitions() if p not in offsets]
        except (kafka.KafkaException, FileNotFoundError) as error:
            logger.error("Kafka cannot be asked for new partitions: %s", error)
            return
        if new:
            self.consumer.incremental_assign([kafka.TopicPartition(self.topic, p, kafka.OFFSET_BEGINNING) for p in new])
            for known in (offsets, self.offsets):
                known.update(dict.fromkeys(new, 0))
            logger.info("%s has new partitions, which are read from their beginning: %s", self.topic, new)

    def _say_it_went_back(self, partition: int, expected: int, found: int) -> None:
        logger.error(
            "%s, partition %d goes on at offset %d, before the position %d: %s, and is read from there",
            self.topic,
            partition,
            found,
            expected,
            MADE_ANEW,
        )

    def _warn_of_gap(self, partition: int, expected: int, found: int) -> None:
        self._gaps += 1
        if is_power_of_two(self._gaps):
            logger.warning(
                "%s, partition %d goes on at offset %d after %d: messages in between were removed unread by retention "
                "or compaction, or are marks of transactions (seen %d times)",
                self.topic,
                partition,
                found,
                expected - 1,
                self._gaps,
            )

    def backlog(self) -> int:
        """How many messages the brokers have that were not given yet, as of the last fetch."""
        import confluent_kafka as kafka

        behind = 0
        for partition, offset in self.offsets.items():
            at = kafka.TopicPartition(self.topic, partition)
            behind += max(0, self.consumer.get_watermark_offsets(at, cached=True)[1] - offset)
        return behind

    def state_dict(self) -> dict[str, Any]:
        return {"source": "kafka", "topic": self.topic, "offsets": dict(self.offsets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, source="kafka", topic=self.topic)
        self.offsets = dict(state["offsets"])

    def close(self) -> None:
        self.consumer.close()

"""Messages of message brokers: fields of bytes, or one JSON text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..events import Batch, Rejected, concatenate_batches
from ..schema import MAX_REJECTED_TEXT, Schema, record_as_json
from .sample import Sample, read_records, sample_records


@dataclass(frozen=True)
class Message:
    """One message, which has either a JSON text or fields."""

    where: str
    """The position of the message, for rejected records."""
    text: bytes | None = None
    fields: Mapping[bytes, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The size of the message in bytes."""
        if self.text is not None:
            return len(self.text)
        return sum(len(name) + len(value) for name, value in self.fields.items())

    def show(self) -> str:
        """Return the beginning of the message as text."""
        if self.text is not None:
            return _decode_beginning(self.text)
        fields = {_decode_beginning(name): _decode_beginning(value) for name, value in self.fields.items()}
        return record_as_json(fields)[:MAX_REJECTED_TEXT]

    def parse(self, max_bytes: int) -> Mapping[str, Any]:
        """Return the fields of the message, or raise ValueError with the reason why it cannot be used."""
        if self.size > max_bytes:
            raise ValueError(f"the message has {self.size} bytes, more than {max_bytes}")
        if self.text is not None:
            return parse_json_record(self.text)
        return {name.decode(): value.decode() for name, value in self.fields.items()}


def _decode_beginning(data: bytes) -> str:
    return data[:MAX_REJECTED_TEXT].decode(errors="replace")


def parse_json_record(text: bytes) -> Mapping[str, Any]:
    """Parse a JSON object, or raise ValueError with the reason why the text is not one."""
    record = _decoder.decode(text.decode(json.detect_encoding(text), "surrogatepass"))
    if not isinstance(record, dict):
        raise ValueError(f"the JSON value is a {type(record).__name__}, not an object")
    return record


def reject_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, in which it would be unclear which of two values with the same name is meant."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError(f"the JSON object contains {list_duplicates(name for name, _ in pairs)} twice")
    return record


_decoder = json.JSONDecoder(object_pairs_hook=reject_duplicate_names)


def list_duplicates(names: Iterable[str]) -> str:
    """Return the names that occur more than once, quoted and separated by commas."""
    return ", ".join(repr(name) for name, count in Counter(names).items() if count > 1)


def unreadable_reason(error: Exception) -> str:
    """Return the reason for rejecting a record that could not be parsed."""
    return f"not readable: {'not UTF-8' if isinstance(error, UnicodeDecodeError) else error}"


def convert_messages(messages: Sequence[Message], schema: Schema, max_bytes: int) -> Batch:
    """Convert messages to a batch and reject those that cannot be parsed.

    Numbers are written as text in fields, but not in JSON. Messages of the two types are converted separately, so the
    result for a message does not depend on the other messages.
    """
    parsed: list[tuple[Message, Mapping[str, Any]]] = []
    rejected: list[Rejected] = []
    for message in messages:
        try:
            parsed.append((message, message.parse(max_bytes)))
        except (ValueError, RecursionError) as error:
            reason = unreadable_reason(error)[:MAX_REJECTED_TEXT]
            rejected.append(Rejected(reason, message.where, message.show(), message.size))
    parts = []
    for is_text, group in groupby(parsed, lambda pair: pair[0].text is None):
        same_type, records = zip(*group, strict=True)
        parts.append(schema.convert_records(records, [message.where for message in same_type], text=is_text))
    batch = concatenate_batches(parts)
    batch.rejected = rejected + batch.rejected
    return batch


def sample_messages(messages: Sequence[Message], max_bytes: int, description: str) -> Sample:
    """Return a sample that consists of messages."""
    records, unreadable = read_records(messages, lambda message: message.parse(max_bytes))
    sample = sample_records(records, None, description, is_text=all(message.text is None for message in messages))
    if unreadable:
        sample.warnings.append(f"{unreadable:,} of {len(messages):,} messages cannot be read and will be rejected")
    return sample

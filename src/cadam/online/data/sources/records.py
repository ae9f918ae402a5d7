"""Records as message brokers hold them: fields of bytes, or one text of JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..events import Batch, Rejected, concatenate_batches
from ..schema import KEPT, Schema


@dataclass(frozen=True)
class Record:
    """One message: where it is, and its JSON text or its fields."""

    where: str
    text: bytes | None = None
    fields: Mapping[bytes, bytes] | None = None

    @property
    def size(self) -> int:
        if self.text is not None:
            return len(self.text)
        return sum(len(name) + len(value) for name, value in (self.fields or {}).items())

    def shown(self) -> str:
        """The beginning of it, for people."""
        if self.text is not None:
            return self.text[:KEPT].decode(errors="replace")
        short = {name[:KEPT]: value[:KEPT] for name, value in list((self.fields or {}).items())[:KEPT]}
        return str({n.decode(errors="replace"): v.decode(errors="replace") for n, v in short.items()})[:KEPT]

    def read(self, longest: int) -> Mapping[str, Any]:
        """Its fields; ValueError says why there are none."""
        if self.size > longest:
            raise ValueError(f"{self.size} bytes, more than {longest}")
        if self.text is not None:
            return json_record(self.text)
        return {name.decode(): value.decode() for name, value in (self.fields or {}).items()}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names differ: of two values of one name nobody can tell which is meant."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError(f"a JSON object with {repeated(name for name, _ in pairs)} twice")
    return record


_decoder = json.JSONDecoder(object_pairs_hook=_object)


def repeated(names: Iterable[str]) -> str:
    """Those that are there more than once, for people; empty if none is."""
    return ", ".join(repr(name) for name, times in Counter(names).items() if times > 1)


def unreadable(error: Exception) -> str:
    """Why a record was rejected before it was one."""
    return f"not readable: {'not UTF-8' if isinstance(error, UnicodeDecodeError) else error}"


def json_record(text: bytes) -> Mapping[str, Any]:
    """An event written as a JSON object; ValueError says why it is none."""
    record = _decoder.decode(text.decode(json.detect_encoding(text), "surrogatepass"))
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    return record


def batch_of(records: Sequence[Record], schema: Schema, longest: int) -> Batch:
    """A batch of the records that can be read; the others are rejected.

    Fields are text, so numbers in them are; JSON knows the difference. So one kind is converted apart from the other,
    and what counts does not depend on which records come together.
    """
    read: list[Mapping[str, Any]] = []
    good: list[Record] = []
    rejected: list[Rejected] = []
    for record in records:
        try:
            read.append(record.read(longest))
            good.append(record)
        except (ValueError, RecursionError) as error:
            rejected.append(Rejected(unreadable(error)[:KEPT], record.where, record.shown(), record.size))
    if not read:
        return Batch(rejected=rejected)
    parts = []
    start = 0
    for as_text, same in groupby(good, lambda record: record.text is None):
        where = [record.where for record in same]
        parts.append(schema.records(read[start : start + len(where)], where, text=as_text))
        start += len(where)
    batch = concatenate_batches(parts)
    batch.rejected = rejected + batch.rejected
    return batch

"""Validation of a stream and a model before anything is learnt from them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from .schema import Schema
from .sources import LinesSource, ParquetSource, RedisSource, Source
from .sources.lines import csv_names, open_binary
from .sources.parquet import parquet_files
from .sources.records import json_record, repeated
from .sources.uri import PARQUET

logger = logging.getLogger("cadam.online")

LOOKED_AT = 1000
"""Records, or files of a folder, whose fields are looked at."""


class MismatchError(ValueError):
    """Names that the schema has and the data or the model has not."""


def check_uri(uri: str) -> None:
    """That a file is not given as if its name said how it is to be read, and not as Parquet if it is none."""
    kind = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}.get(Path(uri).suffix)
    if Path(uri).is_dir():
        kind = "parquet"
    if kind is not None and ":" not in uri:
        raise MismatchError(f"--data {uri} does not say how it is to be read; is {kind}:{uri} meant?")
    form, _, path = uri.partition(":")
    if form == "parquet" and Path(path).is_file():
        with open(path, "rb") as file:
            begins = file.read(len(PARQUET))
        if not PARQUET.startswith(begins):
            meant = "csv or jsonl" if kind in (None, "parquet") else kind
            raise MismatchError(f"--data {uri}: {path} is no Parquet file; is {meant}:{path} meant?")


def check_columns(source: Source, schema: Schema) -> None:
    """That the data has the columns of the schema, as far as a look at its beginning can tell.

    A label may come later, in a record of its own, where the schema has an id and not all records have the same fields.
    Standard input and Kafka are not looked at: what they give could not be read again.
    """
    columns = list(_columns(source))
    found = list(dict.fromkeys(columns))
    needed = schema.fields()
    features = [name for name in needed if name in schema.features]
    alike = isinstance(source, (ParquetSource, LinesSource)) and _all_alike(source)
    if alike and (twice := repeated(name for name in columns if name in needed)):
        raise MismatchError(f"{_place(source)} has more than one column {twice}: give each a name of its own")
    if not found or (not alike and set(found) <= set(needed) - set(features)):
        return  # nothing yet, or labels only so far
    if not alike and schema.id is not None:
        needed.remove(schema.target.column)
    missing = [name for name in needed if name not in found]
    if missing:
        asked, there = ", ".join(map(repr, missing)), ", ".join(found)
        raise MismatchError(f"{_place(source)} has no column {asked}, which the schema asks for; it has {there}")


def _place(source: Source) -> Any:
    return source.stream if isinstance(source, RedisSource) else getattr(source, "path", source)


def _all_alike(source: ParquetSource | LinesSource) -> bool:
    """Whether one place says what fields there are, for all records."""
    return source.path.is_file() if isinstance(source, ParquetSource) else source.format == "csv"


def _columns(source: Source) -> Iterator[str]:
    """The names of the fields that the data begins with."""
    if isinstance(source, ParquetSource):
        yield from _parquet_columns(source)
    elif isinstance(source, LinesSource) and source.fields is not None:
        yield from source.fields
    elif isinstance(source, LinesSource) and not source.pipe:
        with open_binary(source.path, buffered=True) as file:
            if source.format == "csv":
                yield from csv_names(file.readline(source.longest), source.schema.separator)
            else:
                lines = iter(lambda: file.readline(source.longest), b"")
                yield from _record_columns(islice(lines, LOOKED_AT), json_record)
    elif isinstance(source, RedisSource):
        yield from _redis_columns(source)


def _parquet_columns(source: ParquetSource) -> Iterator[str]:
    import pyarrow.parquet as pq

    files = [source.path] if source.path.is_file() else sorted(parquet_files(source.path))
    for file in islice(files, LOOKED_AT):
        try:
            yield from pq.read_schema(file).names
        except Exception:  # as a damaged file has it
            continue  # it is rejected when its turn comes


def _redis_columns(source: RedisSource) -> Iterator[str]:
    import redis

    try:
        entries: Any = source.client.xrange(source.stream, count=LOOKED_AT)
    except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError):
        return  # it is waited for
    except redis.ResponseError as error:
        raise MismatchError(source.refused(error)) from error
    if not entries and not source.client.exists(source.stream):
        if not source.follow:
            raise MismatchError(source.absent())
        logger.warning("%s; it is waited for", source.absent())
    yield from _record_columns(entries, lambda entry: source._record(*entry).read(source.longest))


def _record_columns(records: Iterable[Any], read: Callable[[Any], Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        try:
            yield from read(record)
        except (ValueError, RecursionError):
            continue  # it is rejected when its turn comes


def check_arguments(model: nn.Module, schema: Schema, place: str) -> None:
    """That the model can be called with the schema's features by name; `place` says where the model comes from."""
    try:
        signature = inspect.signature(model.forward)
    except (ValueError, TypeError):
        return  # not written in Python
    try:
        signature.bind(**dict.fromkeys(schema.features))
    except TypeError as error:
        taken = ", ".join(signature.parameters) or "nothing"
        given = ", ".join(schema.features)
        raise MismatchError(
            f"the model of {place} cannot be called with the features by name: its forward takes {taken}; "
            f"the schema has {given} ({error})"
        ) from error

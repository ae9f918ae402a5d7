"""Sources by name, for the command line."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from ..schema import Schema
from .kafka import KafkaSource
from .lines import Format, LinesSource
from .parquet import ParquetSource
from .redis_stream import RedisSource
from .source import Source

FORMS = """\
  parquet:PATH                    a Parquet file, or a folder of them
  csv:PATH, jsonl:PATH            lines of a file; - is standard input
  redis://HOST[:PORT]/STREAM      a Redis stream; ?db=N chooses the database; rediss:// for TLS
  kafka://HOST[:PORT]/TOPIC       a Kafka topic of JSON messages; further servers in ?servers=HOST:PORT,...,
                                  other query fields are settings of librdkafka
"""


def open_source(
    uri: str,
    schema: Schema,
    *,
    batch_size: int = 1024,
    follow: bool = False,
    patience: float | None = 1.0,
) -> Source:
    """The source that a URI names; see the sources themselves for what the options mean."""
    kind, _, rest = uri.partition(":")
    if kind == "parquet" and rest:
        return ParquetSource(rest, schema, batch_size=batch_size, follow=follow)
    if kind in ("csv", "jsonl") and rest:
        form: Format = "csv" if kind == "csv" else "jsonl"
        return LinesSource(rest, schema, form, batch_size=batch_size, follow=follow, patience=patience)
    parts = urlsplit(uri)
    name = parts.path.lstrip("/")
    query = dict(parse_qsl(parts.query))
    if kind in ("redis", "rediss") and parts.netloc and name:
        url = f"{kind}://{parts.netloc}/{query.pop('db', '0')}"
        _refuse(query, uri)
        return RedisSource(url, name, schema, batch_size=batch_size, follow=follow, patience=patience)
    if kind == "kafka" and parts.netloc and name:
        servers = ",".join([parts.netloc, *filter(None, [query.pop("servers", None)])])
        return KafkaSource(
            servers, name, schema, batch_size=batch_size, follow=follow, patience=patience, settings=query
        )
    raise ValueError(f"{uri!r} is no source; there are\n{FORMS}")


def _refuse(query: dict[str, str], uri: str) -> None:
    if query:
        raise ValueError(f"{uri}: unknown fields {', '.join(query)}")

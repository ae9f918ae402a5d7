"""Sources by name, for the command line."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from ..schema import Schema
from .base import Source
from .kafka import KafkaSource
from .lines import Format, LinesSource, is_compressed, open_binary
from .parquet import ParquetSource
from .redis_stream import RedisSource

FORMS = """\
  PATH                            a file or folder: its name, or what it begins with, says how it is read
  parquet:PATH                    a Parquet file, or a folder of them
  csv:PATH, jsonl:PATH            lines of a file, .gz too; - is standard input
  redis://HOST[:PORT]/STREAM      a Redis stream; ?db=N chooses the database; rediss:// for TLS
  kafka://HOST[:PORT]/TOPIC       a Kafka topic of JSON messages; further servers in ?servers=HOST:PORT,...,
                                  other query fields are settings of librdkafka
"""

SCHEMES = ("parquet", "csv", "jsonl", "redis", "rediss", "kafka")
SUFFIXES = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".csv", ".tsv", ".tab"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
}
PARQUET = b"PAR1"
"""What Parquet files begin with."""
MAGIC = {
    PARQUET: "a Parquet file: give it as parquet:PATH",
    b"PK\3\4": "a zip archive or an Excel file: unpack it, or save it as CSV",
    b"\x1f\x8b": "compressed with gzip: give it a name that ends in .gz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it (zstd -d), or compress it with gzip",
    b"BZh": "compressed with bzip2: decompress it (bunzip2), or compress it with gzip",
    b"\xfd7zXZ": "compressed with xz: decompress it (unxz), or compress it with gzip",
    b"SQLite format 3": "an SQLite database: export the table as CSV",
}
"""What files begin with that are no text, and what they are."""


def uri_of(place: str) -> str:
    """The URI of a file that is given by its path alone; a URI as it is."""
    if place == "-":
        raise ValueError("- is standard input, which does not say how it is to be read: give csv:- or jsonl:-")
    if place.partition(":")[0] in SCHEMES and not Path(place).exists():
        return place
    path = Path(place)
    if path.is_dir():
        return f"parquet:{place}"
    if not path.is_file():
        raise FileNotFoundError(f"{place} does not exist; a source is one of\n{FORMS}")
    suffix = path.with_suffix("").suffix if is_compressed(path) else path.suffix
    with open_binary(path, buffered=True) as file:
        begins = file.read(64).lstrip(b"\xef\xbb\xbf \r\n\t")
    if begins.startswith(PARQUET):
        return f"parquet:{place}"
    return f"{SUFFIXES.get(suffix.lower(), 'jsonl' if begins[:1] in (b'{', b'[') else 'csv')}:{place}"


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

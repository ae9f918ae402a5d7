"""The sources and the metrics that users name on the command line.

This module imports neither torch nor pyarrow, so that the help of the command line is fast. It names each
implementation as `MODULE:NAME`, which is imported on first use. A new source or metric needs its own module and an
entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SourceEntry:
    """A kind of source that is opened by a URI."""

    implementation: str
    """`MODULE:NAME` of the subclass of `cadam.online.Source`."""
    forms: Mapping[str, str]
    """The forms of the URI, each with a description for the help; a description may have several lines."""
    schemes: tuple[str, ...]
    """The parts before the colon of the URIs."""
    suffixes: Mapping[str, str] = field(default_factory=dict)
    """Suffixes of file names (in lower case) that imply one of the schemes."""


SOURCES = [
    SourceEntry(
        "cadam.online.data.sources.parquet:ParquetSource",
        forms={"parquet:PATH": "a Parquet file, or a folder of them"},
        schemes=("parquet",),
        suffixes={".parquet": "parquet", ".pq": "parquet"},
    ),
    SourceEntry(
        "cadam.online.data.sources.lines:LinesSource",
        forms={
            "csv:PATH, jsonl:PATH": "the lines of a file, which may be compressed as .gz; - is standard input",
        },
        schemes=("csv", "jsonl"),
        suffixes={".csv": "csv", ".tsv": "csv", ".tab": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"},
    ),
    SourceEntry(
        "cadam.online.data.sources.redis_stream:RedisSource",
        forms={"redis://HOST[:PORT]/STREAM": "a Redis stream; ?db=N selects the database; rediss:// uses TLS"},
        schemes=("redis", "rediss"),
    ),
    SourceEntry(
        "cadam.online.data.sources.kafka:KafkaSource",
        forms={
            "kafka://HOST[:PORT]/TOPIC": "a Kafka topic of JSON messages; ?servers=HOST:PORT,... adds servers,\n"
            "and other query fields are settings of librdkafka"
        },
        schemes=("kafka",),
    ),
]
"""The kinds of sources, in the order of the help."""

METRICS = {
    "auc": "cadam.online.metrics.auc:AUC",
    "gauc": "cadam.online.metrics.gauc:GAUC",
    "log_loss": "cadam.online.metrics.summed:LOG_LOSS",
    "normalized_entropy": "cadam.online.metrics.summed:NORMALIZED_ENTROPY",
    "calibration": "cadam.online.metrics.summed:CALIBRATION",
}
"""`MODULE:NAME` of the `WindowMetric` or `SummedMetric` behind each name that `--metrics` accepts."""


def source_help() -> str:
    """Return the list of URIs that name a source, for the help of the command line and for error messages."""
    forms = {"PATH": "a file or folder; its name or its first bytes decide how it is read"}
    for source in SOURCES:
        forms |= source.forms
    lines = ""
    for form, description in forms.items():
        lines += f"  {form:30}  " + description.replace("\n", "\n" + 34 * " ") + "\n"
    return lines

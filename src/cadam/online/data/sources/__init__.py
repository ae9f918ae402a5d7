"""Sources of events. Each source yields batches and knows its position in the data."""

from .base import ColumnNames, Source
from .kafka import KafkaSource
from .lines import LinesSource
from .parquet import ParquetSource
from .redis_stream import RedisSource
from .registry import SOURCES, open_source, resolve_uri, source_help
from .sample import Sample, SamplingError

__all__ = [
    "SOURCES",
    "ColumnNames",
    "KafkaSource",
    "LinesSource",
    "ParquetSource",
    "RedisSource",
    "Sample",
    "SamplingError",
    "Source",
    "open_source",
    "resolve_uri",
    "source_help",
]

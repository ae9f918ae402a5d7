"""Sources of events. Each source yields batches and knows its position in the data."""

from .base import Source
from .kafka import KafkaSource
from .lines import LinesSource
from .parquet import ParquetSource
from .redis_stream import RedisSource
from .uri import open_source, resolve_uri

__all__ = ["KafkaSource", "LinesSource", "ParquetSource", "RedisSource", "Source", "open_source", "resolve_uri"]

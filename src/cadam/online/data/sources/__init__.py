"""Where events come from. Each source gives batches and knows its position."""

from .base import Source
from .kafka import KafkaSource
from .lines import LinesSource
from .parquet import ParquetSource
from .redis_stream import RedisSource
from .uri import open_source

__all__ = ["KafkaSource", "LinesSource", "ParquetSource", "RedisSource", "Source", "open_source"]

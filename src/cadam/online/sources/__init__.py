"""Where events come from. Each source gives batches and knows its position."""

from .lines import LinesSource
from .parquet import ParquetSource
from .source import Source

__all__ = ["LinesSource", "ParquetSource", "Source"]

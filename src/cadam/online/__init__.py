"""Online learning: predict the events of a stream, learn when their labels come, lose none and repeat none."""

from .checkpoint import DamagedCheckpointError
from .events import Batch, Events, Labels, Poison
from .learner import Learner
from .progress import LogLoss, Metric
from .reports import Console, Prometheus, Scalars
from .schema import Schema
from .sources import KafkaSource, LinesSource, ParquetSource, RedisSource, Source, open_source

__all__ = [
    "Batch",
    "Console",
    "DamagedCheckpointError",
    "Events",
    "KafkaSource",
    "Labels",
    "Learner",
    "LinesSource",
    "LogLoss",
    "Metric",
    "ParquetSource",
    "Poison",
    "Prometheus",
    "RedisSource",
    "Scalars",
    "Schema",
    "Source",
    "open_source",
]

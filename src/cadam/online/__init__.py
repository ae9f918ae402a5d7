"""Online learning: predict the events of a stream, learn when their labels come, lose none and repeat none."""

from .checkpoint import DamagedCheckpointError
from .drift import HourlyPopulation, LabelDelay, LabelNoise, SuddenChange
from .events import Batch, Events, Labels, Poison
from .evidence import ConfidenceSequence
from .learner import Learner
from .metrics import StreamMetrics, measure, recompute
from .progress import LogLoss, Metric
from .reports import Console, Prometheus, Scalars
from .schema import Schema
from .sources import KafkaSource, LinesSource, ParquetSource, RedisSource, Source, open_source

__all__ = [
    "Batch",
    "ConfidenceSequence",
    "Console",
    "DamagedCheckpointError",
    "Events",
    "HourlyPopulation",
    "KafkaSource",
    "LabelDelay",
    "LabelNoise",
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
    "StreamMetrics",
    "SuddenChange",
    "measure",
    "open_source",
    "recompute",
]

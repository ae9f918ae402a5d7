"""Online learning: predict the events of a stream, learn when their labels come, lose none and repeat none."""

from ..statistics.confidence_sequence import ConfidenceSequence
from .data.events import Batch, Events, Labels, Rejected
from .data.schema import Schema
from .data.simulation import LabelDelay, LabelNoise, SuddenChange
from .data.sources import KafkaSource, LinesSource, ParquetSource, RedisSource, Source, open_source
from .learner import Learner
from .metrics.running import LogLoss, Metric
from .metrics.stream import StreamMetrics, measure, recompute
from .monitoring.reports import Console, Prometheus, Scalars
from .monitoring.status_page import StatusPage
from .persistence.checkpoints import DamagedCheckpointError
from .persistence.export import LoadedModel, load_model

__all__ = [
    "Batch",
    "ConfidenceSequence",
    "Console",
    "DamagedCheckpointError",
    "Events",
    "KafkaSource",
    "LabelDelay",
    "LabelNoise",
    "Labels",
    "Learner",
    "LinesSource",
    "LoadedModel",
    "LogLoss",
    "Metric",
    "ParquetSource",
    "Prometheus",
    "RedisSource",
    "Rejected",
    "Scalars",
    "Schema",
    "Source",
    "StatusPage",
    "StreamMetrics",
    "SuddenChange",
    "load_model",
    "measure",
    "open_source",
    "recompute",
]

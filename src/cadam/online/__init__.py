"""Online learning: predict the events of a stream, learn when their labels come, lose none and repeat none."""

import warnings
from typing import Any

from .checkpoint import DamagedCheckpointError
from .drift import HourlyPopulation, LabelDelay, LabelNoise, SuddenChange
from .events import Batch, Events, Labels, Rejected
from .evidence import ConfidenceSequence
from .export import LoadedModel, load_model
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
    "StreamMetrics",
    "SuddenChange",
    "load_model",
    "measure",
    "open_source",
    "recompute",
]


def __getattr__(name: str) -> Any:
    if name == "Poison":  # until version 0.3
        warnings.warn("cadam.online.Poison is now called Rejected", DeprecationWarning, stacklevel=2)
        return Rejected
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

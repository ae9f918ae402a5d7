"""Online learning: predict the events of a stream, join their labels, and learn each event once."""

import logging

from ..checkpoint_files import DamagedCheckpointError
from ..printable import escape_log_record
from ..statistics.sequential import ConfidenceSequence
from .data.events import Batch, Events, Labels, Rejected
from .data.schema import Schema
from .data.simulation import LabelDelay, LabelNoise, SuddenChange
from .data.sources import KafkaSource, LinesSource, ParquetSource, RedisSource, Source, open_source
from .labels.batch_growth import BatchGrowth
from .labels.join import LabelOptions
from .learner import Learner
from .metrics.log_loss import LogLoss
from .metrics.metric import Metric
from .metrics.stream import StreamMetrics, measure, recompute
from .monitoring.console import Console
from .monitoring.prometheus_file import PrometheusFile
from .monitoring.status_page import StatusPage
from .monitoring.tensorboard import TensorBoard
from .persistence.checkpoint_schedule import CheckpointOptions
from .persistence.export import LoadedModel, load_model
from .persistence.prediction_log import LogOptions

logging.getLogger("cadam.online").addFilter(escape_log_record)

__all__ = [
    "Batch",
    "BatchGrowth",
    "CheckpointOptions",
    "ConfidenceSequence",
    "Console",
    "DamagedCheckpointError",
    "Events",
    "KafkaSource",
    "LabelDelay",
    "LabelNoise",
    "LabelOptions",
    "Labels",
    "Learner",
    "LinesSource",
    "LoadedModel",
    "LogLoss",
    "LogOptions",
    "Metric",
    "ParquetSource",
    "PrometheusFile",
    "RedisSource",
    "Rejected",
    "Schema",
    "Source",
    "StatusPage",
    "StreamMetrics",
    "SuddenChange",
    "TensorBoard",
    "load_model",
    "measure",
    "open_source",
    "recompute",
]

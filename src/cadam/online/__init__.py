"""Online learning: predict events of a live stream, learn from them when their labels come, never lose or repeat one."""

from .checkpoint import DamagedCheckpointError
from .events import Batch, Events, Labels, Poison
from .learner import Learner
from .progress import LogLoss, Metric
from .schema import Schema
from .sources import LinesSource, ParquetSource, Source

__all__ = [
    "Batch",
    "DamagedCheckpointError",
    "Events",
    "Labels",
    "Learner",
    "LinesSource",
    "LogLoss",
    "Metric",
    "ParquetSource",
    "Poison",
    "Schema",
    "Source",
]

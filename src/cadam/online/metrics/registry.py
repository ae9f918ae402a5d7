"""The metrics that `StreamMetrics` computes.

To add a metric, define a `WindowMetric` or a `SummedMetric` in a module of this package and add it to `METRICS`.
"""

from __future__ import annotations

from .auc import AUC
from .gauc import GAUC
from .metric import SummedMetric, WindowMetric
from .summed import CALIBRATION, LOG_LOSS, NORMALIZED_ENTROPY

METRICS: dict[str, WindowMetric | SummedMetric] = {
    metric.name: metric
    for metric in (
        AUC,
        GAUC,
        LOG_LOSS,
        NORMALIZED_ENTROPY,
        CALIBRATION,
    )
}
"""All metrics by the name that users give."""

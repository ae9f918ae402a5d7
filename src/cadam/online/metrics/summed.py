"""Metrics that follow from sums over events: log loss, normalized entropy and calibration.

Normalized entropy and calibration are defined as in He et al., Practical Lessons from Predicting Clicks on Ads at
Facebook (2014), https://doi.org/10.1145/2648584.2648589.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np

from ..data.events import Array
from .log_loss import entropy, log_loss
from .metric import SummedMetric


@dataclass(frozen=True)
class Sums:
    """Sums over events. The sums of two sets of events add up to those of their union."""

    events: float = 0.0
    clicks: float = 0.0
    loss: float = 0.0
    predicted: float = 0.0
    """The sum of the predicted probabilities."""

    @classmethod
    def of(cls, scores: Array, labels: Array, weights: Array | None = None) -> Sums:
        """Compute the sums over events, each multiplied by its weight if there are weights."""
        logits = np.asarray(scores, dtype=np.float64)
        if len(logits) == 0:
            return cls()
        with np.errstate(invalid="ignore"):  # a nan among the logits makes the sums nan, which is visible enough
            chances = np.exp(-np.logaddexp(0, -logits))
            if weights is None:
                loss = len(logits) * log_loss(logits, labels)
                return cls(len(logits), float(np.sum(labels)), loss, float(chances.sum()))
            each = np.asarray(weights, dtype=np.float64)
            losses = np.logaddexp(0, np.where(labels, -logits, logits))
            # Not by `each @ values`: the last bits of long dot products depend on the number of threads of the library.
            return cls(float(each.sum()), *(float((each * values).sum()) for values in (labels, losses, chances)))

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scaled(self, factor: float) -> Sums:
        """Multiply all sums by a factor."""
        return Sums(*(factor * number for number in astuple(self)))

    @property
    def click_rate(self) -> float:
        """The share of clicks."""
        return self.clicks / self.events

    @property
    def mean_loss(self) -> float:
        """The mean log loss."""
        return self.loss / self.events


def _normalized_entropy(sums: Sums) -> dict[str, float]:
    constant = entropy(sums.click_rate)
    return {"normalized_entropy": sums.mean_loss / constant if constant > 0 else math.nan}


def _calibration(sums: Sums) -> dict[str, float]:
    calibration = sums.predicted / sums.clicks if sums.clicks else math.nan
    return {"calibration": calibration, "click_rate": sums.click_rate}


LOG_LOSS = SummedMetric(
    outputs={"log_loss": "mean log loss of the predictions"},
    compute=lambda sums: {"log_loss": sums.mean_loss},
)
NORMALIZED_ENTROPY = SummedMetric(
    outputs={"normalized_entropy": "log loss divided by that of the best constant prediction"},
    compute=_normalized_entropy,
)
CALIBRATION = SummedMetric(
    outputs={"calibration": "predicted clicks divided by actual clicks", "click_rate": "share of clicks"},
    compute=_calibration,
)

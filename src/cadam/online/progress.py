"""How learning goes, in numbers that cost nothing: events, log loss, and the loss of the best constant beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .events import Array


class Metric(Protocol):
    """What a learner tells of each prediction once its label is known."""

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None: ...
    def results(self) -> Mapping[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class LogLoss:
    """The mean log loss of logits, and that of the best constant prediction, known only afterwards."""

    count: int = 0
    positives: float = 0.0
    loss: float = 0.0

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None:
        logits, truth = scores.astype(np.float64), labels.astype(np.float64)
        self.count += len(logits)
        self.positives += float(truth.sum())
        self.loss += float((np.logaddexp(0, logits) - truth * logits).sum())

    def __sub__(self, other: LogLoss) -> LogLoss:
        return LogLoss(self.count - other.count, self.positives - other.positives, self.loss - other.loss)

    @property
    def mean(self) -> float:
        return self.loss / self.count if self.count else math.nan

    @property
    def best_constant(self) -> float:
        """The entropy of the mean label."""
        if not self.count:
            return math.nan
        p = self.positives / self.count
        return 0.0 if p in (0, 1) else -p * math.log(p) - (1 - p) * math.log(1 - p)

    def results(self) -> Mapping[str, float]:
        rate = self.positives / self.count if self.count else math.nan
        return {
            "labelled": self.count,
            "mean label": rate,
            "log loss": self.mean,
            "best constant": self.best_constant,
        }

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)

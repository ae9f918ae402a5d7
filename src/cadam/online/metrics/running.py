"""How learning goes, in numbers that cost nothing: events, log loss, and the loss of the best constant beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np

from ...optim.alignment import Ratio
from ..data.events import Array

NONE = Ratio(0, 0, 0)


class AlignmentCounts:
    """Alignment since the stream began: what an optimizer counts now, and what was counted before the last resume."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer if hasattr(optimizer, "alignment") else None
        self.before: dict[str, Ratio] = {}
        self.total_before = NONE

    def by_parameter(self) -> dict[str, Ratio]:
        """Empty if the optimizer does not count."""
        now = {} if self.optimizer is None else self.optimizer.alignment().parameters
        return {name: ratio + self.before.get(name, NONE) for name, ratio in now.items()}

    def total(self) -> Ratio:
        """Over all parameters: also over those that share a name, of which `by_parameter` has only one."""
        return self.total_before + (NONE if self.optimizer is None else self.optimizer.alignment().total)


class Metric(Protocol):
    """What a learner tells of each prediction once its label is known."""

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None: ...
    def results(self) -> Mapping[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def entropy(rate: float) -> float:
    """Of a label that is 1 with this probability: the mean log loss of the best constant prediction. Else nan."""
    if not 0 <= rate <= 1:
        return math.nan
    return 0.0 if rate in (0, 1) else -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)


@dataclass
class LogLoss:
    """The mean log loss of logits, and that of the best constant prediction, known only afterwards."""

    count: int = 0
    positives: float = 0.0
    loss: float = 0.0
    predicted: float = 0.0
    """The probabilities, summed."""

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None:
        logits, truth = scores.astype(np.float64), labels.astype(np.float64)
        self.count += len(logits)
        self.positives += float(truth.sum())
        softplus = np.logaddexp(0, logits)
        self.loss += float((softplus - truth * logits).sum())
        self.predicted += float(np.exp(logits - softplus).sum())

    def __sub__(self, other: LogLoss) -> LogLoss:
        return LogLoss(*(ours - theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean(self) -> float:
        return self.loss / self.count if self.count else math.nan

    @property
    def rate(self) -> float:
        """The mean label."""
        return self.positives / self.count if self.count else math.nan

    @property
    def best_constant(self) -> float:
        """The entropy of the mean label."""
        return entropy(self.rate)

    @property
    def of_mean(self) -> float:
        """The loss of the mean prediction, given for every event; nan if that is 0 or 1.

        A model whose loss is well above has differences between events that are wrong.
        """
        mean = self.predicted / self.count if self.count else math.nan
        if not 0 < mean < 1:
            return math.nan
        return -self.rate * math.log(mean) - (1 - self.rate) * math.log1p(-mean)

    def results(self) -> Mapping[str, float]:
        return {
            "labelled": self.count,
            "mean_label": self.rate,
            "log_loss": self.mean,
            "best_constant": self.best_constant,
        }

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)

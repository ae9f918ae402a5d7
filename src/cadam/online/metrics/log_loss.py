"""The log loss of predictions, and of the best constant prediction to compare it with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoint_files import check_like
from ..data.events import Array
from .arrays import Numbers, as_pair


def log_loss(logits: Numbers, labels: Numbers) -> float:
    """Compute the mean of -log p(label) in float64.

    Args:
        logits: the predictions. Tensors on a GPU are evaluated there.
        labels: 0 for negative events, other values for positive ones.

    Returns:
        The log loss, or nan if a logit or a label is nan.

    Raises:
        ValueError: if logits and labels are not one-dimensional and equally long.
    """
    x, y = as_pair(logits, labels)
    if bool((x != x).any()) or bool((y != y).any()):
        return math.nan
    if isinstance(x, Tensor):
        opposed = torch.where(y != 0, -x, x).double()
        return float(torch.logaddexp(torch.zeros_like(opposed), opposed).mean())
    opposed = np.where(y != 0, -x, x).astype(np.float64)
    return float(np.mean(np.logaddexp(0, opposed)))


def entropy(rate: float) -> float:
    """Compute the entropy of a label that is 1 with probability `rate`; nan if `rate` is not a probability.

    It is the mean log loss of the best constant prediction.
    """
    if not 0 <= rate <= 1:
        return math.nan
    return 0.0 if rate in (0, 1) else -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)


class MeanLoss:
    """The mean over a stream of a loss other than the log loss. It implements `Metric`.

    Args:
        loss: computes the mean loss from scores and labels.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._loss = loss
        self.count, self.sum = 0, 0.0

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None:
        """Add labeled predictions."""
        try:
            with torch.no_grad():
                columns = (torch.tensor(values, dtype=torch.float32) for values in (scores, labels))
                mean = float(self._loss(*columns))
        except Exception:  # The user's loss may raise anything. The training step then reports the error.
            return
        self.count += len(scores)
        self.sum += len(scores) * mean

    def results(self) -> Mapping[str, float]:
        """Return the mean loss."""
        return {"loss": self.sum / self.count if self.count else math.nan}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"count": self.count, "sum": self.sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
        self.count, self.sum = state["count"], state["sum"]


@dataclass
class LogLoss:
    """The mean log loss of a stream of logits, beside that of the best constant prediction in hindsight.

    It implements `Metric` and costs almost nothing, so every learner has one.
    """

    count: int = 0
    positives: float = 0.0
    loss: float = 0.0
    predicted: float = 0.0
    """The sum of the predicted probabilities."""
    weight: float = 0.0
    """The sum of the weights of the events, by which all sums but `count` are weighted."""

    def update(
        self, scores: Array, labels: Array, users: Array | None, time: Array, weights: Array | None = None
    ) -> None:
        """Add labeled predictions."""
        logits, targets = scores.astype(np.float64), labels.astype(np.float64)
        self.count += len(logits)
        softplus = np.logaddexp(0, logits)
        sums: list[Array] = [targets, softplus - targets * logits, np.exp(logits - softplus)]
        if weights is not None:
            sums = [weights.astype(np.float64) * values for values in sums]
        positives, loss, predicted = (float(values.sum()) for values in sums)
        self.positives, self.loss, self.predicted = (
            self.positives + positives,
            self.loss + loss,
            self.predicted + predicted,
        )
        self.weight += len(logits) if weights is None else float(weights.sum(dtype=np.float64))

    def __sub__(self, other: LogLoss) -> LogLoss:
        return LogLoss(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def mean(self) -> float:
        """The mean log loss."""
        return self.loss / self.weight if self.weight else math.nan

    @property
    def rate(self) -> float:
        """The mean label."""
        return self.positives / self.weight if self.weight else math.nan

    @property
    def best_constant(self) -> float:
        """The log loss of the best constant prediction, which is the entropy of the mean label."""
        return entropy(self.rate)

    @property
    def of_mean_prediction(self) -> float:
        """The log loss if every prediction were replaced by the mean prediction; nan if that is 0 or 1.

        If the actual loss is well above it, the model separates events in the wrong direction.
        """
        mean = self.predicted / self.weight if self.weight else math.nan
        if not 0 < mean < 1:
            return math.nan
        return -self.rate * math.log(mean) - (1 - self.rate) * math.log1p(-mean)

    def results(self) -> Mapping[str, float]:
        """Return the current values by name."""
        return {
            "labeled": self.count,
            "mean_label": self.rate,
            "log_loss": self.mean,
            "best_constant": self.best_constant,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
        state = {"weight": state["count"], **state}  # absent in checkpoints of older versions
        check_like(state, vars(self), "log loss")
        self.__dict__.update({name: state[name] for name in vars(self)})

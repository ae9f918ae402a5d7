"""The initial bias of a ready-made model: the log odds of the first labels.

With a bias of 0, a model predicts one half at first. Where 3% of the labels are 1, it takes thousands of events until
the optimizer has moved the bias to the log odds of 3%, and until then a constant predicts better. Lin et al., Focal
loss for dense object detection (2017), section 3.3, https://arxiv.org/abs/1708.02002, set the bias to a prior for this
reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.events import Array
from .networks import Linear

FIRST_LABELS = 256
"""The number of labels from which the bias is estimated."""
PRIOR = 0.5
"""The number of labels of each class that are added to those that were seen, so that the log odds are finite.

With one half, this is the estimator of Krichevsky and Trofimov, The performance of universal encoding (1981),
https://doi.org/10.1109/TIT.1981.1056331.
"""


class FirstLabels:
    """The labels that a model learns first, summed up."""

    def __init__(self) -> None:
        self.count = 0
        self.total = self.total_squares = self.positives = 0.0
        """The sums of the weights, of their squares, and of weight times label."""

    @property
    def is_complete(self) -> bool:
        """Whether there are `FIRST_LABELS` labels."""
        return self.count >= FIRST_LABELS

    def add(self, labels: Array, weights: Array | None = None) -> None:
        """Add labels, numbers from 0 to 1, and the weights of their events. Labels with the weight 0 do not count."""
        weights = np.ones(len(labels)) if weights is None else weights.astype(float)
        self.count += int((weights > 0).sum())
        self.total += float(weights.sum())
        self.total_squares += float((weights**2).sum())
        self.positives += float((weights * labels).sum())

    def log_odds(self) -> float | None:
        """Estimate the log odds of a label of 1; None before the first label.

        The unit of the weights does not matter. Labels of unequal weights count as ``(sum w)^2 / sum w^2`` labels of
        equal weight (Kish, Survey sampling, 1965).
        """
        if not self.count:
            return None
        effective, share = self.total**2 / self.total_squares, self.positives / self.total
        return math.log((effective * share + PRIOR) / (effective * (1 - share) + PRIOR))

    def state_dict(self) -> dict[str, float]:
        """Return the sums."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the sums that `state_dict` returned."""
        for name in vars(self):
            setattr(self, name, state[name])


@torch.no_grad()
def set_bias(model: nn.Module, log_odds: float) -> None:
    """Set the bias of a ready-made model. Its weights are not changed."""
    assert isinstance(model, Linear)
    model.inputs.bias.fill_(log_odds)

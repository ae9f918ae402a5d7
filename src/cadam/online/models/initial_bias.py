"""The initial bias of a ready-made model: the log odds of the first labels.

With a bias of 0, a model predicts one half at first. Where 3% of the labels are 1, it takes thousands of events until
the optimizer has moved the bias to the log odds of 3%, and until then a constant predicts better. Lin et al., Focal loss
for dense object detection (2017), section 3.3, https://arxiv.org/abs/1708.02002, set the bias to a prior for this reason.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..data.events import Array
from .networks import Linear

PRIOR = 0.5
"""The number of labels of each class that are added to those that were seen, so that the log odds are finite.

With one half, this is the estimator of Krichevsky and Trofimov, The performance of universal encoding (1981),
https://doi.org/10.1109/TIT.1981.1056331.
"""


def find_log_odds(labels: Array, weights: Array | None = None) -> float | None:
    """Estimate the log odds of a label of 1.

    Args:
        labels: numbers from 0 to 1.
        weights: the weights of the events. Their unit does not matter.

    Returns:
        The log odds; None if there is no label with a weight above 0.
    """
    total = float(len(labels) if weights is None else weights.sum(dtype=float))
    if not total > 0:
        return None
    count = len(labels) if weights is None else total**2 / float((weights.astype(float) ** 2).sum())
    share = float((labels if weights is None else labels * weights).sum(dtype=float)) / total
    return math.log((count * share + PRIOR) / (count * (1 - share) + PRIOR))


@torch.no_grad()
def set_bias(model: nn.Module, log_odds: float) -> None:
    """Set the bias of a ready-made model. Its weights are not changed."""
    assert isinstance(model, Linear)
    model.inputs.bias.fill_(log_odds)

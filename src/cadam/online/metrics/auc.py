"""The area under the ROC curve."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .arrays import Numbers, as_pair
from .metric import WindowMetric


def auc(scores: Numbers, labels: Numbers) -> float:
    """Compute the area under the ROC curve exactly.

    It is the probability that a random positive event has a higher score than a random negative one; ties count half
    (Hanley and McNeil 1982, "The meaning and use of the area under a receiver operating characteristic (ROC) curve",
    Radiology 143(1)). Positive and negative scores are sorted separately. For each positive score, binary search counts
    the negative scores below it and those not above it; half of the sum is the number of correctly ordered pairs. All
    counts are integers, so there is no rounding error. Tensors on a GPU are evaluated there.

    Args:
        scores: the predictions; only their order matters.
        labels: 0 for negative events, other values for positive ones.

    Returns:
        The AUC, or nan if there is only one class or if a score or a label is nan.

    Raises:
        ValueError: if scores and labels are not one-dimensional and equally long.
    """
    x, y = as_pair(scores, labels)
    is_positive = y != 0
    positives, negatives = x[is_positive], x[~is_positive]
    pairs = len(positives) * len(negatives)
    if pairs == 0 or bool((x != x).any()) or bool((y != y).any()):
        return math.nan
    if isinstance(positives, Tensor):
        negatives = negatives.sort().values
        counts = sum(int(torch.searchsorted(negatives, positives, right=right).sum()) for right in (False, True))
    else:
        # Sorting the positives too makes successive searches access neighboring memory, which is in the cache.
        negatives, positives = np.sort(negatives), np.sort(positives)
        counts = sum(int(np.searchsorted(negatives, positives, side).sum()) for side in ("left", "right"))
    return counts / (2 * pairs)


AUC = WindowMetric(
    outputs={"auc": "area under the ROC curve"},
    averaged=("auc",),
    compute=lambda scores, labels, users: {"auc": auc(scores, labels)},
)

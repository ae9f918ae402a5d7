"""How well clicks are predicted."""

from __future__ import annotations

import numpy as np

from .experiment import Array


def auc(scores: Array, labels: Array) -> float:
    """The area under the ROC curve, exactly: the chance that a click scores above a non-click, ties counting half.

    It is nan if only one class is there, or if a score is.
    """
    positive = np.asarray(labels, dtype=bool)
    clicks = int(positive.sum())
    if clicks in (0, len(positive)) or np.isnan(scores).any():
        return float("nan")
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    return float((ranks[positive].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(positive) - clicks)))


def log_loss(logits: Array, labels: Array) -> float:
    """The mean of -log p(label), from logits."""
    x = np.asarray(logits, dtype=np.float64)
    return float(np.mean(np.logaddexp(0, x) - np.asarray(labels) * x))

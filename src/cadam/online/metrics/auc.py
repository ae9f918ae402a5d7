"""How well clicks are predicted. Arrays are measured with numpy; tensors on a device, there and without leaving it."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[Any] | Tensor


def auc(scores: Numbers, labels: Numbers) -> float:
    """The area under the ROC curve, exactly: the chance that a click scores above a non-click, ties counting half.

    Clicks and non-clicks are sorted apart; for each click, the non-clicks below it and those not above it are
    counted, and half of the sum is the number of pairs in the right order. All of that is in whole numbers.
    It is nan if only one class is there, or if a score or a label is.
    """
    x, y = _alike(scores, labels)
    positive = y != 0
    clicks, passes = x[positive], x[~positive]
    pairs = len(clicks) * len(passes)
    if pairs == 0 or bool((x != x).any()) or bool((y != y).any()):
        return math.nan
    if isinstance(clicks, Tensor):
        passes = passes.sort().values
        counts = sum(int(torch.searchsorted(passes, clicks, right=right).sum()) for right in (False, True))
    else:
        passes, clicks = np.sort(passes), np.sort(clicks)  # sorted queries find their place in cached memory
        counts = int(np.searchsorted(passes, clicks, "left").sum() + np.searchsorted(passes, clicks, "right").sum())
    return counts / (2 * pairs)


def log_loss(logits: Numbers, labels: Numbers) -> float:
    """The mean of -log p(label), from logits, in float64; nan if a logit or a label is."""
    x, y = _alike(logits, labels)
    if bool((x != x).any()) or bool((y != y).any()):
        return math.nan
    if isinstance(x, Tensor):
        against = torch.where(y != 0, -x, x).double()
        return float(torch.logaddexp(torch.zeros_like(against), against).mean())
    against = np.where(y != 0, -x, x).astype(np.float64)
    return float(np.mean(np.logaddexp(0, against)))


def _alike(scores: Numbers, labels: Numbers) -> tuple[Any, Any]:
    """Both as tensors of one device, or both as arrays."""
    if isinstance(scores, Tensor) and scores.device.type != "cpu":
        scores, labels = scores.detach(), torch.as_tensor(labels, device=scores.device)
    else:
        scores, labels = _array(scores), _array(labels)
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(f"scores and labels must be equally long, got {tuple(scores.shape)}, {tuple(labels.shape)}")
    return scores, labels


def _array(numbers: Numbers) -> NDArray[Any]:
    if isinstance(numbers, Tensor):
        numbers = numbers.detach()
        numbers = (numbers.float() if numbers.dtype == torch.bfloat16 else numbers).cpu()  # numpy has no bfloat16
    return np.asarray(numbers)

"""Pairs of scores and labels, as numpy arrays or as tensors on one device."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[Any] | Tensor


def as_pair(scores: Numbers, labels: Numbers) -> tuple[Any, Any]:
    """Convert scores and labels to tensors on the device of the scores, or to arrays if that is the CPU.

    Raises:
        ValueError: if they are not one-dimensional and equally long.
    """
    if isinstance(scores, Tensor) and scores.device.type != "cpu":
        scores, labels = scores.detach(), torch.as_tensor(labels, device=scores.device)
    else:
        scores, labels = _as_array(scores), _as_array(labels)
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(f"scores and labels must be equally long, got {tuple(scores.shape)}, {tuple(labels.shape)}")
    return scores, labels


def _as_array(numbers: Numbers) -> NDArray[Any]:
    if isinstance(numbers, Tensor):
        numbers = numbers.detach()
        numbers = (numbers.float() if numbers.dtype == torch.bfloat16 else numbers).cpu()  # numpy has no bfloat16
    return np.asarray(numbers)

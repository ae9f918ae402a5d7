"""A mean and how sure one can be of it: Student's t interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

MOST_FREEDOM = 1000
"""Beyond it Student's t is taken for that of 1000: wider by a thousandth at most."""


@lru_cache
def t_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| <= t) = confidence for Student's T.

    With t = sqrt(freedom) tan(a), that probability is a finite sum of powers of sin(a) and cos(a) (Abramowitz and
    Stegun 26.7.3 and 26.7.4); a is found by bisection.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if freedom < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {freedom}")
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@dataclass(frozen=True)
class Interval:
    """A mean and the 95% interval around it; nan ends where there are too few values for one."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __format__(self, spec: str) -> str:
        if self.count == 0:
            return "none"
        ends = "" if math.isnan(self.low) else f" [{self.low:{spec}}, {self.high:{spec}}]"
        return f"{self.mean:{spec}}{ends}"


def interval(values: Sequence[float] | Array, weights: Sequence[float] | Array | None = None) -> Interval:
    """Mean and 95% interval of independent values.

    With weights, the mean is sum(w x) / sum(w) and its variance that of a ratio (the delta method); heavy values count
    as fewer: the t distribution has the freedom of sum(w)^2 / sum(w^2) values.
    """
    count = len(values)
    if count == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    if weights is None:
        mean, effective = float(np.mean(values)), float(count)
        error = float(np.std(values)) / math.sqrt(count)
    else:
        x, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
        if not (w > 0).all():
            raise ValueError("weights must be positive")
        mean, effective = float(w @ x / w.sum()), float(w.sum() ** 2 / (w @ w))
        error = math.sqrt(float(np.square(w * (x - mean)).sum())) / float(w.sum())
    if effective < 2 - 1e-9:
        return Interval(mean, math.nan, math.nan, count)
    freedom = min(round(effective) - 1, MOST_FREEDOM)
    half = t_quantile(0.95, freedom) * error * math.sqrt(effective / (effective - 1))
    return Interval(mean, mean - half, mean + half, count)

"""A mean with its interval, by Student's t distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

MAX_DEGREES = 1000
"""The largest number of degrees of freedom that is used; the quantile of more degrees is at most 0.1% smaller."""


@lru_cache
def t_quantile(confidence: float, degrees: int) -> float:
    """Return the t for which P(|T| <= t) = confidence, where T has Student's t distribution.

    With t = sqrt(degrees) tan(a), this probability is a finite sum of powers of sin(a) and cos(a): equations 26.7.3 and
    26.7.4 of Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964). The angle a is found by bisection.

    Args:
        confidence: The probability, between 0 and 1.
        degrees: The degrees of freedom, at least 1.

    Raises:
        ValueError: If an argument is out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees}")
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _probability_within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _probability_within(angle: float, degrees: int) -> float:
    """Return P(|T| <= sqrt(degrees) tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


@dataclass(frozen=True)
class Interval:
    """A mean and its interval; the ends are nan if there are too few values for an interval."""

    mean: float
    low: float
    high: float
    count: int
    """The number of values."""

    @property
    def half_width(self) -> float:
        """Half of the distance between the ends."""
        return (self.high - self.low) / 2

    def __format__(self, spec: str) -> str:
        if self.count == 0:
            return "none"
        ends = "" if math.isnan(self.low) else f" [{self.low:{spec}}, {self.high:{spec}}]"
        return f"{self.mean:{spec}}{ends}"


def interval(
    values: Sequence[float] | Array, weights: Sequence[float] | Array | None = None, confidence: float = 0.95
) -> Interval:
    """Return the mean of independent values with its interval, by Student's t distribution.

    Student (1908), "The probable error of a mean", Biometrika 6(1). With weights, the mean is sum(w x) / sum(w), and
    its variance is that of a ratio by the delta method (Cochran 1977, "Sampling Techniques", section 6.3). The degrees
    of freedom follow from the effective sample size sum(w)^2 / sum(w^2) of Kish (1965), "Survey Sampling", section
    11.7, because few heavy values carry less information than many equal ones.

    Args:
        values: The values.
        weights: One positive weight per value.
        confidence: The probability that the interval contains the true mean.

    Raises:
        ValueError: If a weight is not positive.
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
    if effective < 2 - 1e-9:  # the tolerance is for rounding errors in sums of two equal weights
        return Interval(mean, math.nan, math.nan, count)
    degrees = min(round(effective) - 1, MAX_DEGREES)
    half_width = t_quantile(confidence, degrees) * error * math.sqrt(effective / (effective - 1))
    return Interval(mean, mean - half_width, mean + half_width, count)

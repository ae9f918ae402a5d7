"""An independent implementation of the verdict about two arms, from the docstrings of `cadam.statistics` alone.

It computes everything again after each batch, in plain numpy, and shares no code with the product.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FIRST_CHECK, NARROWEST_AT = 20, 500
Ends = tuple[float, float, float]
"""A mean with the ends of its interval."""


@cache
def t_quantile(confidence: float, degrees: int) -> float:
    """Return the quantile of Student's t by numerical integration of its density over the angle atan(t / sqrt(n))."""
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    share = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp(confidence, share / share[-1], angles)))


def sequence(values: Array, alpha: float) -> Ends:
    """Return the confidence sequence of batches of equal size, after the last of them.

    Theorem 2.2 of Waudby-Smith et al. (2024) with rho^2 = 1 / r, Student's quantile, and Hall's transformation.
    """
    count = len(values)
    if count < FIRST_CHECK:
        return float(values.mean()) if count else math.nan, -math.inf, math.inf
    narrowest = -2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1
    r = NARROWEST_AT * values[:FIRST_CHECK].var(ddof=1) / narrowest
    v, n = count * values.var(ddof=1), count - 1
    z = math.sqrt((v + r) / v * math.log((v + r) / (r * alpha**2)))
    student = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    student += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    skewness = ((values - values.mean()) ** 3).sum() / v**1.5

    def without_skewness(y: float) -> float:
        return float(3 / skewness * (np.cbrt(1 + skewness * (y - skewness / 6)) - 1))

    below, above = max(student, without_skewness(student)), max(student, -without_skewness(-student))
    mean, error = float(values.mean()), math.sqrt(v) / count
    return mean, mean - below * error, mean + above * error


def over_seeds(differences: Array, confidence: float) -> Ends:
    """Return Student's interval over seeds."""
    means = differences.mean(1)
    half = t_quantile(confidence, len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means))
    return means.mean(), means.mean() - half, means.mean() + half


def side(*intervals: Ends) -> int:
    """Return 1 or -1 if all intervals are on that side of 0, otherwise 0."""
    return int(all(low > 0 for _, low, _ in intervals)) - int(all(high < 0 for _, _, high in intervals))


def verdicts(differences: Array, alpha: float = 0.05) -> tuple[list[int], int]:
    """Return the verdict after each batch and that at the end: 1 if the arm is higher, -1 if it is lower, else 0.

    Args:
        differences: The difference of each batch, by seed.
        alpha: The probability of a wrong verdict.
    """
    total = differences.shape[1]
    starts = [FIRST_CHECK]
    while 2 * starts[-1] <= total / 2:
        starts.append(2 * starts[-1])
    confidence = 1 - alpha / 2
    judgment, since, running, at_end = 0, 0, [], 0
    for count in range(1, total + 1):
        batches = differences[:, :count].mean(0)
        time = sequence(batches, alpha)
        # The interval over seeds is only needed if that over time excludes 0.
        now, at_end = 0, 0
        if time[1] > 0 or time[2] < 0:
            seeds = over_seeds(differences[:, :count], confidence)
            at_end = side(time, seeds)
            if covering := [start for start in starts if 2 * start <= count]:
                start = covering[-1]
                recent, earlier = sequence(batches[start:], alpha / len(starts)), sequence(batches[:start], alpha)
                recent_seeds = over_seeds(differences[:, start:count], confidence)
                is_fading = (2 * recent[0] - earlier[0]) * time[0] <= 0
                now = 0 if is_fading else side(time, recent, seeds, recent_seeds)
                is_reversing = any(side(each) * time[0] < 0 for each in (recent, recent_seeds))
                change = recent[0] - earlier[0], recent[1] - earlier[2], recent[2] - earlier[1]
                if is_reversing or (is_fading and side(change) * time[0] < 0):
                    at_end = 0
        if now != judgment:
            judgment, since = now, count - 1
        running.append(judgment if count >= 2 * since else 0)
    return running, at_end

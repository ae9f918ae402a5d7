"""Selection of a learning rate from a grid, by the mean of a metric over tuning seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cadam.statistics.comparison import Better


class NoLearningRateError(ValueError):
    """An optimizer diverged at every learning rate of its grid."""


@dataclass(frozen=True)
class RateChoice:
    """The best learning rate of a grid, and the means that it was chosen by."""

    arm: str
    lr: float
    means: Mapping[float, float]
    """The mean of the metric at each learning rate; nan where a run diverged."""

    @property
    def warning(self) -> str | None:
        """A warning if the grid leaves open whether another rate is better, otherwise None."""
        if len(self.means) == 1:
            return f"{self.arm}: there is only one learning rate ({self.lr:g}), so none was chosen"
        if self.lr in (min(self.means), max(self.means)):
            end = "lowest" if self.lr == min(self.means) else "highest"
            return f"{self.arm}: the best learning rate, {self.lr:g}, is the {end} of its grid; extend the grid"
        return None


def choose_lr(arm: str, values: Mapping[float, Mapping[int, float]], better: Better) -> RateChoice:
    """Choose the learning rate with the best mean over seeds.

    A rate at which any run diverged is never chosen. Of equally good rates the lowest is chosen.

    Args:
        arm: The name of the optimizer.
        values: A metric by learning rate and seed.
        better: Whether lower or higher values are better.

    Returns:
        The chosen rate, with the mean at every rate.

    Raises:
        NoLearningRateError: If some run diverged at every rate.
    """
    means = {lr: float(np.mean(list(by_seed.values()))) for lr, by_seed in sorted(values.items())}
    usable = {lr: mean for lr, mean in means.items() if math.isfinite(mean)}
    if not usable:
        raise NoLearningRateError(f"{arm} diverged at every learning rate of its grid: {sorted(means)}")
    sign = 1 if better == "lower" else -1
    return RateChoice(arm, min(usable, key=lambda lr: (sign * usable[lr], lr)), means)

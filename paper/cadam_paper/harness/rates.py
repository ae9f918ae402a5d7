"""Learning-rate curves: a metric of an optimizer as a function of the learning rate.

A comparison of two optimizers at a single learning rate depends on that rate as much as on the optimizers, so both run
at every rate of a grid. When they are compared at their best rates, the rate of each seed is chosen on the other seeds,
so that no run both chooses a rate and evaluates it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cadam.statistics.comparison import Better, Comparison, compare
from cadam.statistics.intervals import Interval, interval

from .learning_rates import NoLearningRateError
from .results import Results
from .summary import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class RateCurve:
    """A metric of one arm by learning rate and seed. A rate at which a run diverged (NaN) is never the best.

    Raises:
        ValueError: If rates have different seeds.
    """

    arm: str
    better: Better
    values: Mapping[float, Mapping[int, float]]

    def __post_init__(self) -> None:
        seeds = {frozenset(by_seed) for by_seed in self.values.values()}
        if len(seeds) != 1 or not next(iter(seeds)):
            by_rate = {rate: sorted(by_seed) for rate, by_seed in self.values.items()}
            raise ValueError(f"{self.arm}: every rate needs the same seeds, got {by_rate}")

    @classmethod
    def of(cls, results: Results, arm: str, metric: str, better: Better) -> RateCurve:
        """Return the curve of an arm from its results on test seeds."""
        return cls(arm, better, results.tests().where(optimizer=arm).metric_by_rate(metric))

    @property
    def rates(self) -> list[float]:
        """The learning rates in increasing order."""
        return sorted(self.values)

    @property
    def seeds(self) -> list[int]:
        """The seeds in increasing order."""
        return sorted(next(iter(self.values.values())))

    def at(self, rate: float) -> Interval:
        """Return the mean over seeds at a rate of the curve, with its 95% interval."""
        return interval(list(self.values[rate].values()))

    def interpolate(self, rate: float) -> float:
        """Return the mean at any rate, interpolated linearly over the logarithm of the rate."""
        logarithms = [math.log(each) for each in self.rates]
        return float(np.interp(math.log(rate), logarithms, [self.at(each).mean for each in self.rates]))

    def best(self, without: int | None = None) -> float:
        """Return the rate with the best mean over the seeds.

        Args:
            without: A seed to leave out.

        Raises:
            NoLearningRateError: If the arm diverged at every rate.
        """
        sign = 1 if self.better == "lower" else -1
        means = {
            rate: sign * float(np.mean([value for seed, value in by_seed.items() if seed != without]))
            for rate, by_seed in self.values.items()
        }
        usable = {rate: mean for rate, mean in means.items() if math.isfinite(mean)}
        if not usable:
            raise NoLearningRateError(f"{self.arm} diverged at every learning rate of its grid: {self.rates}")
        return min(usable, key=lambda rate: (usable[rate], rate))

    @property
    def best_is_at_an_end(self) -> bool:
        """Whether the best rate is the lowest or the highest, so that the grid has to be extended."""
        return self.best() in (self.rates[0], self.rates[-1])

    def nearest_to_triple(self, rate: float) -> float:
        """Return the rate of the curve that is nearest to three times `rate`."""
        return min(self.rates, key=lambda r: abs(r / rate - 3))

    def rate_by_seed(self) -> dict[int, float]:
        """Return for each seed the rate that is best on the other seeds. A single seed gets its own best rate."""
        if len(self.seeds) == 1:
            return {self.seeds[0]: self.best()}
        return {seed: self.best(without=seed) for seed in self.seeds}

    def values_at_best(self) -> dict[int, float]:
        """Return the metric by seed, at the rates of `rate_by_seed`."""
        return {seed: self.values[rate][seed] for seed, rate in self.rate_by_seed().items()}

    def tolerance(self, within: float) -> tuple[float, float]:
        """Return the range of rates around the best rate whose means differ from the best by at most `within`."""
        best, rates = self.best(), self.rates
        good = {rate for rate in rates if abs(self.at(rate).mean - self.at(best).mean) <= within}
        low = high = rates.index(best)
        while low > 0 and rates[low - 1] in good:
            low -= 1
        while high < len(rates) - 1 and rates[high + 1] in good:
            high += 1
        return rates[low], rates[high]


MIN_RATE, MAX_RATE = 1e-7, 1000.0
"""Grids are not extended beyond these rates."""


def next_rates(curves: Sequence[RateCurve], ratio: float | None = None) -> list[float]:
    """Return the rates by which a grid must be extended because some curve has its best rate at an end of the grid.

    The rates of a grid are 1, 3, 10, 30 and so on, times a power of 10, unless a `ratio` of neighboring rates is
    given. A grid is not extended beyond an end whose neighbor is exactly as good. This is the case if
    `runner.later_specs` assumes that all missing runs have the same result.
    """
    ends = {curve.best() for curve in curves if curve.best_is_at_an_end and len(set(curve.tolerance(0.0))) == 1}
    down, up = (3, 10 / 3) if ratio is None else (ratio, ratio)
    lower = [float(f"{rate / down:.0e}") for rate in ends if any(rate == curve.rates[0] for curve in curves)]
    higher = [float(f"{rate * up:.0e}") for rate in ends if any(rate == curve.rates[-1] for curve in curves)]
    return sorted(rate for rate in (*lower, *higher) if MIN_RATE <= rate <= MAX_RATE)


def compare_at_best_rates(arm: RateCurve, baseline: RateCurve) -> Comparison:
    """Compare two arms, each at its own best rate, which is chosen on the other seeds."""
    return compare(arm.values_at_best(), baseline.values_at_best(), names=(arm.arm, baseline.arm), better=arm.better)


def compare_at_rate(arm: RateCurve, baseline: RateCurve, rate: float) -> Comparison:
    """Compare two arms at the same rate."""
    return compare(arm.values[rate], baseline.values[rate], names=(arm.arm, baseline.arm), better=arm.better)


def tolerance_row(label: str, curve: RateCurve, near: float) -> Row:
    """Return a row with the range of rates whose means differ from the best by at most `near`."""
    low, high = curve.tolerance(near)
    return Row(
        f"{label}: {curve.arm} within {near:g} of its best",
        "",
        f"{low:g} to {high:g}, best {curve.best():g}",
        "",
        len(curve.seeds),
        0.0,
        values={"low": low, "high": high, "best": curve.best()},
    )


def draw(axes: Axes, curves: Mapping[str, RateCurve]) -> None:
    """Draw curves over learning rates, with 95% intervals, a dot for each run, and a ring around the best rate.

    The vertical axis covers all runs but not all intervals, because intervals from few seeds can be very wide.

    Args:
        axes: The panel.
        curves: The curves by color.
    """
    for color, curve in curves.items():
        means = [curve.at(rate) for rate in curve.rates]
        axes.plot(curve.rates, [m.mean for m in means], "-", color=color, lw=1.5, label=curve.arm)
        for rate, by_seed in curve.values.items():
            axes.plot([rate] * len(by_seed), list(by_seed.values()), ".", color=color, ms=4, alpha=0.6)
        if len(curve.seeds) > 1:
            low, high = ([getattr(m, end) for m in means] for end in ("low", "high"))
            axes.fill_between(curve.rates, low, high, color=color, alpha=0.13, lw=0)
        best = curve.best()
        axes.plot([best], [curve.at(best).mean], "o", color=color, ms=10, fillstyle="none")
    values = [value for curve in curves.values() for by_seed in curve.values.values() for value in by_seed.values()]
    runs = [value for value in values if math.isfinite(value)]
    margin = 0.06 * (max(runs) - min(runs)) or 1.0
    axes.set(xscale="log", ylim=(min(runs) - margin, max(runs) + margin))

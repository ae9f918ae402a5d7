"""A metric over learning rates: the unit in which two optimizers are compared.

One rate for both says as much about the rate as about the optimizers, so each arm has a curve over rates. Best against
best, the rate of each seed is chosen on the other seeds: a rate is never chosen by the runs that it is judged by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cadam.ab.results import Results
from cadam.ab.summary import Row
from cadam.statistics.comparison import Better, Comparison, compare
from cadam.statistics.intervals import Interval, interval
from cadam.statistics.learning_rates import NoLearningRateError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class RateCurve:
    """A metric of one arm by learning rate and seed. A rate at which a run diverged (nan) is never the best."""

    arm: str
    better: Better
    values: Mapping[float, Mapping[int, float]]

    def __post_init__(self) -> None:
        seeds = {frozenset(by_seed) for by_seed in self.values.values()}
        if len(seeds) != 1 or not next(iter(seeds)):
            found = {rate: sorted(by_seed) for rate, by_seed in self.values.items()}
            raise ValueError(f"{self.arm}: every rate needs the same seeds, got {found}")

    @classmethod
    def of(cls, results: Results, arm: str, metric: str, better: Better) -> RateCurve:
        """From the test seeds of an arm."""
        mine = results.tests().where(optimizer=arm)
        rates = sorted({result.spec.lr for result in mine})
        return cls(arm, better, {rate: mine.where(lr=rate).metric(metric) for rate in rates})

    @property
    def rates(self) -> list[float]:
        return sorted(self.values)

    @property
    def seeds(self) -> list[int]:
        return sorted(next(iter(self.values.values())))

    def at(self, rate: float) -> Interval:
        """The mean over seeds at one rate, with its interval."""
        return interval(list(self.values[rate].values()))

    def between(self, rate: float) -> float:
        """The mean at any rate: those that were run are joined by straight lines over the logarithm of the rate."""
        means = [self.at(known).mean for known in self.rates]
        return float(np.interp(math.log(rate), [math.log(known) for known in self.rates], means))

    def best(self, without: int | None = None) -> float:
        """The rate with the best mean over the seeds, or over all but one of them."""
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
        """Is the best rate the lowest or the highest that was run? Then the grid has to be extended."""
        return self.best() in (self.rates[0], self.rates[-1])

    def above(self, rate: float) -> float:
        """The rate that was run which is nearest to three times another."""
        return min(self.rates, key=lambda r: abs(r / rate - 3))

    def chosen(self) -> dict[int, float]:
        """By seed the rate that the other seeds choose; with one seed, the one it has chosen."""
        alone = len(self.seeds) == 1
        return {seed: self.best(None if alone else seed) for seed in self.seeds}

    def at_its_best(self) -> dict[int, float]:
        """The metric by seed, each at the rate chosen for it."""
        return {seed: self.values[rate][seed] for seed, rate in self.chosen().items()}

    def tolerance(self, within: float) -> tuple[float, float]:
        """The lowest and the highest rate around the best whose means lie within so much of the best mean."""
        best, rates = self.best(), self.rates
        good = {rate for rate in rates if abs(self.at(rate).mean - self.at(best).mean) <= within}
        low = high = rates.index(best)
        while low > 0 and rates[low - 1] in good:
            low -= 1
        while high < len(rates) - 1 and rates[high + 1] in good:
            high += 1
        return rates[low], rates[high]


LOWEST, HIGHEST = 1e-7, 1000.0
"""No grid is extended beyond these."""


def beyond(curves: Sequence[RateCurve]) -> list[float]:
    """The next rate beyond each end of the grid at which some curve has its best, in steps of 1, 3, 10, 30 ...

    Not where the rate next to that end is exactly as good, as in results that are only supposed.
    """
    ends = {curve.best() for curve in curves if curve.best_is_at_an_end and len(set(curve.tolerance(0.0))) == 1}
    lower = [float(f"{rate / 3:.0e}") for rate in ends if any(rate == curve.rates[0] for curve in curves)]
    higher = [float(f"{rate * 10 / 3:.0e}") for rate in ends if any(rate == curve.rates[-1] for curve in curves)]
    return sorted(rate for rate in (*lower, *higher) if LOWEST <= rate <= HIGHEST)


def best_against_best(arm: RateCurve, baseline: RateCurve) -> Comparison:
    """Each at its own rate, chosen on the other seeds."""
    return compare(arm.at_its_best(), baseline.at_its_best(), names=(arm.arm, baseline.arm), better=arm.better)


def at_one_rate(arm: RateCurve, baseline: RateCurve, rate: float) -> Comparison:
    """Both at the same rate."""
    return compare(arm.values[rate], baseline.values[rate], names=(arm.arm, baseline.arm), better=arm.better)


def tolerance_row(what: str, curve: RateCurve, near: float) -> Row:
    """The stretch of rates that cost an arm no more than so much, as a line of the table."""
    low, high = curve.tolerance(near)
    return Row(
        f"{what}: {curve.arm} within {near:g} of its best",
        "",
        f"{low:g} to {high:g}, best {curve.best():g}",
        "",
        len(curve.seeds),
        0.0,
        values={"low": low, "high": high, "best": curve.best()},
    )


def draw(axes: Axes, curves: Mapping[str, RateCurve]) -> None:
    """Curves by their colour, with 95% intervals and a dot for each run; the best rate is ringed.

    The panel is as high as the runs need: the intervals of a few seeds may reach far beyond it.
    """
    for colour, curve in curves.items():
        means = [curve.at(rate) for rate in curve.rates]
        axes.plot(curve.rates, [m.mean for m in means], "-", color=colour, lw=1.5, label=curve.arm)
        for rate, by_seed in curve.values.items():
            axes.plot([rate] * len(by_seed), list(by_seed.values()), ".", color=colour, ms=4, alpha=0.6)
        if len(curve.seeds) > 1:
            low, high = ([getattr(m, end) for m in means] for end in ("low", "high"))
            axes.fill_between(curve.rates, low, high, color=colour, alpha=0.13, lw=0)
        best = curve.best()
        axes.plot([best], [curve.at(best).mean], "o", color=colour, ms=10, fillstyle="none")
    runs = [v for c in curves.values() for by_seed in c.values.values() for v in by_seed.values() if math.isfinite(v)]
    margin = 0.06 * (max(runs) - min(runs)) or 1.0
    axes.set(xscale="log", ylim=(min(runs) - margin, max(runs) + margin))

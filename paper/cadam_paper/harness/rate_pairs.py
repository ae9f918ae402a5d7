"""Two optimizers over learning rates, condition by condition: which specs that takes, what they say, and the figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cadam.ab.report import palette
from cadam.ab.results import Results, RunSpec
from cadam.ab.summary import Row, Summary, comparison_row
from cadam.ab.verdict import verdict_over_seeds
from cadam.statistics.comparison import Comparison

from .rates import RateCurve, at_one_rate, best_against_best, beyond, draw, tolerance_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pair:
    """A treatment and its baseline over the same learning rates, under one condition."""

    treatment: RateCurve
    baseline: RateCurve
    paper: tuple[float, float] | None = None
    """What the paper has for the baseline and for the treatment, where it has this condition."""
    seconds: float = 0.0

    @property
    def own(self) -> Comparison:
        """Each at its own best rate, chosen on the other seeds."""
        return best_against_best(self.treatment, self.baseline)

    def at(self, rate: float) -> Comparison:
        """Both at one rate."""
        return at_one_rate(self.treatment, self.baseline, rate)

    @property
    def margin(self) -> float | None:
        """The paper's difference."""
        return None if self.paper is None else self.paper[1] - self.paper[0]

    @property
    def explains(self) -> float | None:
        """The lowest rate for both at which their difference reaches the paper's; None where it does at none.

        Between the rates that were run, differences are joined by straight lines over the logarithm of the rate.
        """
        rates = self.baseline.rates
        gains = [self.at(rate).difference.mean for rate in rates]
        if self.margin is None:
            return None
        wanted, before = self.margin, math.nan
        for i, gain in enumerate(gains):
            if gain >= wanted:
                part = (wanted - before) / (gain - before) if i and before < wanted else 1.0
                low = rates[max(i - 1, 0)]
                return float(low * (rates[i] / low) ** part)
            before = gain
        return None


def grown(
    grid: Sequence[float],
    specs: Callable[[Sequence[float]], list[RunSpec]],
    curves: Callable[[Results], Iterable[RateCurve]],
    found: Results,
) -> list[RunSpec]:
    """The specs of a grid, and of rates beyond it as long as the best rate of some curve stands at its end."""
    while True:
        named = specs(grid)
        if not found.has(named):
            return named
        known = set(named)
        more = beyond(list(curves(Results([result for result in found if result.spec in known]))))
        if not more:
            return named
        grid = sorted({*grid, *more})


def summary(pairs: Mapping[str, Pair], near: float, *, same_data: bool, digits: int = 2) -> Summary:
    """By condition: each at its own best rate, both at the baseline's best and about three times that, and tolerances.

    Where the data are the paper's, also the rate that would explain its margin.
    """
    rows: list[Row] = []
    warnings, ahead = [], []
    for name, pair in pairs.items():
        own, base, seconds = pair.own, pair.baseline, pair.seconds
        paper = "" if pair.margin is None else f"{pair.margin:+.2f}"
        rows.append(comparison_row(f"{name}: each at its own best rate", paper, own, seconds, digits))
        ahead.append(f"{name} {own.difference:+.{digits}f} ({verdict_over_seeds(own)})")
        rate = base.best()
        above = base.above(rate)
        for words, at in ((f"{base.arm}'s best rate", rate), (f"{above / rate:.0f} times that", above)):
            rows.append(comparison_row(f"{name}: both at {words}, {at:g}", "", pair.at(at), seconds, digits))
        if same_data and pair.margin is not None:
            rows.append(_explanation(name, pair))
        for curve in (pair.treatment, base):
            rows.append(tolerance_row(name, curve, near))
            if curve.best_is_at_an_end:
                warnings.append(f"{name}: the best rate of {curve.arm}, {curve.best():g}, is at an end of the grid")
    arms = next(iter(pairs.values())).own
    text = f"Each at its own best rate, {arms.arm} minus {arms.baseline}: {'; '.join(ahead)}."
    return Summary(text, rows, warnings)


def _explanation(name: str, pair: Pair) -> Row:
    """At which rate for both their difference is the paper's, which does not say its rate."""
    at = pair.explains
    times = math.nan if at is None else at / pair.baseline.best()
    said = "at none that was run" if at is None else f"{at:.2g}, {times:.1f} times {pair.baseline.arm}'s best"
    values = {} if at is None else {"rate": at, "times the best": times}
    what = f"{name}: the rate at which the difference is the paper's"
    return Row(what, f"{pair.margin:+.2f}", said, "", len(pair.baseline.seeds), 0.0, values=values)


def figure(pairs: Mapping[str, Pair], metric: str, *, same_data: bool, digits: int = 2) -> Figure:
    """Above, both arms over rates; below, their difference at each rate beside the paper's."""
    drawn, axes = palette.panels(2, len(pairs), 2.9 * len(pairs), 5.6, sharex="col")
    for column, (name, pair) in enumerate(pairs.items()):
        above, below = axes[:, column]
        draw(above, {palette.CADAM: pair.treatment, palette.ADAM: pair.baseline})
        if pair.paper is not None and same_data:
            _papers_lines(above, pair.paper)
        above.set_title(name)
        _differences(below, pair, digits)
        below.set_xlabel("learning rate")
        for panel in (above, below):
            panel.minorticks_off()
            panel.set_xticks(pair.baseline.rates, [f"{rate:.0e}".replace("e-0", "e-") for rate in pair.baseline.rates])
    axes[0, 0].set_ylabel(metric)
    arms = next(iter(pairs.values()))
    axes[1, 0].set_ylabel(f"{arms.treatment.arm} minus {arms.baseline.arm}, same rate")
    axes[0, 0].legend(loc="lower center", fontsize=8)
    return drawn


def _papers_lines(axes: Axes, paper: tuple[float, float]) -> None:
    """The paper's two numbers, as dotted lines in the arms' colours."""
    for value, colour in zip(paper, (palette.ADAM, palette.CADAM), strict=True):
        axes.axhline(value, color=colour, lw=1, ls=":")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, *paper), max(high, max(paper) + 0.04 * (high - low)))
    axes.annotate(
        "paper", (0.02, max(paper)), xycoords=("axes fraction", "data"), fontsize=7, color=palette.MUTED, va="bottom"
    )


def _differences(axes: Axes, pair: Pair, digits: int) -> None:
    rates = pair.baseline.rates
    found = [pair.at(rate).difference for rate in rates]
    means = [each.mean for each in found]
    axes.axhline(0, color=palette.MUTED, lw=0.8)
    axes.plot(rates, means, "o-", color=palette.INK, ms=4, lw=1.3)
    if all(math.isfinite(each.low) for each in found):
        axes.vlines(rates, [each.low for each in found], [each.high for each in found], color=palette.INK, lw=1)
    span = float(np.ptp(means)) or 1.0
    low, high = min(0.0, *means) - 0.15 * span, max(0.0, *means) + 0.15 * span
    if pair.margin is not None:
        low, high = min(low, pair.margin - 0.1 * span), max(high, pair.margin + 0.1 * span)
        axes.axhline(pair.margin, color=palette.CADAM, lw=1, ls="--")
        axes.annotate(
            f"paper {pair.margin:+.{digits}f}",
            (0.02, pair.margin),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            color=palette.CADAM,
            va="bottom",
        )
    axes.set(xscale="log", ylim=(low, high))

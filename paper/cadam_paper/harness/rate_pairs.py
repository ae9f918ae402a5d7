"""Comparison of a treatment and its baseline over learning rates, under several conditions: summary and figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from cadam.ab.report import palette
from cadam.statistics.comparison import Comparison

from .panels import panels
from .rates import RateCurve, compare_at_best_rates, compare_at_rate, draw, next_rates, tolerance_row
from .results import Results, RunSpec
from .summary import Row, Summary, comparison_row
from .verdict import verdict_over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pair:
    """A treatment and its baseline over the same learning rates, under one condition."""

    treatment: RateCurve
    baseline: RateCurve
    paper: tuple[float, float] | None = None
    """The paper's values for the baseline and for the treatment, if it has this condition."""
    seconds: float = 0.0

    @property
    def at_own_rates(self) -> Comparison:
        """The comparison of the arms, each at its own best rate, which is chosen on the other seeds."""
        return compare_at_best_rates(self.treatment, self.baseline)

    def at(self, rate: float) -> Comparison:
        """Compare both arms at one rate."""
        return compare_at_rate(self.treatment, self.baseline, rate)

    @property
    def paper_margin(self) -> float | None:
        """The difference of the arms that the paper reports, or None if it has no numbers."""
        return None if self.paper is None else self.paper[1] - self.paper[0]

    @property
    def rate_at_paper_margin(self) -> float | None:
        """The lowest common rate at which the difference of the arms is as large as in the paper, or None.

        Between the rates of the grid, the difference is interpolated linearly over the logarithm of the rate.
        """
        if self.paper_margin is None:
            return None
        rates = self.baseline.rates
        gains = [self.at(rate).difference.mean for rate in rates]
        if gains[0] >= self.paper_margin:
            return rates[0]
        for (low, gain_low), (high, gain_high) in pairwise(zip(rates, gains, strict=True)):
            if gain_high >= self.paper_margin:
                # A gain that is NaN, because a run diverged, cannot be interpolated.
                part = (self.paper_margin - gain_low) / (gain_high - gain_low) if math.isfinite(gain_low) else 1.0
                return float(low * (high / low) ** part)
        return None


def extended_specs(
    grid: Sequence[float],
    specs: Callable[[Sequence[float]], list[RunSpec]],
    curves: Callable[[Results], Iterable[RateCurve]],
    results: Results,
    extend: Callable[[Sequence[RateCurve]], list[float]] = next_rates,
) -> list[RunSpec]:
    """Return the run specs of a grid, which is extended as long as some curve has its best rate at an end of the grid.

    Args:
        grid: The rates to start with.
        specs: Returns the run specs of a grid.
        curves: Returns the curves from the results of a grid.
        results: The results so far.
        extend: Returns the rates to add to the grid of some curves.
    """
    while True:
        current = specs(grid)
        if not results.has(current):
            return current
        current_specs = set(current)
        more = extend(list(curves(Results([result for result in results if result.spec in current_specs]))))
        if not more:
            return current
        grid = sorted({*grid, *more})


def summary(pairs: Mapping[str, Pair], near: float, *, same_data: bool, digits: int = 2) -> Summary:
    """Summarize comparisons over learning rates by condition.

    Each condition has three comparisons: each arm at its own best rate, both at the best rate of the baseline, and both
    at about three times that rate. Further rows contain the ranges of rates that are near the best.

    Args:
        pairs: The pairs by condition.
        near: A rate is near the best if the means differ by at most this number.
        same_data: Whether the data are those of the paper. If so, a row has the rate at which our difference equals
            the paper's.
        digits: The number of digits after the decimal point.
    """
    rows: list[Row] = []
    warnings, differences = [], []
    for name, pair in pairs.items():
        own, base, seconds = pair.at_own_rates, pair.baseline, pair.seconds
        paper = "" if pair.paper_margin is None else f"{pair.paper_margin:+.2f}"
        rows.append(comparison_row(f"{name}: each at its own best rate", paper, own, seconds, digits))
        differences.append(f"{name} {own.difference:+.{digits}f} ({verdict_over_seeds(own)})")
        best = base.best()
        above = base.nearest_to_triple(best)
        for words, rate in ((f"{base.arm}'s best rate", best), (f"{above / best:.0f} times that", above)):
            rows.append(comparison_row(f"{name}: both at {words}, {rate:g}", "", pair.at(rate), seconds, digits))
        if same_data and pair.paper_margin is not None:
            rows.append(_paper_margin_row(name, pair))
        for curve in (pair.treatment, base):
            rows.append(tolerance_row(name, curve, near))
            if curve.best_is_at_an_end:
                warnings.append(f"{name}: the best rate of {curve.arm}, {curve.best():g}, is at an end of the grid")
    arms = next(iter(pairs.values())).at_own_rates
    text = f"Each at its own best rate, {arms.arm} minus {arms.baseline}: {'; '.join(differences)}."
    return Summary(text, rows, warnings)


def _paper_margin_row(name: str, pair: Pair) -> Row:
    """Return a row with the rate at which our difference equals the paper's. The paper does not report its rate."""
    rate = pair.rate_at_paper_margin
    values: dict[str, float] = {}
    measured = "at no rate of the grid"
    if rate is not None:
        values = {"rate": rate, "times the best": rate / pair.baseline.best()}
        measured = f"{rate:.2g}, {values['times the best']:.1f} times {pair.baseline.arm}'s best"
    label = f"{name}: the rate at which the difference is the paper's"
    return Row(label, f"{pair.paper_margin:+.2f}", measured, "", len(pair.baseline.seeds), 0.0, values=values)


def figure(pairs: Mapping[str, Pair], metric: str, *, same_data: bool, digits: int = 2) -> Figure:
    """Draw both arms over learning rates, and below them their difference at each rate with the paper's difference."""
    drawing, axes = panels(2, len(pairs), 2.9 * len(pairs), 5.6, sharex="col")
    for column, (name, pair) in enumerate(pairs.items()):
        above, below = axes[:, column]
        draw(above, {palette.CADAM: pair.treatment, palette.ADAM: pair.baseline})
        if pair.paper is not None and same_data:
            _draw_paper_values(above, pair.paper)
        above.set_title(name)
        _draw_differences(below, pair, digits)
        below.set_xlabel("learning rate")
        for panel in (above, below):
            panel.minorticks_off()
            panel.set_xticks(pair.baseline.rates, [f"{rate:.0e}".replace("e-0", "e-") for rate in pair.baseline.rates])
    axes[0, 0].set_ylabel(metric)
    arms = next(iter(pairs.values()))
    axes[1, 0].set_ylabel(f"{arms.treatment.arm} minus {arms.baseline.arm}, same rate")
    axes[0, 0].legend(loc="lower center", fontsize=8)
    return drawing


def _draw_paper_values(axes: Axes, paper: tuple[float, float]) -> None:
    """Draw the two values of the paper as dotted lines in the colors of the arms."""
    for value, color in zip(paper, (palette.ADAM, palette.CADAM), strict=True):
        axes.axhline(value, color=color, lw=1, ls=":")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, *paper), max(high, max(paper) + 0.04 * (high - low)))
    axes.annotate(
        "paper", (0.02, max(paper)), xycoords=("axes fraction", "data"), fontsize=7, color=palette.MUTED, va="bottom"
    )


def _draw_differences(axes: Axes, pair: Pair, digits: int) -> None:
    """Draw the difference of the arms at each rate, with the difference that the paper reports."""
    rates = pair.baseline.rates
    differences = [pair.at(rate).difference for rate in rates]
    means = [each.mean for each in differences]
    axes.axhline(0, color=palette.MUTED, lw=0.8)
    axes.plot(rates, means, "o-", color=palette.INK, ms=4, lw=1.3)
    if all(math.isfinite(each.low) for each in differences):
        lows, highs = [each.low for each in differences], [each.high for each in differences]
        axes.vlines(rates, lows, highs, color=palette.INK, lw=1)
    span = float(np.ptp(means)) or 1.0
    low, high = min(0.0, *means) - 0.15 * span, max(0.0, *means) + 0.15 * span
    if pair.paper_margin is not None:
        low, high = min(low, pair.paper_margin - 0.1 * span), max(high, pair.paper_margin + 0.1 * span)
        axes.axhline(pair.paper_margin, color=palette.CADAM, lw=1, ls="--")
        axes.annotate(
            f"paper {pair.paper_margin:+.{digits}f}",
            (0.02, pair.paper_margin),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            color=palette.CADAM,
            va="bottom",
        )
    axes.set(xscale="log", ylim=(low, high))

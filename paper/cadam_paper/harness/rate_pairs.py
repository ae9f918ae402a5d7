"""A treatment and its baseline over learning rates, under several conditions: rows, warnings and a figure."""

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

from .panels import panels
from .rates import RateCurve, at_one_rate, best_against_best, draw, next_rates, tolerance_row

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
    def own(self) -> Comparison:
        """The comparison at the best rate of each arm, chosen on the other seeds."""
        return best_against_best(self.treatment, self.baseline)

    def at(self, rate: float) -> Comparison:
        """Return the comparison of both arms at one rate."""
        return at_one_rate(self.treatment, self.baseline, rate)

    @property
    def margin(self) -> float | None:
        """The difference that the paper reports."""
        return None if self.paper is None else self.paper[1] - self.paper[0]

    @property
    def explains(self) -> float | None:
        """The lowest rate for both arms at which their difference reaches that of the paper; None if none does.

        Between the rates of the grid, the difference is interpolated linearly over the logarithm of the rate.
        """
        if self.margin is None:
            return None
        rates = self.baseline.rates
        before = math.nan
        for i, rate in enumerate(rates):
            gain = self.at(rate).difference.mean
            if gain >= self.margin:
                part = (self.margin - before) / (gain - before) if i and before < self.margin else 1.0
                low = rates[max(i - 1, 0)]
                return float(low * (rate / low) ** part)
            before = gain
        return None


def extended_specs(
    grid: Sequence[float],
    specs: Callable[[Sequence[float]], list[RunSpec]],
    curves: Callable[[Results], Iterable[RateCurve]],
    results: Results,
) -> list[RunSpec]:
    """Return the run specs of a grid, and of rates beyond it as long as some curve has its best rate at an end.

    Args:
        grid: The rates to start with.
        specs: Returns the run specs of a grid.
        curves: Returns the curves from the results of a grid.
        results: The results so far.
    """
    while True:
        current = specs(grid)
        if not results.has(current):
            return current
        wanted = set(current)
        more = next_rates(list(curves(Results([result for result in results if result.spec in wanted]))))
        if not more:
            return current
        grid = sorted({*grid, *more})


def summary(pairs: Mapping[str, Pair], near: float, *, same_data: bool, digits: int = 2) -> Summary:
    """Summarize comparisons over learning rates by condition.

    The rows are the comparison at the best rate of each arm, at the best rate of the baseline, and at about three times
    that rate, and the range of rates that are near the best.

    Args:
        pairs: The pairs by condition.
        near: A rate whose mean is within this distance of the best is near the best.
        same_data: Whether the data are those of the paper. There is then a row with the rate at which the difference
            is that of the paper.
        digits: The number of digits after the decimal point.
    """
    rows: list[Row] = []
    warnings, differences = [], []
    for name, pair in pairs.items():
        own, base, seconds = pair.own, pair.baseline, pair.seconds
        paper = "" if pair.margin is None else f"{pair.margin:+.2f}"
        rows.append(comparison_row(f"{name}: each at its own best rate", paper, own, seconds, digits))
        differences.append(f"{name} {own.difference:+.{digits}f} ({verdict_over_seeds(own)})")
        rate = base.best()
        above = base.above(rate)
        for words, at in ((f"{base.arm}'s best rate", rate), (f"{above / rate:.0f} times that", above)):
            rows.append(comparison_row(f"{name}: both at {words}, {at:g}", "", pair.at(at), seconds, digits))
        if same_data and pair.margin is not None:
            rows.append(_explanation_row(name, pair))
        for curve in (pair.treatment, base):
            rows.append(tolerance_row(name, curve, near))
            if curve.best_is_at_an_end:
                warnings.append(f"{name}: the best rate of {curve.arm}, {curve.best():g}, is at an end of the grid")
    arms = next(iter(pairs.values())).own
    text = f"Each at its own best rate, {arms.arm} minus {arms.baseline}: {'; '.join(differences)}."
    return Summary(text, rows, warnings)


def _explanation_row(name: str, pair: Pair) -> Row:
    """Return a row with the rate at which the difference is that of the paper, which does not report its rate."""
    rate = pair.explains
    values: dict[str, float] = {}
    measured = "at no rate of the grid"
    if rate is not None:
        values = {"rate": rate, "times the best": rate / pair.baseline.best()}
        measured = f"{rate:.2g}, {values['times the best']:.1f} times {pair.baseline.arm}'s best"
    label = f"{name}: the rate at which the difference is the paper's"
    return Row(label, f"{pair.margin:+.2f}", measured, "", len(pair.baseline.seeds), 0.0, values=values)


def figure(pairs: Mapping[str, Pair], metric: str, *, same_data: bool, digits: int = 2) -> Figure:
    """Draw both arms over rates, and below them their difference at each rate beside that of the paper."""
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

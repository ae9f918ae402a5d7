"""The figures of an A/B, and their conversion to SVG for a page."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING

from ..result import METRIC_NAMES, UNITS, Result
from . import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (4.0, 2.8)
"""The size of a figure in inches. In the 358 pixels of a phone's page, text of 9 points then has 11 pixels."""
MAX_RELATIVE_LOSS = 1.25
"""Learning rates are shown up to this multiple of the lowest log loss; the worst ones are far above."""


def result_figures(result: Result) -> Mapping[str, Figure]:
    """Draw the figures of a result, by caption."""
    colors = palette.arm_colors([arm.name for arm in result.arms])
    figures: dict[str, Figure] = {}
    name, unit = METRIC_NAMES[result.metric], UNITS[result.metric].strip()
    unit = f"% of the {name}" if unit == "%" else unit
    if any(math.isfinite(low) for pair in result.pairs for low in pair.curve.low):
        figure, axes = _figure("Difference so far", f"difference, {unit}")
        _draw_difference(axes, result, colors)
        better = "Below 0, the arm is better" if result.metric == "log_loss" else "Above 0, the arm is better"
        figures[
            f"The mean difference of the {name} so far, arm minus {result.arms[0].name}, with its confidence sequence. "
            f"{better}. A dotted line marks the moment of the verdict."
        ] = figure
    figure, axes = _figure("Log loss by learning rate", "log loss", "learning rate")
    _draw_rates(axes, result, colors)
    figures[
        "The log loss at each learning rate over all judged events; a ring marks the best one in hindsight. Dashed: "
        "the arm itself, which chooses its rate along the stream."
    ] = figure
    if result.period_ends:
        figure, axes = _figure("Periods", "difference, % of the log loss")
        _draw_periods(axes, result, colors)
        _add_legend(figure, ncols=2)
        figures["The difference of the log loss in each period. Below 0, the arm is better."] = figure
        for arm in result.arms:
            title = textwrap.fill(f"{arm.name}: rates along the stream", 44)
            figure, axes = _figure(title, "log loss minus the arm's own, %")
            _draw_rate_curves(axes, result, arm.name, colors[arm.name])
            rates = len(arm.loss_by_period)
            columns = rates if rates <= 4 else math.ceil(rates / 2) if rates <= 8 else math.ceil(rates / 3)
            _add_legend(figure, ncols=columns, handlelength=1, columnspacing=1)
            figures[
                f"The log loss of {arm.name} at each learning rate in each period, minus that of the arm itself. The "
                "stronger the line, the higher the rate. Below 0, another choice of the rate would have been better."
            ] = figure
    return figures


def _figure(title: str, ylabel: str, xlabel: str = "events") -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if xlabel == "events":
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short_number(value)))
    return figure, axes


def _add_legend(figure: Figure, **options: int) -> None:
    """Add a legend below the figure, unless there is nothing to explain: an arm that has diverged has no curves."""
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside lower center", **options)


def _short_number(value: float) -> str:
    """Format a number of events with k or M."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def _draw_difference(axes: Axes, result: Result, colors: Mapping[str, str]) -> None:
    reach = 0.0
    for pair in result.pairs:
        rows = [row for row in zip(*vars(pair.curve).values(), strict=True) if math.isfinite(row[2])]
        if not rows:
            continue
        events, mean, low, high = zip(*rows, strict=True)
        axes.plot(events, mean, color=colors[pair.arm], lw=1.5, label=pair.arm)
        axes.fill_between(events, low, high, color=colors[pair.arm], alpha=0.2, lw=0)
        reach = max(reach, abs(mean[-1]) + 3 * (high[-1] - low[-1]) / 2)
        if pair.decided_at is not None:
            axes.axvline(pair.decided_at, color=colors[pair.arm], lw=1, ls=":")
    axes.axhline(0, color=palette.INK, lw=0.8)
    if reach > 0:
        axes.set_ylim(-reach, reach)  # the first checks are too wide to show
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _draw_rates(axes: Axes, result: Result, colors: Mapping[str, str]) -> None:
    lowest = math.inf
    rates: set[float] = set()
    for arm in result.arms:
        points = {lr: loss for lr, loss in arm.loss_by_rate.items() if math.isfinite(loss)}
        if not points:
            continue
        axes.plot(list(points), list(points.values()), "o-", ms=4, lw=1.2, color=colors[arm.name], label=arm.name)
        axes.plot(arm.best_rate, arm.loss_at_best_rate, "o", ms=10, mfc="none", color=colors[arm.name])
        axes.axhline(arm.metrics["log_loss"], color=colors[arm.name], lw=1, ls="--")
        lowest = min(lowest, arm.loss_at_best_rate, arm.metrics["log_loss"])
        rates |= set(points)
    if math.isfinite(lowest):
        axes.set(xscale="log", ylim=(0.99 * lowest, MAX_RELATIVE_LOSS * lowest))
        axes.set_xticks(sorted(rates), [f"{lr:g}" for lr in sorted(rates)], rotation=45)
        axes.minorticks_off()
        axes.legend(loc="best")


def _draw_periods(axes: Axes, result: Result, colors: Mapping[str, str]) -> None:
    starts = [result.warm_up or 0, *result.period_ends[:-1]]
    widths = [end - start for start, end in zip(starts, result.period_ends, strict=True)]
    for number, pair in enumerate(result.pairs):
        share = 0.85 / len(result.pairs)
        left = [start + width * (0.075 + number * share) for start, width in zip(starts, widths, strict=True)]
        bars = [width * share for width in widths]
        axes.bar(left, pair.periods, bars, align="edge", color=colors[pair.arm], label=pair.arm)
    axes.axhline(0, color=palette.INK, lw=0.8)


def _draw_rate_curves(axes: Axes, result: Result, name: str, color: str) -> None:
    arm = result.arm(name)
    own = arm.own_loss_by_period
    peaks: list[float] = []
    rates = list(arm.loss_by_period)
    for number, (lr, losses) in enumerate(arm.loss_by_period.items()):
        relative = [100 * (loss / base - 1) for loss, base in zip(losses, own, strict=True)]
        finite = [value for value in relative if math.isfinite(value)]
        if finite:
            share = number / max(len(rates) - 1, 1)
            # A paler line could not be seen in dark mode, so the width shows the rate, too.
            alpha, width = 0.65 + 0.35 * share, 0.8 + 1.4 * share
            axes.plot(result.period_ends, relative, color=color, alpha=alpha, lw=width, label=f"{lr:g}")
            peaks.append(max(map(abs, finite)))
    axes.axhline(0, color=palette.INK, lw=0.8)
    # Rates far from the best one do not fit, but the nearest one that differs is always shown whole.
    nearest = min((peak for peak in peaks if peak > 0), default=0.0)
    reach = min(max(peaks, default=0.0), max(10.0, 1.1 * nearest)) or 1
    axes.set_ylim(-reach / 3, reach)


def styled(draw: Callable[[], Mapping[str, Figure]]) -> Mapping[str, Figure]:
    """Call a function that draws figures, with the style of all figures."""
    import matplotlib

    with matplotlib.rc_context(palette.STYLE):
        return draw()


def svg(figure: Figure, name: str, caption: str) -> str:
    """Convert a figure to SVG that can be part of a page.

    Colors of the palette become CSS variables, ids get a prefix so that they are unique on the page, and coordinates
    are rounded to keep the page small. The CSS variable `--inches` is the width of the figure, by which a page
    limits its size: text should have about the same size in all figures.

    Args:
        figure: The figure.
        name: A name that is unique on the page.
        caption: The text for screen readers.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**palette.STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r' d="([^"]*)"', _round_path, text)
    for color in palette.DARK:
        text = text.replace(color, f"var({palette.css_variable(color)})")
    text = re.sub(r'<svg (.*?)width="[^"]*"', r"<svg \1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<svg (.*?)height="[^"]*"', r"<svg \1", text, count=1, flags=re.DOTALL)
    attributes = f'role="img" aria-label="{escape(caption)}" style="--inches:{figure.get_figwidth():g}"'
    return text.replace("<svg ", f"<svg {attributes} ", 1)


def _round_path(path: re.Match[str]) -> str:
    """Round the coordinates of a path to a tenth of a point."""
    rounded = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), path[1])
    return f' d="{" ".join(rounded.split())}"'

"""The figures of an archived A/B study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from cadam.ab.report import palette
from cadam.statistics.intervals import Array

from .ab_evidence import MAIN_METRIC, METRIC_NAMES, Evidence, collect_evidence
from .ab_study import UNCHANGED, Study, at_chosen_rates, choose_rates, hindsight_rates
from .learning_rates import RateChoice
from .results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAME_LENGTH = 16
"""If the name of an arm is longer, one legend below the figure serves all panels."""
MAX_RELATIVE_LOSS = 1.4
"""The panel of learning rates shows log losses up to this multiple of the lowest; the worst rates are far above."""


def study_figures(study: Study, results: Results) -> Mapping[str, Figure]:
    """Draw the figures of a study.

    Returns:
        The figures by caption: the arms along the stream, their difference with the confidence sequence, the learning
        rates, and one figure for each simulated change.
    """
    from matplotlib.figure import Figure

    tests = at_chosen_rates(study, results)
    colors = palette.arm_colors(study.arms)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    stream_panel, sequence_panel, rate_panel = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    for arm in study.arms:
        curve = tests.where(optimizer=arm, condition=UNCHANGED).curve("auc").mean(0)
        stream_panel.plot(_smooth(curve), color=colors[arm], label=arm, lw=1.2)
    stream_panel.set(xlabel="block of time", ylabel="AUC, mean of five blocks", title="Along the stream")
    _draw_rates(rate_panel, choose_rates(study, results), hindsight_rates(study, results), colors)
    baseline = tests.where(optimizer=study.baseline, condition=UNCHANGED)
    pairs = {"A/A": (results.repeats(), palette.TARGET)}
    for arm in study.arms[1:]:
        pairs[f"{arm} - {study.baseline}"] = tests.where(optimizer=arm, condition=UNCHANGED), colors[arm]
    _draw_sequences(
        sequence_panel,
        {name: (collect_evidence(runs, baseline, MAIN_METRIC), color) for name, (runs, color) in pairs.items()},
    )
    if max(map(len, study.arms)) > MAX_NAME_LENGTH:
        figure.legend(*stream_panel.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    else:
        stream_panel.legend(loc="best")
        if sequence_panel.get_legend_handles_labels()[0]:
            sequence_panel.legend(loc="best")
    figures = {
        "Left: the AUC of predictions before their events are learned, mean over seeds. Middle: the difference after "
        "each block, with its confidence sequence; gray is the baseline compared with itself. Right: the log loss by "
        "learning rate, on the tuning part (ring: chosen) and, dotted, on the measured part.": figure
    }
    for condition, change in study.simulated.items():
        if "change" in change:
            caption = (
                f"{condition[0].upper()}{condition[1:]}: the log loss minus that of the same events without the "
                "change, mean over seeds. Dotted: the change."
            )
            figures[caption] = _change_figure(study, tests, condition, colors)
    return figures


def _draw_rates(
    axes: Axes, chosen: Mapping[str, RateChoice], hindsight: Mapping[str, RateChoice], colors: Mapping[str, str]
) -> None:
    for arm, choice in chosen.items():
        axes.plot(list(choice.means), list(choice.means.values()), "o-", ms=4, color=colors[arm])
        axes.plot(choice.lr, choice.means[choice.lr], "o", ms=10, mfc="none", color=colors[arm])
        later = hindsight[arm].means
        axes.plot(list(later), list(later.values()), "x:", ms=4, lw=1, color=colors[arm])
    choices = [*chosen.values(), *hindsight.values()]
    rates = sorted({lr for choice in choices for lr in choice.means})
    lowest = min(min(choice.means.values()) for choice in choices)
    axes.set(xscale="log", xlabel="learning rate", ylabel="log loss", title="Learning rates (ring: chosen)")
    axes.set_xticks(rates, [f"{lr:g}" for lr in rates], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(0.95 * lowest, MAX_RELATIVE_LOSS * lowest)


def _draw_sequences(axes: Axes, sequences: Mapping[str, tuple[Evidence | None, str]]) -> None:
    """Draw the mean difference so far with its confidence sequence, for each comparison that has one."""
    reach = 0.0
    for name, (evidence, color) in sequences.items():
        if evidence is None:
            continue
        checks = np.flatnonzero(np.isfinite(evidence.low)) + 1
        if len(checks):
            mean = np.cumsum(evidence.by_block) / np.arange(1, len(evidence.by_block) + 1)
            axes.plot(checks, mean[checks - 1], color=color, lw=1.2, label=name)
            low, high = evidence.low[checks - 1], evidence.high[checks - 1]
            axes.fill_between(checks, low, high, color=color, alpha=0.2, lw=0)
        end = evidence.sequence
        if math.isfinite(end.low):
            reach = max(reach, abs(end.mean) + 3 * end.half_width)
    if reach > 0:
        axes.set_ylim(-reach, reach)  # the first checks are too wide to show
    if not axes.lines:
        axes.text(0.5, 0.6, "too few blocks", transform=axes.transAxes, ha="center", color=palette.MUTED)
    axes.axhline(0, color=palette.INK, lw=0.8)
    title = "Mean so far, confidence sequence"
    axes.set(xlabel="blocks so far", ylabel=f"difference of {METRIC_NAMES[MAIN_METRIC]}", title=title)


def _smooth(curve: Array, width: int = 5) -> Array:
    """Return the moving average over `width` blocks."""
    smooth: Array = np.convolve(curve, np.ones(width) / width, "valid")
    return smooth


def _change_figure(study: Study, tests: Results, condition: str, colors: Mapping[str, str]) -> Figure:
    """Draw the log loss that a simulated change adds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    for arm in study.arms:
        runs = tests.where(optimizer=arm)
        gap = runs.where(condition=condition).curve("log_loss") - runs.where(condition=UNCHANGED).curve("log_loss")
        axes.plot(gap.mean(0), color=colors[arm], label=arm, lw=1.2)
    for block in study.simulated[condition]["change"]["blocks"]:
        axes.axvline(block, color=palette.TARGET, lw=1, ls=":")
    axes.set(xlabel="block of time", ylabel="added log loss")
    axes.legend(loc="best")
    return figure

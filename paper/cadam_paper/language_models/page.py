"""The table and the figure of the page on language models, from the published results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cadam.statistics.comparison import Comparison

from ..harness.panels import panels
from ..harness.rates import RateCurve, compare_at_best_rates, draw
from ..published import format_interval, format_rate, is_significant_among, load, table_header, table_row
from .optimizers import ARMS
from .study import BASELINE, COLORS, METRICS, speedups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONDITIONS = {
    "lm-shift": "one domain after the other",
    "lm-mixed": "domains mixed",
    "lm-cosine": "domains mixed, cosine schedule",
    "lm-noise": "domains mixed, 20% of targets random",
}
"""The published experiments, and what they say about the text."""
AT_AN_END = "†"
"""Marks a value whose learning rate is at an end of the grid."""
HIGH_RATE = 8e-3
"""The learning rate at which the page says how much AdamW and CAdamW lose: twice AdamW's best in most conditions."""


def curves(name: str, metric: str) -> dict[str, RateCurve]:
    """Return the metric of every arm by learning rate and seed."""
    results = load(name).results
    return {arm: RateCurve.of(results, arm, metric, "lower") for arm in ARMS}


def comparisons(name: str, metric: str) -> dict[str, Comparison]:
    """Compare every arm with AdamW, each at its own best learning rate."""
    of_arms = curves(name, metric)
    return {arm: compare_at_best_rates(of_arms[arm], of_arms[BASELINE]) for arm in ARMS if arm != BASELINE}


def result_table() -> list[str]:
    """Return the table of all arms: best learning rate, bits per byte, and the difference from AdamW.

    A dagger marks a value whose best learning rate is at an end of the grid, or that is compared with such a value.
    """
    lines = table_header("text", "optimizer", "best rate", *(f"{text}, minus AdamW" for text in METRICS.values()))
    for name, condition in CONDITIONS.items():
        by_metric = {metric: comparisons(name, metric) for metric in METRICS}
        for arm, curve in curves(name, "loss").items():
            cells = []
            for metric in METRICS:
                of_arm, of_baseline = (curves(name, metric)[each] for each in (arm, BASELINE))
                value = (
                    f"{of_arm.at(of_arm.best()).mean:.2f}"
                    if arm == BASELINE
                    else format_interval(by_metric[metric][arm].difference)
                )
                is_uncertain = of_arm.best_is_at_an_end or of_baseline.best_is_at_an_end
                cells.append(f"{value} {AT_AN_END}" if is_uncertain else value)
            lines.append(table_row(condition, arm, format_rate(curve.best()), *cells))
    return lines


def answer() -> list[str]:
    """Return the answer of the page: a table and a few sentences, from the conclusions of the comparisons.

    The main comparisons are those of CAdamW with AdamW by the loss over the pass, one per condition. They are corrected
    for their number; the other comparisons of the table explain them and are not.
    """
    main = {condition: comparisons(name, "loss")["CAdamW"] for name, condition in CONDITIONS.items()}
    ahead = [condition for condition, comparison in main.items() if comparison.kind == "better"]
    behind = [condition for condition, comparison in main.items() if comparison.kind == "worse"]
    significant = [c for c in (*ahead, *behind) if is_significant_among(main[c].difference, len(main))]
    return [
        *table_header("text", "loss of CAdamW minus loss of AdamW, bits per byte"),
        *(table_row(condition, format_interval(comparison.difference)) for condition, comparison in main.items()),
        "",
        f"The 95% interval excludes 0 in favor of CAdamW in {len(ahead)} of {len(main)} conditions and in favor of "
        f"AdamW in {len(behind)}. After correction for {len(main)} comparisons, {_count(significant)}.",
    ]


def _count(significant: Sequence[str]) -> str:
    if not significant:
        return "none of them is significant"
    return f"{len(significant)} {'is' if len(significant) == 1 else 'are'} significant ({'; '.join(significant)})"


def high_rate() -> list[str]:
    """Say how much AdamW and CAdamW lose at a high learning rate, in the conditions in which both were run at it."""
    losses: dict[str, list[float]] = {BASELINE: [], "CAdamW": []}
    not_run = []
    for name, condition in CONDITIONS.items():
        of_arms = {arm: curves(name, "loss")[arm] for arm in losses}
        lacking = [arm for arm, curve in of_arms.items() if HIGH_RATE not in curve.rates]
        not_run += [f"{arm} was not run at this rate with *{condition}*" for arm in lacking]
        if not lacking:
            for arm, curve in of_arms.items():
                losses[arm].append(curve.at(HIGH_RATE).mean - curve.at(curve.best()).mean)
    ranges = {arm: f"{min(values):.2f} to {max(values):.2f}" for arm, values in losses.items()}
    return [
        f"- **CAdamW tolerates a rate that is too high.** At {format_rate(HIGH_RATE)}, the loss of {BASELINE} is "
        f"{ranges[BASELINE]} bits above that at its best rate, and the loss of CAdamW {ranges['CAdamW']}, in "
        f"{len(losses[BASELINE])} of {len(CONDITIONS)} conditions. {'; '.join(not_run)}.",
    ]


def speedup_table() -> list[str]:
    """Return the table of speedups by seed: the steps of AdamW divided by the steps of an arm to the same loss."""
    arms = [arm for arm in ARMS if arm != BASELINE]
    lines = table_header("text", *arms)
    for name, condition in CONDITIONS.items():
        results = load(name).results
        lines.append(table_row(condition, *(_format_speedups(speedups(results, arm)) for arm in arms)))
    return lines


def _format_speedups(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" if ratio else "not reached" for ratio in sorted(ratios))


def rate_figure() -> Figure:
    """Draw the mean loss over the pass by learning rate, for all arms under each condition."""
    figure, axes = panels(2, 2, 8, 7)
    for panel, (name, condition) in zip(axes.flat, CONDITIONS.items(), strict=True):
        of_arms = curves(name, "loss")
        draw(panel, {COLORS[arm]: curve for arm, curve in of_arms.items()})
        rates = sorted({rate for curve in of_arms.values() for rate in curve.rates})
        panel.minorticks_off()
        panel.set_xticks(rates, [format_rate(rate) for rate in rates])
        panel.set(title=condition, xlabel="learning rate", ylabel="bits per byte, mean over the pass")
    axes[0, 0].legend(fontsize=8)
    return figure

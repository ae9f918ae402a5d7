"""The table and the figure of the page on language models, from the published results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cadam.statistics.comparison import Comparison

from ..harness.panels import panels
from ..harness.rates import RateCurve, compare_at_best_rates, draw
from ..published import format_interval, format_rate, load, table_header, table_row
from .optimizers import ARMS
from .study import BASELINE, COLORS, METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONDITIONS = {"lm-shift": "one domain after the other", "lm-mixed": "all domains in every batch"}
"""The published experiments, and what they say about the text."""


def curves(name: str, metric: str) -> dict[str, RateCurve]:
    """Return the metric of every arm by learning rate and seed."""
    results = load(name).results
    return {arm: RateCurve.of(results, arm, metric, "lower") for arm in ARMS}


def comparisons(name: str, metric: str) -> dict[str, Comparison]:
    """Compare every arm with AdamW, each at its own best learning rate."""
    of_arms = curves(name, metric)
    return {arm: compare_at_best_rates(of_arms[arm], of_arms[BASELINE]) for arm in ARMS if arm != BASELINE}


def result_table() -> list[str]:
    """Return the table of all arms: best learning rate, bits per byte, and the difference from AdamW."""
    lines = table_header("text", "optimizer", "best rate", *(f"{text}, minus AdamW" for text in METRICS.values()))
    for name, condition in CONDITIONS.items():
        by_metric = {metric: comparisons(name, metric) for metric in METRICS}
        for arm, curve in curves(name, "loss").items():
            cells = [
                f"{curves(name, metric)[arm].at(curves(name, metric)[arm].best()).mean:.2f}"
                if arm == BASELINE
                else format_interval(by_metric[metric][arm].difference)
                for metric in METRICS
            ]
            lines.append(table_row(condition, arm, format_rate(curve.best()), *cells))
    return lines


def answer() -> list[str]:
    """Return the answer of the page in a few sentences, from the conclusions of the comparisons."""
    shift, mixed = (comparisons(name, "loss")["CAdamW"] for name in CONDITIONS)
    words: Mapping[str, str] = {
        "better": "CAdamW is clearly ahead of AdamW",
        "worse": "CAdamW is clearly behind AdamW",
        "inconclusive": "the difference between CAdamW and AdamW is not clear with three seeds",
    }
    return [
        f"With one domain after the other, {words[shift.kind]} "
        f"({format_interval(shift.difference)} bits per byte over the pass). With all domains in every batch, "
        f"{words[mixed.kind]} ({format_interval(mixed.difference)}). Lower is better; each optimizer is at its own "
        f"best learning rate. The table has {2 * len(METRICS) * (len(ARMS) - 1)} comparisons, so one of them would be "
        "bold by chance alone."
    ]


def rate_figure() -> Figure:
    """Draw the mean loss over the pass by learning rate, for all arms under both conditions."""
    figure, axes = panels(1, len(CONDITIONS), 10, 4.2)
    for panel, (name, condition) in zip(axes[0], CONDITIONS.items(), strict=True):
        of_arms = curves(name, "loss")
        draw(panel, {COLORS[arm]: curve for arm, curve in of_arms.items()})
        rates = sorted({rate for curve in of_arms.values() for rate in curve.rates})
        panel.minorticks_off()
        panel.set_xticks(rates, [format_rate(rate) for rate in rates])
        panel.set(title=condition, xlabel="learning rate", ylabel="bits per byte, mean over the pass")
    axes[0, 0].legend(fontsize=8)
    return figure

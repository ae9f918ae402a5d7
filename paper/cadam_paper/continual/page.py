"""The tables and figures of the page on continual learning, from the published results of the study for the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from cadam.ab.text import join_words
from cadam.statistics.comparison import Comparison
from cadam.statistics.intervals import Interval, interval

from ..harness.rates import RateCurve, compare_at_best_rates
from ..harness.results import Results
from ..published import format_interval, format_rate, is_significant_among, load, table_header, table_row
from .arms import ARMS
from .study import BASELINE, METRICS
from .tasks import CONDITIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "continual-small"
"""Name of the experiment whose published results the page shows."""
BY_RATE, BY_TASK = 0, 1
"""Positions of the two figures of the experiment."""
TREATMENT = "CAdam"
PENALIZED, PENALIZED_TREATMENT = "Adam, L2 toward the start 1e-3", "CAdam, L2 toward the start 1e-3"
MAIN_COMPARISONS = 4 * len(CONDITIONS)
"""Number of comparisons that the first sentences of the page report, for the Bonferroni correction."""
STRONGLY_PENALIZED = "Adam, L2 toward the start 1e-2"


def figure(number: int) -> Figure:
    """Draw one of the figures of the experiment."""
    request = load(NAME)
    return list(request.experiment.figures(request.results).values())[number]


def curve(condition: str, arm: str, metric: str) -> RateCurve:
    """Return a metric of an arm by learning rate and seed under one condition."""
    return RateCurve.of(load(NAME).results.where(condition=condition), arm, metric, "higher")


@cache
def comparisons(condition: str, metric: str) -> Mapping[str, Comparison]:
    """Compare every arm with Adam, each at its own best learning rate by this metric."""
    baseline = curve(condition, BASELINE, metric)
    return {arm: compare_at_best_rates(curve(condition, arm, metric), baseline) for arm in ARMS if arm != BASELINE}


def decline(condition: str, arm: str) -> Interval:
    """Return the accuracy in the last tenth of the tasks minus that in the first tenth.

    The learning rate is the one with the best accuracy over all tasks.

    A negative difference is a loss of plasticity.
    """
    best = curve(condition, arm, "accuracy").best()
    first, last = (curve(condition, arm, metric).values[best] for metric in ("first_accuracy", "last_accuracy"))
    return interval([last[seed] - first[seed] for seed in first])


def inactive(condition: str, arm: str) -> float:
    """Return the share of hidden units that are always 0 after the last task, in percent, at the best rate."""
    best = curve(condition, arm, "accuracy").best()
    results: Results = load(NAME).results.where(condition=condition, optimizer=arm, lr=best)
    return 100 * float(results.curve("inactive")[:, -1].mean())


def result_table() -> list[str]:
    """Return the table of all arms: best rate, accuracy, its change over the tasks, and the difference from Adam."""
    lines = table_header(
        "tasks",
        "optimizer",
        "best rate",
        *(f"{text}, minus Adam" for text in METRICS.values()),
        "last tenth minus first tenth",
        "inactive units at the end",
    )
    for condition in CONDITIONS:
        for arm in ARMS:
            cells = [
                f"{curve(condition, arm, metric).at(curve(condition, arm, metric).best()).mean:.2f}"
                if arm == BASELINE
                else format_interval(comparisons(condition, metric)[arm].difference)
                for metric in METRICS
            ]
            best = format_rate(curve(condition, arm, "accuracy").best())
            change = format_interval(decline(condition, arm))
            lines.append(table_row(condition, arm, best, *cells, change, f"{inactive(condition, arm):.0f}%"))
    return lines


def answer() -> list[str]:
    """Return the Markdown lines at the top of the page, which state the result of each comparison."""
    declines = {(condition, arm): decline(condition, arm) for condition in CONDITIONS for arm in (BASELINE, TREATMENT)}
    losing = [
        f"{arm} with {condition}"
        for (condition, arm), change in declines.items()
        if change.mean < 0 and is_significant_among(change, len(declines))
    ]
    count = len(CONDITIONS) * (len(ARMS) - 1)
    unclear = [
        f"{arm} with {condition}"
        for condition in CONDITIONS
        for arm, comparison in comparisons(condition, "accuracy").items()
        if not is_significant_among(comparison.difference, count)
    ]
    return [
        f"Differences of the accuracy over all tasks in points, each optimizer at its own best learning rate. *Clear* "
        f"means significant after correction for these {MAIN_COMPARISONS} comparisons.",
        "",
        f"- **CAdam minus Adam**: {_compare(TREATMENT, BASELINE)}.",
        f"- **The same with an L2 penalty of 1e-3 toward the initial weights** on both: "
        f"{_compare(PENALIZED_TREATMENT, PENALIZED)}.",
        f"- **The penalty without a mask**: {STRONGLY_PENALIZED} minus {BASELINE}: "
        f"{_compare(STRONGLY_PENALIZED, BASELINE)}.",
        f"- **The mask with the smaller penalty against the larger penalty**: {PENALIZED_TREATMENT} minus "
        f"{STRONGLY_PENALIZED}: "
        f"{_compare(PENALIZED_TREATMENT, STRONGLY_PENALIZED)}.",
        "- **Loss of plasticity**, a lower accuracy in the last tenth of the tasks than in the first, is clear in "
        f"{len(losing)} of {len(declines)} cases of Adam and CAdam after correction for their number: {_join(losing)}.",
        f"- **All arms against Adam**, over all tasks: {count - len(unclear)} of {count} differences are clear after "
        f"correction for their number. Not clear: {_join(unclear)}.",
    ]


def differences(arm: str, other: str) -> dict[str, Interval]:
    """Return the accuracy of one arm minus that of another over all tasks, each at its own best rate, by condition."""
    return {
        condition: compare_at_best_rates(
            curve(condition, arm, "accuracy"), curve(condition, other, "accuracy")
        ).difference
        for condition in CONDITIONS
    }


def clear_names(compared: Mapping[str, Interval]) -> list[str]:
    """Return the conditions whose difference is significant after correction for the main comparisons."""
    return [name for name, difference in compared.items() if is_significant_among(difference, MAIN_COMPARISONS)]


def _compare(arm: str, other: str) -> str:
    """Format the differences of two arms over all tasks, and how many are clear after correction."""
    compared = differences(arm, other)
    shown = " and ".join(f"{format_interval(difference)} with {name}" for name, difference in compared.items())
    return f"{shown}; {_count(clear_names(compared))}"


def _count(clear: list[str]) -> str:
    if len(clear) == len(CONDITIONS):
        return "both are clear"
    return f"only the one with {clear[0]} is clear" if clear else "neither is clear"


def _join(names: list[str]) -> str:
    return join_words(names) if names else "none"

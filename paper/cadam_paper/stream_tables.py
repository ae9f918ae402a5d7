"""Tables of docs/streams.md: the A/B comparisons and the learning-rate curves on real event streams.

These streams replace the paper's online experiments (table 3), whose data are private.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from cadam.ab.text import join_words
from cadam.statistics.comparison import sign

from .archive_names import UNCHANGED, display_condition
from .harness.summary import Row
from .harness.verdict import kind_names
from .published import difference_of, find_row, find_rows, is_complete, load, summary, table_header, table_row

STREAMS = {
    "flights": "flights",
    "movielens": "100,000 film ratings",
    "movielens-1m": "a million film ratings",
    "electricity": "electricity prices",
    "forest": "forest cover",
    "retrosheet": "baseball",
}
"""The label of each stream, by its name. The names of its experiments are ab-NAME and rates-NAME."""

MAIN = "GAUC by impressions"
"""The metric that decides the A/B."""
OWN = "each at its own best rate"
ARMS = ("Adam", "CAdam")


def answer() -> list[str]:
    """Return the table of gains and verdicts by stream, and a sentence about the best learning rates."""
    table = table_header(
        "gain of CAdam in points of GAUC",
        OWN,
        "both at three times Adam's best rate",
        "rates chosen on the first fifth",
        f"verdict, {OWN}",
        "verdict, rates chosen on the first fifth",
    )
    words = kind_names("CAdam better", "CAdam worse")
    curves, chosen = dict(_complete_experiments("rates")), dict(_complete_experiments("ab"))
    for label in STREAMS.values():
        rows = {}
        if label in curves:
            rows["own"] = find_row(curves[label], f"{MAIN}: {OWN}")
            rows["high"] = find_row(curves[label], f"{MAIN}: both at three times that")
        if label in chosen:
            rows["chosen"] = find_row(chosen[label], f"{UNCHANGED}: {MAIN} (")
        gains = [_format_gain(rows[key]) if key in rows else "not run" for key in ("own", "high", "chosen")]
        kinds = [rows[key].verdict_kind if key in rows else None for key in ("own", "chosen")]
        verdicts = [words[kind] if kind else "not run" for kind in kinds]
        table.append(table_row(label, *gains, *verdicts))
    ratios = best_rate_ratios()
    higher = [label for label, ratio in ratios.items() if ratio > 1]
    lower = [label for label, ratio in ratios.items() if ratio < 1]
    return [
        *table,
        "",
        f"CAdam's best rate is higher than Adam's on {_join_or_none(higher)}, and lower on {_join_or_none(lower)}.",
    ]


def best_rate_ratios() -> dict[str, float]:
    """Return the ratio of CAdam's best learning rate to Adam's by stream."""
    return {
        label: _rate_tolerance(name, "CAdam")["best"] / _rate_tolerance(name, "Adam")["best"]
        for label, name in _complete_experiments("rates")
    }


def _format_gain(row: Row) -> str:
    """Format a difference of GAUC in points, in bold if the interval over seeds excludes 0."""
    text = f"{100 * row.values['difference']:+.2f}"
    return f"**{text}**" if sign(difference_of(row)) else text


def _join_or_none(labels: Sequence[str]) -> str:
    return join_words(labels) if labels else "none"


def comparison_table() -> list[str]:
    """Return the table of the A/B comparisons, with learning rates chosen on the first fifth, by condition."""
    table = table_header(
        "stream",
        "measured events, users",
        display_condition(UNCHANGED),
        "verdict",
        "sudden shift of one feature",
        "20% label noise",
    )
    for label, experiment in _complete_experiments("ab"):
        metrics = load(experiment).results.tests()[0].outcome.metrics
        sizes = f"{metrics['events']:,.0f}, {metrics['users_of_both_classes']:,.0f}"
        differences = [_format_difference(row) for row in find_rows(experiment, suffix=f": {MAIN} (higher is better)")]
        verdict = str(summary(experiment).verdicts[UNCHANGED])
        table.append(table_row(label, sizes, differences[0], verdict, *differences[1:]))
    return table


def rate_table() -> list[str]:
    """Return the table of best learning rates, and of CAdam minus Adam at these rates and at common rates."""
    table = table_header(
        "stream", "seeds", "best rate: Adam, CAdam", OWN, "both at Adam's best", "both at three times that"
    )
    for label, experiment in _complete_experiments("rates"):
        best = ", ".join(f"{_rate_tolerance(experiment, arm)['best']:g}" for arm in ARMS)
        prefixes = (OWN, "both at Adam's best rate", "both at three times that")
        rows = [find_row(experiment, f"{MAIN}: {prefix}") for prefix in prefixes]
        table.append(table_row(label, str(rows[0].seeds), best, *map(_format_difference, rows)))
    return table


def tolerance_table() -> list[str]:
    """Return the table of learning rates within a point of GAUC of the best, and of differences in log loss."""
    table = table_header("stream", *(f"{arm} within 0.01 of its best" for arm in ARMS), f"log loss, {OWN}")
    for label, experiment in _complete_experiments("rates"):
        tolerances = [_rate_tolerance(experiment, arm) for arm in ARMS]
        ranges = [f"{tolerance['low']:g} to {tolerance['high']:g}" for tolerance in tolerances]
        table.append(table_row(label, *ranges, _format_difference(find_row(experiment, f"log loss: {OWN}"))))
    return table


def interval_table() -> list[str]:
    """Return the table of differences with their intervals over seeds, users and time."""
    table = table_header("stream", "rates", "over seeds", "over users", "confidence sequence over time", "verdict")
    by_label: dict[str, list[str]] = {}
    for kind, condition, prefix, words in (
        ("rates", OWN, f"{MAIN}: {OWN}", "each its own best"),
        ("ab", UNCHANGED, f"{UNCHANGED}: {MAIN} (", "chosen on the first fifth"),
    ):
        for label, experiment in _complete_experiments(kind):
            rows = [find_row(experiment, prefix)]
            for over in ("difference over users", "confidence sequence"):
                rows += find_rows(experiment, f"{condition}: {over}")[:1]
            verdict = f"{rows[0].verdict_kind}{', conflicting' if rows[0].conflicting else ''}"
            by_label.setdefault(label, []).append(table_row(label, words, *map(_format_difference, rows), verdict))
    return [*table, *(row for label in STREAMS.values() for row in by_label.get(label, []))]


def _complete_experiments(kind: str) -> Iterable[tuple[str, str]]:
    """Return (label, experiment) for the streams whose experiment of this kind is completely archived."""
    return [(label, f"{kind}-{name}") for name, label in STREAMS.items() if is_complete(f"{kind}-{name}")]


def _rate_tolerance(experiment: str, arm: str) -> Mapping[str, float]:
    """Return the best learning rate of an arm, and the range of rates whose GAUC is within a point of the best."""
    return find_row(experiment, f"{MAIN}: {arm} within").values


def _format_difference(row: Row) -> str:
    """Format a difference and its interval with four digits, in bold if the interval excludes 0."""
    difference = difference_of(row)
    if not math.isfinite(difference.low):
        return f"{difference.mean:+.4f}, {row.verdict}"
    text = f"{difference:+.4f}"
    return f"**{text}**" if sign(difference) else text

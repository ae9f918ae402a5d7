"""The recommendation of an A/B: sentences about the verdict, the size of the effect, and the learning rates.

The effect is stated in points of GAUC, as a number of correctly ranked pairs of events, and in log loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cadam.ab.text import join_words
from cadam.statistics.comparison import Comparison, position
from cadam.statistics.intervals import Interval

from .ab_evidence import MAIN_METRIC
from .verdict import SAME_ARM, SAME_RUNS, Recommendation, Verdict

PAIRS = 1000
"""The number of pairs of events that the effect is expressed in."""


@dataclass(frozen=True)
class Findings:
    """Everything that the recommendation about one arm depends on."""

    verdict: Verdict
    gauc: Comparison
    """The comparison of GAUC over seeds."""
    log_loss: Comparison
    """The comparison of the log loss over seeds."""
    intervals: Mapping[str, Interval]
    """The intervals of the difference of GAUC over seeds, users and time."""
    rates: Mapping[str, float]
    """The learning rates that the arms were compared at."""
    rates_by_gauc: Mapping[str, float]
    """The learning rates with the highest GAUC on the measured part, under one seed."""
    difference_by_gauc: float
    """The difference of GAUC at `rates_by_gauc`, under one seed."""
    rates_by_loss: Mapping[str, float]
    """The learning rates with the lowest log loss on the measured part, under one seed."""
    matters: float
    """The smallest difference of GAUC of practical use."""
    events: int
    """The number of measured events."""
    label: str = ""
    """The name of the label, which sentences about events mention."""
    has_user: bool = True
    """Whether GAUC compares events of the same user."""
    chance: float = 0.0
    """The distance from 0.5 that the GAUC of random scores is likely to have."""
    missing_reason: str = ""
    """The reason why the interval over time is unknown."""


def recommend(findings: Findings) -> Recommendation:
    """Return the recommendation about one arm, with its reasons and numbers."""
    f, verdict = findings, findings.verdict
    values: dict[str, Any] = {
        "metric": MAIN_METRIC,
        "difference": f.gauc.difference.mean,
        "intervals": {source: {"low": i.low, "high": i.high} for source, i in f.intervals.items()},
        "matters": f.matters,
        "log_loss_difference": f.log_loss.difference.mean,
        "learning_rates": dict(f.rates),
        "learning_rates_to_use": dict(f.rates_by_loss),
        "learning_rates_in_hindsight": dict(f.rates_by_gauc),
        "difference_in_hindsight": f.difference_by_gauc,
        "measured_events": f.events,
        "seeds": f.gauc.seeds,
    }
    if verdict.kind == "diverged":
        return Recommendation(verdict, "", (f"Learning rates in use: {_format_rates(f.rates)}.",), values)
    return Recommendation(verdict, _describe_effect(f), _reasons(f), values, _objection(f))


def _reasons(f: Findings) -> tuple[str, ...]:
    reasons = [
        describe_intervals(f.verdict, f.intervals, f.matters, f.missing_reason),
        f"Unknown over seeds: {SAME_RUNS}." if f.gauc.same_runs else "",
        _describe_pairs(f),
        _describe_log_loss(f.log_loss),
        f"Learning rates to use: {_format_rates(f.rates_by_loss)}.",
    ]
    if f.rates_by_loss != f.rates:
        reasons.append(
            "These rates had the lowest log loss on the measured events under one seed. The arms were compared at the "
            f"rates with the lowest log loss on the first part: {_format_rates(f.rates)}."
        )
    if f.rates_by_gauc != f.rates:
        reasons.append(
            f"The best learning rates in hindsight by GAUC, under one seed: {_format_rates(f.rates_by_gauc)}. The "
            f"difference there is {100 * f.difference_by_gauc:+.2f} points."
        )
    if math.isfinite(f.gauc.floor):
        reasons.append(
            f"Noise floor: two sets of {f.gauc.seeds} runs of {f.gauc.baseline} that differ only in their seeds are "
            f"within {100 * f.gauc.floor:.2f} points of each other."
        )
    reasons.append(
        f"Measured on the last {f.events:,} events under {f.gauc.seeds} seeds; the rates were chosen on the events "
        "before."
    )
    return tuple(filter(None, reasons))


def _objection(f: Findings) -> str:
    """Return the reason not to recommend any arm, whatever the verdict is, or an empty text."""
    gauc, arm, baseline = f.gauc, f.verdict.arm, f.verdict.baseline
    if max(gauc.mean, gauc.baseline_mean) <= 0.5 + f.chance:
        return (
            f"neither arm ranks better than chance (GAUC {100 * gauc.baseline_mean:.2f} with {baseline}, "
            f"{100 * gauc.mean:.2f} with {arm}, chance 50). Check label and features, or use more events"
        )
    difference, in_hindsight = gauc.difference.mean, f.difference_by_gauc
    has_conclusion = f.verdict.kind in ("better", "worse")
    is_reversed = in_hindsight * difference < -f.matters * abs(difference)
    if f.rates_by_gauc == f.rates or not has_conclusion or not is_reversed:
        return ""
    best = ",".join(f"{rate:g}" for rate in sorted(set(f.rates_by_gauc.values())))
    return (
        f"the learning rates decide which arm is ahead. GAUC with {arm} is {_format_points(difference)} at the rates "
        f"that were best on the first part ({_format_rates(f.rates)}), and {_format_points(in_hindsight)} at the best "
        f"rates for the rest ({_format_rates(f.rates_by_gauc)}). Compare again at the latter: --lr {best}"
    )


def _format_rates(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate:g}" for name, rate in rates.items())


def _format_points(difference: float) -> str:
    return f"{100 * abs(difference):.2f} points {'higher' if difference > 0 else 'lower'}"


def _describe_effect(f: Findings) -> str:
    arm, difference = f.verdict.arm, f.gauc.difference.mean
    if f.verdict.kind == "equivalent":
        return (
            f"GAUC with {arm} is within {100 * f.matters:g} points of that with {f.verdict.baseline} "
            f"({100 * difference:+.2f} points)"
        )
    size = _format_points(difference) if abs(100 * difference) >= 0.005 else "about the same"
    means = f"{100 * f.gauc.baseline_mean:.2f} -> {100 * f.gauc.mean:.2f}"
    return f"GAUC with {arm} is {size} ({means}){describe_doubt(f.verdict, f.intervals, f.matters)}"


def describe_doubt(verdict: Verdict, intervals: Mapping[str, Interval], matters: float) -> str:
    """Return which intervals leave an inconclusive verdict open, as a clause; empty for other verdicts."""
    if verdict.kind != "inconclusive":
        return ""
    if verdict.conflicting:
        return ", but the intervals conflict"
    positions = {source: position(interval, matters) for source, interval in intervals.items()}
    doubtful = [source for source in positions if positions[source] == "open"]
    if not doubtful:  # some intervals exclude 0 and the others are within `matters`: the size is not certain
        doubtful = [source for source in positions if positions[source] == "within"]
    unknown = [source for source in doubtful if not math.isfinite(intervals[source].half_width)]
    groups = {"inconclusive": [source for source in doubtful if source not in unknown], "unknown": unknown}
    clauses = [f"{words} over {join_words(sources)}" for words, sources in groups.items() if sources]
    return f", but that is {join_words(clauses)}"


def describe_intervals(
    verdict: Verdict, intervals: Mapping[str, Interval], matters: float, missing_reason: str = ""
) -> str:
    """Return on which side of 0 the difference lies over seeds, users and time, and where it is too small to matter."""
    if verdict.same:
        return (
            f"{SAME_ARM[:1].upper()}{SAME_ARM[1:]}: both arms compute the same, so an option that only one of them has "
            "has no effect."
        )
    known = {source: interval for source, interval in intervals.items() if math.isfinite(interval.half_width)}
    words = {
        "above": f"{verdict.arm} is ahead",
        "below": f"{verdict.arm} is behind",
        "within": "No practical difference",
        "open": "Inconclusive",
    }
    parts = []
    for where, text in words.items():
        group = {source: i for source, i in known.items() if position(i, matters) == where}
        ends = [f"{source} ({100 * i.low:+.2f} to {100 * i.high:+.2f})" for source, i in group.items()]
        if ends:
            parts.append(f"{text} over {join_words(ends)}.")
    if unknown := [source for source in intervals if source not in known]:
        parts.append(f"Unknown over {join_words(unknown)}{missing_reason and f': {missing_reason}'}.")
    return f"{' '.join(parts)} (95% intervals, in points.)" if known else " ".join(parts)


def _describe_pairs(f: Findings) -> str:
    """Return the effect as a number of pairs of events; empty if it rounds to 0."""
    more = PAIRS * f.gauc.difference.mean
    if round(abs(more), 1) == 0:
        return ""
    kinds = f"one with {f.label} and one without" if f.label else "one positive and one negative"
    number = f"{abs(more):.0f}" if abs(more) >= 10 else f"{abs(more):.1f}"
    same_user = " of one user" if f.has_user else ""
    return (
        f"Of {PAIRS:,} pairs of events{same_user}, {kinds}, {f.verdict.arm} ranks {number} "
        f"{'more' if more > 0 else 'fewer'} in the right order."
    )


def _describe_log_loss(log_loss: Comparison) -> str:
    share = log_loss.difference.mean / log_loss.baseline_mean
    if not math.isfinite(share) or log_loss.kind not in ("better", "worse"):
        return ""
    meaning = "lower, so its probabilities are better too" if share < 0 else "higher: its probabilities are worse"
    return f"Its log loss is {abs(share):.2%} {meaning}."

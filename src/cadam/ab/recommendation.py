"""What an A/B recommends: the verdict with the effect in points, in ranked pairs and in log loss, and the rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..statistics.comparison import Comparison, position
from ..statistics.intervals import Interval
from .verdict import SAME_ARM, SAME_RUNS, Recommendation, Verdict

PAIRS = 1000
"""The effect is said as so many pairs of events."""


def recommend(
    verdict: Verdict,
    gauc: Comparison,
    log_loss: Comparison,
    intervals: Mapping[str, Interval],
    *,
    rates: Mapping[str, float],
    hindsight: tuple[Mapping[str, float], float],
    best: Mapping[str, float] | None = None,
    matters: float,
    events: int,
    label: str = "",
    by_user: bool = True,
    chance: float = 0.0,
    silent: str = "",
) -> Recommendation:
    """Of one arm against its baseline.

    `intervals`: of the difference of GAUC, over seeds, users and time; `hindsight`: the learning rates that had the
    best GAUC where it was measured, and the difference there; `best`: those with the least log loss there; `by_user`:
    whether GAUC compares within users; `chance`: how far from 0.5 random scores would put it; `silent`: why an
    interval is not known.
    """
    values: dict[str, Any] = {
        "metric": "gauc_by_impressions",
        "difference": gauc.difference.mean,
        "intervals": {over: {"low": i.low, "high": i.high} for over, i in intervals.items()},
        "matters": matters,
        "log_loss_difference": log_loss.difference.mean,
        "learning_rates": dict(rates),
        "learning_rates_to_use": dict(best or rates),
        "learning_rates_in_hindsight": dict(hindsight[0]),
        "difference_in_hindsight": hindsight[1],
        "measured_events": events,
        "seeds": gauc.seeds,
    }
    use = _rates(rates)
    if verdict.kind == "diverged":
        return Recommendation(verdict, "", (f"Learning rates in use: {use}.",), values)
    reasons = [
        _holds(verdict, intervals, matters, silent),
        f"Not known over seeds: {SAME_RUNS}." if gauc.same_runs else "",
        _pairs(verdict, gauc.difference.mean, label, by_user),
        _log_loss(log_loss),
        f"Learning rates to use: {_rates(best or rates)}.",
    ]
    if best and best != rates:
        reasons.append(
            "They had the least log loss on the measured events, by one seed. The comparison ran at those that had the "
            f"least on the first part: {use}."
        )
    if hindsight[0] != rates:
        reasons.append(
            f"Best learning rates in hindsight by GAUC, by one seed: {_rates(hindsight[0])}. The difference there is "
            f"{100 * hindsight[1]:+.2f} points."
        )
    if math.isfinite(gauc.floor):
        reasons.append(
            f"Noise floor: two sets of {gauc.seeds} runs of {gauc.baseline} that differ only in their seeds lie within "
            f"{100 * gauc.floor:.2f} points of each other."
        )
    reasons.append(
        f"Measured on the last {events:,} events under {gauc.seeds} seeds; the rates were chosen on those before."
    )
    effect, useless = _effect(verdict, gauc, intervals, matters), ""
    if max(gauc.mean, gauc.baseline_mean) <= 0.5 + chance:
        useless = (
            f"neither arm ranks better than chance (GAUC {100 * gauc.baseline_mean:.2f} with {verdict.baseline}, "
            f"{100 * gauc.mean:.2f} with {verdict.arm}, chance 50). Check label and features, or give more events"
        )
    elif (
        hindsight[0] != rates
        and verdict.kind in ("better", "worse")
        and hindsight[1] * gauc.difference.mean < -matters * abs(gauc.difference.mean)
    ):
        useless = _turns(verdict, gauc.difference.mean, rates, hindsight)
    return Recommendation(verdict, effect, tuple(filter(None, reasons)), values, useless)


def _turns(
    verdict: Verdict, difference: float, rates: Mapping[str, float], hindsight: tuple[Mapping[str, float], float]
) -> str:
    """That the other arm is ahead at the learning rates that were best where it was measured, and what to do."""
    here, there = (f"{100 * abs(d):.2f} points {'higher' if d > 0 else 'lower'}" for d in (difference, hindsight[1]))
    best = ",".join(f"{rate:g}" for rate in sorted(set(hindsight[0].values())))
    return (
        f"the learning rates decide which arm is ahead. GAUC with {verdict.arm} is {here} at the rates that were best "
        f"on the first part ({_rates(rates)}), and {there} at the best over the rest ({_rates(hindsight[0])}). Compare "
        f"again at the latter: --lr {best}"
    )


def _rates(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate:g}" for name, rate in rates.items())


def _effect(verdict: Verdict, gauc: Comparison, intervals: Mapping[str, Interval], matters: float) -> str:
    points = 100 * gauc.difference.mean
    if verdict.kind == "equivalent":
        return (
            f"GAUC with {verdict.arm} is within {100 * matters:g} points of that with {verdict.baseline} "
            f"({points:+.2f} points)"
        )
    how = "about the same"
    if abs(points) >= 0.005:
        how = f"{abs(points):.2f} points {'higher' if points > 0 else 'lower'}"
    pair = f"{100 * gauc.baseline_mean:.2f} -> {100 * gauc.mean:.2f}"
    return f"GAUC with {verdict.arm} is {how} ({pair}){_but(verdict, intervals, matters)}"


def _but(verdict: Verdict, intervals: Mapping[str, Interval], matters: float) -> str:
    if verdict.kind != "inconclusive":
        return ""
    if verdict.conflicting:
        return ", but the intervals conflict"
    places = {over: position(interval, matters) for over, interval in intervals.items()}
    undecided = [over for over in places if places[over] == "open"]
    undecided = undecided or [over for over in places if places[over] == "within"]  # some are ahead, by more
    unknown = [over for over in undecided if not math.isfinite(intervals[over].half_width)]
    words = {"not decided": [over for over in undecided if over not in unknown], "not known": unknown}
    return f", but that is {listed(f'{what} over {listed(overs)}' for what, overs in words.items() if overs)}"


def listed(words: Iterable[str]) -> str:
    """As in "seeds, users and time"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _holds(verdict: Verdict, intervals: Mapping[str, Interval], matters: float, silent: str = "") -> str:
    """On which side of 0 the difference lies over seeds, users and time, and where it is too small to matter."""
    if verdict.same:
        same = f"{SAME_ARM[:1].upper()}{SAME_ARM[1:]}"
        return f"{same}: both compute the same here, and an option that only one has does nothing."
    known = {over: interval for over, interval in intervals.items() if math.isfinite(interval.half_width)}
    places = {
        "above": f"{verdict.arm} is ahead",
        "below": f"{verdict.arm} is behind",
        "within": "No practical difference",
        "open": "Not decided",
    }
    parts = []
    for where, words in places.items():
        there = {over: i for over, i in known.items() if position(i, matters) == where}
        ends = [f"{over} ({100 * i.low:+.2f} to {100 * i.high:+.2f})" for over, i in there.items()]
        if ends:
            parts.append(f"{words} over {listed(ends)}.")
    if unknown := [over for over in intervals if over not in known]:
        parts.append(f"Not known over {listed(unknown)}{silent and f': {silent}'}.")
    return f"{' '.join(parts)} (95% intervals, in points.)" if known else " ".join(parts)


def _pairs(verdict: Verdict, difference: float, label: str, by_user: bool) -> str:
    more = PAIRS * difference
    if round(abs(more), 1) == 0:
        return ""
    kinds = f"one with {label} and one without" if label else "one positive and one negative"
    number = f"{abs(more):.0f}" if abs(more) >= 10 else f"{abs(more):.1f}"
    return (
        f"Of {PAIRS:,} pairs of events{' of one user' if by_user else ''}, {kinds}, {verdict.arm} ranks {number} "
        f"{'more' if more > 0 else 'fewer'} in the right order."
    )


def _log_loss(log_loss: Comparison) -> str:
    share = log_loss.difference.mean / log_loss.baseline_mean
    if not math.isfinite(share) or log_loss.kind not in ("better", "worse"):
        return ""
    how = "lower, so its probabilities are better too" if share < 0 else "higher: its probabilities are worse"
    return f"Its log loss is {abs(share):.2%} {how}."

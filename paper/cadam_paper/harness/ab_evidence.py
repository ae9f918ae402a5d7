"""The evidence for a difference between two arms, and the verdict that follows from it.

Three intervals for the same paired difference answer different questions: over seeds (would other initial weights give
the same?), over users (would other users?), and a confidence sequence over blocks of time (would a later check?). One
arm is called better, or both are called equivalent, only if all three intervals agree. If every seed gives the same
run, as with a model whose weights all start at 0, seeds are not evidence, and the other two intervals decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cadam.ab.text import join_words
from cadam.statistics.comparison import Better, Comparison, compare, judge, position, sign, without_seeds
from cadam.statistics.intervals import Array, Interval, interval
from cadam.statistics.paired_scores import MAX_FACTOR, growth_until_decided, round_up

from .confidence_sequence import (
    FIRST_CHECK,
    confidence_sequence,
    count_changes,
    first_exclusion,
    over_blocks,
)
from .results import Results
from .summary import Row, comparison_row
from .verdict import SAME_ARM, Verdict, floor_qualifier, verdict_over_seeds

MAIN_METRIC = "gauc_by_impressions"
"""The metric that the verdict is about."""
CHANCE_METRIC = "gauc_by_chance"
"""The distance from 0.5 that random scores give the GAUC, as a metric of the measured part and a curve over blocks."""
METRIC_NAMES = {
    MAIN_METRIC: "GAUC by impressions",
    "gauc_by_user": "GAUC by user",
    "auc": "AUC",
    "log_loss": "log loss",
}
BETTER: Mapping[str, Better] = {MAIN_METRIC: "higher", "gauc_by_user": "higher", "auc": "higher", "log_loss": "lower"}
TIME = "time"
OVER_USERS = "difference over users"
SEQUENCE = "confidence sequence over blocks"
NO_DIFFERENCE = "there is no difference within any block"
TOO_FEW_CHANGES = "too few blocks differ from the block before for an interval over time"
TOO_FEW_BLOCKS = "there are too few independent blocks for an interval over time"


@dataclass(frozen=True)
class Evidence:
    """The paired difference of one metric, averaged over seeds, by block of time and by user."""

    by_block: Array
    """The difference in each block."""
    low: Array
    high: Array
    """The ends of the confidence sequence after each block."""
    blocks: Interval
    """The interval over blocks of time, for a single check at the end."""
    users: Interval | None
    """The interval over users; None if there is only one user or the metric is not measured by user."""

    @property
    def sequence(self) -> Interval:
        """The confidence sequence after the last block."""
        if len(self.by_block) == 0:
            return Interval(math.nan, -math.inf, math.inf, 0)
        return Interval(float(self.by_block.mean()), float(self.low[-1]), float(self.high[-1]), len(self.by_block))

    @property
    def intervals(self) -> dict[str, Interval]:
        """The intervals over users, if there is one, and over blocks of time, and the confidence sequence, by name."""
        users = {} if self.users is None else {OVER_USERS: self.users}
        return {**users, "difference over blocks of time": self.blocks, SEQUENCE: self.sequence}

    @property
    def first_exclusion(self) -> int:
        """The number of the block after which the sequence first excluded 0; 0 if it never did."""
        return int(first_exclusion(self.low, self.high)) if len(self.by_block) else 0

    @property
    def missing_reason(self) -> str:
        """The reason why the sequence has no finite ends after the last block; empty if it has."""
        if math.isfinite(self.sequence.low):
            return ""
        if len(self.by_block) < FIRST_CHECK:
            return TOO_FEW_BLOCKS
        if not self.by_block.any():
            return NO_DIFFERENCE
        return TOO_FEW_CHANGES if count_changes(self.by_block)[-1] < FIRST_CHECK // 2 else TOO_FEW_BLOCKS


def collect_evidence(arm: Results, baseline: Results, metric: str) -> Evidence | None:
    """Collect the evidence about one metric by block and by user.

    Blocks in which the metric does not exist, because all labels are equal, are left out.

    Args:
        arm: The results of the arm.
        baseline: The results of the baseline, in the same order of seeds.
        metric: The name of the metric.

    Returns:
        The evidence, or None if a run diverged or the runs measured different numbers of events.
    """
    runs = (*arm, *baseline)
    if not all(math.isfinite(run.outcome.metrics[metric]) for run in runs):
        return None
    if len({run.outcome.metrics["events"] for run in runs}) > 1:
        return None
    by_block = (arm.curve(metric) - baseline.curve(metric)).mean(0)
    by_block = by_block[np.isfinite(by_block)]
    low, high = confidence_sequence(by_block)
    users = None
    if metric.startswith("gauc"):
        difference = (arm.curve("user_auc") - baseline.curve("user_auc")).mean(0)
        if len(difference) > 1:
            users = interval(difference, baseline.curve("user_impressions")[0])
    return Evidence(by_block, low, high, over_blocks(by_block), users)


def compare_runs(pair: tuple[Results, Results], metric: str, repeats: Results | None = None) -> Comparison:
    """Compare a metric of two arms over seeds.

    Args:
        pair: The results of the arm and of the baseline.
        metric: The name of the metric.
        repeats: Results of the baseline under other seeds, for the A/A noise floor.
    """
    comparison = compare(
        pair[0].metric(metric),
        pair[1].metric(metric),
        names=(pair[0][0].spec.optimizer, pair[1][0].spec.optimizer),
        better=BETTER[metric],
        repeat=None if repeats is None else repeats.metric(metric),
    )
    return without_seeds(comparison) if all(map(ignores_seeds, pair)) else comparison


def ignores_seeds(results: Results) -> bool:
    """Return whether an arm gives the same metrics, to the last bit, under each of several seeds."""
    return len(results) > 1 and all(len(set(results.metric(name).values())) == 1 for name in METRIC_NAMES)


def are_identical(arm: Results, baseline: Results) -> bool:
    """Return whether two arms give the same metrics, to the last bit, under every seed."""
    return all(arm.metric(name) == baseline.metric(name) for name in METRIC_NAMES)


def deciding_intervals(seeds: Comparison, evidence: Evidence | None) -> dict[str, Interval]:
    """Return the intervals on which the verdict is based, by source of variation: seeds, users and time."""
    if evidence is None:
        return {"seeds": seeds.difference}
    intervals = {
        "seeds": None if seeds.same_runs else seeds.difference,
        "users": evidence.users,
        TIME: evidence.sequence,
    }
    return {source: interval for source, interval in intervals.items() if interval is not None}


def conclude(seeds: Comparison, evidence: Evidence | None, matters: float = 0.0, events: int = 0) -> Verdict:
    """Return the verdict: better, worse or equivalent only if seeds, users and time all support it.

    Args:
        seeds: The comparison over seeds.
        evidence: The evidence by block and user; None if a run diverged or measured other events.
        matters: The smallest difference of practical use.
        events: The number of measured events, from which the number that would give a conclusion is estimated.
    """
    make = partial(Verdict, arm=seeds.arm, baseline=seeds.baseline)
    if seeds.kind == "diverged":
        return verdict_over_seeds(seeds)
    if evidence is None:
        return make(kind="diverged", detail=": the arms did not measure the same events")
    if math.isnan(seeds.difference.low) and not seeds.same_runs:
        return verdict_over_seeds(seeds)
    intervals = deciding_intervals(seeds, evidence)
    kind, is_conflicting = judge(list(intervals.values()), seeds.better, matters)
    next_step, more_events = "", None
    if kind == "equivalent":
        detail = f": less than {matters:g} over {join_words(intervals)}"
    elif kind == "inconclusive":
        detail = f": {_explain_inconclusive(seeds, intervals, evidence.missing_reason, matters)}"
        next_step, more_events = _next_step(intervals, is_conflicting, matters, events)
    else:
        block = f"block {evidence.first_exclusion} of {evidence.sequence.count}"
        detail = f", significant since {block}{floor_qualifier(seeds)}"
    return make(kind=kind, conflicting=is_conflicting, detail=detail, next_step=next_step, more_events=more_events)


def _explain_inconclusive(
    seeds: Comparison, intervals: Mapping[str, Interval], missing_reason: str, matters: float
) -> str:
    """List which intervals exclude 0 and on which side, which are within `matters`, and which are inconclusive."""
    words = {
        "above" if seeds.better == "higher" else "below": f"{seeds.arm} ahead",
        "below" if seeds.better == "higher" else "above": f"{seeds.arm} behind",
        "within": f"within {matters:g}",
        "open": "inconclusive",
    }
    groups = {where: [over for over, i in intervals.items() if position(i, matters) == where] for where in words}
    if missing_reason:
        groups["open"].remove(TIME)
    if len(groups["open"]) == len(intervals):
        return f"none of the intervals over {join_words(intervals)} excludes 0"
    parts = [f"{words[where]} over {join_words(sources)}" for where, sources in groups.items() if sources]
    return "; ".join(filter(None, (", ".join(parts), missing_reason)))


def _next_step(
    intervals: Mapping[str, Interval], is_conflicting: bool, matters: float, events: int
) -> tuple[str, int | None]:
    """Estimate how much more data would give a conclusion.

    The estimate assumes that the means stay the same and that intervals shrink with the square root of the amount of
    data. The number of events is None if something else is missing or no number can be given.
    """
    if is_conflicting:
        return "find out which users and which time the difference comes from", None
    factors = {
        over: growth_until_decided(interval, matters) for over, interval in intervals.items() if sign(interval) == 0
    }
    source = max(factors, key=lambda over: factors[over])
    factor = factors[source]
    if math.isinf(factor) or not events:
        return "run more events", None
    if factor > MAX_FACTOR:
        unit = "seeds" if source == "seeds" else "events"
        return f"a conclusion would take more than {MAX_FACTOR} times as many {unit}", None
    if source == "seeds":
        return f"about {math.ceil(factor * intervals[source].count)} seeds would give a conclusion", None
    more = round_up(max(factor - 1, 0.1) * events)
    return f"about {more:,} more events would give a conclusion", more


@dataclass(frozen=True)
class Decision:
    """The comparison of two arms by the main metric: over seeds, the other evidence, and the verdict."""

    seeds: Comparison
    evidence: Evidence | None
    events: int
    verdict: Verdict

    def row(self, label: str, reference: str, seconds: float) -> Row:
        """Return the comparison over seeds as a row that carries the verdict of all intervals."""
        verdict = self.verdict
        row = comparison_row(label, reference, self.seeds, seconds, digits=4)
        return replace(row, verdict=str(verdict), verdict_kind=verdict.kind, conflicting=verdict.conflicting)


def decide(pair: tuple[Results, Results], matters: float, repeats: Results | None = None) -> Decision:
    """Compare an arm with the baseline by the main metric.

    Args:
        pair: The results of the arm and of the baseline, in the same order of seeds.
        matters: The smallest difference of practical use.
        repeats: Results of the baseline under other seeds, for the A/A noise floor.
    """
    seeds, evidence = compare_runs(pair, MAIN_METRIC, repeats), collect_evidence(*pair, MAIN_METRIC)
    events = 0 if evidence is None else int(pair[0][0].outcome.metrics["events"])
    if are_identical(*pair):
        verdict = Verdict("equivalent", seeds.arm, seeds.baseline, same=True, detail=f": {SAME_ARM}")
    else:
        verdict = conclude(seeds, evidence, matters, events)
    return Decision(seeds, evidence, events, verdict)


def evidence_rows(condition: str, evidence: Evidence | None, seeds: int, floor: Evidence | None = None) -> list[Row]:
    """Return rows for the intervals over users and blocks and for the confidence sequence.

    Args:
        condition: The condition of the stream, which begins the labels.
        evidence: The evidence about the difference of two arms.
        seeds: The number of seeds that the evidence is averaged over.
        floor: The evidence about the baseline compared with itself, for the column of the noise floor.
    """
    if evidence is None:
        return []
    floors = {} if floor is None else floor.intervals
    rows = []
    for name, estimate in evidence.intervals.items():
        unit = "users" if name == OVER_USERS else "blocks"
        measured = f"{estimate.count} {unit}, mean of {seeds} seeds"
        words = {0: "contains 0", 1: "above 0", -1: "below 0"}[sign(estimate)]
        if name == SEQUENCE:
            words = evidence.missing_reason or words
            if evidence.first_exclusion:
                block = f"block {evidence.first_exclusion}"
                words += f" since {block}" if sign(estimate) else f"; it excluded 0 at {block}"
        noise_floor = f"{floors[name]:+.4f}" if name in floors else ""
        values = {"difference": estimate.mean, "low": estimate.low, "high": estimate.high}
        rows.append(
            Row(f"{condition}: {name}", "", measured, f"{estimate:+.4f}", seeds, 0.0, words, noise_floor, values)
        )
    return rows

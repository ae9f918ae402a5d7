"""The analysis of an A/B study: from the results of its runs to rows, verdicts, recommendations and warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise

import numpy as np

from cadam.ab.text import join_words
from cadam.statistics.comparison import compare, without_seeds

from .ab_evidence import (
    BETTER,
    CHANCE_METRIC,
    MAIN_METRIC,
    METRIC_NAMES,
    Decision,
    Evidence,
    collect_evidence,
    compare_runs,
    decide,
    deciding_intervals,
    evidence_rows,
    ignores_seeds,
)
from .ab_recommendation import Findings, recommend
from .ab_study import UNCHANGED, Study, at_chosen_rates, choose_rates, hindsight_rates
from .confidence_sequence import lag_one_correlation, recovery_blocks
from .learning_rates import NoLearningRateError, choose_lr
from .results import Results
from .summary import Row, Summary, comparison_row
from .verdict import Recommendation, Verdict

MIN_COST = 0.02
"""A simulated change that adds a smaller share to the log loss leaves nothing to recover from."""
HIGH_CORRELATION = 0.5
"""A correlation of neighboring blocks above this causes a warning."""
EXPLANATION = (
    "GAUC: how often, within a user, a positive event is ranked above a negative one, averaged over users (by "
    "impressions: weighted by the events of the user); 0.5 is guessing. Log loss: lower is better. The confidence "
    "sequence may be checked after every block; it contains the true difference at all checks together with a "
    "probability of about 95%, if blocks are long enough that their dependence decays within a few blocks. "
    "Fluctuations about as long as the measured part make it too narrow."
)
"""An explanation of the measures, for pages and consoles."""


def summarize(study: Study, results: Results) -> Summary:
    """Summarize the results of all runs of a study."""
    chosen = choose_rates(study, results)
    tests, repeats = at_chosen_rates(study, results), results.repeats()
    baseline = tests.where(optimizer=study.baseline)
    unchanged_baseline = baseline.where(condition=UNCHANGED)
    floors = {name: collect_evidence(repeats, unchanged_baseline, name) for name in (MAIN_METRIC, "log_loss")}
    rows: list[Row] = []
    verdicts: dict[str, Verdict] = {}
    recommendations: list[Recommendation] = []
    sentences = []
    warnings = [f"{choice.warning} (--lr)" for choice in chosen.values() if choice.warning]
    for arm in study.arms[1:]:
        has_unchanged_evidence = False
        for condition in study.conditions:
            is_unchanged = condition == UNCHANGED
            pair = tests.where(optimizer=arm, condition=condition), baseline.where(condition=condition)
            decision = decide(pair, study.matters, repeats if is_unchanged else None)
            verdicts[condition if len(study.arms) == 2 else f"{arm}, {condition}"] = decision.verdict
            rows += _condition_rows(study, condition, pair, decision, floors, repeats)
            difference = f" ({decision.seeds.difference:+.4f})" if decision.evidence is not None else ""
            sentences.append(f"{condition[0].upper()}{condition[1:]}: {decision.verdict}{difference}.")
            if is_unchanged:
                has_unchanged_evidence = decision.evidence is not None
                recommendations.append(_recommend(study, results, arm, pair, decision))
                warnings += rate_warnings(study, results, arm, decision.seeds.difference.mean)
                rows.append(_hindsight_row(study, results, arm))
            is_change = "change" in study.simulated.get(condition, {})
            if is_change and decision.evidence is not None and has_unchanged_evidence:
                rows.append(_recovery_row(study, results, arm, condition))
    warnings += _block_warnings(study, floors[MAIN_METRIC], unchanged_baseline)
    rates = ", ".join(f"{arm} {choice.lr:g}" for arm, choice in chosen.items())
    users = int(baseline[0].outcome.metrics["users_of_both_classes"]) if floors[MAIN_METRIC] is not None else 0
    text = f"{METRIC_NAMES[MAIN_METRIC]} of {' and '.join(reversed(study.arms))} over {users} users. "
    text += f"{' '.join(sentences)} Learning rates: {rates}, chosen on the first part of the stream."
    return Summary(text, rows, warnings, verdicts, recommendations)


def _condition_rows(
    study: Study,
    condition: str,
    pair: tuple[Results, Results],
    decision: Decision,
    floors: Mapping[str, Evidence | None],
    repeats: Results,
) -> list[Row]:
    """Return a row for each metric under one condition, with the other evidence about GAUC and log loss."""
    is_unchanged = condition == UNCHANGED
    seconds = pair[0].seconds + pair[1].seconds
    rows = []
    for metric in METRIC_NAMES if is_unchanged else floors:
        label = f"{condition}: {METRIC_NAMES[metric]} ({BETTER[metric]} is better)"
        if metric == MAIN_METRIC:
            rows.append(decision.row(label, study.reference if is_unchanged else "", seconds))
        else:
            comparison = compare_runs(pair, metric, repeats if is_unchanged else None)
            rows.append(comparison_row(label, "", comparison, seconds, digits=4))
        if metric in floors:
            evidence = decision.evidence if metric == MAIN_METRIC else collect_evidence(*pair, metric)
            rows += evidence_rows(condition, evidence, len(pair[0]), floors[metric] if is_unchanged else None)
    return rows


def _recommend(
    study: Study, results: Results, arm: str, pair: tuple[Results, Results], decision: Decision
) -> Recommendation:
    names = (arm, study.baseline)
    chosen, by_loss = choose_rates(study, results), hindsight_rates(study, results)
    best_rates = _best_rates(study, results, arm)
    values = _first_seed_values(results, best_rates)
    schema = study.settings.get("schema", {})
    findings = Findings(
        decision.verdict,
        decision.seeds,
        compare_runs(pair, "log_loss", results.repeats()),
        deciding_intervals(decision.seeds, decision.evidence),
        rates={name: chosen[name].lr for name in names},
        rates_by_gauc=best_rates,
        difference_by_gauc=values[arm] - values[study.baseline],
        rates_by_loss={name: by_loss[name].lr for name in names},
        matters=study.matters,
        events=decision.events,
        label=schema.get("label") or "",
        has_user="user" in (schema or {"user": ""}),
        chance=_chance(pair[1]),
        missing_reason="" if decision.evidence is None else decision.evidence.missing_reason,
    )
    return recommend(findings)


def _block_warnings(study: Study, floor: Evidence | None, baseline: Results) -> list[str]:
    """Return warnings about blocks that are too short for the confidence sequence or for GAUC."""
    warnings = []
    advice = f"longer blocks would help (--blocks {max(2, study.blocks // 2)})"
    if floor is not None and floor.first_exclusion:
        warnings.append(
            f"the A/A confidence sequence excludes 0 after block {floor.first_exclusion}: runs of {study.baseline} "
            "from other initial weights differ for longer than the blocks account for, so the interval over seeds is "
            "more reliable than the one over time"
        )
    if floor is not None and len(floor.by_block):
        correlation = lag_one_correlation(floor.by_block)
        if correlation > HIGH_CORRELATION:
            warnings.append(f"neighboring blocks are correlated ({correlation:.2f}): {advice}")
    if blocks := blocks_at_chance(baseline):
        numbers = f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks[:5]))}"
        more = ", ..." if len(blocks) > 5 else ""
        warnings.append(
            f"in {len(blocks)} of {study.blocks} blocks the GAUC of {study.baseline} cannot be distinguished from "
            f"guessing ({numbers}{more}): most users there have only one kind of label, or the model predicts "
            f"nothing; {advice}"
        )
    return warnings


def blocks_at_chance(baseline: Results) -> list[int]:
    """Return the numbers, from 1, of blocks in which the GAUC cannot be distinguished from that of random scores.

    The list is empty if a result lacks the curve of the GAUC of random scores, as runs that diverged do.
    """
    if not all(CHANCE_METRIC in result.outcome.curves for result in baseline):
        return []
    is_at_chance = np.abs(baseline.curve(MAIN_METRIC).mean(0) - 0.5) <= baseline.curve(CHANCE_METRIC)[0]
    return [int(block) + 1 for block in np.flatnonzero(is_at_chance)]


def _chance(baseline: Results) -> float:
    """Return how far from 0.5 the GAUC of random scores may be; 0 if the results do not have it."""
    values = [result.outcome.metrics.get(CHANCE_METRIC, math.nan) for result in baseline]
    return max(filter(math.isfinite, values), default=0.0)


def _best_rates(study: Study, results: Results, arm: str) -> dict[str, float]:
    """Return the learning rates of an arm and of the baseline with the highest GAUC in hindsight."""
    by_gauc = hindsight_rates(study, results, MAIN_METRIC, "higher")
    return {name: by_gauc[name].lr for name in (arm, study.baseline)}


def _first_seed_values(results: Results, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the main metric of arms at some learning rates, on the unchanged stream under the first seed."""
    seed = min(result.spec.seed for result in results.tests())
    return {
        name: results.where(optimizer=name, lr=lr, seed=seed, condition=UNCHANGED).metric(MAIN_METRIC)[seed]
        for name, lr in rates.items()
    }


def rate_warnings(study: Study, results: Results, arm: str, difference: float) -> list[str]:
    """Return a warning if other learning rates reverse the sign of the difference by more than matters.

    The other rates are the best ones in hindsight, and those that would be chosen from a grid without a chosen rate.
    """
    names = arm, study.baseline
    chosen = choose_rates(study, results)
    alternatives = {"with the best learning rates in hindsight": _best_rates(study, results, arm)}
    for left_out in sorted({chosen[name].lr for name in names}):
        rest = Results([result for result in results.tuning() if result.spec.lr != left_out])
        with suppress(NoLearningRateError):
            alternatives[f"without {left_out:g} in the grid"] = {
                name: choose_lr(name, rest.where(optimizer=name).metric_by_rate("log_loss"), "lower").lr
                for name in names
            }
    reversals = []
    for description, rates in alternatives.items():
        if all(rates[name] == chosen[name].lr for name in names):
            # One seed at the chosen rates can differ by chance from the mean over seeds, which decides the verdict.
            continue
        values = _first_seed_values(results, rates)
        other = values[arm] - values[study.baseline]
        if other * difference < 0 and abs(other) > study.matters:
            at_rates = ", ".join(f"{name} {lr:g}" for name, lr in rates.items())
            reversals.append(f"{other:+.4f} {description} ({at_rates})")
    if not reversals:
        return []
    return [
        f"the choice of learning rates decides which arm is ahead: {arm} minus {study.baseline} is {difference:+.4f} "
        f"at the chosen rates, but under one seed {join_words(reversals)}"
    ]


def _hindsight_row(study: Study, results: Results, arm: str) -> Row:
    """Return a row for the comparison at the best learning rates in hindsight, which checks the choice."""
    rates = _best_rates(study, results, arm)
    values = _first_seed_values(results, rates)
    difference = values[arm] - values[study.baseline]
    measured = ", ".join(f"{name} {values[name]:.4f} (at {rates[name]:g})" for name in values)
    label = f"{UNCHANGED}: {METRIC_NAMES[MAIN_METRIC]}, best learning rates in hindsight"
    words = "one seed, chosen on the measured part: a check of the choice, not a result"
    numbers = {**values, "difference": difference}
    return Row(label, "", measured, f"{difference:+.4f}", 1, 0.0, words, "", numbers)


def recovery_times(study: Study, results: Results, arm: str, condition: str) -> dict[int, float]:
    """Return by seed how many events an arm takes to recover from a simulated change, on average over changes.

    The gap is the log loss with the change minus the log loss without it in the same block and under the same seed.
    The arm has recovered when nine tenths of the largest gap are made up. A gap that does not close counts until the
    next change.
    """
    tests = at_chosen_rates(study, results).where(optimizer=arm)
    changes = [*study.simulated[condition]["change"]["blocks"], study.blocks]
    times = {}
    for changed, unchanged in zip(tests.where(condition=condition), tests.where(condition=UNCHANGED), strict=True):
        gain = unchanged.outcome.curves["log_loss"] - changed.outcome.curves["log_loss"]
        recovery = []
        for start, end in pairwise(changes):
            blocks = recovery_blocks(gain[:end], start)
            recovery.append(end - start if blocks is None else blocks)
        times[changed.spec.seed] = float(np.mean(recovery)) * changed.outcome.metrics["events"] / study.blocks
    return times


def change_cost(study: Study, results: Results, condition: str) -> float:
    """Return the share by which a simulated change increases the log loss in the three blocks after it."""
    tests = at_chosen_rates(study, results)
    first_blocks = study.simulated[condition]["change"]["blocks"]
    blocks = [first + n for first in first_blocks for n in range(3) if first + n < study.blocks]
    changed, unchanged = (tests.where(condition=c).curve("log_loss")[:, blocks].mean() for c in (condition, UNCHANGED))
    return float(changed / unchanged - 1)


def _recovery_row(study: Study, results: Results, arm: str, condition: str) -> Row:
    """Return a row that compares how long two arms take to recover from a simulated change."""
    label = f"{condition}: events until recovered (lower is better)"
    names = (arm, study.baseline)
    cost = change_cost(study, results, condition)
    if cost < MIN_COST:
        measured = f"the change adds {cost:.1%} to the log loss"
        seeds = len({result.spec.seed for result in results.tests()})
        return Row(label, "", measured, "", seeds, 0.0, "nothing to recover from", "", {"cost": cost})
    times = [recovery_times(study, results, name, condition) for name in names]
    comparison = compare(*times, names=names, better="lower")
    tests = at_chosen_rates(study, results).where(condition=condition)
    if all(ignores_seeds(tests.where(optimizer=name)) for name in names):
        comparison = without_seeds(comparison)
    return comparison_row(label, "", comparison, 0.0, digits=0)

"""The A/B of two optimizers on a stream: its specs, what they say together, and the real streams it was tried on.

Both arms meet the same events from the same start, each with the learning rate that was best for it on the first part
of the stream. The verdict is about GAUC and comes from three intervals for the paired difference, which answer
different questions: over seeds (other starts), over users (other people), and a confidence sequence over blocks of time
(a later look). Only where all three agree is one arm called better, or both equivalent. Where every seed gives the same
run, as with a model whose weights all start at 0, seeds are no evidence, and the other two decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..statistics.comparison import Better, Comparison, compare, judge, position, sign, without_seeds
from ..statistics.confidence_sequence import (
    FIRST_LOOK,
    changes,
    confidence_sequence,
    first_alarm,
    over_blocks,
    over_users,
    recovery,
    relatedness,
)
from ..statistics.intervals import Array, Interval
from ..statistics.learning_rates import NoLearningRateError, RateChoice, choose_lr
from .recommendation import recommend
from .report import palette
from .results import Results, RunSpec, evaluation_seeds, repeat_seeds, tuning_seeds
from .summary import Row, Summary, comparison_row
from .text import join_words
from .verdict import SAME_ARM, Recommendation, Verdict, floor_qualifier, verdict_over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AS_IT_IS = "as it is"
MAIN = "gauc_by_impressions"
BY_CHANCE = "gauc_by_chance"
"""The curve of how far from 0.5 random scores put the GAUC of a block."""
TIME = "time"
SAME = "no difference within any block"
ALIKE = "too few blocks differ from the one before for an interval over time"
TOO_FEW = "too few independent blocks for an interval over time"
MOST_TIMES = 100
"""Where it would take more than so many times the events to decide, their number is not said."""
LONG = 16
"""Letters of an arm's name beyond which one legend below a figure serves all its parts."""
LEAST_COST = 0.02
"""A planted change that adds less than this share to the log loss leaves nothing to recover from."""
NAMES = {MAIN: "GAUC by impressions", "gauc_by_user": "GAUC by user", "auc": "AUC", "log_loss": "log loss"}
BETTER: Mapping[str, Better] = {MAIN: "higher", "gauc_by_user": "higher", "auc": "higher", "log_loss": "lower"}


@dataclass(frozen=True)
class Study:
    """What is compared, on what."""

    name: str
    data: str
    arms: tuple[str, ...]
    """Optimizers of `cadam`; the first is the baseline."""
    batch_size: int
    model: str = "small DeepFM"
    grid: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    tuning_seeds: int = 2
    tuning_share: float = 0.2
    blocks: int = 50
    events: int | None = None
    """How many of the first events are used; all of them if None."""
    planted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    """What is done to the stream, by condition; see `runs.source`."""
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Whatever else a result depends on."""
    matters: float = 0.001
    """The least difference of GAUC that is of any use: arms that differ by less are equivalent."""
    reference: str = ""
    """The difference of GAUC that a paper reports, for studies that repeat one of a paper."""

    @property
    def baseline(self) -> str:
        return self.arms[0]

    def spec(self, arm: str, lr: float, seed: int, condition: str, tuning: bool = False) -> RunSpec:
        settings = {
            "events": self.events,
            "batch_size": self.batch_size,
            "tuning_share": self.tuning_share,
            "blocks": self.blocks,
            "tuning": tuning,
            **self.planted.get(condition, {}),
            **self.more,
        }
        return RunSpec(self.name, self.model, self.data, arm, lr, condition, seed, settings)


def run_specs(study: Study, seeds: int, found: Results) -> Sequence[RunSpec]:
    """Every learning rate on tuning seeds; then each arm at its best, in every condition, and the baseline's A/A.

    The other learning rates run along the stream as it is too, under one seed: to see whether the choice held.
    """
    tuning = [
        study.spec(arm, lr, seed, AS_IT_IS, tuning=True)
        for arm in study.arms
        for lr in study.grid
        for seed in tuning_seeds(study.tuning_seeds)
    ]
    if len(found) < len(tuning):
        return tuning
    best = {arm: choice.lr for arm, choice in choices(study, found).items()}
    tests = [
        study.spec(arm, best[arm], seed, condition)
        for condition in (AS_IT_IS, *study.planted)
        for seed in evaluation_seeds(seeds)
        for arm in study.arms
    ]
    again = [study.spec(study.baseline, best[study.baseline], s, AS_IT_IS) for s in repeat_seeds(seeds)]
    looking_back = [
        study.spec(arm, lr, evaluation_seeds(seeds)[0], AS_IT_IS)
        for arm in study.arms
        for lr in study.grid
        if lr != best[arm]
    ]
    return [*tuning, *tests, *again, *looking_back]


def choices(study: Study, results: Results) -> dict[str, RateChoice]:
    """The learning rate of each arm: the least log loss on the tuning part."""
    tuning = results.tuning()
    return {arm: choose_lr(arm, tuning.where(optimizer=arm).metric_by_rate("log_loss"), "lower") for arm in study.arms}


def at_their_best(study: Study, results: Results) -> Results:
    """The test runs at the learning rates that were chosen."""
    rates = {arm: choice.lr for arm, choice in choices(study, results).items()}
    return Results([result for result in results.tests() if result.spec.lr == rates[result.spec.optimizer]])


def looking_back(
    study: Study, results: Results, metric: str = "log_loss", better: Better = "lower"
) -> dict[str, RateChoice]:
    """What the choice by a metric would have been, had one known the measured part: by one seed."""
    seed = min(result.spec.seed for result in results.tests())
    tests = results.tests().where(condition=AS_IT_IS, seed=seed)
    return {arm: choose_lr(arm, tests.where(optimizer=arm).metric_by_rate(metric), better) for arm in study.arms}


# Evidence ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """The paired difference of one metric, averaged over seeds, as blocks and users show it."""

    by_block: Array
    low: Array
    high: Array
    """Ends of the confidence sequence after each block."""
    blocks: Interval
    users: Interval | None

    @property
    def sequence(self) -> Interval:
        """What the sequence says at the end."""
        if len(self.by_block) == 0:
            return Interval(math.nan, -math.inf, math.inf, 0)
        return Interval(float(self.by_block.mean()), float(self.low[-1]), float(self.high[-1]), len(self.by_block))

    @property
    def alarm(self) -> int:
        """The block after which the sequence first excluded 0; 0 if it never did."""
        return int(first_alarm(self.low, self.high)) if len(self.by_block) else 0

    @property
    def silent(self) -> str:
        """Why the sequence says nothing at the end; empty if it does."""
        if math.isfinite(self.sequence.low):
            return ""
        if len(self.by_block) < FIRST_LOOK:
            return TOO_FEW
        if not self.by_block.any():
            return SAME
        return ALIKE if changes(self.by_block)[-1] < FIRST_LOOK // 2 else TOO_FEW


def evidence(arm: Results, baseline: Results, metric: str) -> Evidence | None:
    """From results in the same order of seeds; None if a run diverged, wholly or so that it lost events.

    Blocks in which the metric does not exist (one class) are left out; a single user gives no interval over users.
    """
    if not all(math.isfinite(result.outcome.metrics[metric]) for result in (*arm, *baseline)):
        return None
    if len({result.outcome.metrics["events"] for result in (*arm, *baseline)}) > 1:
        return None
    by_block = (arm.curve(metric) - baseline.curve(metric)).mean(0)
    by_block = by_block[np.isfinite(by_block)]
    low, high = confidence_sequence(by_block)
    users = None
    if metric.startswith("gauc"):
        difference = (arm.curve("user_auc") - baseline.curve("user_auc")).mean(0)
        users = over_users(difference, baseline.curve("user_impressions")[0]) if len(difference) > 1 else None
    return Evidence(by_block, low, high, over_blocks(by_block), users)


def verdict(seeds: Comparison, found: Evidence | None, matters: float = 0.0, events: int = 0) -> Verdict:
    """Better, worse or equivalent only where seeds, users and the confidence sequence over time all say so.

    `found` is None where a run diverged or lost events. From the `events` measured follows how many more would decide.
    """
    make = partial(Verdict, arm=seeds.arm, baseline=seeds.baseline)
    if seeds.kind == "diverged":
        return verdict_over_seeds(seeds)
    if found is None:
        return make(kind="diverged", detail=": the arms did not meet the same events")
    if math.isnan(seeds.difference.low) and not seeds.same_runs:
        return verdict_over_seeds(seeds)
    intervals = told(seeds, found)
    kind, conflicting = judge(list(intervals.values()), seeds.better, matters)
    detail, next_step, more_events = "", "", None
    if kind == "equivalent":
        detail = f": less than {matters:g} over {join_words(intervals)}"
    elif kind == "inconclusive":
        detail = f": {_undecided(seeds, intervals, found.silent, matters)}"
        next_step, more_events = _next_step(intervals, conflicting, matters, events)
    else:
        detail = f", known after block {found.alarm} of {found.sequence.count}{floor_qualifier(seeds)}"
    return make(kind=kind, conflicting=conflicting, detail=detail, next_step=next_step, more_events=more_events)


def told(seeds: Comparison, found: Evidence | None) -> dict[str, Interval]:
    """The intervals of one difference that decide together, by what varies."""
    if found is None:
        return {"seeds": seeds.difference}
    over_seeds = None if seeds.same_runs else seeds.difference
    intervals = {"seeds": over_seeds, "users": found.users, TIME: found.sequence}
    return {over: interval for over, interval in intervals.items() if interval is not None}


@dataclass(frozen=True)
class Decision:
    """What is found of the verdict's metric where two arms met the same events: over seeds, and over users and time."""

    seeds: Comparison
    found: Evidence | None
    events: int
    verdict: Verdict

    def row(self, what: str, paper: str, seconds: float) -> Row:
        """As a line whose verdict is that of all intervals, not only of that over seeds."""
        v = self.verdict
        line = comparison_row(what, paper, self.seeds, seconds, digits=4)
        return replace(line, verdict=str(v), verdict_kind=v.kind, conflicting=v.conflicting)


def decide(study: Study, pair: tuple[Results, Results], repeats: Results | None = None) -> Decision:
    """An arm against the baseline, from results in the same order of seeds."""
    seeds, found = compared(pair, MAIN, repeats), evidence(*pair, MAIN)
    events = 0 if found is None else int(pair[0][0].outcome.metrics["events"])
    if is_same_arm(*pair):
        equal = Verdict("equivalent", seeds.arm, seeds.baseline, same=True, detail=f": {SAME_ARM}")
        return Decision(seeds, found, events, equal)
    return Decision(seeds, found, events, verdict(seeds, found, study.matters, events))


def _undecided(seeds: Comparison, intervals: Mapping[str, Interval], silent: str, matters: float) -> str:
    """Which intervals exclude 0, on which side, which lie within what matters, and which do neither."""
    words = {
        "above" if seeds.better == "higher" else "below": f"{seeds.arm} ahead",
        "below" if seeds.better == "higher" else "above": f"{seeds.arm} behind",
        "within": f"within {matters:g}",
        "open": "open",
    }
    groups = {where: [over for over, i in intervals.items() if position(i, matters) == where] for where in words}
    if silent:
        groups["open"].remove(TIME)
    if len(groups["open"]) == len(intervals):
        return f"none of the intervals over {join_words(intervals)} excludes 0"
    parts = [f"{words[where]} over {join_words(overs)}" for where, overs in groups.items() if overs]
    return "; ".join(filter(None, (", ".join(parts), silent)))


def _next_step(
    intervals: Mapping[str, Interval], conflicting: bool, matters: float, events: int
) -> tuple[str, int | None]:
    """What would decide: how much more of what is open, if means stay and intervals narrow by the root of it.

    The number of events is None where it is something else that is missing, or no number can be given.
    """
    if conflicting:
        return "see which users and which time the difference comes from", None
    times = {over: _times(interval, matters) for over, interval in intervals.items() if sign(interval) == 0}
    most = max(times, key=lambda over: times[over])
    if math.isinf(times[most]) or not events:
        return "run more events", None
    if times[most] > MOST_TIMES:
        return f"it would take more than {MOST_TIMES} times as many {'seeds' if most == 'seeds' else 'events'}", None
    if most == "seeds":
        return f"about {math.ceil(times[most] * intervals[most].count)} seeds would decide", None
    more = _round(max(times[most] - 1, 0.1) * events)
    return f"about {more:,} more events would decide", more


def _times(interval: Interval, matters: float) -> float:
    """How many times as much it takes until an interval excludes 0, or lies within what matters."""
    reach = max(abs(interval.mean), matters - abs(interval.mean))
    return (interval.half_width / reach) ** 2 if reach > 0 and math.isfinite(interval.half_width) else math.inf


def _round(number: float) -> int:
    """To one digit, upwards."""
    unit = 10 ** math.floor(math.log10(number))
    return int(math.ceil(number / unit) * unit)


# Summary -------------------------------------------------------------------------------------------------------


def summary(study: Study, results: Results) -> Summary:
    chosen, after = choices(study, results), looking_back(study, results)
    tests, repeats = at_their_best(study, results), results.repeats()
    rows: list[Row] = []
    verdicts: dict[str, Verdict] = {}
    recommendations: list[Recommendation] = []
    sentences, warnings = [], [f"{choice.warning} (--lr)" for choice in chosen.values() if choice.warning]
    baseline = tests.where(optimizer=study.baseline)
    floors = {metric: evidence(repeats, baseline.where(condition=AS_IT_IS), metric) for metric in (MAIN, "log_loss")}
    same = floors[MAIN]
    for arm in study.arms[1:]:
        undisturbed: Evidence | None = None
        for condition in (AS_IT_IS, *study.planted):
            pair = tests.where(optimizer=arm, condition=condition), baseline.where(condition=condition)
            plain = condition == AS_IT_IS
            decision = decide(study, pair, repeats if plain else None)
            found, decided = decision.found, decision.verdict
            undisturbed = found if plain else undisturbed
            verdicts[condition if len(study.arms) == 2 else f"{arm}, {condition}"] = decided
            seconds = pair[0].seconds + pair[1].seconds
            measured = NAMES if plain else floors
            others = {name: compared(pair, name, repeats if plain else None) for name in measured if name != MAIN}
            for metric in measured:
                what = f"{condition}: {NAMES[metric]} ({BETTER[metric]} is better)"
                if metric == MAIN:
                    rows.append(decision.row(what, study.reference if plain else "", seconds))
                else:
                    rows.append(comparison_row(what, "", others[metric], seconds, digits=4))
                if metric in floors:
                    more = found if metric == MAIN else evidence(*pair, metric)
                    rows += evidence_rows(condition, more, len(pair[0]), floors[metric] if plain else None)
            difference = f" ({decision.seeds.difference:+.4f})" if found is not None else ""
            sentences.append(f"{condition[0].upper()}{condition[1:]}: {decided}{difference}.")
            if plain:
                recommendations.append(
                    recommend(
                        decided,
                        decision.seeds,
                        others["log_loss"],
                        told(decision.seeds, found),
                        rates={name: chosen[name].lr for name in (arm, study.baseline)},
                        hindsight=in_hindsight(study, results, arm),
                        best={name: after[name].lr for name in (arm, study.baseline)},
                        matters=study.matters,
                        events=decision.events,
                        label=study.more.get("schema", {}).get("label") or "",
                        by_user="user" in study.more.get("schema", {"user": ""}),
                        chance=reach_of_chance(pair[1]),
                        silent="" if found is None else found.silent,
                    )
                )
                warnings += rate_warnings(study, results, arm, decision.seeds.difference.mean)
                rows.append(_hindsight_row(study, results, arm))
            if "change" in study.planted.get(condition, {}) and None not in (found, undisturbed):
                rows.append(_recovery_row(study, results, arm, condition))
    rates = ", ".join(f"{arm} {choice.lr:g}" for arm, choice in chosen.items())
    if same is not None and same.alarm:
        warnings.append(
            f"the A/A sequence excludes 0 after block {same.alarm}: other starts of {study.baseline} differ for longer "
            "than the blocks can tell, so trust the seeds more than the sequence"
        )
    longer = f"longer blocks would tell more (--blocks {max(2, study.blocks // 2)})"
    if same is not None and len(same.by_block) and (related := relatedness(same.by_block)) > 0.5:
        warnings.append(f"neighbouring blocks go together (correlation {related:.2f}): {longer}")
    if blocks := blocks_at_chance(baseline.where(condition=AS_IT_IS)):
        which = f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks[:5]))}"
        warnings.append(
            f"in {len(blocks)} of {study.blocks} blocks the GAUC of {study.baseline} cannot be told from guessing "
            f"({which}{', ...' if len(blocks) > 5 else ''}): users there mostly have "
            f"one kind of label, or the model predicts nothing; {longer}"
        )
    users = int(baseline[0].outcome.metrics["users_of_both_classes"]) if same is not None else 0
    text = f"{NAMES[MAIN]} of {' and '.join(reversed(study.arms))} over {users} users. {' '.join(sentences)}"
    text += f" Learning rates: {rates}, chosen on the first part of the stream."
    return Summary(text, rows, warnings, verdicts, recommendations)


def compared(pair: tuple[Results, Results], metric: str, repeats: Results | None = None) -> Comparison:
    """A metric of two arms over seeds; `repeats` is the baseline under other seeds, for A/A."""
    found = compare(
        pair[0].metric(metric),
        pair[1].metric(metric),
        names=(pair[0][0].spec.optimizer, pair[1][0].spec.optimizer),
        better=BETTER[metric],
        repeat=None if repeats is None else repeats.metric(metric),
    )
    return without_seeds(found) if all(map(is_same_run, pair)) else found


def is_same_run(results: Results) -> bool:
    """Whether an arm comes out the same to the bit under each of several seeds."""
    return len(results) > 1 and all(len(set(results.metric(name).values())) == 1 for name in NAMES)


def is_same_arm(arm: Results, baseline: Results) -> bool:
    """Whether two arms come out the same to the bit under every seed."""
    return all(arm.metric(name) == baseline.metric(name) for name in NAMES)


def evidence_rows(condition: str, found: Evidence | None, seeds: int, same: Evidence | None = None) -> list[Row]:
    """The same difference as users and blocks of time show it, and the baseline against itself beside it."""
    if found is None:
        return []
    floors = (None, None, None) if same is None else (same.users, same.blocks, same.sequence)
    lines = (("over users", found.users), ("over blocks of time", found.blocks))
    rows = []
    for (what, interval), floor in zip(
        (*lines, ("confidence sequence over blocks", found.sequence)), floors, strict=True
    ):
        if interval is None:
            continue
        unit = "users" if what == "over users" else "blocks"
        words = {0: "holds 0", 1: "above 0", -1: "below 0"}[sign(interval)]
        if what.startswith("confidence sequence") and found.silent:
            words = found.silent
        if what.startswith("confidence sequence") and found.alarm:
            words += f" since block {found.alarm}" if sign(interval) else f"; excluded 0 at block {found.alarm}"
        rows.append(
            Row(
                f"{condition}: the same, {what}",
                "",
                f"{interval.count} {unit}, mean of {seeds} seeds",
                f"{interval:+.4f}",
                seeds,
                0.0,
                words,
                "" if floor is None else f"{floor:+.4f}",
                {"difference": interval.mean, "low": interval.low, "high": interval.high},
            )
        )
    return rows


def blocks_at_chance(baseline: Results) -> list[int]:
    """The blocks, from 1, in which the GAUC lies no further from 0.5 than random scores would put it.

    None where a result does not say how far that is: older ones do not, nor do runs that diverged.
    """
    if not all(BY_CHANCE in result.outcome.curves for result in baseline):
        return []
    within = np.abs(baseline.curve(MAIN).mean(0) - 0.5) <= baseline.curve(BY_CHANCE)[0]
    return [int(block) + 1 for block in np.flatnonzero(within)]


def reach_of_chance(baseline: Results) -> float:
    """How far from 0.5 random scores would put the GAUC of the whole; 0 where results do not say: older ones do not."""
    found = [result.outcome.metrics.get(BY_CHANCE, math.nan) for result in baseline]
    return max(filter(math.isfinite, found), default=0.0)


def _first_seed(results: Results, rates: Mapping[str, float]) -> dict[str, float]:
    """The main metric of arms at some learning rates, on the stream as it is, under the seed that has all of them."""
    seed = min(result.spec.seed for result in results.tests())
    return {
        name: results.where(optimizer=name, lr=lr, seed=seed, condition=AS_IT_IS).metric(MAIN)[seed]
        for name, lr in rates.items()
    }


def rate_warnings(study: Study, results: Results, arm: str, difference: float) -> list[str]:
    """Where other learning rates turn the sign of the difference, by more than matters: a warning.

    Those are the best in hindsight, and those that would be chosen from a grid without one that was.
    """
    names = arm, study.baseline
    tuning = results.tuning()
    chosen, hindsight = choices(study, results), in_hindsight(study, results, arm)[0]
    others = {"with the best learning rates in hindsight": hindsight}
    for left_out in sorted({chosen[name].lr for name in names}):
        grid = Results([result for result in tuning if result.spec.lr != left_out])
        with suppress(NoLearningRateError):
            others[f"without {left_out:g} in the grid"] = {
                name: choose_lr(name, grid.where(optimizer=name).metric_by_rate("log_loss"), "lower").lr
                for name in names
            }
    turned = []
    for what, rates in others.items():
        if all(rates[name] == chosen[name].lr for name in names):
            continue  # what is left is the difference of one seed
        value = _first_seed(results, rates)
        other = value[arm] - value[study.baseline]
        if other * difference < 0 and abs(other) > study.matters:
            turned.append(f"{other:+.4f} {what} ({', '.join(f'{name} {lr:g}' for name, lr in rates.items())})")
    if not turned:
        return []
    return [
        f"the choice of learning rates decides which arm is ahead: {arm} minus {study.baseline} is {difference:+.4f} "
        f"at those chosen, but under one seed {join_words(turned)}"
    ]


def in_hindsight(study: Study, results: Results, arm: str) -> tuple[dict[str, float], float]:
    """The learning rates with the best value of what the verdict goes by, and the difference there, by one seed."""
    chosen = looking_back(study, results, MAIN, "higher")
    rates = {name: chosen[name].lr for name in (arm, study.baseline)}
    value = _first_seed(results, rates)
    return rates, value[arm] - value[study.baseline]


def _hindsight_row(study: Study, results: Results, arm: str) -> Row:
    """Each arm at its best learning rate in hindsight: a check of the choice."""
    rates, difference = in_hindsight(study, results, arm)
    value = _first_seed(results, rates)
    texts = [f"{name} {value[name]:.4f} (at {rates[name]:g})" for name in value]
    what = f"{AS_IT_IS}: {NAMES[MAIN]}, best learning rates in hindsight"
    words = "one seed, chosen on what is measured: a check of the choice, no result"
    return Row(what, "", ", ".join(texts), f"{difference:+.4f}", 1, 0.0, words, "", {**value, "difference": difference})


def recovery_times(study: Study, results: Results, arm: str, condition: str) -> dict[int, float]:
    """By seed: how many events it takes, after a planted change, to be as good as without it, on average over changes.

    The gap is the log loss with the change minus that without it in the same block, under the same seed; it counts as
    closed when nine tenths of its peak are made up. One that is not closed counts until the next change.
    """
    tests = at_their_best(study, results).where(optimizer=arm)
    moments = [*study.planted[condition]["change"]["blocks"], study.blocks]
    times = {}
    for changed, plain in zip(tests.where(condition=condition), tests.where(condition=AS_IT_IS), strict=True):
        better = plain.outcome.curves["log_loss"] - changed.outcome.curves["log_loss"]
        taken = []
        for start, end in pairwise(moments):
            blocks = recovery(better[:end], start)
            taken.append(end - start if blocks is None else blocks)
        times[changed.spec.seed] = float(np.mean(taken)) * changed.outcome.metrics["events"] / study.blocks
    return times


def cost_of_change(study: Study, results: Results, condition: str) -> float:
    """How much log loss a planted change adds in the three blocks after it, as a share of that without it."""
    tests = at_their_best(study, results)
    blocks = [b + n for b in study.planted[condition]["change"]["blocks"] for n in range(3) if b + n < study.blocks]
    changed, plain = (tests.where(condition=c).curve("log_loss")[:, blocks].mean() for c in (condition, AS_IT_IS))
    return float(changed / plain - 1)


def _recovery_row(study: Study, results: Results, arm: str, condition: str) -> Row:
    what = f"{condition}: events until recovered (lower is better)"
    if (cost := cost_of_change(study, results, condition)) < LEAST_COST:
        measured = f"the change adds {cost:.1%} to the log loss"
        return Row(
            what,
            "",
            measured,
            "",
            len({result.spec.seed for result in results.tests()}),
            0.0,
            "nothing to recover from",
            "",
            {"cost": cost},
        )
    both = [recovery_times(study, results, name, condition) for name in (arm, study.baseline)]
    compared = compare(*both, names=(arm, study.baseline), better="lower")
    tests = at_their_best(study, results).where(condition=condition)
    if all(is_same_run(tests.where(optimizer=name)) for name in (arm, study.baseline)):
        compared = without_seeds(compared)
    return comparison_row(what, "", compared, 0.0, digits=0)


# Figures -------------------------------------------------------------------------------------------------------


def figures(study: Study, results: Results) -> Mapping[str, Figure]:
    """Both arms along the stream, the difference as one who watches sees it, and what the learning rate does."""
    from matplotlib.figure import Figure

    tests = at_their_best(study, results)
    chosen, after = choices(study, results), looking_back(study, results)
    colours = dict(zip((study.arms[-1], study.baseline, *study.arms[1:-1]), palette.SERIES, strict=False))
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    along, sequence, rates = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    for arm in study.arms:
        curve = tests.where(optimizer=arm, condition=AS_IT_IS).curve("auc").mean(0)
        along.plot(_smooth(curve), color=colours[arm], label=arm, lw=1.2)
        means = chosen[arm].means
        rates.plot(list(means), list(means.values()), "o-", ms=4, color=colours[arm])
        rates.plot(chosen[arm].lr, means[chosen[arm].lr], "o", ms=10, mfc="none", color=colours[arm])
        means = after[arm].means
        rates.plot(list(means), list(means.values()), "x:", ms=4, lw=1, color=colours[arm])
    along.set(xlabel="block of time", ylabel="AUC, five blocks", title="Along the stream")
    one_legend = max(map(len, study.arms)) > LONG
    if one_legend:  # colours mean the same in all three
        figure.legend(*along.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    else:
        along.legend(loc="best")
    rates.set(xscale="log", xlabel="learning rate", ylabel="log loss", title="Rates (ring: chosen)")
    tried = sorted({lr for choice in (*chosen.values(), *after.values()) for lr in choice.means})
    rates.set_xticks(tried, [f"{lr:g}" for lr in tried], rotation=45)
    rates.minorticks_off()
    least = min(min(choice.means.values()) for choice in (*chosen.values(), *after.values()))
    rates.set_ylim(0.95 * least, 1.4 * least)  # the worst rates are far off
    baseline = tests.where(optimizer=study.baseline, condition=AS_IT_IS)
    pairs = {
        f"{arm} - {study.baseline}": (tests.where(optimizer=arm, condition=AS_IT_IS), colours[arm])
        for arm in study.arms[1:]
    }
    reach = 0.0
    for name, (arm_results, colour) in {"A/A": (results.repeats(), palette.TARGET), **pairs}.items():
        found = evidence(arm_results, baseline, MAIN)
        if found is not None:
            _draw_sequence(sequence, found, name, colour)
            end = found.sequence
            reach = max(reach, abs(end.mean) + 3 * end.half_width if math.isfinite(end.low) else 0.0)
    if reach > 0:
        sequence.set_ylim(-reach, reach)  # the first looks are too wide to show
    if sequence.lines and not one_legend:
        sequence.legend(loc="best")
    elif not sequence.lines:
        sequence.text(0.5, 0.6, "too few blocks", transform=sequence.transAxes, ha="center", color=palette.MUTED)
    sequence.axhline(0, color=palette.INK, lw=0.8)
    sequence.set(xlabel="blocks seen", ylabel=f"difference of {NAMES[MAIN]}", title="Mean so far, confidence sequence")
    made = {
        "Left: prediction of the next events, mean over seeds. Middle: the difference as it was seen after each block, "
        "with its confidence sequence; grey is the baseline against itself. Right: log loss by learning rate, "
        "on the part it was chosen on and, dotted, on the part that is measured.": figure
    }
    changed = [condition for condition in study.planted if "change" in study.planted[condition]]
    for condition in changed:
        made[
            f"{condition[0].upper()}{condition[1:]}: log loss above that of the same events without the change, mean "
            "over seeds. Dotted: the change."
        ] = _recovery_figure(study, results, condition, colours)
    return made


def _draw_sequence(axes: Any, found: Evidence, name: str, colour: str) -> None:
    looks = np.flatnonzero(np.isfinite(found.low)) + 1
    if len(looks) == 0:
        return
    mean = np.cumsum(found.by_block) / np.arange(1, len(found.by_block) + 1)
    axes.plot(looks, mean[looks - 1], color=colour, lw=1.2, label=name)
    axes.fill_between(looks, found.low[looks - 1], found.high[looks - 1], color=colour, alpha=0.2, lw=0)


def _smooth(curve: Array, width: int = 5) -> Array:
    """The mean of so many blocks."""
    smooth: Array = np.convolve(curve, np.ones(width) / width, "valid")
    return smooth


def _recovery_figure(study: Study, results: Results, condition: str, colours: Mapping[str, str]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    for arm in study.arms:
        tests = at_their_best(study, results).where(optimizer=arm)
        gap = tests.where(condition=condition).curve("log_loss") - tests.where(condition=AS_IT_IS).curve("log_loss")
        axes.plot(gap.mean(0), color=colours[arm], label=arm, lw=1.2)
    for block in study.planted[condition]["change"]["blocks"]:
        axes.axvline(block, color=palette.TARGET, lw=1, ls=":")
    axes.set(xlabel="block of time", ylabel="log loss added")
    axes.legend(loc="best")
    return figure


# Experiments ---------------------------------------------------------------------------------------------------


MEASURE = (
    "GAUC: how often, within a user, an event that happened is ranked above one that did not, averaged over users (by "
    "impressions: each as often as they come); 0.5 is guessing. Log loss: how surprising the labels are, less is "
    "better. The confidence sequence may be checked after every block; over all looks together it holds the truth with "
    "about 95% certainty, if blocks are long enough that what is left of their dependence dies out over a few of them. "
    "Ups and downs about as long as the whole stretch make it too sure."
)


def length(spec: RunSpec) -> float:
    """How much of the stream a run meets."""
    return float(spec.settings["tuning_share"]) if spec.settings["tuning"] else 1.0


def runs_compute(spec: RunSpec) -> Any:
    """`runs.compute`, imported only where something is computed."""
    from . import runs

    return runs.compute(spec)

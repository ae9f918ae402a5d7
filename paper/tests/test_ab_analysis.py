"""The verdict, the recommendation and the warnings of a study, from made-up results."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cadam.ab.report.figures import svg
from cadam.statistics.comparison import Comparison
from cadam.statistics.intervals import Interval
from cadam_paper.harness.ab_analysis import rate_warnings, recovery_times, summarize
from cadam_paper.harness.ab_evidence import (
    CHANCE_METRIC,
    NO_DIFFERENCE,
    TOO_FEW_BLOCKS,
    TOO_FEW_CHANGES,
    Evidence,
    conclude,
)
from cadam_paper.harness.ab_figures import study_figures
from cadam_paper.harness.ab_recommendation import Findings, describe_doubt, describe_intervals, recommend
from cadam_paper.harness.ab_runs import BLOCK_METRICS
from cadam_paper.harness.ab_study import Study, run_length, run_specs
from cadam_paper.harness.confidence_sequence import confidence_sequence, over_blocks
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec
from cadam_paper.harness.summary import Summary
from cadam_paper.harness.verdict import Verdict

SIMULATED = {"with a change": {"change": {"feature": "item", "blocks": [16]}}}
STUDY = Study("ab-made", "made", ("Adam", "CAdam"), 50, grid=(0.01, 0.1), blocks=48, simulated=SIMULATED)


def made(spec: RunSpec, gain: float, noise: float = 0.01, users: int = 60) -> Result:
    """Return a result in which CAdam is better by `gain` in every block, user and seed, with some noise."""
    random = np.random.default_rng([spec.seed, len(spec.condition), spec.optimizer == "CAdam"])
    better = gain * (spec.optimizer == "CAdam")
    gauc = 0.7 + better + noise * random.normal(size=48)
    loss = 0.5 - better + noise * random.normal(size=48)
    if "change" in spec.condition:
        loss[16:] += 0.3 * (0.3 if spec.optimizer == "CAdam" else 0.8) ** np.arange(32)
    curves = {"gauc_by_impressions": gauc, "auc": gauc, "log_loss": loss}
    within = {"user_auc": 0.7 + better + noise * random.normal(size=users), "user_impressions": np.arange(1, users + 1)}
    metrics = {
        name: 0.7 + better + noise / 7 * random.normal() for name in ("gauc_by_impressions", "gauc_by_user", "auc")
    }
    metrics |= {"log_loss": 0.5 - better + abs(spec.lr - 0.1) + noise / 7 * random.normal(), "events": 4800.0}
    metrics |= {"users_of_both_classes": float(users)}
    return Result(spec, Outcome(metrics, {**curves, **within}), Provenance(0.0, 0, "", {}))


def everything(gain: float, seeds: int = 4) -> Results:
    tuning = run_specs(STUDY, seeds, Results())
    found = Results([made(c, gain) for c in tuning])
    return Results([made(c, gain) for c in run_specs(STUDY, seeds, found)])


def kind(summary: Summary) -> str:
    return summary.verdicts["as it is"].kind


def test_learning_rates_are_chosen_first_and_on_other_seeds() -> None:
    tuning = run_specs(STUDY, 4, Results())
    assert all(c.settings["tuning"] and c.seed >= 10_000 for c in tuning)
    results = everything(0.0)
    tests = [r.spec for r in results.tests()]
    rates = [(c.seed, c.condition) for c in tests if c.lr != 0.1]  # 0.1 is the better of the two rates
    assert rates == [(0, "as it is")] * 2  # the other rate only serves to check the choice
    assert {(c.optimizer, c.condition) for c in tests} == {
        (arm, condition) for arm in STUDY.arms for condition in ("as it is", "with a change")
    }
    assert {c.optimizer for c in (r.spec for r in results.repeats())} == {"Adam"}
    assert not any(c.settings["tuning"] for c in tests)


def test_a_simulated_difference_is_detected_and_no_difference_is_not() -> None:
    better = summarize(STUDY, everything(0.02))
    assert kind(better) == "better"
    assert re.search(r"As it is: CAdam better, significant since block \d+ of 48 \(\+0\.01[89]", better.verdict)
    assert kind(summarize(STUDY, everything(-0.02))) == "worse"
    assert kind(summarize(STUDY, everything(0.0, seeds=6))) == "inconclusive"
    whats = [line.label for line in better.rows]
    for part in ("difference over users", "difference over blocks of time", "confidence sequence over blocks"):
        assert f"as it is: {part}" in whats
    assert all(
        line.noise_floor for line in better.rows if line.label.startswith("as it is") and "hindsight" not in line.label
    )


def test_a_row_compares_the_best_learning_rates_in_hindsight() -> None:
    def turned(result: Result) -> Result:
        """Give Adam a better GAUC and a worse log loss at its other learning rate, on the measured part."""
        adam = result.spec.optimizer == "Adam" and result.spec.seed < 10_000 and result.spec.lr == 0.01
        metrics = {**result.outcome.metrics, **({"log_loss": 9.0, "gauc_by_impressions": 0.9} if adam else {})}
        return replace(result, outcome=replace(result.outcome, metrics=metrics))

    summary = summarize(STUDY, Results([turned(r) for r in everything(0.02)]))
    assert kind(summary) == "better"  # the verdict is about the rates that were chosen beforehand
    line = next(line for line in summary.rows if "hindsight" in line.label)
    assert line.label == "as it is: GAUC by impressions, best learning rates in hindsight"
    assert "Adam 0.9000 (at 0.01)" in line.measured
    assert line.values["difference"] < -0.15


def turned_by_rate(result: Result, at: float, gauc: float) -> Result:
    """Give Adam another GAUC at one learning rate on the measured part, without changing its log loss."""
    adam = result.spec.optimizer == "Adam" and result.spec.seed < 10_000 and result.spec.lr == at
    metrics = {**result.outcome.metrics, **({"gauc_by_impressions": gauc} if adam else {})}
    return replace(result, outcome=replace(result.outcome, metrics=metrics))


@pytest.mark.parametrize(
    ("gauc", "said", "unsaid"),
    [
        (0.9, ["in hindsight (CAdam 0.01, Adam 0.01)", "without 0.1 in the grid (CAdam 0.01, Adam 0.01)"], []),
        (0.5, [], ["decides which arm is ahead"]),
        (0.71, [], ["decides which arm is ahead"]),
    ],
)
def test_learning_rates_that_reverse_the_sign_cause_a_warning(gauc: float, said: list[str], unsaid: list[str]) -> None:
    """CAdam is ahead by 0.02 at the chosen rates, and by 0.72 - gauc with Adam at 0.01."""
    told = " ".join(summarize(STUDY, Results([turned_by_rate(r, 0.01, gauc) for r in everything(0.02)])).warnings)
    assert all(part in told for part in said)
    assert not any(part in told for part in unsaid)


def test_a_reversed_sign_below_what_matters_causes_no_warning() -> None:
    results = Results([turned_by_rate(r, 0.01, 0.75) for r in everything(0.02)])
    assert rate_warnings(STUDY, results, "CAdam", 0.02)
    assert not rate_warnings(replace(STUDY, matters=0.1), results, "CAdam", 0.02)
    assert "+0.0200 at the chosen rates" in rate_warnings(STUDY, results, "CAdam", 0.02)[0]


def test_blocks_with_gauc_at_chance_cause_a_warning() -> None:
    def guessed(result: Result) -> Result:
        curves = {**result.outcome.curves, "gauc_by_chance": np.where(np.arange(48) == 6, 0.4, 0.1)}
        return replace(result, outcome=replace(result.outcome, curves=curves))

    warnings = summarize(STUDY, Results([guessed(r) for r in everything(0.02)])).warnings
    assert any("in 1 of 48 blocks the GAUC of Adam cannot be distinguished from guessing" in text for text in warnings)
    assert any("(block 7)" in text for text in warnings)
    assert not any("guessing" in text for text in summarize(STUDY, everything(0.02)).warnings), "not known"


def test_recovery_is_counted_from_the_gap_to_the_stream_without_the_change() -> None:
    results = everything(0.0, seeds=6)
    times = {arm: recovery_times(STUDY, results, arm, "with a change") for arm in STUDY.arms}
    assert 0 < np.mean(list(times["CAdam"].values())) < np.mean(list(times["Adam"].values())) < 32 * 100
    line = next(r for r in summarize(STUDY, results).rows if "until recovered" in r.label)
    assert line.verdict_kind == "better"


def test_a_change_that_costs_nothing_leaves_nothing_to_recover_from() -> None:
    def unmoved(result: Result) -> Result:
        curves = {**result.outcome.curves, "log_loss": np.full(48, 0.5)}
        return replace(result, outcome=replace(result.outcome, curves=curves))

    summary = summarize(STUDY, Results([unmoved(r) for r in everything(0.0)]))
    line = next(r for r in summary.rows if "until recovered" in r.label)
    assert (line.verdict, line.measured) == ("nothing to recover from", "the change adds 0.0% to the log loss")


def comparison(difference: Interval, noise: Interval | None = None) -> Comparison:
    return Comparison("CAdam", "Adam", "higher", 0.71, 0.7, difference, 0, 0, 5, True, noise)


def evidence(low: float, users: Interval | None) -> Evidence:
    by_block = np.full(30, low + 0.01)
    ends = np.where(np.arange(30) < 19, -np.inf, low)
    return Evidence(by_block, ends, np.full(30, low + 0.02), Interval(low + 0.01, low, low + 0.02, 30), users)


ABOVE, BELOW, AROUND = Interval(0.02, 0.01, 0.03, 5), Interval(-0.02, -0.03, -0.01, 5), Interval(0.0, -0.01, 0.01, 5)


@pytest.mark.parametrize(
    ("seeds", "users", "low", "kind", "conflicting"),
    [
        (ABOVE, ABOVE, 0.005, "better", False),
        (BELOW, BELOW, -0.03, "worse", False),
        (AROUND, AROUND, -0.01, "inconclusive", False),
        (ABOVE, AROUND, 0.005, "inconclusive", False),
        (ABOVE, ABOVE, -0.01, "inconclusive", False),
        (AROUND, ABOVE, -0.01, "inconclusive", False),
        (ABOVE, BELOW, 0.005, "inconclusive", True),
        (ABOVE, ABOVE, -0.03, "inconclusive", True),
        (BELOW, AROUND, 0.005, "inconclusive", True),
        (ABOVE, None, 0.005, "better", False),
        (Interval(0.02, math.nan, math.nan, 1), ABOVE, 0.005, "inconclusive", False),
    ],
)
def test_the_verdict_is_better_only_if_all_intervals_agree(
    seeds: Interval, users: Interval | None, low: float, kind: str, conflicting: bool
) -> None:
    found = conclude(comparison(seeds), evidence(low, users))
    assert (found.kind, found.conflicting) == (kind, conflicting)


def test_intervals_with_opposite_signs_conflict() -> None:
    found = conclude(comparison(ABOVE), evidence(-0.03, ABOVE))
    assert str(found) == "conflicting: CAdam ahead over seeds and users, CAdam behind over time"
    assert "which users and which time" in found.next_step


@pytest.mark.parametrize(
    ("seeds", "users", "matters", "kind"),
    [
        (AROUND, AROUND, 0.03, "equivalent"),
        (ABOVE, ABOVE, 0.03, "equivalent"),  # significant, but too small to matter
        (ABOVE, ABOVE, 0.0299, "better"),
        (AROUND, AROUND, 0.0099, "inconclusive"),
        (AROUND, None, 0.03, "equivalent"),
    ],
)
def test_a_difference_within_what_matters_is_equivalent_whether_or_not_it_is_0(
    seeds: Interval, users: Interval | None, matters: float, kind: str
) -> None:
    found = conclude(comparison(seeds), evidence(0.005, users), matters)
    assert found.kind == kind
    wide = replace(evidence(0.005, users), low=np.full(30, -math.inf))
    assert conclude(comparison(seeds), wide, matters).kind == "inconclusive", "nothing is known over time"


def test_an_inconclusive_comparison_estimates_how_much_data_it_needs() -> None:
    """A mean of 0.01 ± 0.02 needs four times the blocks; one of 0.005 ± 0.02 needs sixteen times the seeds."""
    time = Evidence(np.full(30, 0.01), np.full(30, -0.01), np.full(30, 0.03), ABOVE, ABOVE)
    found = conclude(comparison(ABOVE), time, events=10_000)
    assert (found.action, found.more_events) == ("undecided", 30_000)
    assert found.next_step == "about 30,000 more events would give a conclusion"
    few = comparison(Interval(0.005, -0.015, 0.025, 5))
    assert conclude(few, time, events=10_000).next_step == "about 80 seeds would give a conclusion"
    hopeless = comparison(Interval(0.0001, -0.015, 0.015, 5))
    assert "more than 100 times as many seeds" in conclude(hopeless, time, events=10_000).next_step


@pytest.mark.parametrize(
    ("gain", "action", "begins"),
    [
        (0.02, "switch", "Switch to CAdam: GAUC with CAdam is "),
        (-0.02, "stay", "Stay with Adam: GAUC with CAdam is "),
        (0.0, "undecided", "Undecided: GAUC with CAdam is 0."),
    ],
)
def test_the_recommendation_has_an_action_and_an_effect(gain: float, action: str, begins: str) -> None:
    (found,) = summarize(STUDY, everything(gain, seeds=6)).recommendations
    assert found.verdict.action == action
    assert found.headline.startswith(begins)
    assert found.values["difference"] == pytest.approx(gain, abs=0.004)
    assert any("CAdam 0.1, Adam 0.1" in reason for reason in found.reasons if "Learning rates" in reason)


def test_the_recommendation_names_the_label() -> None:
    named = replace(STUDY, settings={"schema": {"label": "click"}})
    (found,) = summarize(named, everything(0.02)).recommendations
    assert any("one with click and one without, CAdam ranks 18 more" in reason for reason in found.reasons)


def test_without_a_user_pairs_are_of_any_events() -> None:
    said = {}
    for user in ({}, {"user": "who"}):
        named = replace(STUDY, settings={"schema": {"label": "click", **user}})
        (found,) = summarize(named, everything(0.02)).recommendations
        said[bool(user)] = " ".join(found.reasons)
    assert "Of 1,000 pairs of events, one with click" in said[False]
    assert "Of 1,000 pairs of events of one user, one with click" in said[True]


@pytest.mark.parametrize(
    ("gaucs", "chance", "has_objection"),
    [((0.5, 0.48), 0.0, True), ((0.52, 0.5), 0.0, False), ((0.52, 0.5), 0.03, True), ((0.71, 0.7), 0.03, False)],
)
def test_arms_no_better_than_chance_are_not_recommended(
    gaucs: tuple[float, float], chance: float, has_objection: bool
) -> None:
    gauc = replace(comparison(ABOVE), mean=gaucs[0], baseline_mean=gaucs[1])
    findings = Findings(
        Verdict("better", "CAdam", "Adam"),
        gauc,
        comparison(BELOW),
        {"seeds": ABOVE},
        rates={"CAdam": 0.1},
        rates_by_gauc={"CAdam": 0.1},
        difference_by_gauc=0.02,
        rates_by_loss={"CAdam": 0.1},
        matters=0.001,
        events=1000,
        chance=chance,
    )
    found = recommend(findings)
    assert found.headline.startswith("Undecided: neither arm ranks better than chance") == has_objection
    assert found.as_json()["action"] == ("undecided" if has_objection else "switch")
    assert found.as_json()["verdict_kind"] == "better"


@pytest.mark.parametrize(
    ("lr", "in_hindsight", "action"),
    [(0.01, -0.004, "undecided"), (0.01, -0.0005, "switch"), (0.01, 0.004, "switch"), (0.1, -0.004, "switch")],
    ids=["reversed", "too little", "same sign", "the rates are those chosen"],
)
def test_a_sign_reversed_in_hindsight_prevents_a_recommendation(lr: float, in_hindsight: float, action: str) -> None:
    gauc = replace(comparison(ABOVE), mean=0.71, baseline_mean=0.7)
    findings = Findings(
        Verdict("better", "CAdam", "Adam"),
        gauc,
        comparison(BELOW),
        {"seeds": ABOVE},
        rates={"CAdam": 0.1, "Adam": 0.03},
        rates_by_gauc={"CAdam": lr, "Adam": 0.3 * lr},
        difference_by_gauc=in_hindsight,
        rates_by_loss={"CAdam": 0.01, "Adam": 0.01},
        matters=0.001,
        events=1000,
    )
    found = recommend(findings)
    assert found.as_json()["action"] == action
    assert "Learning rates to use: CAdam 0.01, Adam 0.01." in found.reasons
    assert any("the lowest log loss on the first part: CAdam 0.1, Adam 0.03" in one for one in found.reasons)
    if action == "undecided":
        assert found.headline.startswith("Undecided: the learning rates decide which arm is ahead. GAUC with CAdam is ")
        assert "0.40 points lower at the best rates for the rest (CAdam 0.01, Adam 0.003)" in found.headline
        assert found.headline.endswith("Compare again at the latter: --lr 0.003,0.01.")


def test_warnings_name_the_option_that_helps() -> None:
    warnings = summarize(replace(STUDY, blocks=30), everything(0.02)).warnings
    ends = [warning for warning in warnings if "of its grid" in warning]
    assert ends
    assert all(warning.endswith("extend the grid (--lr)") for warning in ends)
    assert all("(--blocks 15)" in warning for warning in warnings if "longer blocks" in warning)


def test_arms_within_what_matters_need_no_switch() -> None:
    (found,) = summarize(replace(STUDY, matters=0.5), everything(0.02)).recommendations
    assert found.verdict.action == "no practical difference"
    assert found.headline.startswith("No practical difference: GAUC with CAdam is within 50 points")


def test_a_difference_below_the_noise_floor_is_marked() -> None:
    noisy = comparison(ABOVE, noise=Interval(0.0, -0.05, 0.05, 10))
    assert str(conclude(noisy, evidence(0.005, ABOVE))).endswith(", below the noise floor")


def test_without_users_the_other_intervals_decide() -> None:
    def alone(result: Result) -> Result:
        whole = {"user_auc": np.array([result.outcome.metrics["auc"]]), "user_impressions": np.array([4800])}
        return replace(result, outcome=replace(result.outcome, curves={**result.outcome.curves, **whole}))

    summary = summarize(STUDY, Results([alone(r) for r in everything(0.02)]))
    assert kind(summary) == "better"
    assert not any("over users" in line.label for line in summary.rows)


def test_without_the_metric_in_any_block_the_verdict_is_inconclusive() -> None:
    def empty(result: Result) -> Result:
        curves = {**result.outcome.curves, "gauc_by_impressions": np.full(48, math.nan)}
        return replace(result, outcome=replace(result.outcome, curves=curves))

    summary = summarize(STUDY, Results([empty(r) for r in everything(0.02)]))
    assert kind(summary) == "inconclusive"
    assert TOO_FEW_BLOCKS in summary.verdict
    assert f"Unknown over time: {TOO_FEW_BLOCKS}." in summary.recommendations[0].reasons[0]


@pytest.mark.parametrize(
    ("by_block", "words"),
    [
        (np.zeros(48), NO_DIFFERENCE),
        (np.full(48, 0.01), TOO_FEW_CHANGES),
        (np.arange(10.0), TOO_FEW_BLOCKS),
        (np.arange(48.0), TOO_FEW_BLOCKS),
    ],
)
def test_the_reason_for_a_missing_interval_over_time_is_given(by_block: np.ndarray, words: str) -> None:
    found = Evidence(by_block, *confidence_sequence(by_block), over_blocks(by_block), ABOVE)
    assert found.missing_reason == words
    assert str(conclude(comparison(ABOVE), found)).endswith(f"ahead over seeds and users; {words}")
    assert conclude(comparison(AROUND), replace(found, users=AROUND)).kind == "inconclusive"


def test_an_arm_that_is_the_baseline_shows_no_difference() -> None:
    def same(result: Result) -> Result:
        return replace(result, outcome=replace(result.outcome, curves=everything(0.0)[0].outcome.curves))

    summary = summarize(STUDY, Results([same(r) for r in everything(0.0, seeds=6)]))
    assert kind(summary) == "inconclusive", "seeds differ"
    line = next(line for line in summary.rows if line.label == "as it is: confidence sequence over blocks")
    assert line.verdict == NO_DIFFERENCE


def test_arms_with_equal_gauc_but_different_log_loss_are_not_identical() -> None:
    """With a single feature of two values, the AUC of every block may be equal although the log loss differs."""

    def ranked(result: Result) -> Result:
        if result.spec.settings["tuning"]:
            return result
        metrics = {**result.outcome.metrics, "gauc_by_impressions": 0.6, "gauc_by_user": 0.6, "auc": 0.6}
        metrics["log_loss"] = 0.5 if result.spec.optimizer == "CAdam" else 0.6
        curves = {name: np.full(48, 0.6) for name in result.outcome.curves if name != "user_impressions"}
        curves |= {"user_auc": np.array([0.6]), "user_impressions": np.array([4800])}
        return replace(result, outcome=replace(result.outcome, metrics=metrics, curves=curves))

    summary = summarize(STUDY, Results([ranked(r) for r in everything(0.0)]))
    assert kind(summary) == "inconclusive"
    assert "arms compute the same" not in " ".join(summary.recommendations[0].reasons)


@pytest.mark.parametrize(("gain", "kinds"), [(0.02, "better"), (0.0, "inconclusive")])
def test_seeds_that_change_nothing_are_not_evidence(gain: float, kinds: str) -> None:
    """If all weights start at 0, every seed gives the same run, and users and time decide."""

    def same(result: Result) -> Result:
        return replace(result, outcome=made(replace(result.spec, seed=0), gain).outcome)

    summary = summarize(STUDY, Results([same(result) for result in everything(gain)]))
    assert kind(summary) == kinds
    (found,) = summary.recommendations
    assert set(found.values["intervals"]) == {"users", "time"}
    assert any("Unknown over seeds: every seed gives the same run" in reason for reason in found.reasons)
    said = " ".join([found.headline, *found.reasons])
    assert "log loss" not in said, "it has no other interval than that over seeds"
    assert "Noise floor" not in said
    loss = next(line for line in summary.rows if line.label == "as it is: log loss (lower is better)")
    assert (loss.verdict_kind, loss.noise_floor) == ("inconclusive", "")
    assert "every seed gives the same run" in loss.verdict
    assert not any("there is one seed; run more seeds" in line.verdict for line in summary.rows)


def test_missing_intervals_are_unknown_and_not_inconclusive() -> None:
    nowhere = Interval(0.01, -math.inf, math.inf, 5)
    undecided = partial(Verdict, "inconclusive", "CAdam", "Adam")
    for intervals, words in (
        ({"seeds": ABOVE, "time": nowhere}, ", but that is unknown over time"),
        ({"seeds": AROUND, "time": nowhere}, ", but that is inconclusive over seeds and unknown over time"),
        ({"seeds": AROUND, "users": AROUND, "time": ABOVE}, ", but that is inconclusive over seeds and users"),
    ):
        assert describe_doubt(undecided(), intervals, 0.0) == words


def test_an_interval_within_what_matters_is_not_inconclusive() -> None:
    """AROUND and ABOVE are within 0.03 of 0."""
    wide = Interval(0.0, -0.2, 0.2, 30)
    intervals = {"seeds": AROUND, "users": AROUND, "time": wide}
    verdict = Verdict("inconclusive", "CAdam", "Adam")
    assert describe_doubt(verdict, intervals, 0.03) == ", but that is inconclusive over time"
    said = describe_intervals(verdict, intervals, 0.03)
    assert said.startswith("No practical difference over seeds (")
    assert "Inconclusive over time (-20.00 to +20.00)" in said
    found = Evidence(np.arange(30.0), np.full(30, -0.2), np.full(30, 0.2), AROUND, AROUND)
    assert str(conclude(comparison(AROUND), found, 0.03)).endswith(
        ": within 0.03 over seeds and users, inconclusive over time"
    )
    only = {"seeds": ABOVE, "time": AROUND}  # CAdam is ahead, but the size is uncertain
    assert describe_doubt(verdict, only, 0.03) == ", but that is inconclusive over time"


def test_a_diverged_run_is_not_comparable() -> None:
    results = everything(0.02)
    lost = next(i for i, r in enumerate(results) if r.spec.seed == 0 and r.spec.optimizer == "CAdam")
    numbers = results[lost].outcome
    nothing = {name: np.full(48, math.nan) for name in BLOCK_METRICS}
    outcome = Outcome(dict.fromkeys(numbers.metrics, math.nan), nothing)
    broken = Results([replace(r, outcome=outcome) if i == lost else r for i, r in enumerate(results)])
    assert kind(summarize(STUDY, broken)) == "diverged"
    assert len(study_figures(STUDY, broken)) == 2


def test_figures_are_drawn_and_small() -> None:
    drawn = study_figures(STUDY, everything(0.01))
    assert len(drawn) == 2
    assert all(len(svg(figure, "x", "y").encode()) < 60_000 for figure in drawn.values())


def test_arms_that_measured_different_events_are_not_comparable() -> None:
    def short(result: Result) -> Result:
        metrics = {**result.outcome.metrics, **({"events": 4799.0} if result.spec.optimizer == "CAdam" else {})}
        return replace(result, outcome=replace(result.outcome, metrics=metrics))

    assert kind(summarize(STUDY, Results([short(r) for r in everything(0.02)]))) == "diverged"


def test_an_arm_no_better_than_chance_is_not_recommended() -> None:
    results = everything(0.02)
    for result in results:
        result.outcome.metrics[CHANCE_METRIC] = 0.3  # type: ignore[index]
    (found,) = summarize(STUDY, results).recommendations
    assert found.headline.startswith("Undecided: neither arm")


def test_the_length_of_a_run_is_the_share_of_the_stream_it_meets() -> None:
    assert run_length(STUDY.spec("Adam", 0.1, 0)) == 1
    assert run_length(STUDY.spec("Adam", 0.1, 0, tuning=True)) == STUDY.tuning_share


def test_a_single_learning_rate_causes_no_warning() -> None:
    """One seed may differ in sign from the mean over seeds."""

    def turned(result: Result) -> Result:
        first = result.spec.seed == 0 and result.spec.optimizer == "CAdam"
        metrics = {**result.outcome.metrics, **({"gauc_by_impressions": 0.1} if first else {})}
        return replace(result, outcome=replace(result.outcome, metrics=metrics))

    results = Results([turned(r) for r in everything(0.5) if r.spec.lr == STUDY.grid[0]])
    one = replace(STUDY, grid=STUDY.grid[:1])
    assert rate_warnings(one, results, "CAdam", 0.3) == []

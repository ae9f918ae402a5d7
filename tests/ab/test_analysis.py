"""The analysis of a comparison: arms without hindsight, warm-up, added learning rates, and the result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cadam.ab.analysis import Analysis, constant_loss
from cadam.ab.stream import JudgedEvents
from cadam.ab.study import Run, Study, rate_between
from cadam.ab.wording import headline, summary
from cadam.statistics.paired_scores import MAX_LOSS, PairedScores, log_losses
from cadam.statistics.rate_selection import RateSelector

BATCH, BATCHES = 100, 200


class Scores:
    """Recorded scores in memory, in place of the cache."""

    def __init__(self, by_run: dict[Run, np.ndarray]) -> None:
        self.by_run = by_run

    def files(self, run: Run) -> Any:
        scores = self.by_run[run]

        class Files:
            def read(self, start: int, end: int) -> np.ndarray:
                return scores[start:end]

        return Files()


def make_analysis(
    quality: dict[tuple[str, float], tuple[float, float]],
    lag: int = 0,
    seeds: int = 3,
    weights: np.ndarray | None = None,
    **fields: Any,
) -> Analysis:
    """Return an analysis of arms whose scores have a signal, one for each half of the stream, by arm and rate."""
    random = np.random.default_rng(0)
    count = BATCH * BATCHES
    logits = 1.5 * random.standard_normal(count)
    labels = (random.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    half = np.arange(count) < count // 2
    by_run = {}
    for (arm, lr), (first, second) in quality.items():
        for seed in range(seeds):
            noise = 0.05 * np.random.default_rng([seed, int(1e6 * lr), ord(arm)]).standard_normal(count)
            by_run[Run(arm, lr, seed)] = (logits * np.where(half, first, second) + noise).astype(np.float32)
    arms = tuple(dict.fromkeys(arm for arm, _ in quality))
    grid = fields.pop("grid", tuple(sorted({lr for _, lr in quality})))
    study = Study("data", arms, "model", BATCH, grid, seeds, **fields)
    ends = np.minimum(BATCH * np.arange(1, BATCHES + 2), count)
    judged = JudgedEvents(labels, np.arange(count) % 50, np.ones(count) if weights is None else weights, ends, lag)
    return Analysis(study, judged, Scores(by_run))  # type: ignore[arg-type]


def test_an_arm_predicts_with_the_rate_that_was_best_so_far() -> None:
    analysis = make_analysis({("A", 0.01): (1.0, 0.2), ("A", 0.1): (0.2, 1.0), ("B", 0.01): (1, 1), ("B", 0.1): (1, 1)})
    analysis.update(BATCHES)
    arm = analysis.result().arm("A")
    assert arm.rate_by_period[8] == 0.01
    assert arm.rate_by_period[-1] == 0.1
    assert arm.metrics["log_loss"] < arm.loss_at_best_rate, "following the best rate is better than any single rate"
    state = analysis._arms["A", 0]
    selector = RateSelector((0.01, 0.1))
    for number in range(50):
        assert state.leaders[number] == selector.leader
        losses = {lr: float(analysis._losses[Run("A", lr, 0)][number]) for lr in (0.01, 0.1)}
        assert state.losses[number] == losses[state.leaders[number]]
        selector.update(losses, BATCH)


def test_the_loss_is_the_weighted_mean_over_events() -> None:
    weights = np.where(np.arange(BATCH * BATCHES) % 4 == 0, 4.0, 0.0)
    analysis = make_analysis({("A", 0.01): (1.0, 1.0), ("B", 0.01): (0.5, 0.5)}, weights=weights)
    analysis.update(BATCHES)
    result = analysis.result()
    assert result.warm_up is not None
    part = slice(result.warm_up, BATCH * BATCHES)
    has_weight, labels = weights[part] > 0, analysis.judged.labels[part]
    for arm in result.arms:
        losses = [log_losses(analysis.scores(arm.name, seed, part), labels)[has_weight].mean() for seed in range(3)]
        assert arm.metrics["log_loss"] == pytest.approx(np.mean(losses))
    assert result.best_constant == pytest.approx(constant_loss(float(labels[has_weight].mean())))
    (pair,) = result.pairs
    own, base = (arm.metrics["log_loss"] for arm in reversed(result.arms))
    assert pair.difference == pytest.approx(100 * (own / base - 1))


def test_with_late_labels_only_known_losses_count() -> None:
    quality = {("A", 0.01): (1.0, 1.0), ("A", 0.1): (0.2, 0.2), ("B", 0.01): (1, 1), ("B", 0.1): (1, 1)}
    analysis, late = make_analysis(quality), make_analysis(quality, lag=7)
    analysis.update(BATCHES)
    late.update(BATCHES)
    leaders = analysis._arms["A", 0].leaders
    assert late._arms["A", 0].leaders[7 : BATCHES + 7] == leaders[:BATCHES]
    assert late.result().lag == 7


def test_segments_do_not_change_the_result() -> None:
    quality = {("A", 0.01): (1.0, 0.9), ("A", 0.1): (0.8, 1.0), ("B", 0.01): (0.9, 1), ("B", 0.1): (1, 0.95)}
    whole, parts = make_analysis(quality), make_analysis(quality)
    whole.update(BATCHES + 1)
    for batch in (3, 40, 41, 170, BATCHES + 1):
        parts.update(batch)
    assert parts.result() == whole.result()


@pytest.mark.parametrize(("quality", "kind"), [(1.0, "better"), (0.2, "worse"), (0.6, "equivalent")])
def test_a_difference_gets_its_verdict(quality: float, kind: str) -> None:
    analysis = make_analysis({("A", 0.01): (0.6, 0.6), ("B", 0.01): (quality, quality)}, matters=0.5)
    analysis.update(BATCHES)
    result = analysis.result()
    (pair,) = result.pairs
    assert pair.kind == kind
    assert result.recommended == ("B" if kind == "better" else "A")
    assert pair.decided_at is not None
    assert pair.decided_at >= (analysis.warm_up or 0)
    assert pair.difference == pytest.approx(pair.in_hindsight, abs=0.2)
    expected = 100 * (result.arm("B").metrics["log_loss"] / result.arm("A").metrics["log_loss"] - 1)
    assert pair.difference == pytest.approx(expected, abs=1e-6)


def test_several_arms_are_ranked_and_corrected() -> None:
    analysis = make_analysis({("A", 0.01): (0.6, 0.6), ("B", 0.01): (1, 1), ("C", 0.01): (0.8, 0.8)})
    analysis.update(BATCHES)
    result = analysis.result()
    assert result.ranking == ["B", "C", "A"]
    assert result.recommended == "B"
    alone = PairedScores("lower", 0.1, 0.05, BATCHES)
    assert analysis.pairs["B"].seed_confidence > alone.seed_confidence


def test_warm_up_ends_at_one_moment_for_all_arms() -> None:
    slow = make_analysis({("A", 0.01): (1.0, 1.0), ("B", 0.01): (-1.0, 1.0)})
    slow.update(BATCHES)
    assert slow.warm_up == 2 * 500, "twice as long as the first arm needed"
    never = make_analysis({("A", 0.01): (-1.0, -1.0), ("B", 0.01): (-1.0, -1.0)})
    never.update(BATCHES)
    assert never.result().warm_up is None
    assert never.result().judged_events == 0
    assert never.result().pairs[0].kind == "inconclusive"


def test_a_rate_is_added_where_the_best_is_at_an_end() -> None:
    quality = {(arm, lr): (good, good) for arm in "AB" for lr, good in ((0.01, 0.4), (0.03, 0.6), (0.09, 1.0))}
    analysis = make_analysis(quality, grid=(0.01, 0.03))
    analysis.update(60)
    added = analysis.rates_to_add()
    assert {(run.arm, run.lr) for run in added} == {("A", 0.09), ("B", 0.09)}
    analysis.add(added)
    analysis.update(BATCHES)
    result = analysis.result()
    assert result.arms[0].added_rates == {0.09: 60 * BATCH}
    leaders = analysis._arms["A", 0].leaders
    assert 0.09 not in leaders[:61]
    assert set(leaders[61:]) == {0.09}
    one = make_analysis({("A", 0.01): (1, 1), ("B", 0.01): (1, 1)})
    one.update(BATCHES)
    assert not one.rates_to_add(), "a single rate is what the user asked for"


def test_losses_are_limited() -> None:
    losses = log_losses(np.array([0.0, 100.0, -3.0, np.nan], np.float32), np.array([1.0, 0.0, 0.0, 1.0]))
    np.testing.assert_allclose(losses, [math.log(2), MAX_LOSS, math.log1p(math.exp(-3)), math.nan])
    assert constant_loss(0.5) == pytest.approx(math.log(2))
    assert constant_loss(0.0) == 0


def test_a_verdict_with_another_sign_in_hindsight_does_not_end_the_comparison() -> None:
    rates = {("A", 0.01): (1.0, 0.2), ("A", 0.1): (0.2, 1.0), ("B", 0.01): (0.5, 0.5), ("B", 0.1): (0.5, 0.5)}
    analysis = make_analysis(rates)
    analysis.update(BATCHES + 1)
    result = analysis.result()
    (pair,) = result.pairs
    assert (pair.kind, pair.is_reversed) == ("worse", True)
    assert pair.difference > 0 > pair.in_hindsight
    assert not analysis.is_decided
    assert pair.more_events == result.judged_events
    assert f"About {result.judged_events:,} more events, or learning rates that lie closer" in headline(pair, result)
    assert "This is not decided: the learning rates decide" in summary(pair, result)
    same = make_analysis({key: (0.5 if key[0] == "B" else 1.0,) * 2 for key in rates})
    same.update(BATCHES + 1)
    assert same.is_decided


def test_seeds_that_change_nothing_are_no_evidence() -> None:
    pair = PairedScores("lower", 0.1, 0.05, 100)
    random = np.random.default_rng(0)
    for number in range(100):
        difference = random.normal(-0.05, 0.01)
        pair.update(np.full(3, 0.5 + difference), np.full(3, 0.5), 100, 100 * (number + 1))
    assert pair.over_seeds is None
    assert pair.kind == "better"


def test_a_verdict_that_does_not_last_is_reported() -> None:
    pair = PairedScores("lower", 0.01, 0.05, 2000)
    random = np.random.default_rng(0)
    for number in range(2000):
        mean = -0.02 if number < 300 else 0.01
        differences = random.normal(mean, 0.01) + random.normal(0, 0.002, 5)
        pair.update(0.5 + differences, np.full(5, 0.5), 100, 100 * (number + 1))
    assert pair.first_decided_at is not None
    assert pair.reopened_at is not None
    assert pair.first_decided_at < 30_000 < pair.reopened_at


def follow(differences: np.ndarray) -> PairedScores:
    """Return a pair whose differences, the same under three seeds but for noise, are these; the baseline is 0.5."""
    random = np.random.default_rng(0)
    pair = PairedScores("lower", 0.1, 0.05, len(differences))
    for number, difference in enumerate(differences, 1):
        arm = 0.5 + difference + 1e-3 * random.standard_normal() + 1e-4 * random.standard_normal(3)
        pair.update(arm, np.full(3, 0.5), 100, 100 * number)
    return pair


def test_a_judgment_has_to_stand_for_as_many_events_again_before_the_end() -> None:
    (before, at) = (follow(np.full(count, -0.01)) for count in (77, 78))
    assert (before.judgment, before.kind) == ("better", "inconclusive")
    assert before.judged_since == 3900, "the recent part begins after 20 batches and is known after 20 more"
    assert (at.kind, at.decided_at) == ("better", 7800)
    before.finish(7700)
    assert (before.kind, before.decided_at, before.first_decided_at) == ("better", 7700, 7700)


def test_a_difference_that_fades_gets_no_verdict() -> None:
    pair = follow(-0.2 / np.arange(10, 410))
    assert pair.over_time.high < 0
    assert pair.recent_over_time.high < 0, "also in the recent part it is certain that there is a difference"
    assert pair.is_fading
    assert pair.change.low > 0, "the trend is certain"
    pair.finish(40_000)
    assert pair.is_ending
    assert (pair.kind, pair.first_decided_at) == ("inconclusive", None)
    assert pair.estimate_more() == (40_000, None)


def test_a_difference_of_which_only_the_start_is_certain_gets_no_verdict() -> None:
    pair = follow(np.where(np.arange(400) < 100, -0.02, 0.0))
    assert pair.over_time.high < 0
    assert pair.recent_over_time.low < 0 < pair.recent_over_time.high
    assert pair.kind == "inconclusive"
    pair.finish(40_000)
    assert pair.kind == "inconclusive"


def test_the_whole_stream_decides_at_its_end_unless_the_recent_part_has_another_sign() -> None:
    time = np.arange(300)
    pair = follow(np.where(time < 80, -0.008, -0.003) + np.where(time % 2, 0.02, -0.02))
    assert pair.recent_over_time.low < 0 < pair.recent_over_time.high
    assert pair.kind == "inconclusive"
    pair.finish(30_000)
    assert (pair.kind, pair.decided_at) == ("better", 30_000)
    reversing = follow(np.where(np.arange(400) < 160, -0.02, 0.002))
    reversing.finish(40_000)
    assert reversing.over_time.high < 0 < reversing.recent_over_time.low
    assert (reversing.kind, reversing.is_reversing) == ("inconclusive", True)
    assert reversing.estimate_more() == (40_000, None)


def test_a_rate_is_added_between_the_best_and_its_better_neighbor() -> None:
    assert rate_between({0.001: 0.5, 0.003: 0.4, 0.01: 0.42, 0.03: 0.6}) == 0.0055
    assert rate_between({0.001: 0.5, 0.003: 0.4, 0.0055: 0.41, 0.01: 0.42}) is None, "they are close enough"
    assert rate_between({0.001: 0.5, 0.003: 0.4}) is None, "at an end, the grid is extended first"
    assert rate_between({0.001: 0.5, 0.003: 0.4, 0.01: math.nan}) is None
    quality = {("A", 0.01): (0.6, 0.6), ("A", 0.1): (1.0, 1.0), ("A", 1.0): (0.3, 0.3)}
    quality |= {("B", lr): values for (_, lr), values in quality.items()}
    analysis = make_analysis(quality, grid=(0.01, 0.1, 1.0))
    analysis.update(60)
    assert {(run.arm, run.lr) for run in analysis.rates_to_add()} == {("A", 0.032), ("B", 0.032)}

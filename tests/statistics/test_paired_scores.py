"""The verdict about two arms against an independent implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from benchmarks.false_alarms import LOSS, simulate

from cadam.statistics.intervals import Interval
from cadam.statistics.paired_scores import MIN_GROWTH, PairedScores, growth_until_decided
from cadam.statistics.sequential import ConfidenceSequence
from tests.statistics.verdict_oracle import sequence, t_quantile, verdicts

SIDES = {"better": -1, "worse": 1, "inconclusive": 0}


@pytest.mark.parametrize("batches", [30, 160])
@pytest.mark.parametrize("effect", [0.0, 0.01])
def test_verdicts_are_those_of_an_independent_implementation(effect: float, batches: int) -> None:
    seen = set()
    kinds: list[dict[str, Any]] = [{}, {"skew": 1}, {"head_start": 0.05}, {"drift": 0.03}, {"spikes": 0.01}]
    for number, stream in enumerate(kinds):
        differences = simulate(np.random.default_rng([number, batches]), batches=batches, **stream) - effect * LOSS
        pair = PairedScores("lower", 0.0, 0.05, batches)
        baseline = np.full(len(differences), LOSS)
        running = []
        for count, batch in enumerate(differences.T, 1):
            pair.update(baseline + batch, baseline, 256, 256 * count)
            running.append(SIDES[pair.kind])
            if count % 10 == 0:
                ours, expected = pair.over_time, sequence(differences[:, :count].mean(0), 0.05)
                ends = 100 / LOSS * np.array(expected)
                np.testing.assert_allclose([ours.mean, ours.low, ours.high], ends, rtol=1e-6, atol=1e-9)
        pair.finish(256 * batches)
        expected_running, at_end = verdicts(differences)
        assert running == expected_running
        assert SIDES[pair.kind] == at_end
        seen |= {*running, at_end}
    assert seen >= ({0, -1} if effect and batches > 100 else {0})


def test_an_interval_that_includes_0_needs_more_data() -> None:
    assert growth_until_decided(Interval(1.0, -3.0, 5.0, 100), 0.1) == 16
    assert growth_until_decided(Interval(0.01, -0.19, 0.21, 100), 0.1) == pytest.approx((0.2 / 0.09) ** 2)
    uneven = Interval(0.29, -0.01, 0.56, 100)
    assert uneven.half_width < uneven.mean
    assert growth_until_decided(uneven, 0.1) == MIN_GROWTH
    for decided in (Interval(0.1, 0.01, 0.5, 100), Interval(-0.1, -0.5, -0.01, 100), Interval(0.0, -0.1, 0.1, 100)):
        assert growth_until_decided(decided, 0.1) == 1


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_the_ends_are_finite_after_the_required_batches(lag: int) -> None:
    random = np.random.default_rng(0)
    sequence = ConfidenceSequence(lag=lag)
    for count in range(1, sequence.required_batches + 1):
        sequence.update(random.normal(), 256)
        assert math.isfinite(sequence.interval.high) == (count >= sequence.required_batches)


def test_the_quantile_is_that_of_tables() -> None:
    assert t_quantile(0.975, 4) == pytest.approx(3.4954, abs=1e-4)

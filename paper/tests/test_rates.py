"""Curves over learning rates: the best rate, rates near it, and comparisons at the best rate of each arm."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cadam_paper.harness.learning_rates import NoLearningRateError
from cadam_paper.harness.rates import RateCurve, compare_at_best_rates, compare_at_rate, next_rates, tolerance_row

RATES = (1e-4, 3e-4, 1e-3, 3e-3)


def curve(arm: str, **by_seed: tuple[float, ...]) -> RateCurve:
    """Return a curve from the values of each seed, in the order of RATES."""
    seeds = {int(name[1:]): values for name, values in by_seed.items()}
    return RateCurve(arm, "higher", {rate: {s: v[i] for s, v in seeds.items()} for i, rate in enumerate(RATES)})


def test_the_best_rate_has_the_best_mean_and_did_not_diverge() -> None:
    adam = curve("Adam", s0=(1.0, 5.0, 4.0, math.nan), s1=(1.0, 3.0, 5.0, 99.0))
    assert adam.best() == 1e-3
    assert adam.best(without=1) == 3e-4
    assert RateCurve("Adam", "lower", adam.values).best() == 1e-4
    with pytest.raises(NoLearningRateError):
        curve("Adam", s0=(math.nan,) * 4).best()


def test_the_rate_of_a_seed_is_chosen_on_the_other_seeds() -> None:
    adam = curve("Adam", s0=(0.0, 9.0, 1.0, 0.0), s1=(0.0, 1.0, 9.0, 0.0))
    assert adam.values_at_best() == {0: 1.0, 1: 1.0}, "each seed at the rate that is best for the other"


def test_a_grid_is_extended_beyond_the_ends_at_which_a_curve_is_best() -> None:
    low, inside, high = (curve("Adam", s0=values) for values in ((9, 1, 1, 1), (1, 9, 1, 1), (1, 1, 1, 9)))
    assert next_rates([inside]) == []
    assert next_rates([low, inside]) == [3e-5]
    assert next_rates([high, high]) == [1e-2]
    assert next_rates([low, high]) == [3e-5, 1e-2]
    assert next_rates([RateCurve("Adam", "higher", {0.3: {0: 1.0}, 1000.0: {0: 2.0}})]) == [], (
        "1000 is the highest allowed rate"
    )


def test_a_grid_is_not_extended_beyond_a_tie() -> None:
    tied = curve("Adam", s0=(4.0, 4.0, 2.0, 1.0))
    assert tied.best_is_at_an_end, "the summary still has a warning"
    assert next_rates([tied]) == []
    assert next_rates([curve("Adam", s0=(4.0, 3.0, 2.0, 4.0))]) == [3e-5], "the two ends are not neighbors"


def test_means_are_interpolated_over_the_logarithm_of_the_rate() -> None:
    adam = curve("Adam", s0=(9.0, 7.0, 10.0, 8.0))
    assert adam.interpolate(1e-3) == 10.0
    assert adam.interpolate(math.sqrt(1e-3 * 3e-3)) == pytest.approx(9.0)


def test_a_row_has_the_range_of_good_rates_and_a_curve_finds_three_times_a_rate() -> None:
    adam = curve("Adam", s0=(9.5, 7.0, 10.0, 9.2))
    assert tolerance_row("accuracy", adam, 1.0).values == {"low": 1e-3, "high": 3e-3, "best": 1e-3}
    assert [adam.nearest_to_triple(rate) for rate in RATES] == [3e-4, 1e-3, 3e-3, 3e-3]


def test_tolerance_is_the_range_of_rates_around_the_best() -> None:
    adam = curve("Adam", s0=(9.5, 7.0, 10.0, 9.2))
    assert adam.tolerance(1.0) == (1e-3, 3e-3), "the lowest rate is near too, but not without a gap"
    assert adam.tolerance(5.0) == (1e-4, 3e-3)
    assert not adam.best_is_at_an_end
    assert curve("Adam", s0=(1.0, 2.0, 3.0, 4.0)).best_is_at_an_end


def test_arms_are_compared_at_their_own_rates_and_at_a_common_rate() -> None:
    adam = curve("Adam", s0=(1.0, 5.0, 2.0, 0.0), s1=(1.0, 6.0, 2.0, 0.0), s2=(1.0, 5.5, 2.0, 0.0))
    cadam = curve("CAdam", s0=(0.0, 4.0, 7.0, 3.0), s1=(0.0, 4.5, 8.0, 3.0), s2=(0.0, 4.0, 7.6, 3.0))
    own = compare_at_best_rates(cadam, adam)
    assert own.difference.mean == pytest.approx(np.mean([2.0, 2.0, 2.1]))
    assert compare_at_rate(cadam, adam, 3e-4).difference.mean == pytest.approx(np.mean([-1.0, -1.5, -1.5]))


def test_every_rate_needs_the_same_seeds() -> None:
    with pytest.raises(ValueError, match="same seeds"):
        RateCurve("Adam", "higher", {1e-3: {0: 1.0}, 1e-2: {1: 1.0}})


def test_an_arm_is_not_better_than_itself() -> None:
    """In at least 183 of 200 simulated A/A studies with five seeds, the 95% interval contains 0."""
    random = np.random.default_rng(2026)
    covered = 0
    for _ in range(200):
        shape = -2.0 * (np.arange(5) - random.uniform(1.5, 2.5)) ** 2

        def simulated(arm: str, shape: np.ndarray = shape) -> RateCurve:
            noise = random.normal(0, 1, 5)[:, None] * 0.5 + random.normal(0, 1, (5, 5))
            values = 80 + shape[None, :] + noise
            return RateCurve(arm, "higher", {10.0**-i: dict(enumerate(values[:, i].tolist())) for i in range(5)})

        difference = compare_at_best_rates(simulated("Adam"), simulated("Adam, other seeds")).difference
        covered += difference.low <= 0 <= difference.high
    assert covered >= 183, covered

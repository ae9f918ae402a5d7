"""Intervals, paired comparisons and the choice of a learning rate, also from few or diverged runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cadam.statistics.comparison import compare, noise_floor
from cadam.statistics.intervals import interval, t_quantile
from cadam_paper.harness.learning_rates import choose_lr
from cadam_paper.harness.results import evaluation_seeds, repeat_seeds, tuning_seeds
from cadam_paper.harness.summary import comparison_row
from cadam_paper.harness.verdict import ONE_SEED, floor_qualifier, verdict_over_seeds

NAMES = ("CAdam", "Adam")


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    # From printed tables of Student's t.
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 3, 3.1824),
        (0.95, 4, 2.7764),
        (0.95, 9, 2.2622),
        (0.95, 10, 2.2281),
        (0.95, 30, 2.0423),
        (0.95, 120, 1.9799),
        (0.99, 5, 4.0321),
        (0.90, 8, 1.8595),
        (0.95, 100_001, 1.9600),
    ],
)
def test_quantiles_agree_with_printed_tables(confidence: float, freedom: int, expected: float) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(("confidence", "freedom"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_arguments_out_of_range_have_no_quantile(confidence: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="must"):
        t_quantile(confidence, freedom)


def test_an_interval_agrees_with_a_manual_computation() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * math.sqrt(5 / 3) / 2
    assert (found.mean, found.low, found.high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))


def test_intervals_cover_the_mean_in_95_percent_of_samples() -> None:
    random = np.random.default_rng(0)
    samples = random.normal(3, 2, size=(4000, 5))
    held = np.mean([(found := interval(list(sample))).low <= 3 <= found.high for sample in samples])
    assert held == pytest.approx(0.95, abs=0.012)
    pairs = random.normal(size=(4000, 8))
    held = np.mean([(found := noise_floor(list(p[:5]), list(p[5:]))).low <= 0 <= found.high for p in pairs])
    assert held == pytest.approx(0.95, abs=0.012)


def seeds(*values: float, first: int = 0) -> dict[int, float]:
    return dict(enumerate(values, first))


def test_pairing_removes_the_variance_between_seeds() -> None:
    baseline = seeds(10.0, 20.0, 30.0, 40.0)
    arm = {seed: value - 1 - 0.01 * seed for seed, value in baseline.items()}
    found = compare(arm, baseline, names=NAMES, better="lower", repeat=seeds(12.0, 22.0, 33.0, 39.0, first=100))
    assert (found.kind, floor_qualifier(found)) == ("better", ", below the noise floor")
    assert found.difference.mean == pytest.approx(-1.015)
    assert compare(arm, baseline, names=NAMES, better="higher").kind == "worse"


def test_differences_are_taken_seed_by_seed() -> None:
    """Sorted values of the arms differ by 1 each, but by seed they differ by 5, 1 and -3."""
    arm, baseline = {2: 2.0, 0: 6.0, 1: 4.0}, seeds(1.0, 3.0, 5.0)
    found = compare(arm, baseline, names=NAMES, better="higher")
    half = 4.302653 * 4 / math.sqrt(3)  # Student's t with two degrees of freedom; their standard deviation is 4
    difference = found.difference.mean, found.difference.low, found.difference.high
    assert difference == pytest.approx((1.0, 1 - half, 1 + half))
    assert found.kind == "inconclusive"


def test_the_noise_floor_does_not_depend_on_the_difference_of_the_two_sets() -> None:
    """The true A/A difference is 0, so a shift of one set does not change the noise floor."""
    baseline = seeds(1.0, 2.0, 3.0)
    half = 2.776445 * math.sqrt(2 / 3)
    for shift in (0.0, 5.0, -5.0):
        repeat = {seed: value + shift for seed, value in seeds(1.0, 2.0, 3.0, first=100).items()}
        for ahead, words in ((half + 0.01, ""), (half - 0.01, ", below the noise floor")):
            arm = {seed: value + ahead + 1e-4 * seed for seed, value in baseline.items()}
            found = compare(arm, baseline, names=NAMES, better="higher", repeat=repeat)
            assert found.floor == pytest.approx(half, abs=1e-6)
            assert (found.kind, floor_qualifier(found)) == ("better", words)
            line = comparison_row("loss", "", found, 1.0, 2)
            assert line.noise_floor == f"±2.27 ({abs(shift):.2f} seen)"
            assert line.values["A/A difference"] == pytest.approx(-shift)
    undecided = compare(seeds(1.5, 1.9, 3.0), baseline, names=NAMES, better="higher", repeat=seeds(1, 9, 5, first=9))
    assert (undecided.kind, floor_qualifier(undecided)) == ("inconclusive", "")


def test_two_single_runs_have_a_difference_but_no_noise_floor() -> None:
    found = compare(seeds(3.0), seeds(1.0), names=NAMES, better="higher", repeat=seeds(4.0, first=100))
    assert math.isnan(found.floor)
    assert comparison_row("loss", "", found, 1.0, 1).noise_floor == "3.0 seen"


def test_an_interval_that_contains_0_is_inconclusive() -> None:
    found = compare(seeds(1.0, 2.0, 3.0), seeds(1.2, 1.9, 2.9), names=NAMES, better="lower")
    assert found.kind == "inconclusive"
    assert comparison_row("loss", "", found, 1.0).verdict_kind == "inconclusive"


def test_one_seed_gives_no_verdict() -> None:
    found = compare(seeds(1.0), seeds(5.0), names=NAMES, better="lower")
    assert (found.kind, str(verdict_over_seeds(found))) == ("inconclusive", ONE_SEED)
    assert comparison_row("loss", "", found, 1.0, 1).interval == "-4.0"


def test_without_randomness_one_run_is_conclusive() -> None:
    found = compare(seeds(1.0), seeds(5.0), names=NAMES, better="lower", random=False)
    assert found.kind == "better"
    same = compare(seeds(1.0), seeds(1.0), names=NAMES, better="lower", random=False)
    assert same.kind == "equivalent"


def test_the_verdict_mentions_a_difference_without_variance() -> None:
    found = compare(seeds(1.0, 2.0), seeds(2.0, 3.0), names=NAMES, better="lower")
    assert (
        str(verdict_over_seeds(found))
        == "CAdam better, by the same amount under every seed: seeds may have no effect here"
    )
    same = compare(seeds(1.0, 2.0), seeds(1.0, 2.0), names=NAMES, better="lower")
    assert same.kind == "equivalent"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_run_is_not_averaged_away(bad: float) -> None:
    found = compare(seeds(1.0, 1.1, bad), seeds(2.0, 2.1, 2.0), names=NAMES, better="lower")
    assert found.kind == "diverged"
    assert str(verdict_over_seeds(found)) == "not comparable: CAdam diverged in 1 of 3, Adam in 0"
    assert found.difference.count == 2
    assert comparison_row("loss", "", found, 1.0).values["CAdam diverged"] == 1


def test_without_finite_values_there_is_no_interval() -> None:
    found = compare(seeds(math.nan), seeds(math.nan), names=NAMES, better="lower", repeat=seeds(math.nan, first=9))
    assert "diverged in 1 of 1" in str(verdict_over_seeds(found))
    assert comparison_row("loss", "", found, 1.0).interval == "none: all diverged"


def test_arms_need_the_same_seeds_and_the_repeats_other_seeds() -> None:
    with pytest.raises(ValueError, match=r"only one of them has \[1\]"):
        compare(seeds(1.0, 2.0), seeds(1.0), names=NAMES, better="lower")
    with pytest.raises(ValueError, match=r"other seeds.*\[0\]"):
        compare(seeds(1.0), seeds(1.0), names=NAMES, better="lower", repeat=seeds(1.0))


def test_the_ranges_of_seeds_are_disjoint() -> None:
    kinds = [set(evaluation_seeds(1000)), set(tuning_seeds(1000)), set(repeat_seeds(1000))]
    assert len(set().union(*kinds)) == 3000


def by_seed(losses: dict[float, list[float]]) -> dict[float, dict[int, float]]:
    return {lr: dict(enumerate(values)) for lr, values in losses.items()}


@pytest.mark.parametrize(
    ("losses", "lr", "warning"),
    [
        ({0.1: [3.0], 0.2: [1.0], 0.3: [2.0]}, 0.2, None),
        ({0.1: [1.0, 5.0], 0.2: [2.0, 2.0], 0.3: [9.0, 9.0]}, 0.2, None),
        ({0.1: [1.0], 0.2: [2.0], 0.3: [3.0]}, 0.1, "lowest of its grid"),
        ({0.1: [3.0], 0.2: [2.0], 0.3: [1.0]}, 0.3, "highest of its grid"),
        ({0.1: [3.0, 3.0], 0.2: [2.0, 2.0], 0.3: [0.0, math.nan]}, 0.2, None),
        ({0.1: [1.0]}, 0.1, "only one learning rate"),
    ],
)
def test_the_best_learning_rate_and_the_edge_of_the_grid(
    losses: dict[float, list[float]], lr: float, warning: str | None
) -> None:
    choice = choose_lr("CAdam", by_seed(losses), "lower")
    assert choice.lr == lr
    assert (choice.warning or "").find(warning or "") >= 0
    assert (choice.warning is None) == (warning is None)


def test_higher_can_be_better() -> None:
    assert choose_lr("CAdam", by_seed({0.1: [3.0], 0.2: [1.0]}), "higher").lr == 0.1


def test_a_grid_without_a_finite_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="CAdam diverged at every"):
        choose_lr("CAdam", by_seed({0.1: [math.nan], 0.2: [math.inf]}), "lower")

"""Intervals, paired comparisons and the choice of a learning rate, also from few or diverged runs."""

from __future__ import annotations

import math

import pytest

from cadam.statistics.comparison import compare
from cadam_paper.harness.learning_rates import choose_lr
from cadam_paper.harness.results import evaluation_seeds, repeat_seeds, tuning_seeds
from cadam_paper.harness.summary import comparison_row
from cadam_paper.harness.verdict import ONE_SEED, floor_qualifier, verdict_over_seeds

NAMES = ("CAdam", "Adam")


def seeds(*values: float, first: int = 0) -> dict[int, float]:
    return dict(enumerate(values, first))


def test_pairing_removes_the_variance_between_seeds() -> None:
    baseline = seeds(10.0, 20.0, 30.0, 40.0)
    arm = {seed: value - 1 - 0.01 * seed for seed, value in baseline.items()}
    found = compare(arm, baseline, names=NAMES, better="lower", repeat=seeds(12.0, 22.0, 33.0, 39.0, first=100))
    assert (found.kind, floor_qualifier(found)) == ("better", ", below the noise floor")
    assert found.difference.mean == pytest.approx(-1.015)
    assert compare(arm, baseline, names=NAMES, better="higher").kind == "worse"


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

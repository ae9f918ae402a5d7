"""Student's interval, the paired comparison over seeds, and the noise floor."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cadam.statistics.comparison import compare, noise_floor
from cadam.statistics.intervals import interval, t_quantile

NAMES = ("CAdam", "Adam")


def seeds(*values: float, first: int = 0) -> dict[int, float]:
    return dict(enumerate(values, first))


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    # Values of printed tables of Student's t.
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


def test_differences_are_taken_seed_by_seed() -> None:
    """Sorted values of the arms differ by 1 each, but by seed they differ by 5, 1 and -3."""
    arm, baseline = {2: 2.0, 0: 6.0, 1: 4.0}, seeds(1.0, 3.0, 5.0)
    found = compare(arm, baseline, names=NAMES, better="higher")
    half = 4.302653 * 4 / math.sqrt(3)  # Student's t with two degrees of freedom; their standard deviation is 4
    difference = found.difference.mean, found.difference.low, found.difference.high
    assert difference == pytest.approx((1.0, 1 - half, 1 + half))
    assert found.kind == "inconclusive"


def test_without_randomness_one_run_is_conclusive() -> None:
    found = compare(seeds(1.0), seeds(5.0), names=NAMES, better="lower", random=False)
    assert found.kind == "better"
    same = compare(seeds(1.0), seeds(1.0), names=NAMES, better="lower", random=False)
    assert same.kind == "equivalent"


def test_arms_need_the_same_seeds_and_the_repeats_other_seeds() -> None:
    with pytest.raises(ValueError, match=r"only one of them has \[1\]"):
        compare(seeds(1.0, 2.0), seeds(1.0), names=NAMES, better="lower")
    with pytest.raises(ValueError, match=r"other seeds.*\[0\]"):
        compare(seeds(1.0), seeds(1.0), names=NAMES, better="lower", repeat=seeds(1.0))

"""Comparison of two optimizers over learning rates: the rate at which their difference equals the paper's."""

from __future__ import annotations

import pytest

from cadam_paper.harness.rate_pairs import Pair, summary
from cadam_paper.harness.rates import RateCurve

RATES = (1e-4, 1e-3, 1e-2)


def curve(arm: str, *values: float) -> RateCurve:
    """Return a curve whose two seeds differ by a constant, so that differences are exact."""
    return RateCurve(arm, "higher", {r: {0: v, 1: v + 1} for r, v in zip(RATES, values, strict=True)})


def pair(margin: float) -> Pair:
    """Return a pair in which CAdam gains -1, 0 and 4 at the three rates, and Adam is best at the middle rate."""
    return Pair(curve("CAdam", 69, 80, 74), curve("Adam", 70, 80, 70), (50.0, 50.0 + margin))


@pytest.mark.parametrize(
    ("margin", "rate"), [(-2.0, 1e-4), (-0.5, 10**-3.5), (0.0, 1e-3), (2.0, 10**-2.5), (4.0, 1e-2), (5.0, None)]
)
def test_the_rate_at_the_papers_margin_is_the_lowest_at_which_the_difference_is_as_large(
    margin: float, rate: float | None
) -> None:
    assert pair(margin).rate_at_paper_margin == (None if rate is None else pytest.approx(rate))


def test_a_row_contains_the_rate_and_the_papers_margin() -> None:
    rows = {row.label: row for row in summary({"wind": pair(2.0)}, near=1.0, same_data=True).rows}
    row = rows["wind: the rate at which the difference is the paper's"]
    assert row.values["times the best"] == pytest.approx(10**0.5)
    assert row.reference == "+2.00"
    other = [row.label for row in summary({"wind": pair(2.0)}, near=1.0, same_data=False).rows]
    assert not any("the paper's" in what for what in other), "the paper's margin on other data is not comparable"

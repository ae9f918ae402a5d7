"""A small version of the simulation of delayed purchases."""

from __future__ import annotations

import pytest
from benchmarks.late_labels import Purchases, run


def test_the_predicted_rate_is_right_on_every_day_although_purchases_are_late() -> None:
    stream = Purchases.simulate(days=14, a_day=5000, seed=1)
    assert stream.bought.mean() == pytest.approx(0.04, abs=0.005)
    options = {"horizon": 4.0, "lr": 0.1, "size": 128}
    joined, late, arrival = (run(way, stream, **options) for way in ("joined", "horizon", "arrival"))  # type: ignore[arg-type]
    assert 0.75 < late.judged.min() < late.judged.max() < 1.3
    assert late.auc > joined.auc - 0.01
    assert arrival.judged.min() < 0.75 or arrival.judged.max() > 1.3

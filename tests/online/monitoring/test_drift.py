"""The drift alarm is rarely wrong, finds rises of the loss, and names the features that moved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.drift_alarm import STREAMS, delay, find_alarms

from cadam import CAdam
from cadam.online import Events, Learner, Schema, models
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.monitoring.drift import FALSE_ALARM_RATE, DriftMonitor, divergences, half_widths
from tests.online.streams import Replayed

SCHEMA = Schema({"item": "category:50", "price": "number", "other": "number?"}, label="click")


@pytest.mark.parametrize("name", STREAMS)
def test_false_alarms_are_rare(name: str) -> None:
    random = np.random.default_rng(1)
    alarms = sum(len(find_alarms(STREAMS[name](random, 300), FALSE_ALARM_RATE)) for _ in range(2))
    assert alarms <= 1


def test_a_clear_rise_is_found_within_some_blocks_and_a_fall_is_no_alarm() -> None:
    random = np.random.default_rng(2)
    assert np.median([delay(3.0, FALSE_ALARM_RATE, random) for _ in range(10)]) <= 12
    falling = np.concatenate([random.normal(5, 1, 100), random.normal(0, 1, 200)])
    assert find_alarms(falling, FALSE_ALARM_RATE) == []


def test_the_interval_equals_the_direct_inversion_of_the_bayes_factor() -> None:
    """At the end of the interval, the Bayes factor of the t test with a normal prior is 1 / alpha."""
    alpha, prior = 0.01, 0.1
    for count, variance in ((12, 2.0), (100, 0.5)):
        width = float(half_widths(np.array([count]), np.array([variance]), alpha)[0])
        u = count * width**2 / variance / (count - 1)  # t^2 / (n - 1)
        rest = prior / (prior + count)
        factor = np.sqrt(rest) * ((1 + u) / (1 + u * rest)) ** (count / 2)
        assert factor == pytest.approx(1 / alpha)
    assert np.isinf(half_widths(np.array([1, 2]), np.ones(2), alpha)).all()


def test_divergences_are_zero_without_a_change_and_one_for_disjoint_histograms() -> None:
    random = np.random.default_rng(0)
    same = [random.multinomial(5000, np.full(32, 1 / 32)) for _ in range(2)]
    apart = [np.eye(32)[0] * 5000, np.eye(32)[1] * 5000]
    found = divergences(np.stack([same[0], apart[0]]), np.stack([same[1], apart[1]]))
    assert found[0] < 0.002
    assert found[1] == pytest.approx(1.0, abs=0.001)


def stream(change: str, count: int = 24_000) -> list[Events]:
    """Clicks by item; in the second half another price, or another meaning of the items."""
    random = np.random.default_rng(3)
    item, is_late = random.integers(0, 50, count), np.arange(count) >= count // 2
    price, other = random.normal(size=count), random.normal(size=count)
    rate = np.where(item < 25, 0.8, 0.1)
    if change == "price":
        price[is_late] += 3
        rate = np.where(is_late, 0.5, rate)
    elif change == "meaning":
        rate = np.where(is_late, 0.9 - rate, rate)
    clicks = (random.random(count) < rate).astype(np.float32)
    columns = {"item": item, "price": price, "other": other}
    return [
        Events({name: values[start : start + 250] for name, values in columns.items()}, clicks[start : start + 250])
        for start in range(0, count, 250)
    ]


def build(**options: Any) -> Learner:
    torch.manual_seed(0)
    model = models.build("linear", SCHEMA)
    return Learner(model, CAdam(model.named_parameters(), lr=0.01), LOG_LOSS, drift=DriftMonitor(block=500), **options)


@pytest.mark.parametrize(
    ("change", "text"),
    [("none", ""), ("price", "moved most (0 to 1): price ("), ("meaning", "no feature has moved")],
)
def test_an_alarm_names_the_features_that_moved(change: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = build()
    with caplog.at_level(logging.WARNING):
        ours.run(Replayed(stream(change)))
    numbers = ours.metrics()
    assert numbers["drift_alarms"] == caplog.text.count("drift: the log loss rose") == (1 if text else 0)
    assert text in caplog.text
    if change == "price":
        assert numbers["drift_feature/price"] > 0.5 > 10 * numbers["drift_feature/other"]


def test_a_resumed_run_has_the_same_alarms_and_state(tmp_path: Path) -> None:
    batches = stream("price")
    whole = build().run(Replayed(batches))
    for limit in (5_000, 12_500, None):
        part = build(checkpoint=tmp_path)
        part.run(Replayed(batches), events=limit)
        part.close()
    assert part.metrics() == whole.metrics()
    assert whole.metrics()["drift_alarms"] == 1
    assert part.drift is not None
    assert whole.drift is not None
    assert repr(part.drift.state_dict()) == repr(whole.drift.state_dict())

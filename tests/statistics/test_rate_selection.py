"""The selection of a learning rate along a stream: no hindsight, forgetting, divergence, and state."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from cadam.statistics.rate_selection import HALF_LIFE, RateSelector

RATES = (0.001, 0.003, 0.01)
BATCH = 256


def follow(selector: RateSelector, losses: Sequence[Mapping[float, float]]) -> list[float]:
    """Return the leader before each batch."""
    leaders = []
    for batch in losses:
        leaders.append(selector.leader)
        selector.update(batch, BATCH)
    return leaders


def simulate(best: Sequence[float], gap: float = 0.004, seed: int = 0) -> list[dict[float, float]]:
    """Return losses of batches in which one rate is better than the others by `gap`, with noise per event of 0.1."""
    random = np.random.default_rng(seed)
    noise = random.normal(0, 0.1 / math.sqrt(BATCH), (len(best), len(RATES)))
    return [
        {rate: 0.5 + (gap if rate != good else 0.0) + float(row[n]) for n, rate in enumerate(RATES)}
        for good, row in zip(best, noise, strict=True)
    ]


def test_the_leader_follows_a_best_rate_that_changes() -> None:
    half = 400  # about 100,000 events
    regrets, delays = [], []
    for seed in range(20):
        losses = simulate([RATES[2]] * half + [RATES[0]] * half, seed=seed)
        leaders = follow(RateSelector(RATES), losses)
        chosen = np.mean([batch[rate] for batch, rate in zip(losses, leaders, strict=True)])
        fixed = min(np.mean([batch[rate] for batch in losses]) for rate in RATES)
        regrets.append(chosen - fixed)
        delays.append(leaders[half:].index(RATES[0]) * BATCH)
        assert np.mean([rate == RATES[0] for rate in leaders[half + 2 * HALF_LIFE // BATCH :]]) > 0.9
    # The best fixed rate loses 0.002 on average, because it is the best rate in one half only.
    assert max(regrets) < 0
    assert np.median(delays) < 1.5 * HALF_LIFE


def test_on_a_stationary_stream_the_leader_costs_little() -> None:
    costs = []
    for seed in range(20):
        losses = simulate([RATES[1]] * 800, seed=seed)
        leaders = follow(RateSelector(RATES), losses)
        costs.append(np.mean([0.004 * (rate != RATES[1]) for rate in leaders]))
    assert np.mean(costs) < 0.0004, "less than 0.1% of the loss"


def test_a_forgotten_beginning_does_not_delay_the_choice() -> None:
    beginning = [dict(zip(RATES, (0.69, 0.6, 0.5), strict=True))] * 20
    rest = [dict(zip(RATES, (0.45, 0.46, 0.47), strict=True))] * 380
    leaders = follow(RateSelector(RATES), [*beginning, *rest])
    assert leaders[19] == RATES[2]
    assert leaders[-1] == RATES[0]
    assert leaders.index(RATES[0]) * BATCH < HALF_LIFE


def test_the_choice_for_a_batch_does_not_depend_on_its_losses() -> None:
    losses = simulate([RATES[0]] * 50)
    changed = [*losses[:-1], dict.fromkeys(RATES, 0.0) | {RATES[2]: -100.0}]
    assert follow(RateSelector(RATES), losses) == follow(RateSelector(RATES), changed)


def test_a_diverged_rate_is_never_named_again() -> None:
    selector = RateSelector(RATES)
    selector.update({0.001: 0.5, 0.003: 0.4, 0.01: math.nan}, BATCH)
    selector.update({0.001: 0.5, 0.003: 0.4, 0.01: 0.0}, BATCH)
    assert selector.leader == 0.003
    selector.update(dict.fromkeys(RATES, math.inf), BATCH)
    assert selector.leader == 0.003, "the middle, because no rate is left"


def test_an_added_rate_competes_from_then_on() -> None:
    selector, other = RateSelector(RATES), RateSelector([0.03])
    for _ in range(10):
        selector.update(dict(zip(RATES, (0.6, 0.55, 0.5), strict=True)), BATCH)
        other.update({0.03: 0.45}, BATCH)
    assert selector.is_leader_highest
    assert not selector.is_leader_lowest
    selector.add(0.03, other.loss(0.03))
    assert selector.leader == 0.03
    assert selector.rates == (*RATES, 0.03)
    assert selector.loss(0.03) == pytest.approx(0.45)
    selector.remove(0.03)
    assert selector.leader == 0.01
    with pytest.raises(ValueError, match="already competes"):
        selector.add(0.01, 0.5)
    with pytest.raises(ValueError, match="cannot be removed"):
        selector.remove(0.03)


def test_the_state_continues_exactly() -> None:
    losses = simulate([RATES[0]] * 30 + [RATES[1]] * 30)
    whole, first = RateSelector(RATES), RateSelector(RATES)
    follow(whole, losses)
    follow(first, losses[:25])
    second = RateSelector(RATES)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    follow(second, losses[25:])
    assert second.state_dict() == whole.state_dict()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        RateSelector([])
    with pytest.raises(ValueError, match="half_life"):
        RateSelector(RATES, half_life=0)
    with pytest.raises(ValueError, match="missing"):
        RateSelector(RATES).update({0.001: 0.5}, BATCH)

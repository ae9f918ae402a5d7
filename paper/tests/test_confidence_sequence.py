"""Coverage of intervals and of the confidence sequence, and their power to detect a simulated difference."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import cadam
from cadam.statistics.intervals import interval
from cadam_paper.harness.confidence_sequence import (
    ConfidenceSequence,
    confidence_sequence,
    count_changes,
    effective_blocks,
    first_exclusion,
    lag_one_correlation,
    over_blocks,
    recovery_blocks,
)


def blocks(runs: int, length: int, related: float, seed: int = 0) -> np.ndarray:
    """Autocorrelated differences of mean 0, with heavy tails and a variance that changes along the stream."""
    random = np.random.default_rng(seed)
    noise = random.standard_t(5, size=(runs, length)) * np.linspace(2, 1, length)
    made = np.empty_like(noise)
    made[:, 0] = noise[:, 0] / math.sqrt(1 - related**2)
    for t in range(1, length):
        made[:, t] = related * made[:, t - 1] + noise[:, t]
    return made


@pytest.mark.parametrize("related", [0.0, 0.3, 0.6])
def test_the_error_rate_over_all_checks_is_at_most_alpha(related: float) -> None:
    made = blocks(500, 300, related)
    low, high = confidence_sequence(made, alpha=0.05)
    alarms = np.count_nonzero(first_exclusion(low, high))
    assert alarms <= 25
    # An ordinary interval that is checked as often exceeds its error rate.
    checks = range(20, 301, 10)
    naive = [[interval(run[:t]) for t in checks] for run in made[:60]]
    assert np.mean([any(i.low > 0 or i.high < 0 for i in run) for run in naive]) > 0.15


def test_a_simulated_difference_is_detected_and_covered() -> None:
    made = blocks(200, 500, 0.3) + 1.0
    low, high = confidence_sequence(made)
    found = first_exclusion(low, high)
    assert np.mean((found > 0) & (found <= 300)) > 0.8
    assert np.mean(found > 0) > 0.95
    assert (low[:, -1] > 0).mean() > 0.95
    assert np.mean(((low <= 1.0) & (high >= 1.0)).all(axis=1)) >= 0.95


def trained_pairs(pairs: int, blocks: int, second_lr: float = 0.05, seed: int = 0) -> np.ndarray:
    """Differences of log loss by block between two linear models in training, for many pairs at once.

    Both models of a pair meet the same events, which drift, from different initial weights. The first blocks, in which
    the initial weights make a real difference, are left out. Adam works by element, so one tensor holds all models.
    """
    draw = torch.Generator().manual_seed(seed)
    features, batch, steps, warm_up = 10, 20, 5, 20
    weight = (0.3 * torch.randn(2, pairs, features, generator=draw)).requires_grad_()
    rates = torch.tensor([0.05, second_lr]).reshape(2, 1, 1)
    optimizer = cadam.Adam([weight], lr=1.0)
    truth = torch.randn(pairs, features, generator=draw)
    differences = torch.zeros(pairs, warm_up + blocks)
    for block in range(warm_up + blocks):
        for _ in range(steps):
            truth = 0.999 * truth + 0.045 * torch.randn(pairs, features, generator=draw)
            x = torch.randn(pairs, batch, features, generator=draw)
            clicks = torch.rand(pairs, batch, generator=draw) < torch.sigmoid((x * truth[:, None]).sum(-1))
            logits = torch.einsum("apf,pnf->apn", weight, x)
            target = clicks.float().expand(2, -1, -1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
            before = weight.detach().clone()
            optimizer.zero_grad()
            loss.mean(-1).sum().backward()
            optimizer.step()
            with torch.no_grad():
                weight.copy_(before + rates * (weight - before))
            means = loss.detach().mean(-1)
            differences[:, block] += (means[1] - means[0]) / steps
    return differences[:, warm_up:].numpy().astype(np.float64)


@pytest.mark.parametrize("pairs", [pytest.param(100, id="100"), pytest.param(500, id="500", marks=pytest.mark.slow)])
def test_pairs_of_the_same_optimizer_are_rarely_called_different(pairs: int) -> None:
    alarms = first_exclusion(*confidence_sequence(trained_pairs(pairs, 100)))
    assert np.count_nonzero(alarms) <= 0.05 * pairs


def test_a_worse_learning_rate_is_detected_in_training() -> None:
    alarms = first_exclusion(*confidence_sequence(trained_pairs(60, 100, second_lr=0.2)))
    assert np.mean(alarms > 0) > 0.9


def test_the_class_agrees_with_the_function_and_continues_from_its_state() -> None:
    made = blocks(1, 60, 0.3)[0] + 5e3  # a large mean must not reduce the accuracy
    low, high = confidence_sequence(made)
    plain_low, _ = confidence_sequence(made - 5e3)
    assert low[20:] - 5e3 == pytest.approx(plain_low[20:], abs=1e-9)
    sequence = ConfidenceSequence()
    for number, value in enumerate(made):
        if number == 30:
            state = json.loads(json.dumps(sequence.state_dict()))
            sequence = ConfidenceSequence()
            sequence.load_state_dict(state)
        sequence.update(value)
        now = sequence.interval
        assert (now.low, now.high) == (low[number], high[number])
        assert sequence.excludes_zero == (low[number] > 0)
    assert sequence.excludes_zero
    with pytest.raises(ValueError, match="must be finite, got nan"):
        sequence.update(math.nan)


def test_ends_are_infinite_before_the_first_check() -> None:
    low, high = confidence_sequence(blocks(1, 40, 0.0)[0], first_check=30)
    assert np.isinf(low[:29]).all()
    assert np.isfinite(high[29:]).all()
    assert ConfidenceSequence().interval.low == -math.inf
    assert not ConfidenceSequence().excludes_zero
    low, high = confidence_sequence(np.empty(0))
    assert low.shape == high.shape == (0,)


@pytest.mark.parametrize("value", [0.0, 0.01, -3e-9])
def test_equal_blocks_have_infinite_ends(value: float) -> None:
    rounded = np.where(np.arange(60) % 2, value, value * (1 + 1e-15))
    for made in (np.full(60, value), rounded):
        low, high = confidence_sequence(made)
        assert np.isneginf(low).all()
        assert np.isposinf(high).all()
    sequence = ConfidenceSequence()
    for _ in range(30):
        sequence.update(value)
    assert not sequence.excludes_zero
    assert sequence.interval.mean == pytest.approx(value)


def test_ends_are_finite_once_enough_blocks_differ() -> None:
    made = np.zeros(60)
    made[30:] = np.random.default_rng(0).standard_normal(30)
    low, high = confidence_sequence(made)
    assert count_changes(made)[[29, 30, 38, 39]].tolist() == [0, 1, 9, 10]
    assert np.isinf(low[:39]).all()
    assert np.isfinite(low[[39, -1]]).all()
    assert np.isfinite(high[[39, -1]]).all()


def slow_and_quick(runs: int, length: int, related: float) -> np.ndarray:
    """Independent noise plus a slow component of equal variance, which neighboring blocks show only in part."""
    random = np.random.default_rng(0)
    slow = random.standard_normal((runs, length)) * math.sqrt(1 - related**2)
    slow[:, 0] = random.standard_normal(runs)
    for t in range(1, length):
        slow[:, t] += related * slow[:, t - 1]
    return slow + random.standard_normal((runs, length))


def test_spikes_and_long_tails_do_not_raise_the_error_rate() -> None:
    random = np.random.default_rng(0)
    spikes = np.where(random.random((1000, 200)) < 0.02, 1.0, 0.0) - 0.02
    assert np.mean(first_exclusion(*confidence_sequence(spikes)) > 0) <= 0.01  # the limit is 5%
    skewed = random.lognormal(size=(1000, 200)) - math.exp(0.5)
    for side in (skewed, -skewed):
        assert np.mean(first_exclusion(*confidence_sequence(side)) > 0) <= 0.05


def test_a_slow_component_beneath_noise_is_accounted_for() -> None:
    """The error rate stays far below that of an estimate from neighboring blocks alone.

    That one would exclude 0 in 27% of the streams within 50 blocks and in 66% within 300 at a correlation of 0.95,
    and in 16% within 300 at 0.8. The rate is still above 5%, because 50 blocks are too few to detect a component that
    takes 20 blocks to decay.
    """
    alarms = first_exclusion(*confidence_sequence(slow_and_quick(1000, 300, 0.95)))
    assert np.mean((alarms > 0) & (alarms <= 50)) < 0.2
    assert np.mean(alarms > 0) < 0.28
    alarms = first_exclusion(*confidence_sequence(slow_and_quick(1000, 300, 0.8)))
    assert np.mean(alarms > 0) < 0.08


def test_effective_blocks_reflect_dependence() -> None:
    random = np.random.default_rng(0)
    worth = np.median(effective_blocks(random.standard_normal((200, 1000))), 0)
    assert (worth <= np.arange(1, 1001)).all()
    assert worth[999] > 600
    # Half of the variance is slow: a block counts as 2 / (1 + (1 + r) / (1 - r)) independent blocks.
    assert 0.6 < np.median(effective_blocks(slow_and_quick(200, 2000, 0.9)), 0)[-1] / (2000 * 2 / 20) < 1.0


@pytest.mark.parametrize(("argument", "value"), [("alpha", 0.0), ("alpha", 1.0), ("first_check", 1)])
def test_arguments_out_of_range_are_rejected(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=argument):
        confidence_sequence(np.zeros(10), **{argument: value})  # type: ignore[arg-type]


def test_the_interval_over_users_covers_and_agrees_with_the_bootstrap() -> None:
    random = np.random.default_rng(0)
    weights = random.pareto(2.5, size=(1000, 200)) + 1
    differences = random.standard_t(4, size=(1000, 200)) * 0.1 + 0.05
    found = [interval(d, w) for d, w in zip(differences, weights, strict=True)]
    assert 0.93 <= np.mean([i.low <= 0.05 <= i.high for i in found]) <= 0.975
    d, w = differences[0], weights[0]
    drawn = random.integers(200, size=(4000, 200))
    means = (w[drawn] * d[drawn]).sum(1) / w[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    assert found[0].half_width == pytest.approx((high - low) / 2, rel=0.15)
    assert found[0].mean == pytest.approx(np.average(d, weights=w))
    assert interval(d, np.ones(200)).half_width == pytest.approx(interval(d).half_width)


def test_one_heavy_user_gives_no_interval() -> None:
    assert math.isnan(interval(np.array([0.1, 0.2, 0.3]), np.array([1000, 1, 1])).low)
    with pytest.raises(ValueError, match="positive"):
        interval(np.array([0.1, 0.2]), np.array([1, 0]))


def test_over_blocks_covers_correlated_blocks() -> None:
    made = blocks(600, 200, 0.6, seed=1)
    assert lag_one_correlation(made[0]) == pytest.approx(0.6, abs=0.15)
    covered = [i.low <= 0 <= i.high for i in (over_blocks(run) for run in made)]
    as_if_independent = [i.low <= 0 <= i.high for i in (interval(run) for run in made)]
    assert np.mean(covered) >= 0.92
    assert np.mean(as_if_independent) < 0.8
    few = over_blocks(made[0][:7])
    assert (few.mean, few.low) == pytest.approx((interval(made[0][:7]).mean, interval(made[0][:7]).low))
    assert over_blocks([]).count == 0


def test_recovery_counts_the_blocks_until_the_drop_is_made_up() -> None:
    curve = np.concatenate([np.full(10, 0.8), 0.8 - 0.2 * 0.5 ** np.arange(20)])
    # The drop of 0.2 shrinks to a tenth in 3.3 halvings; the mean over three blocks includes later blocks.
    assert recovery_blocks(curve, 10) == 3
    assert recovery_blocks(curve[:13], 10) is None
    assert recovery_blocks(np.full(20, 0.8), 10) == 0
    assert recovery_blocks(np.concatenate([np.full(10, 0.8), np.full(10, 0.5)]), 10) is None
    with pytest.raises(ValueError, match="inside the 20 blocks"):
        recovery_blocks(np.full(20, 0.8), 20)

"""The confidence sequence for score differences: error rate, power, late labels, and state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cadam.statistics.intervals import t_quantile
from cadam.statistics.sequential import (
    ConfidenceSequence,
    RecentSequence,
    remove_skewness,
    student_quantile,
)

BATCHES = 400
STREAMS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda random: random.standard_normal(BATCHES),
    "heavy tails": lambda random: random.standard_t(4, BATCHES),
    "skewed": lambda random: random.exponential(size=BATCHES) - 1,
    "bursts": lambda random: random.standard_normal(BATCHES) * np.where(np.arange(BATCHES) // 40 % 5 == 4, 5, 1),
    "growing variance": lambda random: random.standard_normal(BATCHES) * np.exp(np.linspace(-2, 2, BATCHES)),
}


def ends_after_each_batch(differences: np.ndarray, lag: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper ends of a confidence sequence after each batch of 256 events."""
    sequence, intervals = ConfidenceSequence(lag=lag), []
    for difference in differences.tolist():
        sequence.update(difference, 256)
        intervals.append(sequence.interval)
    return np.array([each.low for each in intervals]), np.array([each.high for each in intervals])


def ever_excludes_zero(low: np.ndarray, high: np.ndarray) -> bool:
    """Return whether a confidence sequence excludes 0 after any batch."""
    return bool(((low > 0) | (high < 0)).any())


@pytest.mark.parametrize("name", STREAMS)
def test_looking_after_every_batch_rarely_excludes_the_true_mean(name: str) -> None:
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(100):
        low, high = ends_after_each_batch(STREAMS[name](random))
        wrong += ever_excludes_zero(low, high)
    assert wrong <= 8


def test_a_mean_that_depends_on_the_past_needs_no_correction() -> None:
    """The conditional mean is a random walk; the sequence covers the average of these means, whatever they were."""
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(60):
        noise = random.standard_normal(BATCHES)
        conditional = 0.2 * np.concatenate([[0.0], np.cumsum(noise)[:-1]]) / 10
        low, high = ends_after_each_batch(conditional + noise)
        average = conditional.cumsum() / np.arange(1, BATCHES + 1)
        wrong += bool(((average < low) | (average > high)).any())
    assert wrong <= 6


def test_a_difference_is_found_and_the_width_shrinks() -> None:
    random = np.random.default_rng(0)
    decided = []
    for _ in range(50):
        low, high = ends_after_each_batch(0.3 + random.standard_normal(BATCHES))
        decided.append(ever_excludes_zero(low, high))
        assert high[-1] - low[-1] < (high[50] - low[50]) / 2
    assert sum(decided) >= 48


def test_late_labels_use_blocks_and_are_wider() -> None:
    """Differences that depend on each other within the lag raise no alarm with the lagged form."""
    random = np.random.default_rng(0)
    lag, wrong = 4, {0: 0, 4: 0}
    for _ in range(80):
        noise = random.standard_normal(BATCHES + lag)
        differences = np.convolve(noise, np.ones(lag), "valid")[:BATCHES]
        for value in wrong:
            low, high = ends_after_each_batch(differences, value)
            wrong[value] += ever_excludes_zero(low, high)
    assert wrong[4] <= 6
    assert wrong[0] > 12


def test_batches_count_by_their_events() -> None:
    sequence = ConfidenceSequence(first_check=2)
    sequence.update(1.0, 3)
    sequence.update(5.0, 1)
    assert sequence.interval.mean == 2.0
    assert math.isinf(ConfidenceSequence().interval.high)


def test_equal_batches_have_no_interval() -> None:
    sequence = ConfidenceSequence()
    for _ in range(100):
        sequence.update(0.1, 256)
    assert math.isinf(sequence.interval.high)
    assert not sequence.excludes_zero


def test_the_state_continues_exactly() -> None:
    values = np.random.default_rng(0).normal(0.1, 1, 101).tolist()
    for lag in (0, 3):
        whole, first, second = (ConfidenceSequence(lag=lag) for _ in range(3))
        for value in values:
            whole.update(value, 256)
        for value in values[:50]:
            first.update(value, 256)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for value in values[50:]:
            second.update(value, 256)
        assert second.interval == whole.interval
    with pytest.raises(ValueError, match="another lag"):
        ConfidenceSequence(lag=0).load_state_dict(whole.state_dict())


def test_the_expansion_of_the_quantile_is_accurate() -> None:
    for z in (2.0, 3.0, 4.0):
        confidence = float(torch.erf(torch.tensor(z / math.sqrt(2), dtype=torch.float64)))
        for degrees in (19, 50, 500):
            assert student_quantile(z, degrees) == pytest.approx(t_quantile(confidence, degrees), rel=0.01)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="alpha"):
        ConfidenceSequence(alpha=0)
    with pytest.raises(ValueError, match="first_check"):
        ConfidenceSequence(first_check=1)
    with pytest.raises(ValueError, match="finite"):
        ConfidenceSequence().update(math.nan)


def test_skewed_differences_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    differences = random.lognormal(size=(150, 400)) - math.exp(0.5)

    def count_wrong() -> int:
        ends = [ends_after_each_batch(values) for values in differences]
        return sum(ever_excludes_zero(low, high) for low, high in ends)

    corrected = count_wrong()
    monkeypatch.setattr("cadam.statistics.sequential.remove_skewness", lambda quantile, skewness: quantile)
    assert corrected <= 7 < count_wrong(), "of 150, of which 5% are 7.5"


def test_skewness_is_removed_by_the_inverse_of_halls_transformation() -> None:
    skewness = 0.3
    for quantile in (-2.5, 0.0, 2.5):
        t = remove_skewness(quantile, skewness)
        transformed = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6
        assert transformed == pytest.approx(quantile)
    assert remove_skewness(2.5, 0.0) == 2.5


def test_the_recent_sequence_covers_the_last_half_or_more() -> None:
    sequence = RecentSequence(0.05, total=400)
    assert sequence.starts == [20, 40, 80, 160]
    random = np.random.default_rng(0)
    differences = np.concatenate([np.full(160, -1.0), np.zeros(240)]) + 0.1 * random.standard_normal(400)
    for number, difference in enumerate(differences.tolist(), 1):
        sequence.update(difference)
        if number < 40:
            assert sequence.interval.low == -math.inf
        elif sequence.number is not None:
            start = sequence.starts[sequence.number]
            assert number / 2 >= start > number / 4
            assert sequence.interval.mean == pytest.approx(differences[start:number].mean())
    assert sequence.interval.low < 0 < sequence.interval.high, "the start does not count any more"


def test_the_recent_sequence_of_late_labels_begins_later() -> None:
    assert RecentSequence(0.05, total=400, lag=5).starts == [100, 200]
    assert RecentSequence(0.05, total=10).starts == [20], "a short stream has no recent part"

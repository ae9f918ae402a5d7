"""Schedules of the image experiments: order of the samples, rotation and label noise."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from cadam_paper.harness.experiment import Plan
from cadam_paper.harness.results import tuning_seeds
from cadam_paper.images import streams
from cadam_paper.images.streams import CLEAN, TRUE_LABEL, Schedule, Stream, augmented, continuous, noisy, sudden

SAMPLES, CLASSES, BATCH, EPOCHS = 107, 10, 10, 6
STEPS = SAMPLES // BATCH


def schedule(stream: Stream, seed: int = 0) -> Schedule:
    return stream.schedule(seed, SAMPLES, CLASSES, BATCH, EPOCHS)


def test_an_epoch_shows_samples_at_most_once_in_a_new_order() -> None:
    order = schedule(CLEAN).order.reshape(EPOCHS, -1)
    assert order.shape == (EPOCHS, STEPS * BATCH)
    assert all(len(set(epoch)) == len(epoch) and epoch.min() >= 0 and epoch.max() < SAMPLES for epoch in order)
    assert not np.array_equal(order[0], order[1])


@pytest.mark.parametrize("stream", [CLEAN, sudden(20), continuous(0.5), noisy(40), augmented(), sudden(20) + noisy(10)])
def test_a_seed_determines_the_schedule(stream: Stream) -> None:
    first, again, other = schedule(stream, 1), schedule(stream, 1), schedule(stream, 2)
    for name in ("order", "angle", "labels", "flip", "shift"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.order, other.order)
    assert np.array_equal(first.order, schedule(CLEAN, 1).order)


def test_test_tuning_and_repeat_seeds_have_different_orders_and_noise() -> None:
    """Otherwise runs that choose a learning rate would also evaluate it, and an A/A test would compare equal runs."""
    starts = [Plan("full", 1).test_seeds()[0], tuning_seeds(1)[0], Plan("full", 1).repeat_seeds()[0]]
    assert starts == [0, 10_000, 20_000]
    for one, other in combinations([schedule(noisy(40) + augmented(), seed) for seed in starts], 2):
        for name in ("order", "labels", "flip", "shift"):
            assert not np.array_equal(getattr(one, name), getattr(other, name)), name


def test_sudden_shift_rotates_at_every_epoch_and_continuous_shift_at_every_step() -> None:
    assert schedule(sudden(20)).angle.reshape(EPOCHS, -1).tolist() == [[20.0 * e] * STEPS for e in range(EPOCHS)]
    assert np.allclose(schedule(continuous(0.5)).angle, 0.5 * np.arange(EPOCHS * STEPS))
    both = schedule(sudden(20) + continuous(0.5)).angle
    assert np.allclose(both, schedule(sudden(20)).angle + schedule(continuous(0.5)).angle)


def test_noise_replaces_the_labels_of_different_batches_in_each_epoch() -> None:
    noisy_batches = (schedule(noisy(40)).labels != TRUE_LABEL).reshape(EPOCHS, STEPS, BATCH)
    assert np.array_equal(noisy_batches.all(-1), noisy_batches.any(-1))
    assert noisy_batches.all(-1).sum(1).tolist() == [4] * EPOCHS
    assert len({tuple(epoch) for epoch in noisy_batches.all(-1)}) > 1
    many = noisy(100).schedule(0, 5000, CLASSES, 100, 2).labels
    counts = np.bincount(many.ravel(), minlength=CLASSES)
    assert counts.min() > 900
    assert counts.max() < 1100


def test_changes_do_not_influence_each_other() -> None:
    assert np.array_equal(schedule(sudden(60) + noisy(40)).labels, schedule(noisy(40)).labels)
    twice = schedule(noisy(40) + noisy(40)).labels
    assert (twice != TRUE_LABEL).sum() > (schedule(noisy(40)).labels != TRUE_LABEL).sum()


def test_augmented_moves_and_mirrors() -> None:
    moved = augmented(4).schedule(0, 5000, CLASSES, 100, 2)
    assert (moved.shift.min(), moved.shift.max()) == (-4, 4)
    assert 0.45 < moved.flip.mean() < 0.55


@pytest.mark.parametrize("stream", [CLEAN, sudden(20), continuous(0.5) + noisy(10), augmented(2) + sudden(80)])
def test_a_stream_is_written_and_read_back(stream: Stream) -> None:
    assert streams.parse(str(stream)) == stream


def test_strength_zero_is_no_change() -> None:
    assert sudden(0) == continuous(0) == noisy(0) == CLEAN
    assert str(CLEAN) == "clean"


@pytest.mark.parametrize("text", ["", "sudden", "rain 5", "sudden 5 noise 4", "sudden -5"])
def test_an_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot parse the change"):
        streams.parse(text)


def test_bad_strengths_and_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        noisy(140)
    with pytest.raises(ValueError, match=r"batch of 200 .*107"):
        CLEAN.schedule(0, SAMPLES, CLASSES, 200, 1)

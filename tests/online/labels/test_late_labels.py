"""Late labels lead to the same model as labels that are already joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cadam.online import LabelOptions, Labels, Learner
from cadam.online.data.events import Batch
from tests.online.streams import build, events, learner, table, weights

BATCHES, SIZE, HORIZON = 40, 25, 300.0


def batches(*, is_late: bool) -> list[Batch]:
    """Events with their labels, or with the labels of positives alone, up to 250 events late and in any order.

    Labels that are still under way arrive with the last batch.
    """
    clicks = table(BATCHES * SIZE)["click"]
    delays = np.random.default_rng(1).uniform(0, 250, BATCHES * SIZE)
    arrivals = np.where(clicks == 1, np.arange(BATCHES * SIZE) + delays, np.inf)
    parts = []
    for first in range(0, BATCHES * SIZE, SIZE):
        batch = Batch(events(SIZE, seed=first, first=first, labels=False))
        assert batch.events is not None
        if is_late:
            end = first + SIZE if first + SIZE < BATCHES * SIZE else 1e9
            due = np.flatnonzero((arrivals >= first) & (arrivals < end))
            ids = due[np.argsort(arrivals[due])]
            batch.labels = Labels(ids, np.ones(len(ids)))
        else:
            batch.events.labels = clicks[first : first + SIZE]
        parts.append(batch)
    return parts


@pytest.mark.parametrize("batch_size", [None, 16])
def test_late_positives_give_the_bits_of_labels_already_joined(batch_size: int | None) -> None:
    learners = []
    for is_late in (True, False):
        learners.append(learner(build(), horizon=HORIZON, batch_size=batch_size))
        for batch in batches(is_late=is_late):
            learners[-1].process(batch)
        learners[-1].finish()
    late, joined = learners
    assert weights(late) == weights(joined)
    numbers, expected = late.metrics(), joined.metrics()
    assert numbers["learned"] == expected["learned"] == BATCHES * SIZE
    assert numbers["log_loss"] == expected["log_loss"]
    assert (numbers["expired"], expected["expired"]) == ((table(BATCHES * SIZE)["click"] == 0).sum(), 0)


def test_early_positives_are_learned_before_their_horizon() -> None:
    ours = learner(build(), horizon=HORIZON, early_positives=True)
    for batch in batches(is_late=True):
        ours.process(batch)
    numbers, positives = ours.metrics(), int(table(BATCHES * SIZE)["click"].sum())
    assert numbers["learned"] == BATCHES * SIZE + positives
    assert numbers["labeled"] == BATCHES * SIZE - numbers["pending"]
    assert numbers["pending"] > 0
    learned = numbers["learned"]
    ours.finish()
    assert (ours.metrics()["learned"], ours.metrics()["labeled"]) == (learned, BATCHES * SIZE)


def test_early_positives_need_the_log_loss() -> None:

    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="early_positives needs the log loss"):
        Learner(
            model,
            torch.optim.SGD(model.parameters()),
            torch.nn.functional.mse_loss,
            labels=LabelOptions(5.0, early_positives=True),
        )


WITH_HORIZON, EARLY = {"horizon": 50.0}, {"horizon": 50.0, "early_positives": True}


@pytest.mark.parametrize(
    ("old", "new", "is_refused"),
    [
        (WITH_HORIZON, {}, True),
        (WITH_HORIZON, {"horizon": 50.0, "unmatched": "drop"}, True),
        (WITH_HORIZON, EARLY, True),
        (EARLY, WITH_HORIZON, True),
        ({}, EARLY, True),
        (WITH_HORIZON, {"horizon": 20.0, "capacity": 90}, False),
        ({}, WITH_HORIZON, False),
    ],
)
def test_other_label_options_never_lose_or_repeat_waiting_events(
    old: dict[str, Any], new: dict[str, Any], is_refused: bool
) -> None:
    before = learner(build(), **old)
    before.predict(events(10, labels=False))
    before.observe([2, 3], [1, 0])
    state = before.state_dict()
    after = learner(build(), **new)
    if is_refused:
        model = weights(after)
        with pytest.raises(ValueError, match=r"10 events wait for their labels with horizon=|8 events wait"):
            after.load_state_dict(state)
        assert weights(after) == model
        before.finish()  # no event waits
        after.load_state_dict(before.state_dict())
    else:
        after.load_state_dict(state)
        after.observe(range(10), [1] * 10)
        after.finish()
        assert after.learned == 10
    del state["pending"]["options"]
    learner(build(), **new).load_state_dict(state)  # older versions saved no options

"""`--lr auto`: the learner tunes its learning rate while it runs."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadam import CAdam
from cadam.online import CheckpointOptions, LabelOptions, Labels, Learner, models
from cadam.online import rate_tuning as module
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.rate_tuning import RateTuning
from cadam.online.training_step import TrainingStep
from tests.online.streams import SCHEMA, SHORT_SCHEDULE, Replayed, Small, build, events, weights

BATCH = 64


@pytest.fixture
def short_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHORT_SCHEDULE.items():
        monkeypatch.setattr(module, name, value)


def fm(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("fm", SCHEMA)


def tuned(rate: float, model: nn.Module | None = None, **options: Any) -> Learner:
    model = model or fm()
    return Learner(model, CAdam(model.named_parameters(), lr=rate), LOG_LOSS, tune_rate=True, **options)


def stream(count: int, start: int = 0) -> list[Any]:
    return [events(BATCH, seed=start + number, first=(start + number) * BATCH) for number in range(count)]


def tuning(learner: Learner) -> RateTuning:
    assert learner.rate_tuning is not None
    return learner.rate_tuning


def test_no_prediction_uses_labels_that_arrive_with_or_after_it(short_schedule: None) -> None:
    """Two streams with the same past and other labels from one batch on have the same scores for that batch."""
    scores = []
    for flipped in (False, True):
        learner = tuned(0.3)
        batches = stream(12)
        if flipped:
            batches[-1] = replace(batches[-1], labels=1 - batches[-1].labels)
        scores.append([learner.learn(batch) for batch in batches])
    np.testing.assert_array_equal(np.array(scores[0]), np.array(scores[1]))


def test_a_learner_without_candidates_computes_what_a_fixed_rate_does() -> None:
    fixed_model, tuned_model = fm(), fm()
    fixed = TrainingStep(fixed_model, CAdam(fixed_model.named_parameters(), lr=0.01), LOG_LOSS)
    tuning = RateTuning(tuned_model, CAdam(tuned_model.named_parameters(), lr=0.01), LOG_LOSS)
    tuning.stage, tuning.rest_ends = 1, 10**9
    for batch in stream(5):
        columns = batch.columns()
        assert fixed.learn(columns).tobytes() == tuning.learn(columns).tobytes()  # type: ignore[union-attr]
    for left, right in zip(fixed_model.state_dict().values(), tuned_model.state_dict().values(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", [CAdam, torch.optim.Adagrad])
def test_the_leader_is_the_model_that_a_fixed_rate_would_have_trained(optimizer: Any) -> None:
    """A candidate of the first window is never copied, so its weights are those of a run at its rate alone."""
    model = fm()
    learner = Learner(model, optimizer(model.parameters(), lr=0.3), LOG_LOSS, tune_rate=True)
    batches = stream(20)
    for batch in batches:
        learner.learn(batch)
    assert tuning(learner).switches > 1
    assert tuning(learner).position in (-5, -4, -3, -2, -1, 0)
    model = fm()
    fixed = Learner(model, optimizer(model.parameters(), lr=tuning(learner).rate), LOG_LOSS)
    for batch in batches:
        fixed.learn(batch)
    assert weights(fixed) == weights(learner)
    assert learner.optimizer.param_groups[0]["lr"] == tuning(learner).rate


@pytest.mark.parametrize("rate", [3e-5, 3e-3, 3.0])
def test_the_rate_is_found_from_far_away(rate: float, short_schedule: None) -> None:
    """From each first rate, the late loss is near that of the best fixed rate; the first rate alone is far from it."""

    def late_loss(learner: Learner) -> float:
        for number, batch in enumerate(stream(40)):
            if number == 20:
                early = copy.copy(learner.log_loss)
            learner.learn(batch)
        return (learner.log_loss - early).mean

    fixed = {}
    for each in (0.01, 0.03, 0.1, 0.3, rate):
        model = fm()
        fixed[each] = late_loss(Learner(model, CAdam(model.named_parameters(), lr=each), LOG_LOSS))
    best = min(fixed.values())
    assert fixed[rate] > 1.5 * best
    assert late_loss(tuned(rate)) < 1.4 * best


def test_the_number_of_candidates_shrinks_and_rests_become_longer(short_schedule: None) -> None:
    learner = tuned(0.03)
    counts, rests = [], []
    for batch in stream(120):
        learner.learn(batch)
        counts.append(len(tuning(learner).candidates))
        rests.append(tuning(learner).rest)
    assert counts[0] == 9
    assert counts[-1] <= 2
    assert 1 in counts
    assert sum(counts[60:]) < 60 * 2
    assert max(rests) > module.FIRST_REST


def test_the_lower_neighbor_of_the_leader_keeps_its_history_during_a_rest(short_schedule: None) -> None:
    """After the first rest, its weights are those of a run at its rate alone, so it was not copied from the leader."""
    learner, batches = tuned(0.03), []
    for batch in stream(80):
        batches.append(batch)
        was_resting = tuning(learner).rest_ends > 0
        learner.learn(batch)
        if was_resting and not tuning(learner).rest_ends:
            break
    assert was_resting
    assert not tuning(learner).rest_ends
    position = tuning(learner).position - 1
    model = fm()
    fixed = Learner(model, CAdam(model.named_parameters(), lr=tuning(learner).rate_at(position)), LOG_LOSS)
    for batch in batches:
        fixed.learn(batch)
    candidate = tuning(learner).candidates[position].model
    for left, right in zip(model.state_dict().values(), candidate.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def test_a_higher_rate_that_is_ahead_is_not_deleted_by_a_rest(short_schedule: None) -> None:
    learner = tuned(0.03)
    for batch in stream(120):
        watched = tuning(learner)
        learner.learn(batch)
        if watched.stage == len(module.STAGES) and not watched.rest_ends and max(watched.candidates) > watched.position:
            break
    higher = max(watched.candidates)
    assert higher > watched.position
    watched.stable_since, watched.watched_since = watched.labeled - module.WATCH, watched.labeled
    watched.selector._totals[watched.rate_at(higher)] = (1 - module.MARGIN / 2) * watched.selector._totals[watched.rate]
    watched._follow_schedule()
    assert not watched.rest_ends
    watched.watched_since = watched.labeled - module.LONGEST_WATCH
    watched._follow_schedule()
    assert watched.rest_ends


def test_the_second_batch_is_predicted_at_the_lowest_rate() -> None:
    """A high first rate ruins the weights with its first step, before any loss shows it."""
    learner = tuned(30.0)
    first, second, third = stream(3)
    learner.learn(first)
    assert tuning(learner).position == -5
    learner.learn(second)
    assert np.abs(learner.learn(third)).max() < 10


class Diverging(Small):
    """A model whose scores are infinite once its weights have moved far."""

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        score = super().forward(user, item, price)
        return score * math.inf if next(self.out.parameters()).abs().max() > 1 else score


def test_a_leader_that_diverges_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    learner = tuned(3.0, Diverging())
    with caplog.at_level(logging.INFO, "cadam.online"):
        for batch in stream(10):
            assert np.isfinite(learner.learn(batch)).all()
    assert "the model has diverged" in caplog.text
    assert learner.rejected == 0
    assert tuning(learner).rate < 1
    learner.training.check_finite()


def test_candidates_that_diverge_are_deleted_and_leave_the_leader_alone() -> None:
    torch.manual_seed(0)
    learner, deleted = tuned(0.003, Diverging()), set()
    for batch in stream(4):
        candidates = {tuning(learner).position, *tuning(learner).candidates}
        learner.learn(batch)
        deleted |= {each for each in candidates if each > 4} - tuning(learner).candidates.keys()
    assert deleted  # rates above 0.3
    assert np.isfinite(learner.log_loss.mean)


def test_late_labels_are_the_losses_of_the_selection() -> None:
    """Events are predicted first and labeled later; the rate changes when the labels arrive."""
    learner = tuned(3e-5, labels=LabelOptions())
    batches = stream(16)
    for batch in batches:
        learner.process(replace(batch, labels=None))
    assert tuning(learner).labeled == 0
    for batch in batches:
        learner.process(Labels(batch.ids, batch.labels))
    assert tuning(learner).labeled == 16 * BATCH
    assert tuning(learner).rate > 3e-4


class Killed(BaseException):
    """Ends a run without a last checkpoint, as the end of its process would."""


class Killing(Replayed):
    """A source that ends the run after a number of batches."""

    def __init__(self, batches: list[Any], killed_at: int) -> None:
        super().__init__(batches)
        self.killed_at = killed_at

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.position > self.killed_at:
                raise Killed
            yield batch


@pytest.mark.parametrize(("build_model", "killed_at"), [(fm, 3), (fm, 18), (fm, 31), (build, 14)])
def test_a_killed_run_continues_to_the_same_bits(
    tmp_path: Path, short_schedule: None, build_model: Any, killed_at: int
) -> None:
    check_killed(tmp_path, build_model, [killed_at])


@pytest.mark.slow
def test_a_run_killed_at_20_moments_continues_to_the_same_bits(tmp_path: Path, short_schedule: None) -> None:
    check_killed(tmp_path, fm, range(1, 40, 2))


def check_killed(folder: Path, build_model: Any, moments: Iterable[int]) -> None:
    """Compare a run of 40 batches with runs that are killed and continue from their newest checkpoint."""

    def run(name: str, killed_at: int) -> Learner:
        checkpoint = CheckpointOptions(folder / name, every=5 * BATCH, seconds=math.inf)
        learner = tuned(0.3, build_model(), checkpoint=checkpoint)
        try:
            learner.run(Killing(batches, killed_at))
        except Killed:
            assert killed_at < len(batches)
        learner.close()
        return learner

    batches = stream(40)
    whole = run("whole", len(batches))
    expected = tuning(whole).state_dict()
    assert {len(module.STAGES), 0} & {expected["stage"], len(expected["candidates"])}  # the run reaches the last stage
    for moment in moments:
        run(f"killed-{moment}", moment)
        resumed = run(f"killed-{moment}", len(batches))
        assert resumed.resumed
        assert weights(resumed) == weights(whole)
        assert resumed.metrics() == whole.metrics()
        state = tuning(resumed).state_dict()
        assert {name: state[name] for name in module._SAVED} == {name: expected[name] for name in module._SAVED}
        assert state["selector"] == expected["selector"]
        assert list(state["candidates"]) == list(expected["candidates"])


def test_a_checkpoint_with_a_fixed_rate_starts_the_search_at_its_rate(tmp_path: Path) -> None:
    model = fm()
    fixed = Learner(model, CAdam(model.named_parameters(), lr=0.07), LOG_LOSS, checkpoint=tmp_path)
    fixed.run(Replayed(stream(3)))
    fixed.close()
    learner = tuned(0.003, checkpoint=tmp_path)
    assert learner.resume()
    assert tuning(learner).rate == 0.07
    learner.learn(stream(1, start=3)[0])
    assert len(tuning(learner).candidates) == 9
    learner.close()


def test_groups_keep_the_ratios_of_their_rates() -> None:
    model = build()
    groups = [{"params": model.users.parameters(), "lr": 0.3}, {"params": model.items.parameters(), "lr": 0.03}]
    learner = Learner(model, CAdam(groups, lr=1), LOG_LOSS, tune_rate=True)
    for batch in stream(10):
        learner.learn(batch)
    assert tuning(learner).switches
    for step in (learner.training, *tuning(learner).candidates.values()):
        first, second = (group["lr"] for group in step.optimizer.param_groups)
        assert first == pytest.approx(10 * second)


def test_a_model_that_cannot_be_copied_is_named() -> None:
    model = build()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"cannot be copied .*lock.*give a fixed learning rate"):
        tuned(0.1, model)


def test_tuning_and_per_event_training_are_refused_together() -> None:
    with pytest.raises(ValueError, match="not with per_event"):
        tuned(0.1, per_event=True)


def test_alignment_counts_the_steps_of_the_leader() -> None:
    """The number of elements seen grows by that of one model per step, whichever model leads."""
    learner, model = tuned(0.3), fm()
    fixed = Learner(model, CAdam(model.named_parameters(), lr=0.3), LOG_LOSS)
    for batch in stream(20):
        learner.learn(batch)
        fixed.learn(batch)
    assert tuning(learner).switches
    assert learner.total_alignment().seen == fixed.total_alignment().seen
    assert learner.metrics()["learning_rate_switches"] == tuning(learner).switches

"""The learner predicts before it learns, joins labels in any order, and resumes as if it had never stopped."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cadam
from cadam.online import Console, DamagedCheckpointError, Events, Labels, Learner, Schema
from cadam.online.labels.pending import ResolvedIds
from cadam.online.persistence.checkpoint_schedule import CheckpointOptions
from tests.online.streams import Replayed, Small, build, events, files, learner, table, weights
from tests.optim.exact import present


def test_a_prediction_is_made_before_its_label_changes_anything() -> None:
    ours, model = learner(), build()
    scores = ours.learn(events(64))
    with torch.no_grad():
        e = events(64)
        expected = model.eval()(*(torch.from_numpy(e.features[name]) for name in ("user", "item", "price")))
    assert scores.tobytes() == expected.numpy().tobytes()
    assert ours.learned == 64
    assert ours.learn(events(64, first=64)).tobytes() != scores.tobytes()  # the model has changed by now


def test_it_learns_as_a_plain_loop_does() -> None:
    ours = learner(build())
    for start in range(0, 640, 64):
        ours.learn(events(64, seed=start, first=start))
    model = build()
    optimizer = cadam.CAdam(model.parameters(), lr=0.01)
    for start in range(0, 640, 64):
        batch = events(64, seed=start, first=start)
        optimizer.zero_grad()
        score = model(**{name: torch.from_numpy(v) for name, v in batch.features.items()})
        nn.functional.binary_cross_entropy_with_logits(score, torch.from_numpy(batch.labels)).backward()
        optimizer.step()
    for ours_value, value in zip(ours.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours_value, value)


def test_it_predicts_in_evaluation_mode_and_trains_in_training_mode_even_if_train_is_overridden() -> None:
    modes: list[tuple[bool, bool]] = []

    class Frozen(nn.Dropout):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    class Noting(Small):
        inner: nn.Module

        def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
            modes.append((self.training, self.inner.training))
            return super().forward(user, item, price)

    for inner, learning in ((nn.Dropout(), True), (Frozen(), False)):
        modes.clear()
        model = Noting()
        model.inner = inner
        learner(model).learn(events(8))
        assert modes == [(False, False), (True, learning)]


@pytest.mark.parametrize("count", [1, 2, 5, 1024])
def test_the_clock_is_the_median_of_the_times(count: int) -> None:
    ours, times = learner(), np.random.default_rng(count).normal(size=count)
    batch = events(count)
    batch.time = times
    ours.learn(batch)
    assert ours.join.clock.now == np.quantile(times, 0.5, method="lower")


def test_resolved_ids_are_remembered_with_whether_they_had_a_label() -> None:
    memory = ResolvedIds(10)
    memory.add([1, 2, 3], True)
    memory.add([4, "a"], False)
    assert [memory.get(key) for key in (1, 4, "a", 5)] == [True, False, False, None]
    again = ResolvedIds(10)
    again.load_state_dict(memory.state_dict())
    again.add(range(100, 105), True)  # ten are remembered: the next are the recent ones
    again.add([200], True)
    assert [again.get(key) for key in (1, 4, "a", 104, 200)] == [True, False, False, True, True]
    again.add(range(300, 310), False)
    assert [again.get(key) for key in (1, 4, 200, 300)] == [None, None, True, False]


def test_no_second_checkpoint_is_saved_if_the_last_batch_saved_one(tmp_path: Path) -> None:
    for every, saves in ((64, 3), (128, 2), (1000, 2)):
        folder = tmp_path / str(every)
        ours = learner(checkpoint=folder, checkpoint_every=every)
        ours.run(Replayed([events(64), events(64, first=64)]))
        ours.close()
        again = learner(checkpoint=folder)
        assert again.resume()
        again.close()
        assert (present(ours.schedule).saves, again.events) == (saves, 128)


def test_late_labels_give_the_same_log_loss_and_are_learned_in_the_order_of_the_labels() -> None:
    direct, later = learner(build(), batch_size=10**9), learner(build(), batch_size=10**9)
    direct.learn(events(100))
    scores = later.predict(events(100, labels=False))
    order = np.random.default_rng(1).permutation(100)
    later.observe(order[:40], table(100)["click"][order[:40]])
    assert (later.metrics()["pending"], later.metrics()["labeled"]) == (60, 40)
    later.observe(order[40:], table(100)["click"][order[40:]])
    assert later.metrics()["log_loss"] == pytest.approx(direct.metrics()["log_loss"], abs=1e-12)
    ready = np.concatenate([part["feature/price"] for part in later.queue.parts])
    assert ready.tobytes() == table(100)["price"][order].tobytes()
    assert np.isfinite(scores).all()
    assert later.metrics()["pending"] == 0


def test_the_second_label_is_ignored_and_counted() -> None:
    ours = learner()
    ours.predict(events(4, labels=False))
    ours.observe([2, 2], [1, 0])
    ours.observe([2], [0])
    numbers = ours.metrics()
    assert (numbers["learned"], numbers["repeated_labels"], numbers["mean_label"]) == (1, 2, 1)


def test_a_repeated_event_is_learned_once() -> None:
    ours = learner()
    ours.learn(events(32))
    ours.learn(events(32))
    ours.predict(events(32, first=32, labels=False))
    ours.predict(events(32, first=32, labels=False))
    numbers = ours.metrics()
    assert (numbers["learned"], numbers["repeated_events"], numbers["pending"]) == (32, 64, 32)


def test_a_repeated_event_can_provide_the_label() -> None:
    """An upsert: an event arrives first without its label, and later completely."""
    ours = learner(horizon=1000, unmatched="drop")
    ours.learn(events(8, labels=False))
    ours.learn(events(4))
    numbers = ours.metrics()
    assert (numbers["learned"], numbers["pending"], numbers["repeated_events"]) == (4, 4, 4)
    assert numbers["mean_label"] == table(4)["click"].mean()
    assert numbers["repeated_labels"] == 0
    ours.learn(events(4))  # these have their labels
    assert (ours.metrics()["learned"], ours.metrics()["repeated_labels"]) == (4, 0)
    both = events(2, first=100)
    present(both.ids)[:] = 100  # one event twice in a batch, the second time with its label
    present(both.labels)[0] = math.nan
    ours.learn(both)
    assert (ours.metrics()["learned"], ours.metrics()["pending"]) == (5, 4)
    ours.predict(events(8, labels=True))  # `predict` ignores labels
    assert ours.metrics()["learned"] == 5


@pytest.mark.parametrize("known", [0, 1], ids=["beside one that waits", "beside labelled ones"])
def test_the_label_of_a_repeated_event_counts_beside_labeled_and_unlabeled_events(known: int) -> None:
    ours = learner(horizon=10, unmatched="drop")
    ours.learn(events(1, labels=False))
    late = events(4, first=100)
    present(late.ids)[0], present(late.labels)[3] = 0, 1.0 if known else math.nan
    ours.learn(late)
    assert (ours.metrics()["learned"], ours.metrics()["expired"]) == (3 + known, 0)


def test_a_label_before_its_event_waits_for_it() -> None:
    ours = learner(horizon=100, unmatched="drop")
    ours.observe([5, 1000], [1, 1])
    ours.predict(events(8, labels=False))
    assert (ours.metrics()["learned"], ours.metrics()["pending"]) == (1, 7)
    ours.predict(events(8, first=400, labels=False))
    ours.predict(events(8, first=600, labels=False))
    assert ours.metrics()["orphan_labels"] == 1  # event 1000 never arrived


@pytest.mark.parametrize("unmatched", ["drop", "negative"])
def test_events_without_a_label_are_dropped_or_negative_after_the_horizon(unmatched: str) -> None:
    ours = learner(horizon=50, unmatched=unmatched)
    for start in range(0, 100, 10):
        ours.predict(events(10, first=start, labels=False))
    ours.observe([99], [1])
    numbers = ours.metrics()
    assert numbers["expired"] == 40
    assert numbers["pending"] == (60 if unmatched == "negative" else 59)
    assert numbers["learned"] == (40 if unmatched == "negative" else 1)
    ours.observe([0], [1])
    assert ours.metrics()["late_labels"] == 1
    ours.finish()
    assert (ours.metrics()["pending"], ours.metrics()["expired"]) == (0, 99)


def test_one_event_dated_years_ahead_does_not_expire_the_others() -> None:
    ours = learner(horizon=50)
    batch = events(20, labels=False)
    present(batch.time)[3] = 1e12
    ours.predict(batch)
    ours.predict(events(20, first=20, labels=False))
    assert ours.metrics()["expired"] == 0


def one_by_one(times: list[float]) -> list[Events]:
    batches = [events(1, first=n, labels=False) for n in range(len(times))]
    for batch, time in zip(batches, times, strict=True):
        present(batch.time)[:] = time
    return batches


def test_one_event_dated_years_ahead_does_not_expire_events_in_batches_of_one() -> None:
    ours = learner(horizon=50, unmatched="negative")
    expected = learner(horizon=50, unmatched="negative")
    times = [float(n) for n in range(300)]
    for batch in one_by_one(times):
        expected.predict(batch)
    for batch in one_by_one([*times[:70], 5e13, *times[71:150], 1.7e308, *times[151:]]):
        ours.predict(batch)
    assert ours.join.clock.now == 299
    assert ours.metrics()["expired"] == expected.metrics()["expired"] == 249


def test_events_after_a_pause_wait_for_the_whole_horizon(tmp_path: Path) -> None:
    """Three events in a row with later times are accepted; the first two of them have waited only since then."""
    ours = learner(horizon=60, unmatched="negative", checkpoint=tmp_path)
    for number, batch in enumerate(one_by_one([0, 10, 1000, 1001, 1002, 1003])):
        if number == 4:  # before it is decided
            ours.observe([77], [1])
            ours.save()
            ours.close()
            ours = learner(horizon=60, unmatched="negative", checkpoint=tmp_path)
            ours.resume()
        ours.predict(batch)
        assert ours.join.clock.now == [0, 10, 10, 10, 1002, 1003][number]
    assert (ours.metrics()["expired"], ours.metrics()["pending"]) == (2, 4)
    assert ours.metrics()["orphan_labels"] == 0
    ours.observe([2, 3, 4, 5], [1, 1, 1, 1])
    ours.finish()
    assert (ours.metrics()["learned"], ours.metrics()["late_labels"]) == (6, 0)
    ours.close()


def test_an_early_label_expires_during_a_pause() -> None:
    ours = learner(horizon=60)
    for number, batch in enumerate(one_by_one([0, 10, 20, 1000, 1001, 1002])):
        if number == 1:
            ours.observe([77], [1])
        ours.predict(batch)
    assert ours.metrics()["orphan_labels"] == 1


def test_an_early_label_expires_even_if_every_batch_jumps_beyond_the_horizon() -> None:
    ours = learner(horizon=60)
    for number in range(5):
        batch = events(4, first=4 * number, labels=False)
        present(batch.time)[:] = 1000.0 * number
        ours.predict(batch)
        if number == 0:
            ours.observe([77], [1])
        assert ours.metrics()["orphan_labels"] == (number > 0)


def test_a_label_before_the_first_event_waits_from_the_first_event_on(tmp_path: Path) -> None:
    ours = learner(horizon=60, unmatched="drop", checkpoint=tmp_path)
    ours.observe([3, 77], [1, 1])
    ours.save()
    ours.close()
    ours = learner(horizon=60, unmatched="drop", checkpoint=tmp_path)
    assert ours.resume()
    for batch in one_by_one([1000, 1001, 1002, 1003]):  # the last is number 3
        ours.predict(batch)
    assert (ours.metrics()["learned"], ours.metrics()["orphan_labels"]) == (1, 0)
    ours.predict(events(4, first=4, labels=False))  # at 4 to 7: the clock does not go back
    late = events(4, first=8, labels=False)
    present(late.time)[:] = 1061.0
    ours.predict(late)
    assert ours.metrics()["orphan_labels"] == 1
    ours.close()


def test_wrong_times_do_not_move_the_clock_if_correct_ones_are_between_them() -> None:
    ours = learner(horizon=50)
    for batch in one_by_one([0, 1e12, 1, 1e12, 2, 1e12, 1e12, 3]):
        ours.predict(batch)
    pair = events(2, first=100, labels=False)
    for _ in range(3):
        present(pair.time)[:] = 3, 1e12
        ours.predict(pair)
    assert ours.join.clock.now == 3
    many = events(4, first=200, labels=False)
    present(many.time)[:] = 3, 3, 1e12, 1e12
    ours.predict(many)
    assert (ours.join.clock.now, ours.metrics()["expired"]) == (3, 0)
    three = events(3, first=300, labels=False)
    present(three.time)[:] = 3, 1e12, 1e12  # two that are ahead, and not three
    ours.predict(three)
    assert ours.join.clock.now == 3


def test_the_clock_never_decreases() -> None:
    ours = learner(horizon=50)
    for batch in one_by_one([0, 40, 10, -100, -100, -100, 30]):
        ours.predict(batch)
    assert ours.join.clock.now == 40


def test_labeled_events_are_released_with_an_infinite_horizon() -> None:
    ours = learner()
    for start in range(0, 20_000, 20):
        ours.predict(events(20, seed=start, first=start, labels=False))
        ours.observe(
            range(start, start + 20 - (start == 10_000)), table(20, start, start)["click"][: 20 - (start == 10_000)]
        )
    assert ours.pending.ring_size == 16_384
    assert len(ours.pending.state_dict()["rows"]["id"]) == 20_000 - 10_019
    assert len(ours.pending.arrivals) == 500
    ours.observe([10_019], [1])
    assert ours.learned == 20_000
    assert len(ours.pending.state_dict()["rows"]["id"]) == 0


def test_the_number_of_orphan_labels_in_memory_is_bounded() -> None:
    ours = learner(capacity=10)
    ours.observe(range(100), [1] * 100)
    assert len(ours.pending.early) == 10
    assert ours.metrics()["orphan_labels"] == 90


def test_capacity_bounds_the_number_of_pending_events() -> None:
    ours = learner(capacity=100)
    for start in range(0, 1000, 30):
        ours.predict(events(30, seed=start, first=start, labels=False))
    assert len(ours.pending) == 100
    assert ours.pending.ring_size == 1024
    assert ours.metrics()["crowded_out"] == 1020 - 100


def test_text_ids_join() -> None:
    ours, batch = learner(), events(3, labels=False)
    batch.ids = np.array(["a", "b", "é"], dtype=object)
    ours.predict(batch)
    ours.observe(["é", "z"], [1, 0])
    assert (ours.metrics()["learned"], ours.metrics()["pending"]) == (1, 2)


@pytest.mark.parametrize("ids_first", [True, False])
@pytest.mark.parametrize("resumed", [True, False])
def test_mixing_events_with_and_without_ids_raises_before_any_is_lost(
    ids_first: bool, resumed: bool, tmp_path: Path
) -> None:
    batches = [events(8), events(8)]
    batches[ids_first].ids = None
    ours = learner(checkpoint=tmp_path)
    ours.run(Replayed(batches[:1]))
    if resumed:
        ours.close()
        ours = learner(checkpoint=tmp_path)
        assert ours.resume()
    now, before = ("without", "with") if ids_first else ("with", "without")
    with pytest.raises(ValueError, match=f"events {now} ids after 8 events {before}"):
        ours.learn(batches[1])
    ours.learn(Events({name: values[:0] for name, values in batches[1].features.items()}))  # neither events nor labels
    assert (ours.events, ours.learned, ours.metrics()["repeated_events"]) == (8, 8, 0)
    ours.close()


def test_steps_of_a_fixed_size_do_not_depend_on_when_labels_arrive() -> None:
    clicks = table(200)["click"]
    one = learner(build(), batch_size=32)
    one.predict(events(200, labels=False))
    one.observe(np.arange(200), clicks)
    other = learner(build(), batch_size=32)
    other.predict(events(200, labels=False))
    for start in range(0, 200, 7):
        other.observe(np.arange(200)[start : start + 7], clicks[start : start + 7])
    assert one.steps == other.steps == 6
    assert weights(one) == weights(other)


def test_an_event_that_the_model_refuses_is_rejected_and_the_others_are_learned(tmp_path: Path) -> None:
    ours = learner(rejected=tmp_path / "rejected.jsonl")
    batch = events(64)
    batch.features["item"][17] = 10**6
    batch.features["price"][40] = math.inf
    scores = ours.learn(batch)
    assert np.flatnonzero(~np.isfinite(scores)).tolist() == [17, 40]
    assert (ours.metrics()["learned"], ours.metrics()["rejected"]) == (62, 2)
    text = (tmp_path / "rejected.jsonl").read_text()
    assert "the model refused it" in text
    assert "its score is" in text
    assert all(torch.isfinite(p).all() for p in ours.model.parameters())


def test_a_model_that_refuses_everything_or_has_diverged_is_an_error() -> None:
    class Wrong(Small):
        def forward(self, user, item, price):  # type: ignore[no-untyped-def]
            raise ValueError("never mind the events")

    with pytest.raises(ValueError, match="never mind the events"):
        learner(Wrong()).learn(events(8))
    ours = learner()
    ours.learn(events(8))
    with torch.no_grad():
        ours.model.get_parameter("out.1.weight").fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"out\.1\.weight"):
        ours.learn(events(8, first=8))


def test_a_batch_of_only_bad_events_is_rejected_after_the_model_has_worked(tmp_path: Path) -> None:
    ours = learner(rejected=tmp_path / "rejected.jsonl")

    def bad(first: int, count: int) -> Events:
        batch = events(count, first=first)
        batch.features["item"][:] = 10**6
        return batch

    assert np.isnan(ours.learn(bad(0, 1))).all()  # a single failed event does not show that the model is the cause
    ours.learn(events(8, first=1))
    ours.learn(bad(9, 1))
    ours.learn(bad(10, 300))
    ours.learn(events(8, first=310))
    assert (ours.metrics()["learned"], ours.metrics()["rejected"]) == (16, 302)
    assert len((tmp_path / "rejected.jsonl").read_text().splitlines()) == 302
    with pytest.raises(RuntimeError, match="refused 1001 events in a row; the model refused it: IndexError"):
        ours.learn(bad(400, 1001))


class Normed(Small):
    """A model that cannot be trained on a single event."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        return self.norm(super().forward(user, item, price).reshape(-1, 1))


def test_an_event_that_the_model_cannot_be_trained_on_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "rejected.jsonl"
    ours = learner(Normed(), rejected=file)
    ours.learn(events(20))
    before = [param.detach().clone() for param in ours.model.parameters()]
    scores = ours.learn(events(1, first=20))
    assert np.isfinite(scores).all()
    assert all(torch.equal(*pair) for pair in zip(before, ours.model.parameters(), strict=True))
    ours.learn(events(20, first=21))
    numbers = ours.metrics()
    assert (numbers["learned"], numbers["rejected"], ours.steps) == (40, 1, 2)
    assert "the model cannot be trained on it: ValueError: Expected more than 1 value" in file.read_text()
    with pytest.raises(ValueError, match="Expected more than 1 value"):  # not even once
        learner(Normed()).learn(events(1))
    for number in range(1000):
        ours.learn(events(1, first=100 + number))
    assert ours.metrics()["rejected"] == 1001
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        ours.learn(events(1, first=2000))


def test_one_untrainable_event_does_not_lose_the_rest_of_a_large_batch() -> None:
    class Refusing(Small):
        def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
            if self.training and (price == 7).any():
                raise RuntimeError("seven")
            return super().forward(user, item, price)

    ours = learner(Refusing())
    for start in (0, 2000):
        batch = events(2000, first=start)
        batch.features["price"][1234] = 7
        ours.learn(batch)
    numbers = ours.metrics()
    assert (numbers["learned"], numbers["rejected"], ours.training.consecutive_unlearned) == (3998, 2, 0)


def test_a_buffer_that_was_never_finite_does_not_count_as_divergence(tmp_path: Path) -> None:
    model = Small()
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    ours = learner(model, checkpoint=tmp_path)
    ours.learn(events(20))
    assert ours.save() is not None
    model.register_parameter("wave", nn.Parameter(torch.tensor([complex(math.nan, 0)])))
    with pytest.raises(FloatingPointError, match="wave is no longer finite"):
        ours.save()


def test_an_infinite_moment_or_buffer_is_not_saved(tmp_path: Path) -> None:
    """The weights are still finite, but would never change again."""
    ours = learner(checkpoint=tmp_path)
    ours.learn(events(20))
    ours.save()
    bias = ours.model.get_parameter("out.1.bias")
    ours.optimizer.state[bias]["exp_avg_sq"].fill_(math.inf)  # as by a gradient of 1e30
    with pytest.raises(FloatingPointError, match=r"the optimizer's exp_avg_sq of out\.\S+ is no longer finite"):
        ours.save()
    model = Normed()
    ours = learner(model, checkpoint=tmp_path / "buffers")
    present(model.norm.running_var).fill_(math.inf)
    with pytest.raises(FloatingPointError, match=r"norm\.running_var is no longer finite"):
        ours.save()


def test_any_exception_of_the_model_at_one_event_rejects_that_event() -> None:
    class Choosy(Small):
        def forward(self, user, item, price):  # type: ignore[no-untyped-def]
            {0: "known"}[int((item == 7).sum())]
            return super().forward(user, item, price)

    ours, batch = learner(Choosy()), events(32)
    batch.features["item"][:] = 3
    batch.features["item"][5] = 7
    ours.learn(batch)
    assert (ours.metrics()["learned"], ours.metrics()["rejected"]) == (31, 1)


def test_labels_and_times_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    ours = learner(rejected=tmp_path / "rejected.jsonl", horizon=50, unmatched="drop")
    batch = events(20)
    times = present(batch.time)
    present(batch.labels)[3], times[4], times[5] = math.inf, math.nan, math.inf
    ours.learn(batch)
    ours.predict(events(20, first=20, labels=False))
    numbers = ours.metrics()
    assert (numbers["learned"], numbers["rejected"], numbers["pending"]) == (17, 3, 20)
    assert math.isfinite(numbers["log_loss"])
    assert ours.join.clock.now == 29
    text = (tmp_path / "rejected.jsonl").read_text()
    assert [f"its {what}" in text for what in ("label is inf", "time is nan", "time is inf")] == [True] * 3


def test_labeled_events_also_advance_the_horizon() -> None:
    ours = learner(horizon=50)
    ours.observe([10**6], [1])
    ours.predict(events(10, labels=False))
    ours.learn(events(10, first=100))
    assert (ours.metrics()["expired"], ours.metrics()["orphan_labels"]) == (10, 1)


def test_an_early_label_of_an_event_with_a_label_counts_as_repeated() -> None:
    ours = learner()
    ours.observe([3], [1])
    ours.learn(events(8))
    assert (ours.metrics()["learned"], ours.metrics()["repeated_labels"]) == (8, 1)
    assert not ours.pending.early


def test_invalid_arguments_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="unmatched"):
        learner(unmatched="forget")
    with pytest.raises(ValueError, match="needs a finite horizon"):
        learner(unmatched="negative")
    with pytest.raises(ValueError, match="horizon"):
        learner(horizon=0)
    with pytest.raises(ValueError, match="3 rows"):
        Events({"a": np.zeros(2)}, labels=np.zeros(3))
    with pytest.raises(ValueError, match="label has the shape"):  # a loss would compare each score with each label
        Events({"a": np.zeros(2)}, labels=np.zeros((2, 1)))
    with pytest.raises(TypeError, match="ids must be integers or text"):
        Labels(np.array([1.5]), np.array([1.0]))
    with pytest.raises(TypeError, match="one score per event"):
        learner(nn.Linear(1, 2)).learn(Events({"input": np.zeros((4, 1), np.float32)}))


def test_parameters_that_share_a_name_all_count_in_the_total_alignment(tmp_path: Path) -> None:
    def named_alike() -> Learner:
        model = build()
        groups = [{"params": list(part.named_parameters())} for part in (model.users, model.items, model.out)]
        optimizer = cadam.CAdam(groups, lr=0.01)
        names = ["group0.0.weight", "group1.0.weight", "1.weight", "1.bias"]
        assert list(optimizer.alignment().parameters) == names
        loss, reports = nn.functional.binary_cross_entropy_with_logits, [Console(tmp_path.joinpath("out").open("a"))]
        return Learner(model, optimizer, loss, checkpoint=tmp_path / "state", reports=reports)

    expected = learner(build())
    expected.run(Replayed([events(20, first=20 * n) for n in range(6)]))
    ours = named_alike()
    ours.run(Replayed([events(20, first=20 * n) for n in range(6)]), events=60)
    ours.close()
    ours = named_alike()
    ours.run(Replayed([events(20, first=20 * n) for n in range(6)]))
    ours.close()
    assert ours.total_alignment() == expected.total_alignment()
    assert ours.total_alignment().seen == 6 * sum(p.numel() for p in ours.model.parameters())
    for of in ("all", "touched"):
        assert ours.metrics()[f"alignment_over_{of}"] == expected.metrics()[f"alignment_over_{of}"]
    last = (tmp_path / "out").read_text().splitlines()[-1].split()
    assert last == ["total", *(f"{expected.metrics()[f'alignment_over_{of}']:.3f}" for of in ("all", "touched"))]


# Stop and resume ------------------------------------------------------------------------------------------------


def mixed_stream() -> list[object]:
    """Events with labels, events whose labels come later, twice and before them, and events that get none."""
    batches: list[object] = []
    clicks = table(4000, seed=5)["click"]
    for start in range(0, 4000, 50):
        batch = events(50, seed=start, first=start)
        present(batch.labels)[::2] = np.nan
        batches.append(batch)
        late = np.arange(max(0, start - 120), start, 6)
        batches.append(Labels(late, clicks[late]))
    return batches


def run(folder: Path, stops: list[int]) -> Learner:
    """Process the stream with stops in between, each time with a new model."""
    for end in [*stops, None]:
        ours = learner(
            build(), horizon=200, unmatched="negative", batch_size=48, log=folder / "log", log_rows=700,
            checkpoint=folder / "state", checkpoint_every=300,
        )  # fmt: skip
        ours.run(Replayed(mixed_stream()), events=end)
        ours.close()
    return ours


def test_a_resumed_run_is_bit_for_bit_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", [])
    parts = run(tmp_path / "parts", [350, 1000, 1050, 2710])
    assert weights(whole) == weights(parts)
    assert whole.metrics() == parts.metrics()
    assert whole.metrics()["expired"] > 0 < whole.metrics()["repeated_labels"]
    assert files(tmp_path / "whole" / "log") == files(tmp_path / "parts" / "log")
    assert len(files(tmp_path / "whole" / "log")) > 3


def test_events_rejected_after_the_checkpoint_are_written_once(tmp_path: Path) -> None:
    def bad(first: int) -> Events:
        batch = events(20, first=first)
        batch.features["item"][7] = 10**6
        return batch

    ours = learner(checkpoint=tmp_path)
    ours.learn(bad(0))
    ours.save()
    ours.learn(bad(20))  # after the checkpoint, and lost with the process
    ours.close()
    again = learner(checkpoint=tmp_path)
    assert again.resume()
    again.learn(bad(20))
    lines = (tmp_path / "rejected.jsonl").read_text().splitlines()
    assert (len(lines), len(set(lines)), again.metrics()["rejected"]) == (2, 2, 2)


def test_a_crash_before_the_first_checkpoint_loses_nothing(tmp_path: Path) -> None:
    class Crashing(Replayed):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from super().__iter__()
            raise KeyboardInterrupt

    def ours(name: str) -> Learner:
        return learner(build(), checkpoint=tmp_path / name, log=tmp_path / f"{name}-log", log_rows=30)

    batches = [events(20, seed=n, first=20 * n) for n in range(8)]
    batches[1].features["item"][7] = 10**6
    crashed = ours("crashed")
    with pytest.raises(KeyboardInterrupt):
        crashed.run(Crashing(batches[:4]))
    crashed.close()
    assert len(files(tmp_path / "crashed-log")) == 2
    resumed, whole = ours("crashed").run(Replayed(batches)), ours("whole").run(Replayed(batches))
    assert weights(resumed) == weights(whole)
    assert files(tmp_path / "crashed-log") == files(tmp_path / "whole-log")
    rejections = [(tmp_path / name / "rejected.jsonl").read_text() for name in ("crashed", "whole")]
    assert rejections[0] == rejections[1]
    assert rejections[0].count("\n") == 1


def test_a_stop_during_resume_takes_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = learner(checkpoint=tmp_path)

    def stop() -> bool:
        ours.stop()
        return False

    with monkeypatch.context() as patch:
        patch.setattr(ours, "resume", stop)
        ours.run(Replayed([events(20, first=20 * n) for n in range(8)]))
    assert (ours.events, ours.stopped) == (0, True)
    ours.stop()  # before `run`, for example while a command loads the state
    ours.run(Replayed([events(20, first=20 * n) for n in range(8)]))
    assert (ours.events, ours.stopped) == (0, True)
    ours.run(Replayed([events(20, first=20 * n) for n in range(8)]))
    assert (ours.events, ours.stopped) == (160, False)

    class Late:
        def __call__(self, _: Learner) -> None: ...

        def end(self, learner: Learner) -> None:
            learner.stop()  # when there is nothing left to stop

    ours.reports = [Late()]
    ours.run(Replayed([events(20, first=160 + 20 * n) for n in range(8)]))
    ours.run(Replayed([events(20, first=320 + 20 * n) for n in range(8)]))
    assert (ours.events, ours.stopped) == (480, False)


def test_resuming_with_another_optimizer_raises(tmp_path: Path) -> None:
    ours = learner(checkpoint=tmp_path)
    ours.run(Replayed([events(20)]))
    ours.close()
    model = build()
    other = Learner(model, cadam.Adam(model.named_parameters()), ours.training.loss, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="a learner with CAdam, but this one has Adam"):
        other.run(Replayed([]))


def test_the_log_has_every_prediction_once(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    ours = run(tmp_path, [1000])
    rows = pq.read_table(tmp_path / "log").to_pydict()
    assert len(rows["id"]) == len(set(rows["id"])) == 4000 - len(ours.pending)
    assert set(rows["outcome"]) == {"label", "assumed"}
    logits, labels = np.array(rows["score"], np.float64), np.array(rows["label"])
    again = np.mean(np.logaddexp(0, logits) - labels * logits)
    assert ours.metrics()["log_loss"] == pytest.approx(again, abs=1e-12)


def test_a_damaged_newest_checkpoint_is_detected_and_the_previous_one_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(tmp_path / "whole", [])
    run(tmp_path / "parts", [1000, 1000])
    newest = sorted((tmp_path / "parts" / "state").glob("*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        resumed = run(tmp_path / "parts", [])
    assert "damaged checkpoint, trying the previous one" in caplog.text
    assert newest.name in caplog.text
    assert weights(whole) == weights(resumed)
    assert files(tmp_path / "whole" / "log") == files(tmp_path / "parts" / "log")


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "bit"])
def test_any_damage_is_detected_and_an_error_if_no_checkpoint_is_good(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = learner(checkpoint=tmp_path)
    ours.learn(events(10))
    path = present(ours.save())
    ours.close()
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 4
    if damage == "header":
        content[40] ^= 1
    damaged = {"cut": content[:-7], "empty": bytearray()}
    path.write_bytes(damaged.get(damage, content))
    for _ in range(2):  # at every attempt, because it never restarts from the beginning by itself
        again = learner(checkpoint=tmp_path)
        with pytest.raises(DamagedCheckpointError, match="all 1 checkpoints"):
            again.run(Replayed([]))
        again.close()
    assert "damaged checkpoint, and there is no older one" in caplog.text


def test_two_learners_do_not_share_a_folder(tmp_path: Path) -> None:
    first = learner(checkpoint=tmp_path)
    with pytest.raises(RuntimeError, match="another process"):
        learner(checkpoint=tmp_path)
    first.close()
    learner(checkpoint=tmp_path)


def test_the_log_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    ours = learner(log=tmp_path, log_rows=10)
    ours.learn(events(20))
    with pytest.raises(FileExistsError, match="log of another run"):
        learner(log=tmp_path, log_rows=10).learn(events(20))


def test_a_warm_start_loads_a_checkpoint_of_torch_adam(tmp_path: Path) -> None:
    model = build()
    model.users.sparse = model.items.sparse = False
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for start in range(0, 320, 32):
        batch = events(32, seed=start)
        adam.zero_grad()
        score = model(**{name: torch.from_numpy(v) for name, v in batch.features.items()})
        nn.functional.binary_cross_entropy_with_logits(score, torch.from_numpy(batch.labels)).backward()
        adam.step()
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "old.pt")
    ours = learner(build(seed=1))
    ours.warm_start(tmp_path / "old.pt")
    for new, old in zip(ours.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(new, old)
        assert torch.equal(ours.optimizer.state[new]["exp_avg"], adam.state[old]["exp_avg"])
    ours.learn(events(32))
    assert float(next(iter(ours.optimizer.state.values()))["step"]) == 11
    with pytest.raises(ValueError, match="'model'"):
        ours.warm_start({"weights": {}})


def test_labels_by_text_id_are_an_error_if_the_events_had_no_ids() -> None:
    schema = Schema({"user": "category:30", "item": "category:20", "price": "number"}, label="click", id="event:text")
    records = [{"event": "e1", "user": 1, "item": 2, "price": 0.5}]
    without, with_ids = (schema.encode(part).events for part in ([{**records[0], "event": None}], records))
    assert without is not None
    assert with_ids is not None
    ours = learner()
    ours.predict(without)
    with pytest.raises(ValueError, match=r"'e1'.*id column"):
        ours.observe(["e1"], [1.0])
    ours.observe([0], [1.0])
    assert ours.learned == 1
    other = learner()
    other.predict(with_ids)
    other.observe(["e1"], [1.0])
    assert other.learned == 1


def test_predict_and_observe_save_on_schedule(tmp_path: Path) -> None:
    schema = Schema({"price": "number"}, label="click", id="key:text")
    ours = Learner(
        model := _Column(nn.Linear(1, 1)),
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.functional.binary_cross_entropy_with_logits,
        checkpoint=CheckpointOptions(tmp_path, every=2),
    )
    for number in range(4):
        encoded = schema.encode([{"key": f"e{number}", "price": number}]).events
        ours.predict(present(encoded))
    assert sorted(files(tmp_path))[:2] == [f"checkpoint-{number:012d}.safetensors" for number in (1, 2)]
    ours.observe(["e1"], [1.0])
    assert ours.learned == 1, "the ids have travelled with the encoded events"
    ours.close()


class _Column(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, price: Tensor) -> Tensor:
        return self.linear(price[:, None])[:, 0]

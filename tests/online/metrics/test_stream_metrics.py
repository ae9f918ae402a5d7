"""Metrics of a stream equal plain counting of pairs for any batches, and are restored to the bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cadam.online.data.events import Events as Stream
from cadam.online.learner import Learner
from cadam.online.metrics.gauc import user_auc
from cadam.online.metrics.log_loss import LogLoss
from cadam.online.metrics.stream import StreamMetrics, measure, recompute
from tests.online.streams import grouped

Events = tuple[np.ndarray, np.ndarray, np.ndarray]


def plain_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The AUC by comparing every positive event with every negative one."""
    clicks, passes = scores[labels], scores[~labels]
    return float(np.mean([(c > p) + 0.5 * (c == p) for c in clicks for p in passes]))


def plain_gauc(scores: np.ndarray, labels: np.ndarray, users: np.ndarray) -> tuple[float, float, int]:
    """Return GAUC by impressions and by user, and the number of users with one class, from one user at a time."""
    values, weights, one_class = [], [], 0
    for user in set(users.tolist()):
        own = users == user
        if labels[own].all() or not labels[own].any():
            one_class += 1
            continue
        values.append(plain_auc(scores[own], labels[own]))
        weights.append(own.sum())
    if not values:
        return math.nan, math.nan, one_class
    return float(np.average(values, weights=weights)), float(np.mean(values)), one_class


def events(count: int, users: int, levels: int = 0, seed: int = 0) -> Events:
    """Scores that are informative about the labels; `levels` limits the number of distinct scores, which gives ties."""
    random = np.random.default_rng(seed)
    user = random.integers(users, size=count)
    scores = random.normal(size=count)
    labels = random.random(count) < 1 / (1 + np.exp(-scores))
    return (np.floor(scores * levels) / levels if levels else scores), labels, user


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([-1.5, -0.0, 0.0, 0.25, 7.0]), st.booleans(), st.integers(-(2**63), 2**63 - 1)),
        max_size=40,
    ),
    st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 4)), max_size=40),
)
def test_gauc_equals_a_plain_computation(wide: list[Any], narrow: list[Any]) -> None:
    for rows in (wide, narrow):
        scores = np.array([row[0] for row in rows], dtype=np.float64)
        labels = np.array([row[1] for row in rows], dtype=bool)
        users = np.array([row[2] for row in rows], dtype=np.int64)
        found = user_auc(scores, labels, users)
        by_impressions, by_user, one_class = plain_gauc(scores, labels, users)
        assert found.by_impressions == pytest.approx(by_impressions, abs=1e-14, nan_ok=True)
        assert found.by_user == pytest.approx(by_user, abs=1e-14, nan_ok=True)
        assert found.one_class == one_class
        assert found.impressions.sum() + found.one_class_impressions == len(rows)
        for user, value in zip(found.users, found.auc, strict=True):
            assert value == plain_auc(scores[users == user], labels[users == user])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_many_users_and_ties(dtype: type) -> None:
    scores, labels, users = events(4000, 300, levels=4)
    found = user_auc(scores.astype(dtype), labels, users)
    by_impressions, by_user, one_class = plain_gauc(scores.astype(dtype), labels, users)
    assert (found.by_impressions, found.by_user) == pytest.approx((by_impressions, by_user), abs=1e-14)
    assert by_impressions != by_user
    assert found.one_class == one_class


def test_users_may_have_any_name() -> None:
    scores, labels, users = events(500, 20)
    named = user_auc(scores, labels, np.array([f"user {u}" for u in users]))
    assert named.by_impressions == pytest.approx(user_auc(scores, labels, users).by_impressions, abs=1e-14)
    assert set(named.users) <= {f"user {u}" for u in users}


def test_a_nan_score_makes_every_metric_nan() -> None:
    scores, labels, users = events(100, 5)
    scores[50] = math.nan
    numbers = measure(scores, labels, users)
    assert all(math.isnan(numbers[name]) for name in ("auc", "gauc_by_impressions", "gauc_by_user", "log_loss"))


def test_summed_metrics_equal_their_definitions() -> None:
    labels = np.array([1, 0, 0, 1, 0, 0, 0, 0], dtype=bool)
    constant = np.full(8, math.log(0.25 / 0.75))
    numbers = measure(constant, labels)
    assert numbers["normalized_entropy"] == pytest.approx(1)  # the best constant
    assert numbers["calibration"] == pytest.approx(1)
    assert numbers["click_rate"] == 0.25
    assert numbers["log_loss"] == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert numbers["auc"] == 0.5
    twice = measure(np.full(8, 0.0), labels)  # predicts 0.5 where a quarter are clicks
    assert twice["calibration"] == pytest.approx(2)
    assert measure(np.array([800.0, -800.0]), np.array([0, 1]))["log_loss"] == 800
    assert "gauc_by_user" not in numbers


@pytest.mark.parametrize("clicks", [0, 1, 3, 8])
def test_entropy_is_normalized_by_the_best_constant(clicks: int) -> None:
    labels = np.arange(8) < clicks
    scores, progress = np.linspace(-1, 1, 8), LogLoss()
    progress.update(scores, labels, None, scores)
    numbers = measure(scores, labels)
    if 0 < clicks < 8:
        assert numbers["normalized_entropy"] == numbers["log_loss"] / progress.best_constant
    else:
        assert math.isnan(numbers["normalized_entropy"])
        assert progress.best_constant == 0


def test_labels_outside_0_and_1_have_no_best_constant() -> None:
    progress = LogLoss()
    assert math.isnan(progress.best_constant)
    progress.update(np.zeros(4), np.array([0.0, 3.5, 2.0, 1.0]), None, np.zeros(4))
    assert progress.results()["mean_label"] == 1.625
    assert math.isnan(progress.results()["best_constant"])


def fed(metrics: StreamMetrics, made: Events, sizes: list[int]) -> StreamMetrics:
    """Yield the events in batches of these sizes; the last batch has the rest."""
    scores, labels, users = made
    ends = [*np.cumsum(sizes), len(scores)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        metrics.update(scores[start:end], labels[start:end], users[start:end], np.arange(start, end))
    return metrics


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 300), max_size=12))
def test_metrics_do_not_depend_on_batches(sizes: list[int]) -> None:
    made = events(2000, 30, levels=8)
    kept = [size for size, total in zip(sizes, np.cumsum(sizes), strict=True) if total <= 2000]
    assert fed(StreamMetrics(150), made, kept).results() == fed(StreamMetrics(150), made, []).results()


def test_window_decayed_and_total_values_equal_their_definitions() -> None:
    made = events(1050, 40)
    metrics = fed(StreamMetrics(100, half_life=200), made, [64] * 16)
    windows = [measure(*(column[s : s + 100] for column in made)) for s in range(0, 1000, 100)]
    weights = 0.5 ** (np.arange(9, -1, -1) / 2)
    results = metrics.results()
    assert {name: results[f"{name}/window"] for name in windows[-1]} == windows[-1]
    assert results["time/window"] == 999
    for name in ("auc", "gauc_by_impressions", "gauc_by_user"):
        values = [window[name] for window in windows]
        assert results[f"{name}/mean_of_windows"] == pytest.approx(np.mean(values))
        assert results[f"{name}/decayed"] == pytest.approx(np.average(values, weights=weights))
    assert results["log_loss/decayed"] == pytest.approx(np.average([w["log_loss"] for w in windows], weights=weights))
    whole = measure(*made)
    for name in ("log_loss", "normalized_entropy", "calibration", "click_rate"):
        assert results[f"{name}/total"] == pytest.approx(whole[name], rel=1e-12)
    assert results["events/total"] == 1050
    assert results["auc/mean_of_windows"] != pytest.approx(whole["auc"], abs=1e-6)  # so it is not called the total


def test_a_window_of_one_class_is_left_out_of_the_mean() -> None:
    scores, labels, users = events(300, 4)
    labels[100:200] = True
    results = fed(StreamMetrics(100), (scores, labels, users), []).results()
    values = [measure(scores[s : s + 100], labels[s : s + 100])["auc"] for s in (0, 200)]
    assert results["auc/mean_of_windows"] == pytest.approx(np.mean(values))


@pytest.mark.parametrize("cut", [0, 37, 100, 990])
def test_a_restored_stream_continues_to_the_bit(cut: int) -> None:
    made = events(1050, 40)
    whole = fed(StreamMetrics(100), made, [])
    before = fed(StreamMetrics(100), tuple(column[:cut] for column in made), [])  # type: ignore[arg-type]
    state = before.state_dict()
    held = state.pop("unfinished")
    after = StreamMetrics(100)
    after.load_state_dict({**json.loads(json.dumps(state)), "unfinished": held})
    scores, labels, users = made
    before.update(scores[:500], labels[:500], users[:500], np.arange(500))  # the state is a copy
    after.update(scores[cut:], labels[cut:], users[cut:], np.arange(cut, 1050))
    assert after.results() == whole.results()
    assert repr(after.state_dict()) == repr(whole.state_dict())


class Reported:
    """A metric that keeps all labeled predictions."""

    def __init__(self) -> None:
        self.parts: list[Events] = []

    def update(self, scores: np.ndarray, labels: np.ndarray, users: np.ndarray, time: np.ndarray) -> None:
        self.parts.append((scores, labels, users))

    def results(self) -> dict[str, float]:
        return {}


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.unsqueeze(1)).squeeze(1)


def learner(*metrics: Any, **options: Any) -> Learner:
    torch.manual_seed(0)
    model = Scorer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.binary_cross_entropy_with_logits
    return Learner(model, optimizer, loss, metrics=metrics, **grouped(options))


class Batches:
    """1000 events in batches of 64; some labels never come."""

    def __init__(self, named: bool) -> None:
        self.at = 0
        scores, labels, users = events(1000, 40, levels=4)
        whose = np.array([f"user {u}" for u in users]) if named else users
        self.events = Stream({"x": scores.astype(np.float32)}, np.where(scores < 2, labels, np.nan), users=whose)

    def __iter__(self) -> Iterator[Stream]:
        while self.at < 1000:
            start, self.at = self.at, self.at + 64
            yield self.events.take(slice(start, self.at))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("named", [False, True])
def test_metrics_can_be_recomputed_from_the_prediction_log(tmp_path: Path, named: bool) -> None:
    kept, streamed = Reported(), StreamMetrics(100)
    running = learner(kept, streamed, log=tmp_path / "log", log_rows=300)
    running.run(Batches(named))
    told = tuple(np.concatenate(columns) for columns in zip(*kept.parts, strict=True))
    assert 900 < len(told[0]) < 1000
    assert recompute(tmp_path / "log") == pytest.approx(measure(*told), rel=1e-12)
    assert recompute(tmp_path / "log")["log_loss"] == pytest.approx(streamed.results()["log_loss/total"], rel=1e-12)
    assert running.metrics().items() >= streamed.results().items()


@pytest.mark.parametrize("named", [False, True])
def test_metrics_continue_from_a_checkpoint_to_the_bit(tmp_path: Path, named: bool) -> None:
    whole, first, second = (StreamMetrics(150) for _ in range(3))
    learner(whole).run(Batches(named))
    learner(first, checkpoint=tmp_path).run(Batches(named), events=500)
    learner(second, checkpoint=tmp_path).run(Batches(named))
    assert first.results() != whole.results()
    assert second.results() == whole.results()


def test_only_selected_metrics_are_returned() -> None:
    metrics = StreamMetrics(5, kinds=["gauc", "calibration"])
    metrics.update(*events(10, 3))
    assert {name.partition("/")[0] for name in metrics.results()} == {
        "events", "gauc_by_impressions", "gauc_by_user", "users_of_both_classes", "users_of_one_class", "calibration",
        "click_rate",
    }  # fmt: skip
    with pytest.raises(ValueError, match="no metric auroc; there are auc"):
        StreamMetrics(kinds=["auroc"])
    with pytest.raises(ValueError, match="gauc needs to know the users"):
        StreamMetrics(kinds=["gauc"]).update(*events(10, 3)[:2])


def test_invalid_metric_input_is_named_in_the_error() -> None:
    scores, labels, users = events(10, 3)
    metrics = StreamMetrics(5)
    with pytest.raises(ValueError, match=r"same length.*users.*9"):
        metrics.update(scores, labels, users[:9])
    with pytest.raises(ValueError, match="labels must be 0 or 1"):
        metrics.update(scores, labels + 0.5, users)
    with pytest.raises(TypeError, match="users must be integers or strings, got float64"):
        metrics.update(scores, labels, users.astype(float))
    metrics.update(scores, labels, users)
    with pytest.raises(ValueError, match="this stream had scores, labels, users; now it has scores, labels"):
        metrics.update(scores, labels)
    with pytest.raises(ValueError, match="window is 7 here and 5 in the state"):
        StreamMetrics(7, half_life=50).load_state_dict(metrics.state_dict())
    with pytest.raises(ValueError, match="window must be at least 1"):
        StreamMetrics(0)

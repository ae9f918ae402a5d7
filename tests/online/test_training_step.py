"""A single forward pass for scores and gradients gives the same scores, weights and states as two passes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cadam
from cadam.online import Batch, Events, LabelOptions, Labels, Learner, Schema, models
from cadam.online.models.mode import is_same_in_training
from cadam.online.models.model_file import LOG_LOSS
from tests.online.streams import Replayed
from tests.optim.exact import present

SCHEMA = Schema({"item": "category:50", "user": "hash:100", "tags": "hash:30[3]?", "price": "number", "age": "number"})


def make_events(count: int, seed: int = 0, **columns: Any) -> Events:
    random = np.random.default_rng(seed)
    features = {
        "item": random.integers(0, 50, count),
        "user": random.integers(0, 100, count),
        "tags": random.integers(0, 30, (count, 3)),
        "price": np.where(random.random(count) < 0.1, np.nan, random.normal(size=count)),
        "age": random.gamma(2.0, 20.0, count),
    }
    return Events(features, **{"labels": random.random(count) < 0.3, **columns})


def make_learner(single_pass: bool, model: nn.Module | str = "deepfm", **options: Any) -> Learner:
    torch.manual_seed(0)
    if isinstance(model, str):
        model = models.build(model, SCHEMA)
    optimizer = cadam.CAdam(model.named_parameters(), lr=0.01)
    learner = Learner(model, optimizer, options.pop("loss", LOG_LOSS), **options)
    assert learner.training.has_single_pass
    learner.training.has_single_pass = single_pass
    return learner


def count_passes(model: nn.Module) -> list[bool]:
    """Return a list that gets an entry for each forward pass: whether it computes gradients."""
    passes: list[bool] = []
    model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    return passes


def plain(value: Any) -> Any:
    """Convert arrays and tensors in a state to bytes."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (Tensor, np.ndarray)):
        array = np.asarray(value)
        return (str(array.dtype), array.shape, repr(array.tolist()) if array.dtype == object else array.tobytes())
    return repr(value) if isinstance(value, float) else value


def learn_both_ways(batches: Sequence[Any], **options: Any) -> tuple[Learner, list[bool]]:
    """Process batches with one pass and with two, and check that scores and states are equal to the bit.

    Returns:
        The learner with a single pass, and its passes.
    """
    states, scores, learners, passes = [], [], [], []
    for single_pass in (True, False):
        learner = make_learner(single_pass, **options)
        passes.append(count_passes(learner.model))
        learners.append(learner)
        recorded: list[Any] = []
        scores.append(recorded)
        record = learner._record

        def recording(resolved: Any, record: Any = record, recorded: list[Any] = recorded) -> None:
            columns = resolved.columns
            recorded.append((columns["score"].tobytes(), columns["label"].tobytes(), resolved.outcomes.tobytes()))
            record(resolved)

        learner._record = recording  # type: ignore[method-assign]
        for batch in batches:
            if isinstance(batch, Events):
                recorded.append(learner.learn(batch).tobytes())
            else:
                learner.process(batch)
        learner.finish()
        states.append(plain(learner.state_dict()))
    assert scores[0] == scores[1]
    assert states[0] == states[1]
    return learners[0], passes[0]


@pytest.mark.parametrize("model", models.MODELS)
def test_a_single_pass_gives_the_bits_of_two_passes(model: str) -> None:
    batches = [make_events(count, seed) for seed, count in enumerate([64] * 12 + [17, 1])]
    learner, passes = learn_both_ways(batches, model=model)
    assert learner.learned == learner.events == 12 * 64 + 18
    assert passes == [True] * len(batches)


def test_events_learned_one_by_one_with_torch_take_a_single_pass() -> None:
    learner, passes = learn_both_ways([make_events(10)], per_event=True)
    assert (learner.steps, passes) == (10, [True] * 10)


def test_delayed_labels_take_two_passes() -> None:
    batches: list[Any] = []
    for number in range(6):
        ids = np.arange(number * 32, (number + 1) * 32)
        events = make_events(32, number, ids=ids, labels=None)
        batches.append(Batch(events, Labels(ids - 32, ids % 3 == 0) if number else None))
    batches += [make_events(32, 7, ids=np.arange(500, 532)), Labels(np.arange(160, 192), np.ones(32))]
    learner, passes = learn_both_ways(batches)
    assert learner.learned == 7 * 32
    assert passes == [False, *[False, True] * 5, True, True]


def test_a_step_with_other_events_takes_two_passes() -> None:
    """Labels that follow, expired events and queued events are learned in the same step as the batch."""
    unlabeled = make_events(8, 1, ids=np.arange(8), labels=None, time=np.zeros(8))
    labeled = make_events(8, 2, ids=np.arange(8, 16), time=np.full(8, 100.0))
    following = Batch(labeled, Labels(np.arange(4), np.ones(4)))
    for batches, options in (
        ([unlabeled, following], {}),
        ([unlabeled, labeled], {"labels": LabelOptions(10.0, "negative")}),
        ([labeled], {"batch_size": 3}),
        ([make_events(8, 3), make_events(4, 4)], {"batch_size": 12}),
    ):
        learner, passes = learn_both_ways(batches, **options)
        assert False in passes
        assert learner.learned >= 8


def test_a_missing_label_long_ago_does_not_prevent_a_single_pass() -> None:
    labels = np.array([1.0, math.nan, 0.0, 1.0])
    learner, passes = learn_both_ways([make_events(4, labels=labels), make_events(4, 1), make_events(4, 2)])
    assert passes == [False, True, True, True]
    assert (learner.learned, learner.pending.counts.expired) == (11, 1)


def test_repeated_events_are_learned_once() -> None:
    batches = [
        make_events(8, ids=np.arange(8)),
        make_events(8, 1, ids=np.arange(4, 12)),
        make_events(4, 2, ids=[20] * 4),
    ]
    learner, passes = learn_both_ways(batches)
    assert passes == [True, False, True, False, True]
    assert (learner.learned, learner.pending.counts.repeated_events) == (13, 7)


def test_events_that_must_be_rejected_change_nothing_before_the_others_are_learned() -> None:
    infinite, unknown, late, mislabeled = (make_events(16, seed, time=np.arange(16.0)) for seed in range(4))
    infinite.features["price"][3] = math.inf  # its score is nan
    unknown.features["item"][5] = 10**6  # the model raises an error
    assert late.time is not None
    assert mislabeled.labels is not None
    late.time[2], mislabeled.labels[1] = math.nan, math.inf
    good = make_events(16, 9, time=np.arange(16.0))
    learner, _ = learn_both_ways([good, infinite, good, unknown, late, mislabeled, good])
    assert (learner.events, learner.rejected, learner.learned) == (7 * 16, 4, 7 * 16 - 4)


def test_an_error_of_the_loss_is_handled_as_with_two_passes() -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        if (labels == 7).any():
            raise ValueError("a label of 7")
        return LOG_LOSS(scores, labels)

    batch = make_events(8, 1)
    assert batch.labels is not None
    batch.labels[2] = 7.0
    learner, _ = learn_both_ways([make_events(8), batch, make_events(8, 2)], loss=loss)
    assert (learner.rejected, learner.learned) == (1, 23)


def test_a_loss_that_changes_the_scores_does_not_change_the_predictions() -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return (scores.mul_(2.0) - labels).square().mean()

    learn_both_ways([make_events(8), make_events(8, 1)], loss=loss)


class Shifting(nn.Module):
    """A model that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(51, 1)

    def forward(self, item: Tensor, **others: Tensor) -> Tensor:
        item += 1
        return self.table(item)


def smoothed_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """A loss that changes the labels in place."""
    labels *= 0.9
    labels += 0.05
    return LOG_LOSS(scores, labels)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("single_pass", [True, False])
def test_code_that_changes_its_inputs_does_not_change_the_events(single_pass: bool, is_late: bool) -> None:
    """Events are predicted, measured, logged and learned with the values that they came with."""
    ids = np.arange(16)
    events = make_events(16, ids=ids)
    items, clicks = events.features["item"].copy(), present(events.labels).copy()
    labels = Labels(ids, clicks.copy())
    learner = make_learner(single_pass, Shifting(), loss=smoothed_loss)
    learner.process(Batch(replace(events, labels=None), labels) if is_late else events)
    assert learner.learned == 16
    np.testing.assert_array_equal(events.features["item"], items)
    np.testing.assert_array_equal(labels.labels if is_late else present(events.labels), clicks)
    (table,) = learner.model.parameters()
    learned_rows = present(table.grad).flatten().nonzero().flatten()
    np.testing.assert_array_equal(learned_rows, np.unique(items) + 1)


@pytest.mark.parametrize("first_pass_is_single", [True, False])
def test_a_run_continues_from_a_checkpoint_of_the_other_way(tmp_path: Path, first_pass_is_single: bool) -> None:
    batches = [make_events(32, seed) for seed in range(6)]
    whole = make_learner(single_pass=True)
    whole.run(Replayed(batches))
    for single_pass, limit in ((first_pass_is_single, 96), (not first_pass_is_single, None)):
        part = make_learner(single_pass, checkpoint=tmp_path)
        part.run(Replayed(batches), events=limit)
        part.close()
    assert part.resumed
    assert plain(part.model.state_dict()) == plain(whole.model.state_dict())
    assert plain(part.optimizer.state_dict()) == plain(whole.optimizer.state_dict())
    assert part.metrics()["log_loss"] == whole.metrics()["log_loss"]


# Models that are the same in both modes ------------------------------------------------------------------------


def scale_in_training(module: nn.Module, x: Tensor) -> Tensor:
    return 2 * x if module.training else x


class Own(nn.Module):
    """A user's own model without anything that depends on the mode."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2), *layers)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


class ReadsMode(Own):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class ReadsModeByName(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if getattr(self, "training") else 1)  # noqa: B009


class ReadsModeInHelper(Own):
    def forward(self, x: Tensor) -> Tensor:
        return scale_in_training(self, super().forward(x))


class ReadsGradMode(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


class Helper:
    """A plain object with a reference to a model."""

    def __init__(self, model: nn.Module) -> None:
        self.models = [model]

    def scale(self, x: Tensor) -> Tensor:
        return scale_in_training(self.models[0], x)

    @staticmethod
    def sum(model: nn.Module, x: Tensor) -> Tensor:
        return scale_in_training(model, x)


class ReadsModeInObject(Own):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper.scale(super().forward(x))


class ReadsModeInStaticMethod(Own):
    def forward(self, x: Tensor) -> Tensor:
        return Helper.sum(self, super().forward(x))


FUNCTIONS = {"scale": scale_in_training}


class ReadsModeInFunctionOfDict(Own):
    def forward(self, x: Tensor) -> Tensor:
        return FUNCTIONS["scale"](self, super().forward(x))


PARTIAL = functools.partial(scale_in_training)


class ReadsModeInPartial(Own):
    def forward(self, x: Tensor) -> Tensor:
        return PARTIAL(self, super().forward(x))


class ReadsModeInDefault(Own):
    def forward(self, x: Tensor, scale: Any = scale_in_training) -> Tensor:
        scaled: Tensor = scale(self, super().forward(x))
        return scaled


class ReadsModeInMethod(Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(super().forward(x))

    def scaled(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class ReadsModeInProperty(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    @property
    def scale(self) -> int:
        return 2 if self.training else 1


class ChangesScaleWithMode(Own):
    scale = 1

    def train(self, mode: bool = True) -> ChangesScaleWithMode:
        self.scale = 2 if mode else 1
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ReadsGradOfTensor(Own):
    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return 2 * scores if scores.requires_grad else scores


class HasUnregisteredModule(Own):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Dropout(0.5)]

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.hidden[0](super().forward(x))
        return scores


class CountsCalls(Own):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class WithMethods(nn.Module):
    """A model as users write them: methods, loops, functions of torch and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.scale = ["a", "b"], nn.Parameter(torch.ones(2))
        self.towers = nn.ModuleDict({name: Own(nn.Dropout(0.0)) for name in self.columns})

    def forward(self, **features: Tensor) -> Tensor:
        parts = [tower(features[name].float().clamp_min(EPSILON)) for name, tower in self.towers.items()]
        return self.combined(parts)

    def combined(self, parts: list[Tensor]) -> Tensor:
        for part in parts[1:]:
            parts[0] + part.log1p()
        stacked = torch.stack([nn.functional.relu(part) for part in parts], dim=1)
        return torch.sigmoid(stacked.sum(1) @ self.scale) * math.sqrt(len(parts))


EPSILON = 1e-6


class Declared(ReadsMode):
    same_in_training = True


class DeclaredDifferent(Own):
    same_in_training = False


def hooked() -> nn.Module:
    model = Own()
    model.layers[0].register_forward_hook(lambda module, inputs, output: scale_in_training(module, output))
    return model


def replaced() -> nn.Module:
    model = Own()
    model.forward = lambda x: scale_in_training(model, x)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("model", models.MODELS)
def test_ready_made_models_are_the_same_in_both_modes(model: str) -> None:
    assert is_same_in_training(models.build(model, SCHEMA))


@pytest.mark.parametrize(
    "model",
    [
        Own(nn.Embedding(2, 2), nn.Conv1d(2, 2, 1), nn.GELU(), nn.Bilinear(2, 2, 2), nn.PReLU()),
        Own(nn.Dropout(0.0), nn.LSTM(2, 2)),
        WithMethods(),
        Declared(),
        Own(Declared()),
    ],
)
def test_models_that_do_not_read_the_mode_are_the_same_in_both_modes(model: nn.Module) -> None:
    assert is_same_in_training(model)


@pytest.mark.parametrize(
    "model",
    [
        Own(nn.Dropout(0.1)),
        Own(nn.AlphaDropout(0.1)),
        Own(nn.BatchNorm1d(2)),
        Own(nn.InstanceNorm1d(2, track_running_stats=True)),
        Own(nn.RReLU()),
        Own(nn.LSTM(2, 2, 2, dropout=0.1)),
        Own(nn.MultiheadAttention(2, 1, dropout=0.1)),
        Own(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))),
        Own(nn.utils.spectral_norm(nn.Linear(2, 2))),
        ReadsMode(),
        ReadsModeByName(),
        ReadsModeInHelper(),
        ReadsGradMode(),
        ReadsModeInObject(),
        ReadsModeInStaticMethod(),
        ReadsModeInFunctionOfDict(),
        ReadsModeInPartial(),
        ReadsModeInDefault(),
        ReadsModeInMethod(),
        ReadsModeInProperty(),
        ChangesScaleWithMode(),
        ReadsGradOfTensor(),
        HasUnregisteredModule(),
        CountsCalls(),
        Own(nn.MultiheadAttention(2, 1)),
        DeclaredDifferent(),
        Own(DeclaredDifferent()),
        hooked(),
        replaced(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_that_may_differ_between_the_modes_keep_two_passes(model: nn.Module) -> None:
    assert not is_same_in_training(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_the_code_of_torchscript_is_unknown() -> None:
    assert not is_same_in_training(torch.jit.script(nn.Linear(2, 2)))

"""The bias of a ready-made model begins at the log odds of the first labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadam import CAdam
from cadam.cli.main import main
from cadam.online import Batch, Events, LabelOptions, Labels, Learner, models
from cadam.online.models.initial_bias import FIRST_LABELS, FirstLabels
from cadam.online.models.networks import Linear
from cadam.online.persistence.checkpoints import read_newest
from tests.online.streams import SCHEMA, Replayed, events, table, weights

LOG_LOSS = nn.functional.binary_cross_entropy_with_logits


def build(name: str = "deepfm", seed: int = 0) -> Linear:
    torch.manual_seed(seed)
    return models.build(name, SCHEMA)


def learner(model: nn.Module | None = None, lr: float = 0.01, **options: Any) -> Learner:
    model = build() if model is None else model
    return Learner(model, CAdam(model.named_parameters(), lr=lr), LOG_LOSS, **{"initialize_bias": True, **options})


def bias(ours: Learner) -> float:
    assert isinstance(ours.model, Linear)
    return ours.model.inputs.bias.item()


def find_log_odds(labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    first = FirstLabels()
    first.add(labels, weights)
    log_odds = first.log_odds()
    return math.nan if log_odds is None else log_odds


def with_labels(labels: list[float], first: int = 0, weights: list[float] | None = None) -> Events:
    batch = events(len(labels), first=first)
    batch.labels = np.array(labels, dtype=np.float32)
    batch.weights = None if weights is None else np.array(weights, dtype=np.float32)
    return batch


def test_the_log_odds_are_finite_and_do_not_depend_on_the_unit_of_weights() -> None:
    labels = np.array([1, 0, 0, 0, 0, 0, 0, 0], dtype=np.float32)
    assert find_log_odds(labels) == pytest.approx(math.log(1.5 / 7.5))
    assert find_log_odds(labels, np.full(8, 3.0)) == pytest.approx(math.log(1.5 / 7.5))
    weights = np.array([4.0, 1, 1, 1, 1, 1, 1, 1])
    assert find_log_odds(labels, weights) == pytest.approx(find_log_odds(labels, 0.1 * weights))
    weighted, unweighted = find_log_odds(labels, weights), find_log_odds(labels)
    assert weighted is not None
    assert unweighted is not None
    assert weighted > unweighted
    assert find_log_odds(np.zeros(10)) == pytest.approx(-math.log(21))  # one class
    assert find_log_odds(np.ones(10)) == pytest.approx(math.log(21))
    assert find_log_odds(np.full(4, 0.5)) == 0
    assert math.isnan(find_log_odds(np.ones(3), np.zeros(3)))
    assert math.isnan(find_log_odds(np.empty(0)))


@pytest.mark.parametrize("name", ["linear", "fm", "mlp", "deepfm", "dcn"])
@pytest.mark.parametrize("tune_rate", [False, True])
def test_the_bias_is_set_before_the_first_steps_and_after_their_predictions(name: str, tune_rate: bool) -> None:
    first = with_labels([1, *[0] * 15])
    ours, plain = (learner(build(name), lr=1e-6, tune_rate=tune_rate, initialize_bias=each) for each in (True, False))
    scores = ours.learn(first)
    assert scores.tobytes() == plain.learn(first).tobytes(), "a prediction must not depend on its label"
    assert bias(ours) == pytest.approx(math.log(1.5 / 15.5), abs=0.01)
    ours.learn(with_labels([1.0] * (FIRST_LABELS - 16), first=16))
    expected = math.log((FIRST_LABELS - 14.5) / 15.5)
    for model in ours.training.models:
        assert isinstance(model, Linear)
        assert model.inputs.bias.item() == pytest.approx(expected, abs=0.02), "also in the models of other rates"
    ours.learn(with_labels([0.0] * 16, first=FIRST_LABELS))
    assert bias(ours) == pytest.approx(expected, abs=0.02), "the estimate is complete"


def test_late_labels_and_weights_set_the_bias(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="cadam.online")
    ours = learner(lr=1e-6)
    ours.process(events(20, labels=False))
    ours.process(with_labels([1.0, 1.0], first=100, weights=[0.0, 0.0]))
    assert bias(ours) == pytest.approx(0, abs=0.001), "labels with the weight 0 say nothing"
    ours.process(Batch(labels=Labels(table(20)["event"], np.array([1.0] * 2 + [0.0] * 18))))
    assert bias(ours) == pytest.approx(math.log(2.5 / 18.5), abs=0.01)
    ours.process(with_labels([1.0] * FIRST_LABELS, first=200))
    share = (FIRST_LABELS + 2.5) / 18.5
    assert f"the bias starts at {math.log(share):.2f}, the log odds of the first 276 labels" in caplog.messages


def test_it_needs_a_ready_made_model_and_the_log_loss() -> None:
    model = build()
    optimizer = CAdam(model.named_parameters(), lr=0.01)
    with pytest.raises(ValueError, match="a ready-made model and the log loss"):
        Learner(model, optimizer, nn.functional.mse_loss, initialize_bias=True)
    with pytest.raises(ValueError, match="a ready-made model and the log loss"):
        learner(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="labels that are all negative at first"):
        learner(labels=LabelOptions(horizon=10, early_positives=True))
    with pytest.raises(ValueError, match="the log odds of one label"):
        learner(build("fm"), per_event=True)


@pytest.mark.parametrize("tune_rate", [False, True])
def test_a_run_that_is_killed_while_the_bias_is_set_continues_to_the_bit(tmp_path: Path, tune_rate: bool) -> None:
    batches: list[Any] = [events(16, labels=False), with_labels([0.0] * 100, 16), with_labels([1.0] * 150, 116)]
    batches += [with_labels([0.0, 1.0] * 50, 266), with_labels([1.0] * 50, 366)]
    whole = learner(tune_rate=tune_rate)
    whole.run(Replayed(batches))
    for end in range(1, 5):
        folder = tmp_path / str(end)
        learner(checkpoint=folder, tune_rate=tune_rate).run(Replayed(batches[:end]))
        resumed = learner(checkpoint=folder, tune_rate=tune_rate)
        resumed.run(Replayed(batches))
        assert weights(resumed) == weights(whole)


def test_a_warm_started_learner_keeps_its_bias(tmp_path: Path) -> None:
    ours = learner(lr=1e-6)
    trained = build(seed=1).state_dict()
    ours.warm_start({"model": trained})
    ours.run(Replayed([with_labels([0.0] * 16)]))
    assert bias(ours) == pytest.approx(0, abs=0.001)


def test_cadam_run_sets_the_bias_of_ready_made_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = table(640)
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    data = tmp_path / "clicks.csv"
    data.write_text("\n".join(rows) + "\n")
    command = ["run", str(data), "--label", "click", "--ignore", "event,at", "--model", "fm", "--lr", "1e-9"]
    assert main([*command, "--checkpoint", str(tmp_path / "state")]) == 0
    positives = columns["click"][:256].sum()
    expected = math.log((positives + 0.5) / (256 - positives + 0.5))
    assert float(read_newest(tmp_path / "state")[1]["model"]["inputs.bias"]) == pytest.approx(expected, abs=1e-4)
    assert f"the bias starts at {expected:.2f}, the log odds of the first 256 labels" in caplog.messages

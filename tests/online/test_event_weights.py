"""Weights of events count in the loss and in the metrics, and downsampled negatives are corrected."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from cadam.cli.main import main
from cadam.online import Events, Learner, LogOptions, Schema, StreamMetrics
from cadam.online.models.model_file import LOG_LOSS
from tests.online.streams import Small, build, events, learner, weights


class Linear(torch.nn.Module):
    """A model without randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, price: torch.Tensor) -> torch.Tensor:
        return self.weight[0] + self.weight[1] * price


def linear(**options: object) -> Learner:
    model = Linear()
    return Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), LOG_LOSS, **options)  # type: ignore[arg-type]


def test_the_gradient_is_that_of_the_weighted_sum_over_the_number_of_events() -> None:
    price, labels, weight = np.array([1.0, 2.0, -1.0], np.float32), np.array([1, 0, 1]), np.array([2.0, 0.5, 0.0])
    ours = linear()
    ours.learn(Events({"price": price}, labels, weights=weight))
    # At weights of zero the gradient of the log loss by the logit is 0.5 - label.
    gradient = np.stack([np.ones(3), price]) @ (weight * (0.5 - labels)) / 3
    (parameter,) = ours.model.parameters()
    np.testing.assert_allclose(parameter.detach().numpy(), -0.1 * gradient, rtol=1e-6)


@pytest.mark.parametrize("is_late", [False, True])
def test_unit_weights_change_nothing_and_weights_survive_the_wait(is_late: bool) -> None:
    plain, unit, heavy = (learner(build(), horizon=50 if is_late else math.inf) for _ in range(3))
    for one, value in ((plain, None), (unit, 1.0), (heavy, 3.0)):
        torch.manual_seed(0)
        for number in range(8):
            batch = events(20, seed=number, first=20 * number)
            one.learn(replace(batch, weights=None if value is None else np.full(20, value)))
        one.finish()
    assert isinstance(unit.model, Small)
    assert weights(unit) == weights(plain)
    assert weights(heavy) != weights(plain)
    assert unit.metrics()["log_loss"] == pytest.approx(plain.metrics()["log_loss"], rel=1e-12)


def test_metrics_are_weighted_means() -> None:
    price, labels = np.linspace(-1, 1, 40), (np.arange(40) % 3 == 0).astype(np.float32)
    weight = np.random.default_rng(0).integers(1, 4, 40)
    weighted, repeated = (linear(metrics=[StreamMetrics(kinds=["calibration", "normalized_entropy"])]) for _ in "ab")
    weighted.learn(Events({"price": price}, labels, weights=weight))
    repeated.learn(Events({"price": np.repeat(price, weight)}, np.repeat(labels, weight)))
    expected = repeated.metrics()
    for name in ("log_loss", "mean_label", "best_constant", "calibration/total", "normalized_entropy/total"):
        assert weighted.metrics()[name] == pytest.approx(expected[name], rel=1e-9), name
    assert (weighted.metrics()["labeled"], expected["labeled"]) == (40, weight.sum())


def test_per_event_training_takes_weights_into_account() -> None:
    from cadam import CAdam
    from cadam.online import models

    schema = Schema({"price": "number"}, label="click")
    results = []
    for value in (1.0, 4.0):
        torch.manual_seed(0)
        model = models.build("linear", schema)
        one = Learner(model, CAdam(model.named_parameters(), lr=0.1), LOG_LOSS, per_event=True)
        one.learn(Events({"price": np.array([1.0, 2.0])}, np.array([1, 0]), weights=np.array([1.0, value])))
        results.append([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert results[0] != results[1]


def test_a_weight_below_zero_is_rejected() -> None:
    schema = Schema({"price": "number"}, label="click", weight="w")
    records = [{"price": 1.0, "click": 1, "w": 2.0}, {"price": 1.0, "click": 0, "w": -1.0}, {"price": 1.0, "click": 0}]
    batch = schema.convert_records(records, ["1", "2", "3"])
    assert batch.events is not None
    assert np.asarray(batch.events.weights).tolist() == [2.0]
    assert [rejected.reason for rejected in batch.rejected] == ["w: a weight must be at least 0", "missing field 'w'"]


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_a_weight_that_is_no_weight_rejects_its_event_alone(wrong: float, has_labels: bool) -> None:
    """One such weight in the mean loss would spoil all weights of the model."""
    ours, price = linear(), np.array([1.0, 2.0, -1.0])
    labels = np.array([1.0, 0.0, 1.0] if has_labels else [math.nan, 0.0, 1.0])
    ours.learn(Events({"price": price}, labels, weights=np.array([wrong, 0.5, 2.0])))
    assert (ours.learned, ours.rejected) == (2, 1)
    assert list(ours.rejections.reasons) == [f"its weight is {wrong}"]
    others = linear()
    others.learn(Events({"price": price[1:]}, labels[1:], weights=np.array([0.5, 2.0])))
    assert weights(ours) == weights(others)


def test_downsampled_negatives_are_corrected() -> None:
    rate, kept = 0.04, 0.1
    sampled = rate / (rate + kept * (1 - rate))
    schema = Schema({"price": "number"}, negative_rate=kept)
    np.testing.assert_allclose(schema.probabilities(np.array([np.log(sampled / (1 - sampled))])), [rate], rtol=1e-12)
    with pytest.raises(ValueError, match="negative_rate must be a share"):
        Schema({"price": "number"}, negative_rate=0.0)


def test_the_log_has_the_weight_and_the_corrected_probability(tmp_path: Path) -> None:
    schema = Schema({"price": "number"}, negative_rate=0.25)
    ours = linear(log=LogOptions(tmp_path, probabilities=schema.probabilities))
    ours.learn(Events({"price": np.ones(3)}, np.array([0, 1, 0]), weights=np.arange(1, 4)))
    assert ours.log is not None
    ours.log.flush()
    table = pq.read_table(tmp_path).to_pydict()
    assert table["weight"] == [1, 2, 3]
    assert table["probability"] == pytest.approx([0.2] * 3)


def test_a_loss_without_weight_is_refused_and_events_with_weights_are_learned_with_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clicks.csv").write_text("price,click,w\n" + "1.5,1,2\n2.5,0,1\n" * 200)
    Schema({"price": "number"}, label="click", weight="w").write("schema.json")
    build_function = "import torch\n\n\ndef build():\n    return torch.nn.Linear(1, 1)\n"
    Path("own.py").write_text(f"{build_function}\n\ndef loss(scores, labels):\n    return 0\n")
    assert main(["run", "clicks.csv", "--schema", "schema.json", "--model", "own.py:build"]) == 2
    assert "the loss must take it" in capfd.readouterr().err
    assert main(["run", "clicks.csv", "--schema", "schema.json", "--model", "fm", "--batch-size", "8"]) == 0
    per_event = ("--batch-size", "1", "--checkpoint", "one")
    assert main(["run", "clicks.csv", "--schema", "schema.json", "--model", "linear", *per_event]) == 0
    assert "one event at a time, with torch: events with weights are not compiled" in caplog.text

"""`cadam run` with a model file that has its own loss, and with models whose output does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cadam import CAdam
from cadam.cli.main import main
from cadam.online import Events, Learner
from cadam.online.models.model_file import LOG_LOSS

MODEL = """
import torch
from cadam.online import Schema

SCHEMA = Schema({"x": "number"}, label="y")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, OUTPUTS)

    def forward(self, x):
        return self.layer(x[:, None]).squeeze(1)


def build():
    return Model()
"""
MSE = "\nloss = torch.nn.functional.mse_loss\n"


def run(folder: Path, labels: list[object], outputs: int = 1, loss: str = MSE) -> int:
    lines = [json.dumps({"x": row / 10, "y": label}) for row, label in enumerate(labels)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "own.py").write_text(MODEL.replace("OUTPUTS", str(outputs)) + loss)
    command = ["run", f"jsonl:{folder / 'a.jsonl'}", "--model", f"{folder / 'own.py'}:build", "--batch-size", "10"]
    return main([*command, "--checkpoint", str(folder / "state"), "--lr", "0.01"])


def test_a_model_with_its_own_loss_learns_labels_outside_0_to_1(tmp_path: Path) -> None:
    assert run(tmp_path, [3.0 * row for row in range(100)]) == 0
    assert not (tmp_path / "state" / "rejected.jsonl").read_text()


def test_a_model_with_the_log_loss_rejects_labels_outside_0_to_1(tmp_path: Path) -> None:
    assert run(tmp_path, [3.0 * row for row in range(100)], loss="") == 1


def test_a_model_that_returns_several_scores_per_event_ends_in_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, [float(row % 2) for row in range(100)], outputs=3) == 1
    assert "one score per event" in capsys.readouterr().err


@pytest.mark.parametrize("mean", ["(scores - labels).square()", "1.0"])
def test_a_loss_that_is_not_one_tensor_with_one_number_ends_in_a_message(
    mean: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = f"\ndef loss(scores, labels):\n    return {mean}\n"
    assert run(tmp_path, [float(row % 2) for row in range(100)], loss=loss) == 1
    assert "the loss must return a tensor with the mean over events" in capsys.readouterr().err


def test_a_loss_without_a_gradient_ends_in_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = "\ndef loss(scores, labels):\n    return (scores.round().detach() - labels).square().mean()\n"
    assert run(tmp_path, [float(row % 2) for row in range(100)], loss=loss) == 1
    assert "the loss does not depend on any parameter that can be learned" in capsys.readouterr().err


def test_lists_as_labels_end_in_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [[0, 1]] * 100) == 1
    assert "rejected.jsonl" in capsys.readouterr().err
    assert "y: " in (tmp_path / "state" / "rejected.jsonl").read_text()


@pytest.mark.parametrize(
    ("loss", "name"),
    [(nn.functional.mse_loss, "loss"), (LOG_LOSS, "log_loss"), (nn.BCEWithLogitsLoss(), "log_loss")],
)
def test_only_the_loss_that_is_trained_is_reported(loss: object, name: str, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.layer(x[:, None]).squeeze(1)
            return scores

    torch.manual_seed(0)
    model = Model()
    learner = Learner(model, CAdam(model.parameters()), loss, checkpoint=tmp_path)  # type: ignore[arg-type]
    labels = np.array([0.0, 1.0] if name == "log_loss" else [50.0, 70.0], np.float32)
    scores = learner.learn(Events({"x": np.ones(2)}, labels=labels))
    values = learner.metrics()
    assert {"loss", "log_loss", "best_constant"} & values.keys() == {name} | (
        {"best_constant"} if name == "log_loss" else set()
    )
    assert values[name] == pytest.approx(loss(torch.tensor(scores), torch.tensor(labels)).item())  # type: ignore[operator]
    learner.save()
    learner.close()
    again = Learner(model, CAdam(model.parameters()), loss, checkpoint=tmp_path)  # type: ignore[arg-type]
    assert again.resume()
    assert again.metrics()[name] == values[name]
    again.close()


def test_a_run_is_reproducible_if_its_loss_draws_from_numpy(tmp_path: Path) -> None:
    noise = "\nimport numpy\nloss = lambda scores, labels: ((scores - labels) ** 2).mean() * numpy.random.rand()\n"
    weights = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, [float(row % 2) for row in range(100)], loss=noise) == 0
        path = max((tmp_path / name / "state").glob("checkpoint-*.safetensors"))
        weights.append({key: value.tolist() for key, value in load_file(path).items() if "layer" in key})
    assert weights[0] == weights[1] != {}

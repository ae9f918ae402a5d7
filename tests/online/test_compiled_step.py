"""Models that torch.compile compiles learn the same as others, up to rounding."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadam import CAdam
from cadam.cli.main import main
from cadam.online import Events, Learner, models
from cadam.online.compiled_step import CompiledStep, find_missing_compiler
from cadam.online.data.events import Columns
from cadam.online.data.schema import Schema
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.training_step import TrainingStep

needs_compiler = pytest.mark.skipif(find_missing_compiler("cpu") is not None, reason="no C++ compiler")


class Tiny(nn.Module):
    """A model of one weight."""

    same_in_training = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Deep(nn.Module):
    """A model with an embedding table with sparse gradients, and hidden layers."""

    same_in_training = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 8, sparse=True)
        self.layers = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, item: Tensor, price: Tensor) -> Tensor:
        price = price.to(self.table.weight.dtype)
        scores: Tensor = self.layers(torch.cat([self.table(item), price.unsqueeze(1)], 1)).squeeze(1)
        return scores


def both_steps(dtype: torch.dtype) -> tuple[CompiledStep, TrainingStep]:
    """Return the compiled and the generic step of equal models."""
    torch.manual_seed(0)
    model = Deep().to(dtype)
    reference = copy.deepcopy(model)
    compiled = CompiledStep(model, CAdam(model.named_parameters(), lr=0.003), LOG_LOSS)
    return compiled, TrainingStep(reference, CAdam(reference.named_parameters(), lr=0.003), LOG_LOSS)


def deep_columns(seed: int, count: int = 32) -> Columns:
    random = np.random.default_rng(seed)
    item, price = random.integers(0, 200, count), random.normal(size=count).astype(np.float32)
    labels = random.random(count) < 1 / (1 + np.exp(-(item % 5 - 2 + price)))
    return Events({"item": item, "price": price}, labels=labels).columns()


def learn(step: TrainingStep, batch: Columns) -> np.ndarray:
    scores = step.learn(batch)
    assert scores is not None
    return scores


@pytest.mark.slow
@needs_compiler
def test_one_compiled_step_from_the_same_state_agrees_to_rounding() -> None:
    compiled, generic = both_steps(torch.float32)
    for seed, count in enumerate((32, 2, 17, 32)):
        generic.model.load_state_dict(compiled.model.state_dict())
        generic.optimizer.load_state_dict(copy.deepcopy(compiled.optimizer.state_dict()))
        batch = deep_columns(seed, count)
        np.testing.assert_allclose(learn(compiled, batch), learn(generic, batch), rtol=1e-6, atol=1e-6)
        for mine, other in zip(compiled.model.parameters(), generic.model.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@needs_compiler
def test_a_thousand_compiled_steps_in_float64_agree() -> None:
    compiled, generic = both_steps(torch.float64)
    for seed in range(1000):
        batch = deep_columns(seed)
        np.testing.assert_allclose(learn(compiled, batch), learn(generic, batch), rtol=1e-6, atol=1e-6)
    for name, value in generic.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
@needs_compiler
def test_the_log_loss_over_a_thousand_compiled_steps_agrees() -> None:
    losses = []
    for step in both_steps(torch.float32):
        total = 0.0
        for seed in range(1000):
            batch = deep_columns(seed)
            total += float(LOG_LOSS(torch.from_numpy(learn(step, batch)), torch.from_numpy(batch["label"])))
        losses.append(total)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[1] / 1000 < 0.6  # the model has learned something


@needs_compiler
def test_a_compiled_model_learns_the_same() -> None:
    model = Tiny()
    learners = [
        Learner(each, CAdam(each.named_parameters(), lr=0.01), LOG_LOSS, compile=is_compiled)
        for each, is_compiled in ((model, True), (copy.deepcopy(model), False))
    ]
    assert isinstance(learners[0].training, CompiledStep)
    assert learners[0].training_mode == "in batches, compiled by torch.compile"
    random = np.random.default_rng(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for count in (8, 5, 8, 3):
        x = random.normal(size=count).astype(np.float32)
        scores = [learner.learn(Events({"x": x}, labels=x > 0)) for learner in learners]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # one graph for all batch sizes
    torch.testing.assert_close(learners[0].model.state_dict(), learners[1].model.state_dict())
    assert list(learners[0].model.state_dict()) == ["weight"]


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = Tiny()
    with pytest.raises(RuntimeError, match="needs a C\\+\\+ compiler, and no-such-compiler was not found: install one"):
        Learner(model, CAdam(model.parameters()), LOG_LOSS, compile=True)


def test_ready_made_models_and_tuned_rates_are_refused() -> None:
    model = models.build("linear", Schema({"x": "number"}, label="y"))
    with pytest.raises(ValueError, match="compile is for your own models"):
        Learner(model, CAdam(model.parameters()), LOG_LOSS, compile=True)
    own = Tiny()
    with pytest.raises(ValueError, match="leave out compile or tune_rate"):
        Learner(own, CAdam(own.parameters()), LOG_LOSS, compile=True, tune_rate=True)


def test_the_command_refuses_to_compile_ready_made_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text("x,y\n" + "1.5,0\n2.5,1\n" * 20)
    assert main(["run", "x.csv", "--label", "y", "--compile"]) == 2
    assert "--compile is for your own model" in capsys.readouterr().err

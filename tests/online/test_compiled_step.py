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
from cadam.online.data.schema import Schema
from cadam.online.models.model_file import LOG_LOSS

needs_compiler = pytest.mark.skipif(find_missing_compiler("cpu") is not None, reason="no C++ compiler")


class Tiny(nn.Module):
    """A model of one weight."""

    same_in_training = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


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

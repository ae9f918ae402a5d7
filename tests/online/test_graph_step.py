"""Training steps as CUDA graphs compute the same weights as steps without graphs, and never freeze Python code."""

from __future__ import annotations

import copy
import gc
import json
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cadam
from cadam.online import Learner, models
from cadam.online.graph_step import EAGER_STEPS, MAX_CAPTURES, GraphStep, StepSnapshot
from cadam.online.models.mode import has_only_known_code
from cadam.online.models.model_file import LOG_LOSS
from tests.online.test_training_step import SCHEMA, make_events, plain

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


# Which code may be captured ------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A model of a user whose code can be analyzed."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(9, 1)

    def forward(self, item: Tensor, price: Tensor, **_: Tensor) -> Tensor:
        x = torch.cat([self.items(item), price.nan_to_num().unsqueeze(1)], 1)
        return self.out(torch.relu(x)).squeeze(1)


class Counting(Plain):
    """A model that declares to be the same in training, but counts its calls in Python."""

    same_in_training = True
    calls = 0

    def forward(self, item: Tensor, price: Tensor, **_: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(item, price) * (1 + self.calls % 2)


class Reading(Plain):
    """A model that reads a value of a tensor on the host."""

    def forward(self, item: Tensor, price: Tensor, **_: Tensor) -> Tensor:
        scores = super().forward(item, price)
        return scores * 2 if float(scores.detach().sum()) > 1e9 else scores


calls: list[int] = []


def counting_loss(scores: Tensor, labels: Tensor) -> Tensor:
    calls.append(len(scores))
    return LOG_LOSS(scores, labels)


def squared_error(scores: Tensor, labels: Tensor) -> Tensor:
    return (torch.sigmoid(scores) - labels).square().mean()


@pytest.mark.parametrize(
    ("model", "loss", "is_known"),
    [
        (Plain, LOG_LOSS, True),
        (Plain, squared_error, True),
        (Plain, nn.BCEWithLogitsLoss(), True),
        (Plain, counting_loss, False),
        (Plain, lambda scores, labels: counting_loss(scores, labels), False),
        (Counting, LOG_LOSS, False),
        (lambda: nn.Sequential(Plain(), nn.Dropout()), LOG_LOSS, False),
        *((lambda name=name: models.build(name, SCHEMA), LOG_LOSS, True) for name in models.MODELS),
    ],
)
def test_only_code_without_memory_is_captured(
    model: Callable[[], nn.Module], loss: Callable[..., Tensor], is_known: bool
) -> None:
    assert has_only_known_code(model(), loss) == is_known


@pytest.mark.parametrize(("options", "reason"), [({}, None), ({"sparse_updates": "exact"}, "exact sparse updates")])
def test_only_optimizers_that_can_be_captured_become_capturable(options: dict[str, Any], reason: str | None) -> None:
    model = models.build("fm", SCHEMA)
    optimizer = cadam.CAdam(model.named_parameters(), **options)
    step = GraphStep(model, optimizer, LOG_LOSS)
    assert (step.unsupported is None) if reason is None else (reason in str(step.unsupported))
    assert optimizer.param_groups[0]["capturable"] == (reason is None)


class Scaled(Plain):
    """A model with plain attributes, which a graph would contain as constants."""

    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.factors: list[Any] = [1.0, {"more": [torch.ones(1)]}]

    def forward(self, item: Tensor, price: Tensor, **_: Tensor) -> Tensor:
        return super().forward(item, price) * self.scale * self.factors[0] + self.offset


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "freeze": lambda model, _: model.out.bias.requires_grad_(False),
    "attribute": lambda model, _: setattr(model, "scale", 2.0),
    "attribute of the class": lambda model, _: setattr(model, "offset", 1.0),
    "entry of a list": lambda model, _: operator.setitem(model.factors, 0, 2.0),
    "nested entry": lambda model, _: operator.setitem(model.factors[1]["more"], 0, torch.ones(1)),
    "option of a layer": lambda model, _: setattr(model.items, "max_norm", 1.0),
    "rate on the host": lambda _, optimizer: optimizer.param_groups[0]["lr"].fill_(0.5),
    "option": lambda _, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.9)),
    "module": lambda model, _: setattr(model, "out", nn.Linear(9, 1)),
    "memory": lambda model, _: setattr(model.out.weight, "data", model.out.weight.data.clone()),
    "state": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_a_graph_contains_is_noticed(change: str) -> None:
    model = Scaled()
    optimizer = cadam.CAdam(model.named_parameters(), lr=torch.tensor(0.01))
    model(**{"item": torch.arange(4), "price": torch.ones(4)}).sum().backward()
    optimizer.step()
    assert has_only_known_code(model, LOG_LOSS)
    snapshot = StepSnapshot(model, optimizer)
    model.eval()
    optimizer.step()
    model(**{"item": torch.arange(4), "price": torch.ones(4)}).sum().backward()
    assert snapshot.is_unchanged()
    CHANGES[change](model, optimizer)
    assert not snapshot.is_unchanged()


@pytest.mark.parametrize("name", ["linear", "fm", "mlp", "deepfm"])
def test_training_a_ready_made_model_does_not_change_what_a_graph_contains(name: str) -> None:
    """If it did, the graphs of each step would be captured again, which takes longer than it saves."""
    model = models.build(name, SCHEMA)
    optimizer = cadam.CAdam(model.named_parameters(), lr=0.01)

    def train() -> None:
        optimizer.zero_grad()
        columns = {name: torch.as_tensor(values) for name, values in make_events(8).features.items()}
        model(**columns).sum().backward()
        optimizer.step()

    train()
    snapshot = StepSnapshot(model, optimizer)
    train()
    assert snapshot.is_unchanged()


# With a CUDA device --------------------------------------------------------------------------------------------


def graph_learner(
    model: nn.Module | str = "deepfm", loss: Any = LOG_LOSS, graphs: bool = True, **options: Any
) -> Learner:
    torch.manual_seed(0)
    built = (models.build(model, SCHEMA) if isinstance(model, str) else model).cuda()
    learner = Learner(built, cadam.CAdam(built.named_parameters(), lr=0.01), loss, **options)
    assert isinstance(learner.training, GraphStep)
    if not graphs:
        learner.training.unsupported = "for this test"
    return learner


def state(learner: Learner) -> Any:
    torch.cuda.synchronize()
    return plain(
        copy.deepcopy(
            {"model": _on_cpu(learner.model.state_dict()), "optimizer": _on_cpu(learner.optimizer.state_dict())}
        )
    )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_on_cpu(entry) for entry in value]
    return value.cpu() if isinstance(value, Tensor) else value


def captured(learner: Learner) -> int:
    assert isinstance(learner.training, GraphStep)
    return len(learner.training._graphs)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("model", [*models.MODELS, Plain])
def test_graphs_compute_the_bits_of_steps_without_graphs(model: Any) -> None:
    with_graphs, without = (
        graph_learner(model if isinstance(model, str) else model(), graphs=graphs) for graphs in (True, False)
    )
    if not isinstance(model, str):
        without.model.load_state_dict(with_graphs.model.state_dict())
    for seed in range(40):
        batch = make_events(64 if seed % 3 else 40, seed)
        if seed == 20:
            batch.features["price"][3] = np.inf  # its score is not finite, so one event is rejected
        np.testing.assert_array_equal(with_graphs.learn(batch), without.learn(batch))
    assert captured(with_graphs) == 2
    assert state(with_graphs) == state(without)
    assert with_graphs.metrics() == without.metrics()
    assert with_graphs.steps == 40
    assert "as CUDA graphs" in with_graphs.training_mode


@pytest.mark.cuda
@needs_cuda
def test_event_weights_reach_the_captured_loss() -> None:
    learners = [graph_learner(graphs=graphs) for graphs in (True, False)]
    for seed in range(8):
        batch = make_events(32, seed, weights=np.random.default_rng(seed).random(32).astype(np.float32))
        scores = [learner.learn(batch) for learner in learners]
        np.testing.assert_array_equal(scores[0], scores[1])
    assert captured(learners[0]) == 1
    assert state(learners[0]) == state(learners[1])


@pytest.mark.cuda
@needs_cuda
def test_changes_of_options_state_and_parameters_reach_the_next_step() -> None:
    learners = [graph_learner(graphs=graphs) for graphs in (True, False)]
    for seed in range(24):
        for learner in learners:
            if seed == 6:
                learner.optimizer.param_groups[0]["lr"] = 0.003
            if seed == 11:
                learner.optimizer.load_state_dict(copy.deepcopy(learner.optimizer.state_dict()))
            if seed == 16:
                learner.model.deep[0].weight.data = learner.model.deep[0].weight.data.clone()  # type: ignore[union-attr,index]
        batch = make_events(64, seed)
        np.testing.assert_array_equal(learners[0].learn(batch), learners[1].learn(batch))
    assert captured(learners[0]) == 1
    assert state(learners[0]) == state(learners[1])


@pytest.mark.cuda
@needs_cuda
def test_garbage_of_another_learner_does_not_invalidate_a_capture() -> None:
    thresholds = gc.get_threshold()
    try:
        for _ in range(3):
            learner = graph_learner()
            gc.set_threshold(1, 1, 1)  # garbage is collected at almost every allocation, unless that is disabled
            for seed in range(6):
                learner.learn(make_events(64, seed))
            gc.set_threshold(0)
            assert captured(learner) == 1
            learner.itself = learner  # type: ignore[attr-defined]  # a cycle, which only the garbage collector frees
            del learner
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.cuda
@needs_cuda
def test_a_hook_is_called_in_every_step() -> None:
    learner = graph_learner()
    for seed in range(6):
        learner.learn(make_events(64, seed))
    seen: list[int] = []
    handle = learner.model.register_forward_hook(lambda *_: seen.append(1))
    for seed in range(6):
        learner.learn(make_events(64, seed))
    assert len(seen) == 6
    handle.remove()
    assert np.isfinite(learner.learn(make_events(64, 7))).all()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize(("model", "loss"), [(Counting, LOG_LOSS), (Reading, LOG_LOSS), (Plain, counting_loss)])
def test_code_that_cannot_be_captured_runs_in_every_step(model: type[nn.Module], loss: Any) -> None:
    torch.manual_seed(0)
    learner = graph_learner(model(), loss)
    calls.clear()
    for seed in range(2 * EAGER_STEPS + 4):
        assert np.isfinite(learner.learn(make_events(64, seed))).all()
    assert captured(learner) == 0
    assert "not as CUDA graphs" in learner.training_mode
    assert torch.rand(3, device="cuda").max() < 1  # the random number generator works after a failed capture
    assert learner.steps == 2 * EAGER_STEPS + 4
    if loss is counting_loss:
        assert len(calls) == 2 * learner.steps  # in the step, and for the mean loss


@pytest.mark.cuda
@needs_cuda
def test_a_rate_that_changes_in_every_step_ends_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadam.online.graph_step.MAX_CAPTURES", 3)
    assert MAX_CAPTURES > 3
    learner = graph_learner()
    for seed in range(10):
        learner.optimizer.param_groups[0]["lr"] = 0.01 / (1 + seed)
        learner.learn(make_events(64, seed))
    assert "not as CUDA graphs" in learner.training_mode


@pytest.mark.cuda
@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("seed", range(5))
def test_a_run_with_graphs_killed_at_ten_moments_ends_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    script = Path(__file__).parent / "graph_process.py"
    command = [sys.executable, str(script), str(tmp_path), "10", str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    whole, *killed = map(json.loads, result.stdout.splitlines())
    assert sum(run.pop("kills") for run in killed) >= 10
    assert whole.pop("kills") == 0
    assert whole["graphs"] > 0
    for run in killed:
        assert {**run, "graphs": whole["graphs"]} == whole

"""The fused training step computes the same as autograd, and leaves to autograd what it does not support."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadam import CAdam, clip_grad_norm_
from cadam.online import Events, Learner, fused_step, models
from cadam.online.fused_step import MODELS, FusedStep, create_training_step
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.models.networks import DeepFM
from cadam.online.training_step import TrainingStep
from tests.online.models.test_compiled_inputs import SCHEMA, build, features

pytestmark = pytest.mark.usefixtures("single_thread")
NAMES = [name for name, kind in models.MODELS.items() if kind in MODELS]


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Use one thread, as the command line does: in small operations threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def columns(count: int, seed: int, **changes: Any) -> dict[str, np.ndarray]:
    labels = np.random.default_rng(1000 + seed).random(count) < 0.3
    return Events({**features(count, seed), **changes}, labels=labels).columns()


def both_steps(name: str, dtype: torch.dtype = torch.float32, lr: float = 0.01) -> tuple[FusedStep, TrainingStep]:
    """Return the fused and the generic step of equal models."""
    model = build(name, dtype)
    reference = copy.deepcopy(model)
    fused = create_training_step(model, CAdam(model.named_parameters(), lr=lr), LOG_LOSS)
    assert isinstance(fused, FusedStep)
    assert fused.find_unsupported() is None
    return fused, TrainingStep(reference, CAdam(reference.named_parameters(), lr=lr), LOG_LOSS)


def state(step: TrainingStep) -> dict[str, torch.Tensor]:
    return {**step.model.state_dict(), **{f"grad {n}": p.grad for n, p in step.model.named_parameters()}}


def is_fused(step: FusedStep) -> bool:
    """Whether the last batch was learned without autograd."""
    return any(dict(fused.grads).get(p) is p.grad for fused in step._passes.values() for p in step.model.parameters())


@pytest.mark.parametrize("uses_onednn", [False, True], ids=["torch", "onednn"])
@pytest.mark.parametrize("name", NAMES)
def test_one_step_from_the_same_state_agrees_to_rounding(
    name: str, uses_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_step, "MIN_WORK_FOR_ONEDNN", 0 if uses_onednn else math.inf)
    fused, generic = both_steps(name)
    for seed, count in enumerate((64, 1, 33, 64)):
        generic.model.load_state_dict(fused.model.state_dict())
        generic.optimizer.load_state_dict(copy.deepcopy(fused.optimizer.state_dict()))
        batch = columns(count, seed)
        scores, expected = fused.learn(batch), generic.learn(batch)
        assert is_fused(fused)
        assert scores is not None
        assert expected is not None
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)
        for key, value in state(generic).items():
            mine = state(fused)[key]
            if value.is_sparse:
                mine, value = mine.to_dense(), value.to_dense()
            torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize(
    ("name", "steps"),
    [*((name, 100) for name in NAMES), *(pytest.param(n, 1000, marks=pytest.mark.slow) for n in NAMES)],
)
def test_steps_in_float64_agree(name: str, steps: int) -> None:
    fused, generic = both_steps(name, torch.float64)
    for seed in range(steps):
        batch = columns(16, seed)
        scores, expected = fused.learn(batch), generic.learn(batch)
        assert scores is not None
        assert expected is not None
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)  # scores are float32
    assert is_fused(fused)
    for key, value in generic.model.state_dict().items():
        torch.testing.assert_close(fused.model.state_dict()[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    "name", ["deepfm", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "deepfm")]
)
def test_the_log_loss_over_a_thousand_steps_agrees(name: str) -> None:
    losses = []
    for step in both_steps(name):
        total = 0.0
        for seed in range(1000):
            batch = columns(16, seed)
            scores = step.learn(batch)
            assert scores is not None
            total += float(LOG_LOSS(torch.from_numpy(scores), torch.from_numpy(batch["label"])))
        losses.append(total)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_weights_of_events_count() -> None:
    fused, generic = both_steps("deepfm")
    batch = columns(32, 0) | {"weight": np.linspace(0.1, 3, 32, dtype=np.float32)}
    assert fused.learn(batch) is not None
    assert generic.learn(batch) is not None
    for key, value in generic.model.state_dict().items():
        torch.testing.assert_close(fused.model.state_dict()[key], value, msg=key)


def freeze(step: FusedStep) -> None:
    step.model.inputs.bias.requires_grad_(False)  # type: ignore[union-attr]


def add_module_hook(step: FusedStep) -> None:
    step.model.get_submodule("deep.0").register_forward_hook(lambda *_: None)


def add_parameter_hook(step: FusedStep) -> None:
    next(step.model.parameters()).register_hook(lambda grad: 2 * grad)


def replace_layer(step: FusedStep) -> None:
    step.model.get_submodule("deep")._modules["1"] = nn.Tanh()


def add_group(step: FusedStep) -> None:
    step.optimizer.add_param_group({"params": [("other", nn.Parameter(torch.zeros(1)))]})


def limit_norm(step: FusedStep) -> None:
    step.model.get_submodule("inputs.table").max_norm = 0.1  # type: ignore[assignment]


def replace_score(step: FusedStep) -> None:
    step.model.score = lambda embedded, terms: 2 * terms  # type: ignore[assignment]


@pytest.mark.parametrize(
    "change", [freeze, add_module_hook, add_parameter_hook, replace_layer, add_group, limit_norm, replace_score]
)
def test_changes_between_batches_are_noticed(change: Callable[[FusedStep], None]) -> None:
    fused, generic = both_steps("deepfm")
    for step in (fused, generic):
        step.learn(columns(32, 0))
        change(step)  # type: ignore[arg-type]
        for param in step.model.parameters():
            param.grad = None
        step.learn(columns(32, 1))
    assert fused.find_unsupported() is not None
    assert not is_fused(fused)
    for key, value in generic.model.state_dict().items():
        torch.testing.assert_close(fused.model.state_dict()[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("shared", ["layer", "weight", "bias"])
def test_gradients_of_a_shared_parameter_are_added(shared: str) -> None:
    steps = []
    for kind in (create_training_step, TrainingStep):
        torch.manual_seed(0)
        model = models.build("deepfm", SCHEMA, hidden=(8, 8, 8))
        assert isinstance(model, DeepFM)
        if shared == "layer":
            model.deep[4] = model.deep[2]
        else:
            setattr(model.deep[4], shared, getattr(model.deep[2], shared))
        steps.append(kind(model, torch.optim.SGD(model.parameters(), lr=1.0), LOG_LOSS))
        for seed in range(3):
            assert steps[-1].learn(columns(32, seed)) is not None
    fused, generic = steps
    for key, value in generic.model.state_dict().items():
        torch.testing.assert_close(fused.model.state_dict()[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_a_parameter_that_moves_in_memory_is_noticed() -> None:
    fused, generic = both_steps("deepfm")
    for step in (fused, generic):
        step.learn(columns(32, 0))
        for param in step.model.parameters():
            param.data = param.data.clone()
        step.learn(columns(32, 1))
    assert is_fused(fused)
    for key, value in generic.model.state_dict().items():
        torch.testing.assert_close(fused.model.state_dict()[key], value, rtol=1e-5, atol=1e-6, msg=key)


class Clipping(CAdam):
    """An optimizer whose step does more than that of its base class."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.01)
        return super().step(closure)


def double_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = 2 * param.grad


def replace_gradients_for_a_while(step: TrainingStep, number: int, handles: list[Any]) -> None:
    if number == 2:
        handles.append(step.optimizer.register_step_pre_hook(double_gradients))
    if number == 4:
        handles.pop().remove()


def clear_gradients_in_place(step: TrainingStep, number: int, handles: list[Any]) -> None:
    if number == 2:
        step.optimizer.zero_grad(set_to_none=False)
        step.optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Clipping, lambda *_: None),
        (CAdam, replace_gradients_for_a_while),
        (CAdam, clear_gradients_in_place),
    ],
    ids=["own step", "hook", "cleared"],
)
def test_what_users_do_with_steps_and_gradients_counts(kind: type[CAdam], change: Callable[..., None]) -> None:
    steps = []
    for create in (create_training_step, TrainingStep):
        model = build("deepfm", torch.float64)
        handles: list[Any] = []
        steps.append(create(model, kind(model.named_parameters(), lr=0.01), LOG_LOSS))
        for number in range(6):
            change(steps[-1], number, handles)
            assert steps[-1].learn(columns(32, number)) is not None
    fused, generic = steps
    assert isinstance(fused, FusedStep)
    assert fused._passes
    for key, value in generic.model.state_dict().items():
        torch.testing.assert_close(fused.model.state_dict()[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    "changes",
    [
        {"user": np.full(32, 10**6)},  # not a row of the table
        {"user": np.full(32, -1)},
        {"price": np.full(32, np.inf)},  # the score is not finite
    ],
)
def test_a_batch_with_a_bad_event_changes_nothing(changes: dict[str, np.ndarray]) -> None:
    fused, _ = both_steps("deepfm")
    fused.learn(columns(32, 0))
    before = {key: value.clone() for key, value in fused.model.state_dict().items()}
    assert fused.learn(columns(32, 1, **changes)) is None
    for key, value in fused.model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_features_of_other_types_are_learned_by_autograd() -> None:
    fused, generic = both_steps("deepfm")
    for step in (fused, generic):
        for changes in ({"user": np.arange(32, dtype=np.int32)}, {"age": np.arange(32)}):
            assert step.learn(columns(32, 1, **changes)) is not None
    for key, value in generic.model.state_dict().items():
        assert torch.equal(fused.model.state_dict()[key], value), key


def test_only_ready_made_models_with_the_log_loss_are_fused() -> None:
    class Changed(DeepFM):
        pass

    model = build("deepfm")
    optimizer = CAdam(model.parameters())
    assert type(create_training_step(model, optimizer, nn.MSELoss())) is TrainingStep
    assert type(create_training_step(build("dcn"), optimizer, LOG_LOSS)) is TrainingStep
    model.__class__ = Changed
    assert type(create_training_step(model, optimizer, LOG_LOSS)) is TrainingStep


def test_the_learner_uses_the_fused_step() -> None:
    model = build("deepfm")
    learner = Learner(model, CAdam(model.named_parameters()), LOG_LOSS)
    assert isinstance(learner.training, FusedStep)
    learner.learn(Events(features(32, 0), labels=np.ones(32)))
    assert is_fused(learner.training)
    assert learner.training_mode == "in batches, with a fused training step"

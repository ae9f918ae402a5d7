"""The compiled input layer: it computes the same as the operations of torch, which it replaces."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadam import CAdam
from cadam.online import Events, Learner, Schema, models
from cadam.online.models import MODELS, Inputs
from cadam.online.models.model_file import LOG_LOSS

SCHEMA = Schema(
    {
        "user": "hash:50?",
        "item": "category:20",
        "tags": "hash:30[3]?",
        "days": "category:7[2]",
        "price": "number?",
        "age": "number?",
        "xy": "number[2]",
    },
    label="click",
)


@contextmanager
def torch_operations() -> Iterator[None]:
    """Let all input layers compute with operations of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inputs, "forward", Inputs.forward_with_torch)
        yield


def features(count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    numbers = random.lognormal(size=count).round(1)
    return {
        "user": random.integers(50, size=count),
        "item": random.zipf(1.5, count) % 20,
        "tags": random.integers(4, size=(count, 3)) * random.integers(2, size=(count, 1)),
        "days": random.integers(7, size=(count, 2)),
        "price": np.where(random.random(count) < 0.2, np.nan, numbers),
        "age": np.full(count, np.nan) if seed % 2 else random.integers(5, size=count).astype(float),
        "xy": random.normal(size=(count, 2)) * 1e6,
    }


def tensors(count: int, seed: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in features(count, seed).items()}


def build(name: str, dtype: torch.dtype = torch.float32, width: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = models.build(name, SCHEMA, width=width).to(dtype)
    for buffer in ("count", "sample"):  # these do not depend on the dtype of the model
        setattr(model.inputs.normalizer, buffer, getattr(models.build(name, SCHEMA).inputs.normalizer, buffer))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def results(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the scores of a training batch, the gradients after it, and the buffers."""
    model.zero_grad()
    scores = model(**given)
    LOG_LOSS(scores, torch.arange(len(scores)).to(scores.dtype) % 2).backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads.items()}
    return {"scores": scores.detach(), **dense, **{name: b.clone() for name, b in model.named_buffers()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize("name", MODELS)
def test_scores_gradients_and_samples_are_those_of_torch(name: str, width: int | None, dtype: torch.dtype) -> None:
    model = build(name, dtype, width)
    assert model.inputs.find_uncompiled() is None  # type: ignore[union-attr, operator]
    reference = copy.deepcopy(model)
    for seed, count in enumerate((1, 7, 300, 700, 33)):
        given = tensors(count, seed)
        compiled = results(model, given)
        with torch_operations():
            expected = results(reference, given)
        assert compiled.keys() == expected.keys()
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6
        for key, value in expected.items():
            if "normalizer" in key:
                assert torch.equal(compiled[key], value), key
            else:
                torch.testing.assert_close(compiled[key], value, rtol=tolerance, atol=tolerance, msg=key)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**given), model.train()(**given))
        results(reference, given)


def test_samples_of_any_number_of_values_are_those_of_torch() -> None:
    schema = Schema({"x": "number?"}, label="y")
    compiled, reference = models.build("linear", schema), models.build("linear", schema)
    random = np.random.default_rng(0)
    for count in (3, 500, 20, 512, 513, 2000, 1, 40_000, 256, 256, 3_000_000, 100, 5000):
        x = torch.from_numpy(np.where(random.random(count) < 0.1, np.nan, random.normal(size=count).round(3)))
        with torch.no_grad():
            scores = compiled(x=x)
            with torch_operations():
                assert torch.equal(scores, reference(x=x))
        assert torch.equal(compiled.inputs.normalizer.count, reference.inputs.normalizer.count)
        assert torch.equal(compiled.inputs.normalizer.sample, reference.inputs.normalizer.sample)


def train(model: nn.Module, steps: int, first: int = 0, learner: Learner | None = None) -> Learner:
    """Train a model on batches of 16 events."""
    if learner is None:
        learner = Learner(model, CAdam(model.named_parameters(), lr=3e-3), LOG_LOSS)
    for step in range(first, first + steps):
        given = features(16, step)
        labels = (given["item"] % 3 == 0).astype(np.float32)
        learner.learn(Events(given, labels=labels))
    return learner


def test_float64_weights_after_1000_steps_are_those_of_torch() -> None:
    compiled, reference = build("deepfm", torch.float64), build("deepfm", torch.float64)
    train(compiled, 1000)
    with torch_operations():
        train(reference, 1000)
    for (name, value), expected in zip(compiled.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-9, msg=name)


def test_the_loss_of_1000_steps_in_float32_is_that_of_torch() -> None:
    compiled = train(build("deepfm"), 1000).log_loss.mean
    with torch_operations():
        assert compiled == pytest.approx(train(build("deepfm"), 1000).log_loss.mean, rel=1e-3)


def test_training_resumes_to_the_bit_and_with_torch_from_the_same_state() -> None:
    whole = train(build("deepfm"), 20).model
    half = train(build("deepfm"), 10)
    state = pickle.loads(pickle.dumps((half.model.state_dict(), half.optimizer.state_dict())))

    def resume() -> nn.Module:
        model = build("deepfm")
        model.load_state_dict(state[0])
        optimizer = CAdam(model.named_parameters(), lr=3e-3)
        optimizer.load_state_dict(copy.deepcopy(state[1]))
        return train(model, 10, 10, Learner(model, optimizer, LOG_LOSS)).model

    resumed = resume().state_dict()
    with torch_operations():
        with_torch = resume().state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed[name])
        torch.testing.assert_close(value, with_torch[name], rtol=1e-3, atol=1e-3)


def test_the_gradient_of_a_table_has_one_row_for_each_id_of_the_batch() -> None:
    model = build("deepfm")
    model(**tensors(10, 0)).sum().backward()
    entries = 2 + 3 + 2 + 4
    for table in (model.inputs.table, model.inputs.linear):  # type: ignore[union-attr]
        grad = table.weight.grad  # type: ignore[union-attr]
        assert grad.is_sparse  # type: ignore[union-attr]
        assert grad._nnz() == 10 * entries  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(("name", "bad_id"), [("user", -1), ("user", 10**6), ("item", 25)])
def test_an_id_outside_of_its_feature_is_an_error(name: str, bad_id: int) -> None:
    model, given = build("fm"), tensors(5, 0)
    given[name][2] = bad_id
    before = copy.deepcopy(model.inputs.normalizer.state_dict())  # type: ignore[union-attr]
    with pytest.raises(IndexError, match=f"feature '{name}' has the id {bad_id}"):
        model(**given)
    assert str(model.inputs.normalizer.state_dict()) == str(before)  # type: ignore[union-attr]


def test_an_infinite_number_makes_only_its_own_score_nan() -> None:
    model, given = build("deepfm"), tensors(9, 0)
    given["price"][4] = float("inf")
    assert torch.isnan(model(**given)).tolist() == [row == 4 for row in range(9)]


def test_what_the_compiled_code_does_not_support_is_computed_by_torch_and_named() -> None:
    def mode(model: nn.Module) -> str:
        return Learner(model, CAdam(model.named_parameters()), LOG_LOSS).training_mode

    assert mode(build("deepfm")) == "in batches, with a fused training step"
    assert "bfloat16" in mode(build("mlp", torch.bfloat16))
    assert "sample" in mode(build("deepfm").float())
    frozen = build("deepfm")
    frozen.inputs.table.weight.requires_grad = False  # type: ignore[union-attr]
    assert "frozen" in mode(frozen)
    hooked = build("deepfm")
    calls: list[int] = []
    hooked.inputs.table.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    assert "hooks" in mode(hooked)
    hooked(**tensors(5, 0))
    assert calls


def test_a_copied_and_a_pickled_model_have_their_own_weights() -> None:
    model, given = build("deepfm").eval(), tensors(6, 0)
    scores = model(**given)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for other in copies:
        assert torch.equal(other(**given), scores)
    assert torch.equal(model(**given), torch.zeros(6))


def test_the_backward_pass_can_be_repeated_unless_the_embeddings_were_changed() -> None:
    inputs = build("deepfm").inputs
    embedded, terms = inputs(tensors(6, 0))  # type: ignore[operator]
    total = terms.sum() + embedded.sum()
    total.backward(retain_graph=True)
    first = inputs.vectors.grad.clone()  # type: ignore[union-attr, operator]
    total.backward(retain_graph=True)
    torch.testing.assert_close(inputs.vectors.grad, 2 * first)  # type: ignore[union-attr]
    embedded.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()

"""Ready-made models: their inputs, their gradients, and the normalization of numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadam import CAdam
from cadam.online import Events, Learner, Schema, models
from cadam.online.models import MLP, MODELS, NumberNormalizer, pairwise_interactions
from cadam.online.models.model_file import LOG_LOSS

SCHEMA = Schema(
    {
        "user": "hash:50?",
        "item": "category:20",
        "tags": "hash:30[3]?",
        "at": "clock?",
        "price": "number?",
        "xy": "number[2]",
    },
    label="click",
)


def features(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    records = [
        {
            "user": int(random.integers(100)),
            "item": int(random.integers(20)),
            "tags": random.choice(["a", "b", "c", "d"], random.integers(0, 3)).tolist(),
            "at": 1_700_000_000.0 + 3600 * row,
            "price": None if row % 5 == 0 else float(random.lognormal()),
            "xy": random.normal(size=2).tolist(),
            "click": 0,
        }
        for row in range(count)
    ]
    batch = SCHEMA.convert_records(records, [""] * count)
    assert batch.events is not None
    assert not batch.rejected
    return {name: torch.from_numpy(values) for name, values in batch.events.features.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_scores_and_every_weight_has_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, SCHEMA)
    given = features(40)
    scores = model(**given)
    assert scores.shape == (40,)
    nn.functional.binary_cross_entropy_with_logits(scores, torch.ones(40)).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert not without
    tables = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.is_sparse}
    assert tables == {n for n, _ in model.named_parameters() if n.endswith(("table.weight", "inputs.linear.weight"))}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_an_informative_feature(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, SCHEMA)
    learner = Learner(model, CAdam(model.named_parameters(), lr=0.02), nn.functional.binary_cross_entropy_with_logits)
    for seed in range(40):
        given = {name: values.numpy() for name, values in features(50, seed).items()}
        learner.learn(Events(given, labels=given["item"] % 2))
    last = learner.log_loss
    given = {name: values.numpy() for name, values in features(500, 99).items()}
    learner.learn(Events(given, labels=given["item"] % 2))
    assert last.count == 2500
    assert learner.log_loss.mean < 0.95 * np.log(2)


def normalized(numbers: np.ndarray, batch_size: int = 100) -> np.ndarray:
    """Ranks of numbers that are learned in batches, each by the batches before it."""
    layer, ranks = NumberNormalizer(numbers.shape[1]), []
    for start in range(0, len(numbers), batch_size):
        batch = torch.from_numpy(numbers[start : start + batch_size])
        ranks.append(layer(batch)[0].numpy())
        layer.add(batch)
    return np.concatenate(ranks)


def test_numbers_are_normalized_to_ranks_among_earlier_numbers_only() -> None:
    layer, batch = NumberNormalizer(1), torch.tensor([[3.0], [1.0], [2.0], [2.0]])
    first, _ = layer(batch)
    assert first.flatten().tolist() == [0.5] * 4  # there is no earlier number
    layer.add(batch)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    ranks, missing = layer(torch.tensor([[0.0], [2.0], [9.0], [math.nan]]))
    assert ranks.flatten().tolist() == pytest.approx([0.1, 0.5, 0.9, 0.5])
    assert missing.flatten().tolist() == [False, False, False, True]
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_the_sample_of_numbers_represents_at_least_the_last_half_of_the_events() -> None:
    numbers = np.stack([np.random.default_rng(0).normal(size=40_000), np.arange(40_000.0)], 1)
    numbers[::4, 0] = np.nan
    layer = NumberNormalizer(2)
    for part in np.split(numbers, [1, 50, 5_000, 5_001, 10_000, 15_000, 20_000, 25_000, 30_000]):  # batches of any size
        layer.add(torch.from_numpy(part))
    assert layer.count.tolist() == [30_000, 40_000]
    assert bool((layer.sample.diff(dim=1) >= 0).all())
    probabilities = np.linspace(0.05, 0.95, 10)
    found = np.quantile(layer.sample.numpy(), probabilities, axis=1).T
    assert np.abs(found[0] - np.nanquantile(numbers[:, 0], probabilities)).max() < 0.25
    assert 0 < layer.sample[1, 0] < 20_000
    assert layer.sample[1, -1] > 39_000


@pytest.mark.parametrize(("origin", "unit"), [(0, 1e3), (0, 1e9), (1e8, 10), (1e9, 10), (-5, 1e-6)])
def test_normalized_numbers_do_not_depend_on_unit_and_origin(origin: float, unit: float) -> None:
    numbers = np.round(np.random.default_rng(0).normal(size=(2_000, 1)), 3)
    np.testing.assert_array_equal(normalized(origin + unit * numbers), normalized(numbers))


def test_an_outlier_and_a_constant_do_not_disturb_the_normalization() -> None:
    numbers = np.tile(np.linspace(1, 100, 500), 4)[:, None]
    spoiled = np.concatenate([numbers, np.full((2_000, 1), 7.0)], 1)
    spoiled[3, 0] = 1e18
    ranks = normalized(spoiled)
    assert np.abs(ranks[500:, :1] - normalized(numbers)[500:]).max() < 0.01
    assert (ranks[:, 1] == 0.5).all()


@pytest.mark.parametrize("name", ["linear", "deepfm"])
def test_scores_do_not_depend_on_unit_and_origin_of_a_number(name: str) -> None:
    random = np.random.default_rng(0)
    numbers = np.round(random.normal(size=3_000), 3)
    labels = random.random(3_000) < 1 / (1 + np.exp(-2 * numbers))
    scores = []
    for values in (numbers, 1e9 + 10 * numbers):
        torch.manual_seed(0)
        schema = Schema({"x": "number"}, label="y")
        model = models.build(name, schema)
        learner = Learner(model, CAdam(model.named_parameters(), lr=0.01), LOG_LOSS)
        records = [{"x": float(x), "y": bool(y)} for x, y in zip(values, labels, strict=True)]
        events = schema.convert_records(records, [""] * 3_000).events
        assert events is not None
        scores.append(np.concatenate([learner.learn(events.take(slice(i, i + 100))) for i in range(0, 3_000, 100)]))
    np.testing.assert_array_equal(scores[0], scores[1])


def test_a_model_without_normalization_gets_numbers_in_the_type_of_its_parameters() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x[:, None]).squeeze(1)
            return out

    for model in (Own(), Own().double()):
        learner = Learner(model, CAdam(model.parameters()), nn.functional.mse_loss)
        assert np.isfinite(learner.predict(Events({"x": np.array([1.5, 2.5])}))).all()


def test_pairwise_interactions_are_the_inner_products_of_all_pairs() -> None:
    embedded = torch.randn(5, 4, 3, dtype=torch.float64)
    expected: Any = sum((embedded[:, i] * embedded[:, j]).sum(1) for i in range(4) for j in range(i))
    assert torch.allclose(pairwise_interactions(embedded), expected)


def test_a_list_is_the_mean_of_its_entries_and_an_empty_one_is_0() -> None:
    schema = Schema({"tags": "hash:9[3]?"}, label="click")
    model = models.build("fm", schema)
    assert model.inputs.table is not None
    table = model.inputs.table.weight
    embedded, _ = model.inputs({"tags": torch.tensor([[2, 5, 0], [0, 0, 0]])})
    assert torch.allclose(embedded[0, 0], (table[2] + table[5]) / 2)
    assert embedded[1, 0].tolist() == [0.0] * 8


def test_width_and_hidden_layers_have_the_requested_sizes() -> None:
    model = models.build("mlp", SCHEMA, width=3, hidden=(7, 5))
    assert isinstance(model, MLP)
    assert model.inputs.table is not None
    assert [m.out_features for m in model.deep if isinstance(m, nn.Linear)] == [7, 5, 1]
    assert model.inputs.table.weight.shape[1] == 3
    with pytest.raises(ValueError, match="there are linear, fm, deepfm, dcn, mlp"):
        models.build("lstm", SCHEMA)
    with pytest.raises(ValueError, match="at least 1"):
        models.build("mlp", SCHEMA, width=0)

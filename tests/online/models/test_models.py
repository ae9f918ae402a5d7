"""Ready-made models: their inputs, their gradients, and the normalization of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadam import CAdam
from cadam.online import Events, Learner, Schema, models
from cadam.online.models import MLP, MODELS, NumberNormalizer, pairwise_interactions

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


def test_numbers_are_normalized_by_the_statistics_of_all_learned_events() -> None:
    random = np.random.default_rng(0)
    numbers = random.normal(3, 2, size=(1000, 2)).astype(np.float32)
    numbers[::7, 1] = np.nan
    layer = NumberNormalizer(2).train()
    for part in np.array_split(numbers, 9):
        layer(torch.from_numpy(part))
    tamed = np.arcsinh(numbers.astype(np.float64))
    np.testing.assert_allclose(layer.mean, np.nanmean(tamed, 0), rtol=1e-10)
    np.testing.assert_allclose(layer.variance, np.nanvar(tamed, 0), rtol=1e-10)
    assert layer.count.tolist() == [1000, np.isfinite(numbers[:, 1]).sum()]
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    scaled, missing = layer.eval()(torch.from_numpy(numbers))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    expected = (tamed - np.nanmean(tamed, 0)) / np.nanstd(tamed, 0)
    np.testing.assert_allclose(scaled.numpy(), np.nan_to_num(expected).clip(-8, 8), atol=1e-5)
    assert missing.numpy().tolist() == np.isnan(numbers).tolist()


def test_numbers_are_normalized_to_0_before_anything_is_learned() -> None:
    scaled, _ = NumberNormalizer(1).eval()(torch.tensor([[1e18], [-5.0]]))
    assert scaled.tolist() == [[0.0], [0.0]]


def test_an_outlier_does_not_compress_the_other_numbers() -> None:
    layer = NumberNormalizer(1).train()
    numbers = torch.cat([torch.linspace(1, 100, 999), torch.tensor([1e18])])[:, None]
    scaled, _ = layer(numbers)
    assert scaled[998] - scaled[0] > 0.5


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

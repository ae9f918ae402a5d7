"""The CTR models have the published numbers of parameters and compute their formulas."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from cadam_paper.ctr import models
from cadam_paper.ctr.fields import VOCABULARY

PUBLISHED = {
    "DeepFM": 20_112_701,
    "WideDeep": 20_112_700,
    "DNN": 19_201_953,
    "PNN": 16_939_953,
    "DCN": 19_207_569,
}
SMALL = (3, 5, 2, 4)
over_models = pytest.mark.parametrize("name", models.MODELS)


def build(name: str, seed: int = 0) -> nn.Module:
    return models.build(name, SMALL, seed, width=3, hidden=6)


def some_ids(count: int = 7) -> Tensor:
    offsets = torch.tensor([0, 3, 8, 10])
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(n, (count,), generator=generator) for n in SMALL], 1) + offsets


@over_models
def test_the_numbers_of_parameters_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name, VOCABULARY, 0, device="meta")
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    # Meta tensors have no values, so this shows that no operation reads a value. A CUDA graph requires that.
    model(torch.empty(10, 39, dtype=torch.int64, device="meta")).sum().backward()
    grad = model.get_parameter("table.weight").grad
    assert grad is not None
    assert grad.shape == (910_747, 16)


@over_models
def test_initial_weights(name: str) -> None:
    model = models.build(name, (2000, 3000), 0, width=8, hidden=300)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            assert module.sparse
            assert module.weight.std().item() == pytest.approx(1e-4, rel=0.05)
        elif isinstance(module, nn.Linear):
            xavier = (2 / sum(module.weight.shape)) ** 0.5
            near = 0.1 if module.weight.numel() > 1000 else 0.5
            assert module.weight.std(correction=0).item() == pytest.approx(xavier, rel=near)
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, nn.Dropout):
            assert module.p == 0.2


@over_models
def test_the_seed_determines_the_weights(name: str) -> None:
    first, again, other = (build(name, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["table.weight"], other["table.weight"])


@over_models
def test_dense_parameters_and_tables_are_separated(name: str) -> None:
    model = build(name)
    model(some_ids()).sum().backward()
    dense, tables = models.parameters(model)
    assert [p.grad.is_sparse for p in dense if p.grad is not None] == [False] * len(dense)
    assert tables
    assert [p.grad.is_sparse for p in tables if p.grad is not None] == [True] * len(tables)
    assert {*dense, *tables} == set(model.parameters())


def apply_mlp(model: nn.Module, x: Tensor) -> Tensor:
    """Apply the hidden layers of the MLP, written as matrix products."""
    for layer in (module for module in model.get_submodule("deep").children() if isinstance(module, nn.Linear)):
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    return x


def reference_logits(name: str, model: nn.Module, ids: Tensor) -> Tensor:
    e = model.get_parameter("table.weight")[ids]
    pairs = [(e[:, i] * e[:, j]).sum(1) for i, j in combinations(range(len(SMALL)), 2)]
    flat = e.reshape(len(ids), -1)
    if name == "PNN":
        flat = torch.cat([flat, torch.stack(pairs, 1)], 1)
    last = apply_mlp(model, flat)
    if name == "DCN":
        x = flat
        for cross in model.get_submodule("crosses").children():
            weight, bias = cross.get_parameter("weight.weight"), cross.get_parameter("bias")
            x = flat * (x * weight).sum(1, keepdim=True) + bias + x
        last = torch.cat([x, last], 1)
    logits = (last * model.get_parameter("out.weight")).sum(1) + model.get_parameter("out.bias")
    if name in ("WideDeep", "DeepFM"):
        logits = logits + model.get_parameter("wide.weight")[ids].sum((1, 2))
    if name == "DeepFM":
        logits = logits + sum(pairs) + model.get_parameter("bias")
    return logits


@over_models
def test_logits_are_those_of_the_formula(name: str) -> None:
    model = build(name).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=p.dtype, generator=generator)
    torch.testing.assert_close(model(some_ids()), reference_logits(name, model, some_ids()))


def test_dropout_is_for_training_only() -> None:
    model, ids = build("DNN"), some_ids()
    for p in model.parameters():
        nn.init.normal_(p)
    torch.manual_seed(0)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_an_unknown_model_is_refused_with_the_list_of_models() -> None:
    with pytest.raises(ValueError, match="'FM'; the models are DeepFM, WideDeep, DNN, PNN, DCN"):
        models.build("FM", SMALL, 0)

"""Engines that use raw memory agree with the reference for parameters, state and gradients of every memory layout."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadam
from cadam.rules import ADAM
from tests.lazy_negation import lazily_negated

REFERENCE: dict[str, Any] = {"foreach": False}


def pair(*values: Tensor) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [nn.Parameter(v.clone()) for v in values], [nn.Parameter(v.clone()) for v in values]


def test_both_precisions_in_one_group() -> None:
    ours, reference = pair(torch.ones(3, dtype=torch.float64), torch.ones(3), torch.ones(3, dtype=torch.bfloat16))
    for params, options in ((ours, {}), (reference, REFERENCE)):
        optimizer = cadam.CAdam(params, lr=0.1, **options)
        for step in range(3):
            for p in params:
                p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow  # compiles kernels, as test_a_rule_of_ones_own_is_compiled does
def test_a_rule_of_ones_own_with_two_structures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Mine(cadam.Optimizer):
        rule = dataclasses.replace(ADAM, name="mine")

    for first in (False, True):  # one after the other, because both use the same kernels, which take long to compile
        ours, reference = pair(torch.ones(5), torch.ones(5))
        for params, options in ((ours, {}), (reference, REFERENCE)):
            groups = [{"params": [params[0]], "amsgrad": first}, {"params": [params[1]], "amsgrad": not first}]
            optimizer = Mine(groups, lr=0.1, **options)
            for step in range(4):
                for p in params:
                    p.grad = torch.full((5,), 2.0 / (1 + step))
                optimizer.step()
        for a, b in zip(ours, reference, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bad", [-1, 4])
@pytest.mark.parametrize("options", [{}, REFERENCE], ids=["default", "reference"])
def test_bad_ids_are_refused_by_every_row_engine(bad: int, options: dict[str, Any]) -> None:
    table, dense = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))
    optimizer = cadam.CAdam([("dense", dense), ("table", table)], **options)
    dense.grad = torch.ones(2)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, bad]]), torch.ones(2, 2), (4, 2), check_invariants=False)
    with pytest.raises(IndexError, match=f"'table'.*row id {bad} is out of range for 4 rows"):
        optimizer.step()
    assert torch.equal(table, torch.ones(4, 2))
    assert torch.equal(dense, torch.ones(2))


@pytest.mark.parametrize("kind", ["lazy sign", "zeros without memory"])
def test_lazy_gradients_are_resolved(kind: str) -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = lazily_negated(torch.ones(4)) if kind == "lazy sign" else torch._efficientzerotensor(4)
    optimizer = cadam.CAdam([p], lr=0.1)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), 1.1 if kind == "lazy sign" else 1.0))


def test_a_transposed_neighbour_of_channels_last() -> None:
    results = []
    for options in ({}, REFERENCE):
        a = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
        b = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        optimizer = cadam.CAdam([a, b], lr=0.1, **options)
        for step in range(4):
            a.grad, b.grad = torch.ones_like(a), torch.arange(16.0).view(4, 4) - 5
            optimizer.step()
            if step == 1:
                b.grad = None
                b.data = b.data.t()
        results.append(b.detach().clone())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("options", [{}, REFERENCE, {"foreach": True}], ids=["default", "reference", "foreach"])
def test_an_infinite_parameter_with_no_gradient_stays(options: dict[str, Any]) -> None:
    p = nn.Parameter(torch.tensor([-math.inf, 1.0]))
    p.grad = torch.tensor([0.0, 1.0])
    optimizer = cadam.CAdam([p], lr=0.1, **options)
    optimizer.step()
    assert p[0].item() == -math.inf
    assert optimizer.state[p]["exp_avg"].isfinite().all()


@pytest.mark.parametrize("sparse", [False, True])
def test_autograd_hears_of_the_step(sparse: bool) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    loss = p.pow(3).sum()
    p.grad = (
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (3, 2), check_invariants=True)
        if sparse
        else torch.ones(3, 2)
    )
    cadam.CAdam([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

"""Cases that once went wrong, by engines that trust raw memory above all."""

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


@pytest.mark.parametrize("first", [False, True])
def test_a_rule_of_ones_own_with_two_structures(first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Mine(cadam.Optimizer):
        rule = dataclasses.replace(ADAM, name="mine")

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


@pytest.mark.parametrize(
    "counts", [torch.zeros(1, dtype=torch.int64), torch.zeros(3), torch.zeros(9, dtype=torch.int64)[::3]], ids=str
)
def test_counters_that_do_not_fit_are_refused(counts: Tensor) -> None:
    table = torch.ones(4, 2)
    with pytest.raises(ValueError, match="counts must be three int64"):
        cadam.rows.update_(
            table, cadam.rows.new_state(table), torch.tensor([1]), torch.ones(1, 2), step=1, counts=counts
        )


def test_shared_memory_for_the_step_count_is_noticed() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cadam.CAdam([p])
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
        for value in optimizer.state[p].values():
            value.share_memory_()
    assert optimizer.state[p]["step"].item() == 3


def test_a_buffer_in_another_dtype_is_noticed() -> None:
    p = nn.Parameter(torch.ones(64))
    optimizer = cadam.CAdam([p])
    for step in range(3):
        p.grad = torch.ones(64)
        optimizer.step()
        if step == 0:
            optimizer.state[p]["exp_avg"].data = optimizer.state[p]["exp_avg"].data.bfloat16()
    assert optimizer.explain()[0].engine != "native"


@pytest.mark.parametrize("kind", ["lazy sign", "zeros without memory"])
def test_lazy_gradients_are_resolved(kind: str) -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch._neg_view(torch.ones(4)) if kind == "lazy sign" else torch._efficientzerotensor(4)
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
        torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (3, 2), check_invariants=True) if sparse else torch.ones(3, 2)
    )
    cadam.CAdam([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loaded_state_lies_as_the_parameter_does() -> None:
    p = nn.Parameter(torch.ones(2, 3, 4, 4))
    other = torch.optim.Adam([p])
    p.grad = torch.ones_like(p)
    other.step()
    q = nn.Parameter(p.detach().clone().to(memory_format=torch.channels_last))
    q.grad = torch.ones_like(q)
    optimizer = cadam.CAdam([q], fused=True)
    optimizer.load_state_dict(other.state_dict())
    optimizer.step()
    assert optimizer.state[q]["exp_avg"].stride() == q.stride()


def test_clipping_sums_half_precision_in_float32() -> None:
    p = nn.Parameter(torch.ones(3, 1, dtype=torch.float16))
    ids, values = torch.tensor([[1, 1]]), torch.full((2, 1), 40_000.0, dtype=torch.float16)
    p.grad = torch.sparse_coo_tensor(ids, values, (3, 1), check_invariants=True)
    norm = cadam.clip_grad_norm_([p], 10.0)
    assert norm.item() == 80_000
    assert p.grad.coalesce().values().item() == pytest.approx(10, rel=1e-2)


@pytest.mark.parametrize("options", [{}, REFERENCE], ids=["default", "reference"])
def test_a_new_shape_is_refused_with_nothing_changed(options: dict[str, Any]) -> None:
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = cadam.CAdam([p], **options)
    p.grad = torch.ones(4, 2)
    optimizer.step()
    p.grad = None
    p.data = torch.ones(2, 5)
    p.grad = torch.ones(2, 5)
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0.*shape \(4, 2\).*no parameter was changed"):
        optimizer.step()
    assert optimizer.state[p]["step"].item() == 1


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), nn.Linear(2, 2).parameters], ids=["module", "method"])
def test_what_is_no_iterable_of_parameters_gets_a_hint(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"pass model.parameters\(\)"):
        cadam.CAdam(wrong)

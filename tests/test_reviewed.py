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


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=str)
def test_clipping_sums_half_precision_in_float32(norm_type: float) -> None:
    p = nn.Parameter(torch.ones(3, 1, dtype=torch.float16))
    ids, values = torch.tensor([[1, 1]]), torch.full((2, 1), 40_000.0, dtype=torch.float16)
    p.grad = torch.sparse_coo_tensor(ids, values, (3, 1), check_invariants=True)
    norm = cadam.clip_grad_norm_([p], 10.0, norm_type)
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


# State and parameter on different devices: kernels are handed bare addresses ------------------------------------


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, REFERENCE], ids=["default", "fused", "reference"])
def test_state_on_another_device_is_refused_with_nothing_changed(options: dict[str, Any], sparse: bool) -> None:
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = cadam.CAdam([p], **options)
    grad = torch.ones(4, 2).to_sparse(1) if sparse else torch.ones(4, 2)
    for _ in range(3):
        p.grad = grad
        optimizer.step()
    before = p.detach().clone()
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].to("meta")  # stands for: the model has moved away
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0.*exp_avg is on meta, .* on cpu .*; no parameter was"):
        optimizer.step()
    assert torch.equal(p, before)
    assert (
        optimizer.explain()[0]
        .passed_over[f"native{'-rows' * sparse}"]
        .startswith("fused=None" if options is REFERENCE else "exp_avg is on meta")
    )


def test_state_of_an_option_of_the_group_is_looked_at_too() -> None:
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = cadam.CAdam([{"params": [p], "amsgrad": True}])
    p.grad = torch.ones(4, 2)
    optimizer.step()
    optimizer.state[p]["max_exp_avg_sq"] = torch.ones(4, 2, device="meta")
    with pytest.raises(RuntimeError, match="its state max_exp_avg_sq is on meta"):
        optimizer.step()


def test_state_that_is_no_tensor_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = None
    with pytest.raises(RuntimeError, match="its state exp_avg is None, not a tensor"):
        optimizer.step()


def test_counters_follow_a_parameter_to_another_device() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones(3)
    optimizer.step()
    stays = optimizer._counter(p)
    assert optimizer._counter(p) is stays
    assert optimizer._counter(p).tolist() == [3, 3, 3]
    moved = nn.Parameter(torch.ones(3, device="meta"))
    optimizer._counts[moved] = stays
    assert optimizer._counter(moved).device.type == "meta"


# What an option or a name asks for ------------------------------------------------------------------------------


def test_a_note_of_any_kind_in_a_group_is_the_users_own() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cadam.CAdam([p], lr=0.1)
    for step in range(6):
        optimizer.param_groups[0]["importance"] = torch.rand(3)
        p.grad = torch.ones(3)
        optimizer.step()
        assert optimizer.state[p]["step"] == step + 1


def test_lists_of_tensors_that_autograd_is_to_look_through_are_refused() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = cadam.CAdam([p], foreach=True, differentiable=True)
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="foreach=True was asked for, but differentiable=True needs the eager"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))


def test_parameters_of_the_same_name_are_told_apart() -> None:
    first, second = nn.Linear(4, 2), nn.Linear(2, 1)
    groups = [{"params": list(layer.named_parameters())} for layer in (first, second)]
    optimizer = cadam.CAdam(groups)
    for layer in (first, second):
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
    optimizer.step()
    found = optimizer.alignment()
    assert {name: ratio.seen for name, ratio in found.parameters.items()} == {
        "group0.0.weight": 8,
        "group0.1.bias": 2,
        "group1.0.weight": 2,
        "group1.1.bias": 1,
    }
    assert found.total.seen == 13
    one_group = cadam.CAdam([*first.named_parameters(), *second.named_parameters()])
    assert list(one_group.alignment().parameters) == [
        "group0.0.weight",
        "group0.1.bias",
        "group0.2.weight",
        "group0.3.bias",
    ]


def test_explain_gives_the_reason_where_a_subclass_of_tensor_is_in_the_way() -> None:
    class Odd(Tensor):
        pass

    p = torch.ones(3).as_subclass(Odd).requires_grad_()  # type: ignore[arg-type]
    optimizer = cadam.CAdam([p])
    assert "Odd" in optimizer.explain()[0].passed_over["native"]
    q = nn.Parameter(torch.ones(3))
    q.grad = torch.ones(3).as_subclass(Odd)  # type: ignore[arg-type]
    text = str(cadam.CAdam([q]).explain())
    assert "not native: serves plain gradients only, not Odd" in text
    assert "not cuda" not in text


def test_clipping_rows_does_not_ask_for_the_default_device() -> None:
    table = nn.Parameter(torch.zeros(5, 2))
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2), (5, 2))
    with torch.device("meta"):
        assert cadam.clip_grad_norm_([table], 1e9).item() == pytest.approx(math.sqrt(8))


# Row updates are those of the class ------------------------------------------------------------------------------


def test_row_updates_take_the_defaults_of_the_class() -> None:
    table, ids, grads = torch.ones(4, 2), torch.tensor([1]), torch.ones(1, 2)
    cadam.rows.update_(
        table, cadam.rows.new_state(table, cadam.CAdamW), ids, grads, step=1, optimizer=cadam.CAdamW, lr=0.5
    )
    p = nn.Parameter(torch.ones(4, 2))
    p.grad = torch.sparse_coo_tensor(ids[None], grads, (4, 2))
    cadam.CAdamW([p], lr=0.5).step()
    assert torch.equal(table, p)
    assert table[1, 0] == pytest.approx(0.495)  # decayed by lr * 0.01


@pytest.mark.parametrize(
    ("optimizer", "options", "error", "message"),
    [
        (cadam.CAmsGrad, {"amsgrad": False}, ValueError, "CAmsGrad stands for amsgrad=True"),
        (cadam.CAdam, {"fused": True, "state_dtype": torch.float64}, RuntimeError, "no fused engine can serve it"),
        (cadam.CAdam, {"differentiable": True}, ValueError, "differentiable=True"),
        (cadam.CAdam, {"lr": -1.0}, ValueError, "learning rate"),
        (cadam.CAdam, {"learning_rate": 1.0}, TypeError, "did you mean 'lr'"),
    ],
)
def test_row_updates_refuse_what_the_optimizer_refuses(
    optimizer: type[cadam.Optimizer], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = torch.ones(4, 2)
    dtype = options.get("state_dtype", torch.float32)
    state = {name: torch.zeros(4, 2, dtype=dtype) for name in cadam.rows.new_state(table, optimizer)}
    ids, grads = torch.tensor([1]), torch.ones(1, 2)
    with pytest.raises(error, match=message):
        cadam.rows.update_(table, state, ids, grads, step=1, optimizer=optimizer, **options)
    assert torch.equal(table, torch.ones(4, 2))


def test_row_updates_round_by_chance_only_where_that_can_be_done() -> None:
    table = torch.ones(4, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="stochastic_rounding=True needs the CUDA engine"):
        cadam.rows.update_(
            table,
            cadam.rows.new_state(table),
            torch.tensor([1]),
            torch.ones(1, 2).bfloat16(),
            step=1,
            stochastic_rounding=True,
        )

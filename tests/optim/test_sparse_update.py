"""Sparse updates of plain tensors equal those of the optimizer classes, and refuse the same input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadam


@pytest.mark.parametrize(
    "counts", [torch.zeros(1, dtype=torch.int64), torch.zeros(3), torch.zeros(9, dtype=torch.int64)[::3]], ids=str
)
def test_counters_that_do_not_fit_are_refused(counts: Tensor) -> None:
    table = torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"counts must be .*three int64"):
        cadam.optim.sparse_update.update_(
            table,
            cadam.optim.sparse_update.new_state(table),
            torch.tensor([1]),
            torch.ones(1, 2),
            step=1,
            counts=counts,
        )


def test_row_updates_take_the_defaults_of_the_class() -> None:
    table, ids, grads = torch.ones(4, 2), torch.tensor([1]), torch.ones(1, 2)
    cadam.optim.sparse_update.update_(
        table,
        cadam.optim.sparse_update.new_state(table, cadam.CAdamW),
        ids,
        grads,
        step=1,
        optimizer=cadam.CAdamW,
        lr=0.5,
    )
    p = nn.Parameter(torch.ones(4, 2))
    p.grad = torch.sparse_coo_tensor(ids[None], grads, (4, 2), check_invariants=False)
    cadam.CAdamW([p], lr=0.5).step()
    assert torch.equal(table, p)
    assert table[1, 0] == pytest.approx(0.495)  # decayed by lr * 0.01


@pytest.mark.parametrize(
    ("optimizer", "options", "error", "message"),
    [
        (cadam.CAmsGrad, {"amsgrad": False}, ValueError, "CAmsGrad .*amsgrad=True"),
        (cadam.CAdam, {"fused": True, "state_dtype": torch.float64}, RuntimeError, "no fused engine can serve it"),
        (cadam.CAdam, {"differentiable": True}, ValueError, "differentiable=True"),
        (cadam.CAdam, {"lr": -1.0}, ValueError, "learning rate"),
        (cadam.CAdam, {"learning_rate": 1.0}, TypeError, "did you mean 'lr'"),
    ],
)
def test_row_updates_refuse_the_input_that_the_optimizer_refuses(
    optimizer: type[cadam.Optimizer], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = torch.ones(4, 2)
    dtype = options.get("state_dtype", torch.float32)
    state = {name: torch.zeros(4, 2, dtype=dtype) for name in cadam.optim.sparse_update.new_state(table, optimizer)}
    ids, grads = torch.tensor([1]), torch.ones(1, 2)
    with pytest.raises(error, match=message):
        cadam.optim.sparse_update.update_(table, state, ids, grads, step=1, optimizer=optimizer, **options)
    assert torch.equal(table, torch.ones(4, 2))


def test_row_updates_round_stochastically_only_where_that_can_be_done() -> None:
    table = torch.ones(4, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="stochastic_rounding=True needs the CUDA engine"):
        cadam.optim.sparse_update.update_(
            table,
            cadam.optim.sparse_update.new_state(table, stochastic_rounding=True),
            torch.tensor([1]),
            torch.ones(1, 2).bfloat16(),
            step=1,
            stochastic_rounding=True,
        )


@pytest.mark.skipif(
    cadam.CAdam([torch.zeros(1)]).explain()[0].engine != "native", reason="the C kernels were not compiled"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"moments": "int8"}, {"second_moment": "row", "row_steps": True}], ids=str)
@pytest.mark.parametrize("width", [16, 37])
def test_a_table_of_half_precision_takes_gradients_in_float32(dtype: torch.dtype, options: Any, width: int) -> None:
    """TorchRec makes such gradients. The C kernels sum them in float32, like the reference."""
    found = []
    for how in ({"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        table, counts = torch.randn(50, width).to(dtype), torch.zeros(3, dtype=torch.int64)
        state = cadam.optim.sparse_update.new_state(table, **options)
        update = cadam.optim.sparse_update.RowUpdate(
            table,
            state,
            cadam.CAdam,
            cadam.optim.sparse_update.complete(cadam.CAdam, {"lr": 0.05, **how, **options}),
            counts=counts,
        )
        for step in range(1, 5):
            update(torch.randint(50, (99,)), torch.randn(99, width), step=step)
        found.append((table, state, counts))
    (fast, state, counts), (slow, reference, expected) = found
    torch.testing.assert_close(fast, slow, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert (fast != slow).sum() <= 2
    for name, buffer in state.items():
        torch.testing.assert_close(buffer, reference[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(counts, expected)

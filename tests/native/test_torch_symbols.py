"""Functions of torch that compiled code calls: one is required, the others only make snapshots of tensors faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cadam
from cadam.native import loader, tensor_snapshot, torch_symbols


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Pretend that torch does not have a symbol."""

    def clear_caches() -> None:
        cached = (torch_symbols.torch_symbols, tensor_snapshot._snapshot_library, *vars(loader).values())
        for function in cached:
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    def remove(symbol: str) -> None:
        address = torch_symbols._address
        monkeypatch.setattr(torch_symbols, "_address", lambda name: 0 if name == symbol else address(name))
        clear_caches()

    yield remove
    monkeypatch.undo()
    clear_caches()


def trained() -> tuple[cadam.CAdam, list[Tensor]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (5, 1000, 3)]
    optimizer = cadam.CAdam(params, lr=0.1)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer, [p.detach() for p in params]


@pytest.mark.parametrize("symbol", torch_symbols.SYMBOLS[1:])
def test_a_missing_optional_symbol_costs_no_kernel_and_changes_no_bit(symbol: str, without: Any) -> None:
    expected, values = trained()
    if expected.explain()[0].engine != "native":
        pytest.skip("no C kernels")
    without(symbol)
    optimizer, results = trained()
    assert torch_symbols.torch_symbols().missing == (symbol,)
    assert not tensor_snapshot.can_snapshot_in_c()
    assert [row.engine for row in optimizer.explain()] == ["native"] * 3
    assert all(torch.equal(x, y) for x, y in zip(results, values, strict=True))


def test_without_torchs_threads_there_are_no_c_kernels_and_explain_names_the_symbol(without: Any) -> None:
    _, values = trained()
    without(torch_symbols.REQUIRED_SYMBOL)
    optimizer, results = trained()
    row = optimizer.explain()[0]
    assert row.engine == "foreach"
    assert torch_symbols.REQUIRED_SYMBOL in row.passed_over["native"].reason
    for x, y in zip(results, values, strict=True):
        torch.testing.assert_close(x, y)

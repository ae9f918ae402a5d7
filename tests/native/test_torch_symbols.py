"""Functions of torch that compiled code calls: one is required, the others only make a look at many tensors faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cadam
from cadam.native import library, tensor_snapshot, torch_symbols

OPTIONAL = [name for names in torch_symbols.SYMBOLS.values() for name in names if name != torch_symbols.REQUIRED]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make as if torch had no such symbol."""

    def forget() -> None:
        for cached in (torch_symbols.torch_symbols, tensor_snapshot.compiled_look, *vars(library).values()):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()

    def take(symbol: str) -> None:
        known = torch_symbols.address
        monkeypatch.setattr(torch_symbols, "address", lambda lib, name: 0 if name == symbol else known(lib, name))
        forget()

    yield take
    monkeypatch.undo()
    forget()


def trained() -> tuple[cadam.CAdam, list[Tensor]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (5, 1000, 3)]
    optimizer = cadam.CAdam(params, lr=0.1)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer, [p.detach() for p in params]


@pytest.mark.parametrize("symbol", OPTIONAL)
def test_a_missing_optional_symbol_costs_no_kernel_and_changes_no_bit(symbol: str, without: Any) -> None:
    expected, values = trained()
    if expected.explain()[0].engine != "native":
        pytest.skip("no C kernels")
    without(symbol)
    optimizer, found = trained()
    assert torch_symbols.torch_symbols().missing == (symbol,)
    assert tensor_snapshot.compiled_look() is None
    assert [row.engine for row in optimizer.explain()] == ["native"] * 3
    assert all(torch.equal(x, y) for x, y in zip(found, values, strict=True))


def test_without_torchs_threads_there_are_no_c_kernels_and_explain_names_the_symbol(without: Any) -> None:
    _, values = trained()
    without(torch_symbols.REQUIRED)
    optimizer, found = trained()
    row = optimizer.explain()[0]
    assert row.engine == "foreach"
    assert torch_symbols.REQUIRED in row.passed_over["native"].reason
    for x, y in zip(found, values, strict=True):
        torch.testing.assert_close(x, y)

"""Coded moments on every engine: the same codes as the reference, for any number of threads and instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family import OF_RULE
from torch import Tensor
from triton_interpreter import needs_triton, run_cases

import cadam
from cadam import moments
from cadam.engines.cpu import library
from cadam.rules import RULES

CODED = [name for name, rule in RULES.items() if rule.moments]
KERNELS = cadam.CAdam([torch.zeros(1)]).explain()[0].engine == "native"
needs_kernels = pytest.mark.skipif(not KERNELS, reason="the C kernels were not compiled")


def run(
    rule: str, rows: bool, shape: tuple[int, ...], threads: int = 2, **options: Any
) -> tuple[Tensor, dict[str, Tensor], Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape))
    optimizer = OF_RULE[rule, True]([param], lr=1e-2, **options)
    for _ in range(4):
        grad = torch.randn(shape) * torch.exp2(torch.randint(-25, 5, shape[1:]).float())
        grad[0] = 0
        if rows:
            ids = torch.randperm(shape[0])[: shape[0] // 2]
            grad = torch.sparse_coo_tensor(ids[None], grad[ids], shape, check_invariants=True)
        param.grad = grad
        optimizer.step()
    torch.set_num_threads(before)
    return param.detach(), optimizer.state[param], optimizer


@needs_kernels
@pytest.mark.parametrize("shape", [(700, 37), (90, 16), (90, 64), (33, 300)], ids=str)
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("rule", CODED)
def test_the_c_kernels_give_the_codes_of_the_reference(rule: str, storage: str, rows: bool, shape: Any) -> None:
    param, state, optimizer = run(rule, rows, shape, moments=storage, fused=True)
    assert optimizer.explain()[0].engine == ("native-rows" if rows else "native")
    expected, reference, slow = run(rule, rows, shape, moments=storage, foreach=False)
    assert slow.explain()[0].engine == ("rows" if rows else "eager")
    torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)
    for name, buffer in state.items():
        assert torch.equal(buffer, reference[name]), name
    assert optimizer.alignment() == slow.alignment()


@needs_kernels
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_any_number_of_threads_and_any_instruction_set_gives_the_same_bits(storage: str, rows: bool) -> None:
    found = []
    c = library.package_library().c
    try:
        for threads, level in ((1, -1), (2, -1), (2, 0), (2, 1)):
            c.cadam_use(level)
            found.append(run("adam", rows, (3000, 37), threads, moments=storage))
    finally:
        c.cadam_use(-1)
    for param, state, _ in found[1:]:
        assert torch.equal(param, found[0][0])
        assert all(torch.equal(state[name], found[0][1][name]) for name in state)


@pytest.mark.parametrize("options", [{"second_moment": "row"}, {"row_steps": True}])
def test_what_the_c_kernels_do_not_have_falls_to_the_reference_which_explain_says(options: Any) -> None:
    _, _, optimizer = run("adam", True, (20, 4), **options)
    row = optimizer.explain()[0]
    assert row.engine == "rows"
    if KERNELS:
        assert next(iter(options)) in row.passed_over["native-rows"]
        with pytest.raises(RuntimeError, match=next(iter(options))):
            run("adam", True, (20, 4), fused=True, **options)


def test_lists_of_tensors_refuse_coded_moments() -> None:
    with pytest.raises(RuntimeError, match="moments='int8'"):
        run("adam", False, (20, 4), moments="int8", foreach=True)


@needs_kernels
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_a_broken_gradient_shows_in_the_parameter(storage: str) -> None:
    for bad in (float("nan"), float("inf")):
        for fused in (True, False):
            param = torch.nn.Parameter(torch.zeros(600))
            optimizer = cadam.CAdam([param], moments=storage, fused=fused)
            param.grad = torch.ones(600)
            param.grad[300] = bad
            optimizer.step()
            param.grad = torch.ones(600)
            optimizer.step()
            assert param[300].isnan()
            assert param[:256].isfinite().all()


def test_the_state_of_a_row_has_the_bytes_that_the_documentation_says() -> None:
    expected = {
        (16, "float32", "element"): 128,
        (16, "bfloat16", "element"): 64,
        (16, "int8", "element"): 34,
        (16, "int8", "row"): 21,
        (64, "float32", "element"): 512,
        (64, "bfloat16", "element"): 256,
        (64, "int8", "element"): 130,
        (64, "int8", "row"): 69,
    }
    for (width, storage, second), size in expected.items():
        state = cadam.rows.new_state(torch.zeros(1000, width), moments=storage, second_moment=second)
        held = sum(t.untyped_storage().nbytes() for name, t in state.items() if name != moments.SEED)
        assert held == 1000 * size


@needs_triton
@pytest.mark.parametrize("case", ["dense", "rows", "row_steps"])
def test_the_kernels_in_tritons_interpreter_give_the_codes_of_the_reference(case: str) -> None:
    run_cases(Path(__file__).parent / "light_cases.py", [case])

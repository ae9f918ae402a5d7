"""Quantized moments: every engine, thread count and instruction set stores the same values as the reference."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cadam
from cadam.codegen.kernel_spec import KernelSpec
from cadam.engines import moment_state, row_layout
from cadam.engines.cuda.dense import Cuda
from cadam.engines.cuda.launch import storage_refusal
from cadam.engines.cuda.sparse import RowStrides
from cadam.engines.resolved_group import ResolvedGroup
from cadam.native import loader
from cadam.rules import RULES, moment_storage
from tests.engines.triton_interpreter import ON_CUDA, needs_triton, on_cuda, run_cases
from tests.optim.family import OF_RULE

WITH_MOMENTS = [name for name, rule in RULES.items() if rule.moments]
KERNELS = cadam.CAdam([torch.zeros(1)]).explain()[0].engine == "native"
needs_kernels = pytest.mark.skipif(not KERNELS, reason="the C kernels were not compiled")


def run(
    rule: str,
    rows: bool,
    shape: tuple[int, ...],
    threads: int = 2,
    taken: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor], Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape, dtype=dtype))
    optimizer = OF_RULE[rule, True]([param], lr=1e-2, **options)
    for _ in range(4):
        grad = (torch.randn(shape) * torch.exp2(torch.randint(-25, 5, shape[1:]).float())).to(dtype)
        grad[0] = 0
        if rows:
            ids = torch.randperm(shape[0])[: shape[0] // 2]
            grad = torch.sparse_coo_tensor(ids[None], grad[ids], shape, check_invariants=True)
        param.grad = grad
        optimizer.step()
        if taken:  # advance the step count
            optimizer.state[param]["step"].add_(taken)
            taken = 0.0
    torch.set_num_threads(before)
    return param.detach(), optimizer.state[param], optimizer


@needs_kernels
@pytest.mark.parametrize("shape", [(700, 37), (90, 16), (90, 64), (33, 300)], ids=str)
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("rule", WITH_MOMENTS)
def test_the_c_kernels_give_the_quantized_values_of_the_reference(
    rule: str, storage: str, rows: bool, shape: Any
) -> None:
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
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (37, torch.float32), (16, torch.bfloat16)])
def test_any_number_of_threads_and_any_instruction_set_gives_the_same_bits(
    width: int, dtype: torch.dtype, storage: str, rows: bool
) -> None:
    shared: dict[str, Any] = {"second_moment": "row", "row_steps": True} if rows else {}
    found = []
    c = loader.package_library().c
    try:
        for threads, level in ((1, -1), (2, -1), (2, 0), (2, 1)):
            c.cadam_limit_instruction_set(level)
            for options in (dict[str, Any](), shared):
                found.append(run("adam", rows, (3000, width), threads, dtype=dtype, moments=storage, **options))
    finally:
        c.cadam_limit_instruction_set(-1)
    for number, (param, state, _) in enumerate(found):
        assert torch.equal(param, found[number % 2][0])
        assert all(torch.equal(state[name], found[number % 2][1][name]) for name in state)


@needs_kernels
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_steps_beyond_the_integers_of_float32_have_different_noise(storage: str, rows: bool) -> None:
    found = [run("adam", rows, (90, 16), taken=2.0**24 - 2, moments=storage, fused=fused) for fused in (True, False)]
    (_, fast, _), (_, reference, _) = found
    assert float(fast["step"]) == 2**24 + 4  # 2^24 - 1, 2^24, then the next two numbers
    assert all(torch.equal(fast[name], reference[name]) for name in fast)


def compare_codes(state: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    for name, buffer in state.items():
        if buffer.dtype == torch.float32:  # the kernels may add the squares in another order
            torch.testing.assert_close(buffer, reference[name].cpu(), rtol=1e-5, atol=0)
        else:
            assert torch.equal(buffer, reference[name].cpu()), name


SHARED = [{"second_moment": "row"}, {"second_moment": "row", "row_steps": True}, {"row_steps": True}]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{"moments": "bfloat16"}, {"moments": "int8"}, *SHARED[:2]], ids=str)
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if "positive" in rule.moments.values()])
def test_the_c_kernels_serve_parameters_of_half_precision(rule: str, options: Any, dtype: torch.dtype) -> None:
    """Results equal the reference, except for the last bit of a parameter where float32 was rounded differently."""
    for rows, shape in ((True, (90, 16)), (True, (33, 300)), (True, (90, 64)), (False, (700, 37)), (False, (256, 1))):
        if "second_moment" in options and not rows:
            continue
        param, state, optimizer = run(rule, rows, shape, dtype=dtype, fused=True, **options)
        assert optimizer.explain()[0].engine == ("native-rows" if rows else "native")
        expected, reference, slow = run(rule, rows, shape, dtype=dtype, foreach=False, **options)
        assert slow.explain()[0].engine == ("rows" if rows else "eager")
        torch.testing.assert_close(param, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert (param != expected).sum() <= 4
        compare_codes(state, reference)
        assert optimizer.alignment() == slow.alignment()


@needs_kernels
@pytest.mark.parametrize("shape", [(700, 37), (90, 16), (90, 64), (33, 300)], ids=str)
@pytest.mark.parametrize("options", SHARED, ids=str)
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if "positive" in rule.moments.values()])
def test_the_c_kernels_share_second_moments_and_count_steps_by_row_as_the_reference(
    rule: str, storage: str, options: Any, shape: Any
) -> None:
    param, state, optimizer = run(rule, True, shape, moments=storage, fused=True, **options)
    assert optimizer.explain()[0].engine == "native-rows"
    expected, reference, slow = run(rule, True, shape, moments=storage, foreach=False, **options)
    assert slow.explain()[0].engine == "rows"
    torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)
    compare_codes(state, reference)
    assert optimizer.alignment() == slow.alignment()


@needs_kernels
def test_the_c_kernels_share_the_largest_second_moment_too() -> None:
    found = [run("adam", True, (90, 37), amsgrad=True, second_moment="row", fused=fused) for fused in (True, False)]
    for fast, reference in zip(found[0][1].values(), found[1][1].values(), strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_half_precision_count_their_steps(dtype: torch.dtype) -> None:
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(50, 5, dtype=dtype))
        optimizer = cadam.CAdam([param], lr=0.1, row_steps=True, fused=fused)
        for _ in range(3):
            ids = torch.randint(50, (30,))
            param.grad = torch.sparse_coo_tensor(
                ids[None], torch.randn(30, 5).to(dtype), param.shape, check_invariants=True
            )
            optimizer.step()
        found.append((param.detach(), optimizer.state[param][moment_storage.ROW_STEPS]))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].unique().tolist() == [0, 1, 2, 3]


def test_explain_names_the_reference_for_a_dense_gradient_of_a_table_with_shared_moments() -> None:
    _, _, optimizer = run("adam", True, (20, 4), second_moment="row")
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(20, 4)
    optimizer.step()
    row = optimizer.explain()[0]
    assert row.engine == "eager"
    if KERNELS:
        assert "second_moment" in str(row.passed_over["native"])


def test_a_rule_with_too_many_quantized_moments_runs_on_the_reference() -> None:
    def update(g: Any, s: Any, c: Any, f: Any) -> Any:
        new = {name: getattr(s, name) + (g - getattr(s, name)) * 0.1 for name in ("a", "b", "c")}
        return cadam.Step(new["a"], new["a"], new)

    three = cadam.Rule(
        "three", {"lr": 0.1}, lambda o: dict.fromkeys("abc", 0.0), lambda t, o, f: {}, update,
        moments=dict.fromkeys("abc", "signed"),
    )  # fmt: skip
    param = torch.nn.Parameter(torch.zeros(40))
    optimizer = type("Three", (cadam.Optimizer,), {"rule": three})([param], moments="int8")
    param.grad = torch.ones(40)
    optimizer.step()
    assert optimizer.explain()[0].engine == "eager"


def test_the_foreach_engine_refuses_quantized_moments() -> None:
    with pytest.raises(RuntimeError, match="moments='int8'"):
        run("adam", False, (20, 4), moments="int8", foreach=True)


@needs_kernels
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("width", [16, 20, 37])
def test_a_nonfinite_gradient_shows_in_its_parameter_alone(storage: str, width: int, rows: bool) -> None:
    def train(bad: float, fused: bool) -> Tensor:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(40, width))
        optimizer = cadam.CAdam([param], moments=storage, fused=fused)
        for step in range(4):
            grad = torch.randn(40, width)
            if step == 1:
                grad[3, 5] = bad
            param.grad = grad.to_sparse(1) if rows else grad
            optimizer.step()
        return param.detach()

    c = loader.package_library().c
    try:
        for fused, level in ((False, -1), (True, 0), (True, 1), (True, -1)):
            c.cadam_limit_instruction_set(level)
            finite = train(1e-8, fused)  # so small that it does not affect the scale
            for bad in (float("nan"), float("inf"), float("-inf")):
                param = train(bad, fused)
                assert param.isnan().nonzero().tolist() == [[3, 5]]
                param[3, 5] = finite[3, 5]
                assert torch.equal(param, finite)
    finally:
        c.cadam_limit_instruction_set(-1)


@needs_kernels
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("width", [16, 20])
def test_small_second_moments_round_up_to_the_smallest_value_as_in_the_reference(width: int, rows: bool) -> None:
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(40, width))
        optimizer = cadam.CAdam([param], moments="int8", fused=fused)
        for _ in range(3):
            grad = torch.randn(40, width) * 1e-20
            param.grad = grad.to_sparse(1) if rows else grad
            optimizer.step()
        found.append(optimizer.state[param]["exp_avg_sq"])
    assert torch.equal(*found)
    assert found[0].ne(0).float().mean() > 0.9


@needs_kernels
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_a_table_that_becomes_float64_is_refused_by_the_next_step(storage: str) -> None:
    """A model may be converted in place, and the C kernels do not support quantized moments of float64 tables."""
    table = torch.nn.Embedding(100, 16, sparse=True)
    optimizer = cadam.CAdam(table.parameters(), moments=storage)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        table.to(dtype)
        optimizer.zero_grad()
        table(torch.arange(50)).sum().backward()
        if dtype == torch.float64:
            with pytest.raises(RuntimeError, match=r"at most float32, and this one is torch.float64"):
                optimizer.step()
        else:
            optimizer.step()


@needs_kernels
@pytest.mark.parametrize("large", [1e20, 1e30, 3e38, float("inf")], ids=str)
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("rule", WITH_MOMENTS)
def test_a_moment_that_overflowed_stays_nan_in_the_c_kernels_as_in_the_reference(
    rule: str, width: int, rows: bool, large: float
) -> None:
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(2, width))
        optimizer = OF_RULE[rule, True]([param], lr=0.01, moments="int8", fused=fused)
        for value in (1.0, large, 1.0, -1.0):
            grad = torch.ones(2, width)
            grad[:, 0] = value
            grad[:, 1] = -value
            param.grad = grad.to_sparse(1) if rows else grad
            optimizer.step()
        decoded = moment_state.load_moments(optimizer._slot(param, optimizer.param_groups[0], ""), None, torch.float32)
        found.append((param.detach(), *decoded.values()))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_state_of_a_row_has_the_documented_size() -> None:
    expected = {
        (16, "float32", "element"): 128,
        (16, "bfloat16", "element"): 64,
        (16, "int8", "element"): 34,
        (16, "bfloat16", "row"): 36,
        (16, "int8", "row"): 21,
        (64, "float32", "element"): 512,
        (64, "bfloat16", "element"): 256,
        (64, "int8", "element"): 130,
        (64, "bfloat16", "row"): 132,
        (64, "int8", "row"): 69,
    }
    for (width, storage, second), size in expected.items():
        state = cadam.optim.sparse_update.new_state(torch.zeros(1000, width), moments=storage, second_moment=second)
        held = sum(t.untyped_storage().nbytes() for name, t in state.items() if name != moment_storage.SEED)
        assert held == 1000 * size


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0,), (0, 2, 3)], ids=str)
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("second", ["element", "row"])
@pytest.mark.parametrize("where", ["cpu", "elsewhere"])
def test_a_table_without_elements_takes_any_gradient(
    where: str, storage: str, second: str, shape: tuple[int, ...], fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_layout, "RECORDS_ON", where)
    param = torch.nn.Parameter(torch.ones(shape))
    optimizer = cadam.CAdam([param], moments=storage, second_moment=second, fused=fused)
    none, ids = torch.zeros(shape), torch.zeros(1, 0 if shape[0] == 0 else 3, dtype=torch.int64)
    rows = torch.sparse_coo_tensor(ids, torch.ones(ids.shape[1], *shape[1:]), shape, check_invariants=True)
    for grad in (none, rows, none, rows.coalesce(), rows):
        param.grad = grad
        optimizer.step()
        optimizer.explain()
    assert not any(buffer.isnan().any() for buffer in optimizer.state[param].values())


def test_explain_describes_a_table_that_was_quantized_for_a_dense_gradient() -> None:
    param = torch.nn.Parameter(torch.ones(6, 3))
    optimizer = cadam.CAdam([param], second_moment="row")
    param.grad = torch.ones(6, 3).to_sparse(1)
    optimizer.step()
    optimizer.param_groups[0]["moments"] = "int8"
    param.grad = torch.ones(6, 3)
    optimizer.step()
    assert optimizer.explain()[0].warning is None


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_a_parameter_with_gaps_in_memory_has_the_quantized_values_of_one_without(storage: str) -> None:
    found = []
    for whole in (torch.ones(6, 3), torch.ones(6, 10)[:, :3]):
        torch.manual_seed(0)
        param = torch.nn.Parameter(whole)
        optimizer = cadam.CAdam([param], moments=storage, fused=False, foreach=False)
        for _ in range(3):
            param.grad = torch.randn(6, 3)
            optimizer.step()
        found.append((param, optimizer.state[param]))
    (one, state), (other, with_gaps) = found
    assert other.stride() == (10, 1)
    assert torch.equal(one, other)
    assert all(torch.equal(buffer, with_gaps[name]) for name, buffer in state.items())


def share_storage(state: dict[str, Tensor]) -> bool:
    """Whether some tensors of a state share memory."""
    tensors = [x for x in state.values() if x.dim()]
    return len({x.untyped_storage().data_ptr() for x in tensors}) < len(tensors)


def sparse(shape: tuple[int, ...], seed: int) -> Tensor:
    torch.manual_seed(seed)
    ids = torch.randperm(shape[0])[: shape[0] // 2]
    return torch.sparse_coo_tensor(ids[None], torch.randn(len(ids), *shape[1:]), shape, check_invariants=True)


BESIDE: list[dict[str, Any]] = [{"moments": "bfloat16"}, {"moments": "int8"}]
BESIDE.append({"moments": "int8", "second_moment": "row"})
"""Storage options with which the moments of a row form one record on CUDA."""


@pytest.mark.parametrize("shape", [(30, 16), (30, 3), (30, 10), (30,), (1, 5), (12, 2, 3)], ids=str)
@pytest.mark.parametrize(
    ("rule", "storage"),
    [*[("adam", storage) for storage in BESIDE], ("sgdm", {"moments": "int8"}), ("lion", {"moments": "int8"})],
    ids=str,
)
def test_interleaved_rows_of_moments_equal_separate_ones(
    rule: str, storage: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the moments of a row form a record. With a dense gradient they are separate, as its kernels require."""
    found = []
    for where in ("cpu", "elsewhere"):
        monkeypatch.setattr(row_layout, "RECORDS_ON", where)
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(shape))
        optimizer = OF_RULE[rule, True]([param], lr=1e-2, fused=False, foreach=False, **storage)
        together = []
        for grad in (sparse(shape, 1), sparse(shape, 2), torch.ones(shape), sparse(shape, 3)):
            param.grad = grad
            optimizer.step()
            together.append(share_storage(optimizer.state[param]))
        side_by_side = where == "cpu" and len(param) > 1
        assert together == [side_by_side, side_by_side, False, side_by_side]
        found.append((param.detach(), optimizer.state[param]))
    (one, state), (other, apart) = found
    assert torch.equal(one, other)
    assert all(torch.equal(buffer, apart[name]) for name, buffer in state.items())


def table_side_by_side(
    monkeypatch: pytest.MonkeyPatch, width: int = 16, **storage: Any
) -> tuple[cadam.Optimizer, Tensor]:
    monkeypatch.setattr(row_layout, "RECORDS_ON", "cpu")
    param = torch.nn.Parameter(torch.ones(30, width))
    optimizer = cadam.CAdam([param], fused=False, foreach=False, **storage)
    param.grad = sparse((30, width), 1)
    optimizer.step()
    assert share_storage(optimizer.state[param])
    return optimizer, param


@pytest.mark.parametrize(
    ("storage", "second", "width", "sizes"),
    [
        ("int8", "element", 16, [36]),
        ("int8", "row", 16, [24]),
        ("int8", "element", 64, [128, 2]),
        ("int8", "row", 64, [72]),
        ("int8", "row", 128, [128, 8]),
        ("int8", "element", 3, [12]),
        ("int8", "row", 3, [12]),
        ("int8", "element", 10, [28]),
        ("int8", "row", 10, [20]),
        ("bfloat16", "element", 16, [64]),
        ("bfloat16", "element", 32, [128]),
        ("bfloat16", "element", 3, [12]),
    ],
)
def test_a_record_of_a_row_has_the_size_and_offsets_that_kernels_expect(
    storage: str, second: str, width: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All moments are in one record, or in two if the quantized values fill whole lines of 128 bytes."""
    optimizer, param = table_side_by_side(monkeypatch, width, moments=storage, second_moment=second)
    parts = [x for x in optimizer.state[param].values() if x.dim()]
    memories = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in parts}
    assert sorted(memories.values()) == sorted(30 * size for size in sizes)
    assert all(x.stride(0) * x.itemsize * 30 == memories[x.untyped_storage()._cdata] for x in parts)
    if storage == "int8":
        wide = [x for x in parts if x.shape == param.shape or x.dtype == torch.float32]
        assert all(x.storage_offset() * x.itemsize % 4 == 0 for x in wide)
    for k, part in enumerate(parts):  # the parts of the record do not overlap
        part.copy_(torch.full_like(part, k + 1))
    assert all((part == k + 1).all() for k, part in enumerate(parts))


CONVERSIONS: list[tuple[str, str]] = [
    ("bfloat16", "element"),
    ("int8", "element"),
    ("int8", "row"),
    ("float32", "row"),
    ("int8", "row"),
    ("bfloat16", "row"),
    ("int8", "row"),
    ("int8", "element"),
    ("float32", "element"),
    ("int8", "row"),
]


@pytest.mark.parametrize("width", [16, 10])
def test_moments_in_another_storage_are_interleaved_at_once_and_equal_separate_ones(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for where in ("cpu", "elsewhere"):
        monkeypatch.setattr(row_layout, "RECORDS_ON", where)
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(30, width))
        optimizer = cadam.CAdam([param], fused=False, foreach=False)
        for number, (storage, second) in enumerate(CONVERSIONS):
            optimizer.param_groups[0].update(moments=storage, second_moment=second)
            param.grad = sparse((30, width), number)
            optimizer.step()
            together = storage == "int8" or (storage, second) == ("bfloat16", "element")
            assert share_storage(optimizer.state[param]) == (together and where == "cpu")
            if not together:  # no moment is left in the memory of a record
                held = [x for x in optimizer.state[param].values() if x.dim()]
                assert all(x.untyped_storage().nbytes() == x.nbytes for x in held)
            state = {name: x.clone() for name, x in optimizer.state[param].items()}
            found.append((param.detach().clone(), state))
    for (one, state), (other, apart) in zip(found[: len(CONVERSIONS)], found[len(CONVERSIONS) :], strict=True):
        assert torch.equal(one, other)
        assert state.keys() == apart.keys()
        assert all(torch.equal(buffer, apart[name]) for name, buffer in state.items())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("moments", "int3", "moments value: 'int3'"), ("second_moment", "rwo", "'rwo'"), ("row_steps", "yes", "'yes'")],
)
def test_a_group_whose_storage_is_none_is_refused_before_anything_is_changed(
    option: str, value: str, message: str
) -> None:
    param = torch.nn.Parameter(torch.ones(5, 3))
    optimizer = cadam.CAdam([param])
    for known in (False, True):
        if known:
            optimizer.param_groups[0][option] = cadam.CAdam([param]).defaults[option]
            param.grad = sparse((5, 3), 0)
            optimizer.step()
        before = param.detach().clone()
        optimizer.param_groups[0][option] = value
        param.grad = sparse((5, 3), 1)
        with pytest.raises(ValueError, match=f"group 0: Invalid .*{message}.*; no parameter was changed"):
            optimizer.step()
        assert torch.equal(param, before)


def test_rows_that_count_their_steps_again_count_from_zero() -> None:
    param = torch.nn.Parameter(torch.ones(5, 3))
    optimizer = cadam.CAdam([param], row_steps=True)
    for own in (True, True, False, True):
        optimizer.param_groups[0]["row_steps"] = own
        param.grad = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.ones(1, 3), (5, 3), check_invariants=True)
        optimizer.step()
        assert ("row_steps" in optimizer.state[param]) == own
    assert optimizer.state[param]["row_steps"].flatten().tolist() == [0, 0, 1, 0, 0]


def test_explain_says_how_moments_are_stored() -> None:
    table, head = torch.nn.Parameter(torch.ones(5, 16)), torch.nn.Parameter(torch.ones(3))
    optimizer = cadam.CAdam([table, head], moments="int8", second_moment="row", row_steps=True)
    table.grad, head.grad = sparse((5, 16), 0), torch.ones(3)
    optimizer.step()
    first, second = str(optimizer.explain()).splitlines()[:2]
    assert ", gradient sparse, moments in int8, second moments by row, steps by row: " in first
    assert ", gradient dense, moments in int8, second moments and steps by row if the gradient is sparse: " in second
    plain = cadam.CAdam([head])
    assert ", gradient dense: " in str(plain.explain())


def test_hooks_receive_a_state_dict_that_can_be_saved_and_may_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, param = table_side_by_side(monkeypatch, moments="int8", second_moment="row")
    saved: list[int] = []

    def save(_: Any, found: dict[str, Any]) -> Any:
        torch.save(found, file := io.BytesIO())
        saved.append(file.tell())
        return ["something else"]

    optimizer.register_state_dict_post_hook(save, prepend=True)
    for _ in range(2):
        made: Any = optimizer.state_dict()
        assert made == ["something else"]
    assert len(saved) == 2
    optimizer.state[param]["note"] = torch.ones(3).to_sparse()
    other, table = copy.deepcopy((optimizer, param))
    assert other.state[table].keys() == optimizer.state[param].keys()


@pytest.mark.parametrize("second", ["element", "row"])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_scale", "exp_avg_sq"])
def test_a_replaced_buffer_is_interleaved_with_the_others_again(
    name: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, param = table_side_by_side(monkeypatch, moments="int8", second_moment=second)
    before = {name: x.clone() for name, x in optimizer.state[param].items()}
    optimizer.state[param][name] = copy.deepcopy(optimizer.state[param][name])
    item = optimizer._slot(param, optimizer.param_groups[0], "")
    assert moment_state.has_uniform_row_strides(item)
    assert share_storage(optimizer.state[param])
    assert all(torch.equal(x, before[name]) for name, x in optimizer.state[param].items())


@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_moments_in_records_stay_where_they_are(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, param = table_side_by_side(monkeypatch, **storage)
    before = dict(optimizer.state[param])
    optimizer._plan = None  # the next step is planned again
    optimizer.step()
    assert all(optimizer.state[param][name] is buffer for name, buffer in before.items())


def test_consecutive_moments_in_one_storage_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, param = table_side_by_side(monkeypatch, moments="int8")
    state = optimizer.state[param]
    names = [name for name, x in state.items() if x.dim()]
    before = {name: state[name].clone() for name in names}
    flat = torch.cat([state[name].flatten() for name in names])
    parts = flat.split([state[name].numel() for name in names])
    state.update({name: part.view(before[name].shape) for name, part in zip(names, parts, strict=True)})
    optimizer._slot(param, optimizer.param_groups[0], "")
    assert state["exp_avg"].untyped_storage().nbytes() == 30 * 36
    assert all(torch.equal(state[name], x) for name, x in before.items())


def test_row_strides_do_not_depend_on_dimensions_of_one_element() -> None:
    assert row_layout.row_stride(torch.ones(1, 7).t()) == 1
    assert row_layout.row_stride(torch.ones(5, 1).t()) == 5
    assert row_layout.row_stride(torch.ones(5, 3, 4)[:, 1]) == 12
    assert row_layout.row_stride(torch.ones(5, 7)[:, :4]) == 7
    assert row_layout.row_stride(torch.ones(5, 7)[:, 2:3]) == 7
    assert row_layout.row_stride(torch.ones(4, 5).t()) is None
    assert row_layout.row_stride(torch.ones(1, 4).expand(5, 4)) is None  # all rows share one memory
    assert row_layout.row_stride(torch.ones(20).as_strided((5, 4), (3, 1))) is None  # rows overlap


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"])
def test_kernels_refuse_moments_whose_rows_are_unevenly_spaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels would read bytes between the rows or behind the last row as moments."""
    optimizer, param = table_side_by_side(monkeypatch, moments="int8")
    item = optimizer._slot(param, optimizer.param_groups[0], "")
    assert moment_state.has_uniform_row_strides(item)
    assert storage_refusal(item, rows=True) is None
    apart = {name: optimizer.state[param][name].clone(memory_format=torch.contiguous_format)}
    buffers = {each: apart.get(each, buffer) for each, buffer in item.state.items()}
    scales = {each: apart.get(f"{each}_scale", buffer) for each, buffer in item.scales.items()}
    other = replace(item, state=buffers, scales=scales)
    assert not moment_state.has_uniform_row_strides(other)
    assert "equally far apart" in str(storage_refusal(other, rows=True))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_kernels_refuse_rows_that_overlap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, param = table_side_by_side(monkeypatch, moments="int8", second_moment="row")
    item = optimizer._slot(param, optimizer.param_groups[0], "")
    assert storage_refusal(item, rows=True) is None
    buffers = {**item.state, name: item.state[name][:1].expand_as(item.state[name])}
    assert "equally far apart" in str(storage_refusal(replace(item, state=buffers), rows=True))


@pytest.mark.parametrize("width", [2, 3, 4, 10, 16, 70])
@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_kernels_get_the_row_strides_and_an_alignment_that_the_values_have(
    storage: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, param = table_side_by_side(monkeypatch, width, **storage)
    spec = KernelSpec.of(optimizer.rule, optimizer.param_groups[0], rows=True)
    state = {f"s_{name}": optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")}
    state |= {f"e_{name[:-6]}": x for name, x in optimizer.state[param].items() if name.endswith("_scale")}
    size = state["s_exp_avg"].stride(0) * state["s_exp_avg"].itemsize
    found = RowStrides.of(spec, state)
    if storage["moments"] == "bfloat16":
        assert found == (size // 2, 1, 1, width % 4 == 0)
    else:
        shared = size // 4 if "second_moment" in storage else 1
        assert found == (size, size, shared, True)
        odd = torch.zeros(31, size, dtype=torch.uint8).flatten()[1:].as_strided((30, width), (size, 1))
        assert not RowStrides.of(spec, {**state, "s_exp_avg": odd}).is_aligned
    apart = {name: x.clone(memory_format=torch.contiguous_format) for name, x in state.items()}
    assert RowStrides.of(spec, apart) == (width, 1, 1, True)


@pytest.mark.parametrize("how", ["state dict", "optimizer", "copy"])
@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_moments_in_records_are_saved_and_copied_to_the_bit(
    storage: Any, width: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, param = table_side_by_side(monkeypatch, width, **storage)
    if how == "state dict":
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        other, table = type(optimizer)([param], **storage), param
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
    elif how == "optimizer":
        torch.save(optimizer, tmp_path / "optimizer.pt")
        other = torch.load(tmp_path / "optimizer.pt", weights_only=False)
        (table,) = other.param_groups[0]["params"]
    else:
        other, table = copy.deepcopy((optimizer, param))
    assert all(torch.equal(x, optimizer.state[param][name]) for name, x in other.state[table].items())
    assert other.state[table].keys() == optimizer.state[param].keys()
    before, (one, theirs) = param.detach().clone(), (optimizer.state[param], other.state[table])
    grad = sparse((30, width), 2)
    for each, own in ((optimizer, param), (other, table)):
        own.data = before.clone()
        own.grad = grad
        each.param_groups[0].update(fused=False, foreach=False)
        each.step()
    assert share_storage(theirs)
    assert theirs["exp_avg"].untyped_storage().data_ptr() != one["exp_avg"].untyped_storage().data_ptr()
    assert all(torch.equal(x, theirs[name]) for name, x in one.items())


@needs_triton
def test_the_kernels_for_dense_gradients_refuse_moments_in_records(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, param = table_side_by_side(monkeypatch, moments="bfloat16")
    engine, group = Cuda(), {**optimizer.param_groups[0], "fused": None, "foreach": None}
    engine.device = "cpu"
    resolved = ResolvedGroup.resolve(optimizer.rule, group)
    slot = optimizer._slot(param, group, "")
    dense = torch.ones(30, 16)
    assert "memory layout" in str(engine.refusal(resolved, slot, dense))
    param.grad = dense
    assert engine.refusal(resolved, optimizer._slot(param, group, ""), dense) is None


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_in_a_capture_moments_stay_where_they_are(storage: Any, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each replay of the graph would copy the moments that existed when it was captured."""
    optimizer, param = table_side_by_side(monkeypatch, **storage)
    if dense:
        param.grad = torch.ones(30, 16)
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    before = dict(optimizer.state[param])
    monkeypatch.setattr(row_layout, "capturing", lambda device: True)
    optimizer.step()
    assert all(optimizer.state[param][name] is buffer for name, buffer in before.items())


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_after_a_capture_moments_stay_where_the_graph_reaches_them(
    storage: Any, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a replay would write to memory that was freed."""
    optimizer, param = table_side_by_side(monkeypatch, **storage)
    if not dense:
        optimizer.load_state_dict(optimizer.state_dict())
    with monkeypatch.context() as patched:
        patched.setattr(row_layout, "capturing", lambda device: True)
        optimizer.step()
    before = dict(optimizer.state[param])
    assert share_storage(before) == dense
    param.grad = torch.ones(30, 16) if dense else sparse((30, 16), 2)
    optimizer._plan = None  # the next step is planned again
    optimizer.step()
    assert all(optimizer.state[param][name] is buffer for name, buffer in before.items())


@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_loaded_moments_stay_separate_without_memory_for_a_copy(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, param = table_side_by_side(monkeypatch, **storage)
    reference, other = copy.deepcopy((optimizer, param))
    optimizer.load_state_dict(optimizer.state_dict())
    for one, table in ((optimizer, param), (reference, other)):
        table.grad = sparse((30, 16), 2)
        with monkeypatch.context() as patched:
            if one is optimizer:
                patched.setattr(torch, "zeros", no_room)
            one.step()
    assert not share_storage(optimizer.state[param])
    assert torch.equal(param, other)
    assert all(torch.equal(buffer, reference.state[other][name]) for name, buffer in optimizer.state[param].items())
    new = cadam.CAdam([param], **storage)
    monkeypatch.setattr(torch, "zeros", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        new.step()
    assert param not in new.state


def no_room(*size: Any, zeros: Any = torch.zeros, **how: Any) -> Tensor:
    """Simulate that there is no memory for records, which are bytes."""
    if how.get("dtype") == torch.uint8:
        raise torch.OutOfMemoryError("no room")
    made: Tensor = zeros(*size, **how)
    return made


def test_plain_moments_in_memory_of_the_users_stay_there() -> None:
    memory = torch.zeros(30, 2, 16)
    param = torch.nn.Parameter(torch.ones(30, 16))
    optimizer = cadam.CAdam([param])
    for grad in (torch.ones(30, 16), sparse((30, 16), 1)):
        param.grad = grad
        optimizer.step()
        optimizer.state[param].update(exp_avg=memory[:, 0], exp_avg_sq=memory[:, 1])
        memory.zero_()
        optimizer.step()
        assert memory.any(2).any(0).all()


@needs_kernels
@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_the_c_kernels_serve_an_optimizer_that_had_interleaved_rows(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, _ = table_side_by_side(monkeypatch, **storage)
    optimizer.param_groups[0].update(fused=None, foreach=None)
    monkeypatch.setattr(row_layout, "RECORDS_ON", "elsewhere")
    optimizer.step()
    assert optimizer.explain()[0].engine == "native-rows"


@needs_kernels
@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_the_c_kernels_load_a_state_that_had_interleaved_rows(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for where in ("cpu", "elsewhere"):
        monkeypatch.setattr(row_layout, "RECORDS_ON", where)
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(30, 16))
        optimizer = cadam.CAdam([param], **storage)
        param.grad = sparse((30, 16), 1)
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        monkeypatch.setattr(row_layout, "RECORDS_ON", "elsewhere")
        resumed = cadam.CAdam([param], **storage)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
        param.grad = sparse((30, 16), 2)
        resumed.step()
        assert resumed.explain()[0].engine == "native-rows"
        found.append((param.detach(), resumed.state[param]))
    (one, state), (other, apart) = found
    torch.testing.assert_close(one, other)
    compare_codes(state, apart)


@on_cuda
@pytest.mark.parametrize("width", [3, 10, 16])
@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_on_cuda_rows_are_interleaved_and_have_the_quantized_values_of_the_cpu(
    storage: Any, width: int, tmp_path: Path
) -> None:
    """The optimizer may be saved, loaded or copied between the steps."""

    def saved(optimizer: cadam.Optimizer, param: Tensor, **how: Any) -> cadam.Optimizer:
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        resumed = cadam.CAdam([param], lr=1e-2, **storage)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", **how))
        return resumed

    shape, found = (300, width), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(shape).to(device))
        optimizer: cadam.Optimizer = cadam.CAdam([param], lr=1e-2, **storage)
        together = []
        for k in range(6):
            param.grad = sparse(shape, k).to(device)
            optimizer.step()
            together.append(share_storage(optimizer.state[param]))
            assert optimizer.explain()[0].engine == ("cuda-rows" if device == "cuda" else "native-rows")
            if k == 1:
                optimizer, param = copy.deepcopy((optimizer, param))
            elif k == 2:
                optimizer = saved(optimizer, param)
            elif k == 3:
                optimizer = saved(optimizer, param, map_location="cpu")
        assert together == [device == "cuda"] * 6
        found.append((param.detach().cpu(), optimizer.state[param]))
    (one, state), (other, apart) = found
    torch.testing.assert_close(one, other)
    compare_codes(state, apart)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_a_nan_that_the_device_computed_stays_one(storage: str, rows: bool, device: str) -> None:
    """The NaN of a GPU has all of its bits set."""
    param = torch.nn.Parameter(torch.ones(40, 16, device=device))
    optimizer = cadam.CAdam([param], moments=storage)
    for factor in (float("inf"), 1.0):
        grad = torch.ones(40, 16, device=device)
        grad[3, 5] = torch.zeros(1, device=device).mul(factor)[0]  # 0 * inf, then 0
        param.grad = grad.to_sparse(1) if rows else grad
        optimizer.step()
    decoded = moment_state.load_moments(optimizer._slot(param, optimizer.param_groups[0], ""), None, torch.float32)
    for values in decoded.values():
        assert values.isnan().nonzero().tolist() == [[3, 5]]


@on_cuda
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("storage", BESIDE, ids=str)
def test_a_graph_on_cuda_continues_with_the_moments_that_other_steps_use(storage: Any, dense: bool) -> None:
    """A step with another kind of gradient, or one after a load, comes between two replays."""
    shape, found = (300, 16), []
    for graph in (False, True):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(shape).cuda())
        optimizer = cadam.CAdam([param], lr=1e-2, capturable=True, **storage)
        rows, other = sparse(shape, 1).cuda(), torch.ones(shape).cuda() if dense else sparse(shape, 2).cuda()
        param.grad = rows
        optimizer.step()
        if not dense:
            optimizer.load_state_dict(optimizer.state_dict())
        held = torch.cuda.CUDAGraph()
        if graph:
            with torch.cuda.graph(held):
                optimizer.step()
        for grad in (rows, other, rows):
            if graph and grad is rows:
                held.replay()
            else:
                param.grad = grad
                optimizer.step()
        torch.cuda.synchronize()
        found.append((param.detach().clone(), dict(optimizer.state[param])))
    (one, state), (other_one, others) = found
    torch.testing.assert_close(one, other_one)
    assert all(torch.equal(buffer, others[name]) for name, buffer in state.items())


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        *("dense", "huge", "rows", "distinct_rows", "distinct_ids_that_are_no_rows"),
        *("row_steps", "exact_updates", "stochastic_rounding"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("rows_apart", "records")),
    ],
)
def test_the_kernels_in_tritons_interpreter_give_the_quantized_values_of_the_reference(case: str) -> None:
    run_cases(Path(__file__).parent / "quantized_cases.py", [case])


@pytest.mark.parametrize(("rows", "reason"), [(True, "each block of elements"), (False, "each row")])
def test_scales_of_other_gradients_are_named(rows: bool, reason: str) -> None:
    scales = torch.zeros((2,) if rows else (2, 1), dtype=torch.uint8)
    item = SimpleNamespace(scales={"exp_avg": scales})
    assert f"a scale for {reason}, and the gradient is" in (moment_state.scale_mismatch(item, rows) or "")  # type: ignore[arg-type]
    assert moment_state.scale_mismatch(item, not rows) is None  # type: ignore[arg-type]

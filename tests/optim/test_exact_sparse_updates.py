"""`sparse_updates="exact"`: sparse steps with the result of dense gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cadam
from cadam.optim.sparse_update import RowUpdate, complete
from cadam.rules.base import Rule, Step
from cadam.rules.sparse_updates import LAST_STEPS
from tests.engines.triton_interpreter import ON_CUDA, interpreted, needs_triton

from .family import CONFIDENT
from .test_oracle import oracle_of, variants

ROWS, WIDTH = 12, 5
ENGINES: dict[str, dict[str, Any]] = {
    "native-rows": {"fused": True},
    "rows": {"fused": False, "foreach": False},
    "cuda-rows": {"fused": True},
}
ON_ENGINES = pytest.mark.parametrize("engine", ["native-rows", "rows", pytest.param("cuda-rows", marks=ON_CUDA)])
EXACT: dict[str, Any] = {"sparse_updates": "exact", "weight_decay": 0.0}
CASES = [pytest.param(name, o, id=f"{name}-{o}") for name, cls in CONFIDENT.items() for o in variants(cls)]


def batches(
    steps: int, seed: int = 0, rows: int = ROWS, width: int = WIDTH, count: int = 4
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids with duplicates and their gradients; some batches are empty, and low ids are much more frequent."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        size = 0 if step % 7 == 3 else count
        ids = (rows * rng.random(size) ** 3).astype(np.int64)
        yield ids, rng.integers(-16, 17, (size, width)) / 16


def dense(ids: np.ndarray, values: np.ndarray, rows: int = ROWS) -> np.ndarray:
    grad = np.zeros((rows, values.shape[1]))
    np.add.at(grad, ids, values)
    return grad


def set_grad(param: torch.Tensor, ids: np.ndarray, values: np.ndarray) -> None:
    where, grads = torch.from_numpy(ids)[None].to(param.device), torch.from_numpy(values).to(param)
    param.grad = torch.sparse_coo_tensor(where, grads, param.shape, check_invariants=False)


def table(
    dtype: torch.dtype = torch.float64, rows: int = ROWS, width: int = WIDTH, engine: str = "rows"
) -> torch.nn.Parameter:
    """Return a table on the device of an engine."""
    start = np.random.default_rng(9).standard_normal((rows, width))
    device = "cuda" if engine == "cuda-rows" else "cpu"
    return torch.nn.Parameter(torch.from_numpy(start).to(device, dtype))


def moments(optimizer: cadam.Optimizer) -> dict[str, torch.Tensor]:
    """Return the moments of the only table after the steps that its rows have missed."""
    state: dict[str, torch.Tensor] = cadam.for_torch(optimizer.state_dict())["state"][0]
    assert LAST_STEPS not in state
    return {name: value.cpu() for name, value in state.items() if name != "step"}


@ON_ENGINES
@pytest.mark.parametrize(("name", "options"), CASES)
def test_float64_agrees_with_the_dense_oracle(name: str, options: dict[str, Any], engine: str) -> None:
    param = table(engine=engine)
    cls = CONFIDENT[name]
    expected = oracle_of(cls, param.detach().cpu().numpy(), **options, lr=0.03)
    optimizer = cls([param], lr=0.03, **options, **EXACT, **ENGINES[engine])
    for step, (ids, values) in enumerate(batches(60)):
        set_grad(param, ids, values)
        assert optimizer.explain()[0].engine == engine
        optimizer.param_groups[0]["lr"] = expected.options["lr"] = 0.03 * 0.97**step
        expected.step(dense(ids, values))
        optimizer.step()
    np.testing.assert_allclose(param.detach().cpu(), expected.param, rtol=0, atol=1e-12)
    entry = optimizer.state_dict()["state"][0]
    if "exp_avg" in entry:
        aged = moments(optimizer)
        for buffer in expected.state.keys() - {"max_exp_avg_sq"}:  # `for_torch` converts the maximum of AMSGrad
            np.testing.assert_allclose(aged[buffer], expected.state[buffer], rtol=0, atol=1e-12)


def test_lazy_updates_do_not_agree_with_dense_gradients() -> None:
    results = []
    for mode in ("lazy", "exact"):
        param = table()
        optimizer = cadam.CAdam([param], lr=0.03, sparse_updates=mode)
        for ids, values in batches(60):
            set_grad(param, ids, values)
            optimizer.step()
        results.append(param.detach())
    assert (results[0] - results[1]).abs().max() > 1e-2


@ON_ENGINES
@pytest.mark.parametrize("name", CONFIDENT)
def test_one_float32_step_from_the_same_state_agrees_to_rounding(name: str, engine: str) -> None:
    exact, expected = table(torch.float32, engine=engine), table(torch.float32, engine=engine)
    ours = CONFIDENT[name]([exact], lr=0.03, **EXACT, **ENGINES[engine])
    theirs = CONFIDENT[name]([expected], lr=0.03, weight_decay=0.0)
    *before, (ids, values) = batches(32)
    for each_ids, each in before:
        set_grad(exact, each_ids, each)
        ours.step()
    state = ours.state_dict()
    expected.data.copy_(exact.data)
    theirs.load_state_dict(state)  # the first step with the dense gradient brings all rows up to date
    set_grad(exact, ids, values)
    expected.grad = torch.from_numpy(dense(ids, values)).to(expected)
    ours.step()
    theirs.step()
    torch.testing.assert_close(exact, expected, rtol=3e-6, atol=3e-7)


@ON_ENGINES
@pytest.mark.parametrize(("width", "count"), [(1024, 4), (5, 3000)], ids=["wide rows", "many duplicates"])
def test_rows_that_need_several_tiles(width: int, count: int, engine: str) -> None:
    param = table(width=width, engine=engine)
    expected = oracle_of(cadam.CAdam, param.detach().cpu().numpy(), lr=0.03)
    optimizer = cadam.CAdam([param], lr=0.03, **EXACT, **ENGINES[engine])
    for ids, values in batches(9, width=width, count=count):
        set_grad(param, ids, values)
        expected.step(dense(ids, values))
        optimizer.step()
    np.testing.assert_allclose(param.detach().cpu(), expected.param, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["native-rows", "rows"])
def test_rows_wider_than_a_quantized_row(engine: str) -> None:
    param, width = table(width=1100), 1100
    expected = oracle_of(cadam.CAdam, param.detach().numpy(), lr=0.03)
    optimizer = cadam.CAdam([param], lr=0.03, **EXACT, **ENGINES[engine])
    for ids, values in batches(5, width=width):
        set_grad(param, ids, values)
        expected.step(dense(ids, values))
        optimizer.step()
    np.testing.assert_allclose(param.detach(), expected.param, rtol=0, atol=1e-12)


@ON_ENGINES
def test_most_rows_agree_with_dense_gradients_after_many_float32_steps(engine: str) -> None:
    exact, expected = (table(torch.float32, rows=500, engine=engine) for _ in range(2))
    ours = cadam.CAdam([exact], lr=1e-3, **EXACT, **ENGINES[engine])
    theirs = cadam.CAdam([expected], lr=1e-3)
    for ids, values in batches(1000, rows=500, count=40):
        set_grad(exact, ids, values)
        expected.grad = torch.from_numpy(dense(ids, values, 500)).to(expected)
        ours.step()
        theirs.step()
    differs = (exact - expected).abs().amax(1) > 1e-3
    assert differs.float().mean() < 0.01


@ON_ENGINES
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["CAdam", "CLion", "CAdaBelief"])
def test_quantized_moments_age_alike_on_every_engine(name: str, storage: str, engine: str) -> None:
    states, tables = [], []
    for each in ("rows", engine):
        param = table(torch.float32, width=16, engine=each)
        optimizer = CONFIDENT[name]([param], lr=0.03, moments=storage, **EXACT, **ENGINES[each])
        for ids, values in batches(40, width=16):
            set_grad(param, ids, values)
            assert optimizer.explain()[0].engine == each
            optimizer.step()
        states.append({key: value.cpu() for key, value in optimizer.state[param].items()})
        tables.append(param.detach().cpu())
    torch.testing.assert_close(*tables, rtol=1e-5, atol=1e-6)
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.parametrize(("storage", "share"), [("bfloat16", 2**-6), ("int8", 2**-3)])
def test_quantized_moments_age_within_their_rounding(storage: str, share: float) -> None:
    """After 500 missed steps, moments equal those in float32 except for a share of the largest moment of the row."""
    aged, quantized = [], {"moments": storage}
    unquantized: dict[str, Any] = {}
    for o in (unquantized, quantized):
        param = table(torch.float32, width=16)
        optimizer = cadam.CAdam([param], lr=0.03, betas=(0.999, 0.9999), **EXACT, **o)
        set_grad(param, np.array([1]), np.linspace(-1, 1, 16)[None])
        optimizer.step()
        optimizer.state[param]["step"].add_(500)
        set_grad(param, np.array([1]), np.linspace(0, 0.01, 16)[None])
        optimizer.step()
        aged.append(moments(optimizer))
    for name, expected in aged[0].items():
        difference, largest = (aged[1][name] - expected).abs()[1], expected[1].abs().max()
        assert difference.max() <= share * largest


@needs_triton
def test_the_triton_kernels_in_the_interpreter() -> None:
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr


INTERPRETED = """
from cadam.engines import selection
from cadam.engines.cuda import sparse as cuda_rows
from tests.optim.test_exact_sparse_updates import *

rows = cuda_rows.CudaRows()
rows.device = "cpu"
selection.ENGINES = (rows, *(engine for engine in selection.ENGINES if engine.name == "eager"))
cuda_rows.TILE_ELEMENTS = 64
for cls, options, width, count in (
    (cadam.CAmsGrad, {}, 5, 4), (cadam.CAdaBelief, {}, 5, 4), (cadam.CAdam, {}, 140, 4), (cadam.CAdam, {}, 3, 40)
):
    param = table(width=width)
    expected = oracle_of(cls, param.detach().numpy(), lr=0.03, **options)
    optimizer = cls([param], lr=0.03, **options, **EXACT)
    for step, (ids, values) in enumerate(batches(9, width=width, count=count)):
        set_grad(param, ids, values)
        optimizer.param_groups[0]["lr"] = expected.options["lr"] = 0.03 * 0.97**step
        expected.step(dense(ids, values))
        optimizer.step()
        assert optimizer.explain()[0].engine == "cuda-rows"
    np.testing.assert_allclose(param.detach(), expected.param, rtol=0, atol=1e-12)
"""


@ON_ENGINES
@pytest.mark.parametrize("cls", [cadam.CAdam, cadam.CAmsGrad])
def test_changes_between_steps(cls: type[cadam.Optimizer], engine: str) -> None:
    """New betas, dense gradients, lazy updates and a checkpoint in between take effect from their step on."""
    param, reference = table(engine=engine), table(engine=engine)
    ours = cls([param], lr=0.03, **EXACT, **ENGINES[engine])
    theirs = cls([reference], lr=0.03)
    for step, (ids, values) in enumerate(batches(40)):
        if step == 10:
            for each in (ours, theirs):
                each.param_groups[0]["betas"] = (0.5, 0.9)
        if step == 20:
            state = ours.state_dict()
            ours = cls([param], lr=1.0, **EXACT, **ENGINES[engine])
            ours.load_state_dict(state)
            for each in (ours, theirs):
                each.param_groups[0]["betas"] = (0.8, 0.999)
        reference.grad = torch.from_numpy(dense(ids, values)).to(reference)
        if step % 8 == 5:
            param.grad = reference.grad.clone()
        else:
            set_grad(param, ids, values)
        ours.step()
        theirs.step()
    torch.testing.assert_close(param, reference, rtol=0, atol=1e-12)
    for mode in ("lazy", "exact"):
        ours.param_groups[0]["sparse_updates"] = mode
        set_grad(param, np.array([0]), np.ones((1, WIDTH)))
        ours.step()
        assert (LAST_STEPS in ours.state[param]) == (mode == "exact")


@ON_ENGINES
@pytest.mark.parametrize(
    ("off", "dense_steps"),
    [(range(20), 0), (range(10, 12), 0), (range(5), 5)],
    ids=["at first", "in between", "after dense gradients"],
)
def test_amsgrad_that_is_switched_on_during_a_run(engine: str, off: range, dense_steps: int) -> None:
    param, reference = table(engine=engine), table(engine=engine)
    ours = cadam.CAdam([param], lr=0.03, betas=(0.9, 0.9), **EXACT, **ENGINES[engine])
    theirs = cadam.CAdam([reference], lr=0.03, betas=(0.9, 0.9))
    for step, (ids, values) in enumerate(batches(40)):
        for each in (ours, theirs):
            each.param_groups[0]["amsgrad"] = step not in off
        if step < 4:  # the maximum remembers these gradients
            values = 100 * values
        reference.grad = torch.from_numpy(dense(ids, values)).to(reference)
        if step < dense_steps:
            param.grad = reference.grad.clone()
        else:
            set_grad(param, ids, values)
        ours.step()
        theirs.step()
    torch.testing.assert_close(param, reference, rtol=0, atol=1e-12)


@ON_ENGINES
def test_a_resumed_run_is_identical(engine: str) -> None:
    params = table(torch.float32, engine=engine), table(torch.float32, engine=engine)
    first, resumed = (cadam.CAdam([param], lr=0.03, **EXACT, **ENGINES[engine]) for param in params)
    for step, (ids, values) in enumerate(batches(20)):
        if step == 10:
            params[1].data.copy_(params[0].data)
            resumed.load_state_dict(first.state_dict())
        for param, optimizer in zip(params, (first, resumed), strict=True):
            set_grad(param, ids, values)
            if step >= 10 or optimizer is first:
                optimizer.step()
    assert torch.equal(*params)
    assert torch.equal(first.state[params[0]][LAST_STEPS], resumed.state[params[1]][LAST_STEPS])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"confidence": False}, "needs confidence=True"),
        ({"weight_decay": 0.1}, "needs weight_decay=0"),
        ({"weight_decay": 0.1, "decoupled_weight_decay": True}, "needs weight_decay=0"),
        ({"second_moment": "row"}, "needs second_moment='element'"),
        ({"row_steps": True}, "row_steps=True"),
        ({"capturable": True}, "capturable=True"),
        ({"betas": (torch.tensor(0.9), torch.tensor(0.99))}, "plain numbers"),
        ({"sparse_updates": "eager"}, "'lazy' or 'exact'"),
    ],
    ids=str,
)
def test_options_that_exact_updates_do_not_support_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cadam.CAdam([table()], **{"sparse_updates": "exact", **options})
    param = table()
    optimizer = cadam.CAdam([param], sparse_updates="exact")
    optimizer.param_groups[0].update(options)
    set_grad(param, np.array([1]), np.ones((1, WIDTH)))
    before = param.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(param, before)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"betas\[1\] must differ"):
        cadam.CAdaBelief([table()], betas=(0.9, 0.81), **EXACT)
    plain = Rule("plain", {"lr": 0.1}, lambda o: {}, lambda t, o, f: {}, lambda g, s, c, f: Step(g, g, {}))
    own = type("Own", (cadam.Optimizer,), {"rule": plain})
    with pytest.raises(ValueError, match=r"Rule\.age"):
        own([table()], **EXACT)
    param = table()
    optimizer = cadam.CAdam([param], **EXACT)
    param.grad = torch.ones_like(param).to_sparse()
    with pytest.raises(RuntimeError, match="one sparse dimension"):
        optimizer.step()


def test_rows_that_are_reset_begin_without_moments() -> None:
    param, reference = table(), table()
    ours, theirs = cadam.CAdam([param], lr=0.03, **EXACT), cadam.CAdam([reference], lr=0.03)
    for step, (ids, values) in enumerate(batches(20)):
        if step == 10:
            ours.reset_rows(param, torch.tensor([0, 3]))
            for name in ("exp_avg", "exp_avg_sq"):
                theirs.state[reference][name][[0, 3]] = 0
        set_grad(param, ids, values)
        reference.grad = torch.from_numpy(dense(ids, values))
        ours.step()
        theirs.step()
    torch.testing.assert_close(param, reference, rtol=0, atol=1e-12)


@ON_ENGINES
@pytest.mark.parametrize(
    ("storage", "cls"), [("float32", cadam.CAdam), ("int8", cadam.CAdam), ("float32", cadam.CAmsGrad)]
)
def test_updates_of_plain_tensors(storage: str, cls: type[cadam.Optimizer], engine: str) -> None:
    """Row updates have the result of the optimizer, also after betas change; updates of earlier steps are refused."""
    options = {"lr": 0.03, "moments": storage, **EXACT, **ENGINES[engine]}
    param, copied = table(torch.float32, engine=engine), table(torch.float32, engine=engine).detach()
    optimizer = cls([param], **options)
    state = cadam.sparse_update.new_state(copied, optimizer=cls, **options)
    group = complete(cls, options)
    update = RowUpdate(copied, state, cls, group)
    for step, (ids, values) in enumerate(batches(30), 1):
        if step == 15:
            optimizer.param_groups[0]["betas"] = group["betas"] = (0.5, 0.9999)
        set_grad(param, ids, values)
        optimizer.step()
        update(torch.from_numpy(ids).to(copied.device), torch.from_numpy(values).to(copied), step=step)
    torch.testing.assert_close(param.detach(), copied, rtol=0, atol=0)
    assert torch.equal(state[LAST_STEPS], optimizer.state[param][LAST_STEPS])
    with pytest.raises(OverflowError, match="16,777,216 steps"):
        update(torch.tensor([1], device=copied.device), torch.ones(1, WIDTH, device=copied.device), step=2**24 + 1)


@ON_ENGINES
def test_step_counts_beyond_those_of_float32_are_refused(engine: str) -> None:
    param = table(engine=engine)
    optimizer = cadam.CAdam([param], **EXACT, **ENGINES[engine])
    set_grad(param, np.array([1]), np.ones((1, WIDTH)))
    optimizer.step()
    optimizer.state[param]["step"].fill_(2**24)
    before = param.detach().clone()
    with pytest.raises(OverflowError, match="16,777,216 steps"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({LAST_STEPS: torch.zeros(3, 1, dtype=torch.int32)}, "row_last_steps is torch.int32 of shape"),
        ({LAST_STEPS: torch.full((ROWS, 1), 9, dtype=torch.int32)}, "steps after step 1"),
        ({"row_aging_options": None}, "only one of"),
    ],
    ids=["shape", "future", "one of two"],
)
def test_a_state_that_does_not_fit_is_not_loaded(change: dict[str, Any], message: str) -> None:
    param = table()
    optimizer = cadam.CAdam([param], **EXACT)
    set_grad(param, np.array([1]), np.ones((1, WIDTH)))
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = {k: v for k, v in {**saved["state"][0], **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        cadam.CAdam([table()], **EXACT).load_state_dict(saved)


def test_explain_says_how_a_table_is_updated() -> None:
    param = table()
    optimizer = cadam.CAdam([param], **EXACT)
    set_grad(param, np.array([1]), np.ones((1, WIDTH)))
    optimizer.step()
    assert "exact sparse updates" in str(optimizer.explain())
    assert param.grad is not None
    param.grad = param.grad.to_dense()
    assert "92% of its rows have no gradient" in str(optimizer.explain())
    assert "down to 0.1 of its distance" in str(optimizer.explain())
    assert "of its rows" not in str(cadam.Adam([param]).explain())

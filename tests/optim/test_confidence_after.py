"""`confidence_after`: the mask of a table's row begins with its n-th update."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import cadam
from cadam.rules.moment_storage import ROW_STEPS
from tests.engines.triton_interpreter import ON_CUDA, interpreted, needs_triton

from .test_exact_sparse_updates import ROWS, WIDTH, batches, dense, set_grad, table

AFTER = 4
ENGINES: dict[str, dict[str, Any]] = {
    "native-rows": {"fused": True},
    "rows": {"fused": False, "foreach": False},
    "cuda-rows": {"fused": True},
}
ON_ENGINES = pytest.mark.parametrize("engine", ["native-rows", "rows", pytest.param("cuda-rows", marks=ON_CUDA)])
STORAGES: list[dict[str, Any]] = [
    {},
    {"row_steps": True},
    {"moments": "int8"},
    {"moments": "bfloat16", "second_moment": "row", "row_steps": True},
]


def one_step(param: torch.Tensor, state: dict[str, Any], *, confidence: bool, **options: Any) -> torch.Tensor:
    """Return a table after one step of the reference engine from a saved state, with or without the mask."""
    copied = torch.nn.Parameter(param.detach().clone())
    optimizer = cadam.CAdam([copied], lr=0.03, confidence=confidence, fused=False, foreach=False, **options)
    optimizer.load_state_dict(copy.deepcopy({**state, "param_groups": optimizer.state_dict()["param_groups"]}))
    copied.grad = param.grad
    optimizer.step()
    return copied.detach()


def check_steps(engine: str, dtype: torch.dtype, steps: int = 25, **options: Any) -> None:
    """Compare each row in each step with a step without the mask before its n-th update, and with it from there on."""
    param = table(dtype, engine=engine if torch.cuda.is_available() else "rows")
    optimizer = cadam.CAdam([param], lr=0.03, confidence_after=AFTER, **options, **ENGINES[engine])
    updates = np.zeros(ROWS, int)
    has_differed = False
    for ids, values in batches(steps):
        set_grad(param, ids, values)
        state = optimizer.state_dict()
        masked, unmasked = (one_step(param, state, confidence=c, **options) for c in (True, False))
        updates[np.unique(ids)] += 1
        is_masked = torch.from_numpy(updates >= AFTER)[:, None].to(param.device)
        assert optimizer.explain()[0].engine == engine
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.where(is_masked, masked, unmasked), rtol=1e-5, atol=1e-6)
        has_differed = has_differed or bool(((masked != unmasked) & is_masked).any())
    assert has_differed
    assert optimizer.state[param][ROW_STEPS].flatten().tolist() == updates.tolist()


@ON_ENGINES
@pytest.mark.parametrize("options", STORAGES, ids=str)
def test_the_mask_begins_with_the_nth_update_of_a_row(options: dict[str, Any], engine: str) -> None:
    check_steps(engine, torch.float32, **options)


@ON_ENGINES
def test_float64_tables(engine: str) -> None:
    check_steps(engine, torch.float64)


@needs_triton
def test_the_triton_kernels_in_the_interpreter() -> None:
    done = interpreted(
        "import torch\n"
        "from cadam.engines import selection\n"
        "from cadam.engines.cuda.sparse import CudaRows\n"
        "from tests.optim import test_confidence_after as cases\n"
        "rows = CudaRows()\n"
        "rows.device = 'cpu'\n"
        "selection.ENGINES = (rows, *selection.ENGINES)\n"
        "for options in cases.STORAGES:\n"
        "    cases.check_steps('cuda-rows', torch.float32, 9, **options)\n"
        "cases.check_steps('cuda-rows', torch.float64, 9)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("after", [0, 1])
def test_0_and_1_are_the_mask_of_every_update(after: int) -> None:
    tables = []
    no_options: dict[str, Any] = {}
    for options in (no_options, {"confidence_after": after}):
        param = table(torch.float32)
        optimizer = cadam.CAdam([param], lr=0.03, **options)
        for ids, values in batches(10):
            set_grad(param, ids, values)
            optimizer.step()
        assert ROW_STEPS not in optimizer.state[param]
        tables.append(param.detach())
    assert torch.equal(*tables)


def test_groups_differ_and_dense_gradients_are_masked_from_the_first_step_on() -> None:
    first, second, weights, expected = table(), table(), table(), table()
    ours = cadam.CAdam([{"params": [first, weights], "confidence_after": AFTER}, {"params": [second]}], lr=0.03)
    theirs = cadam.CAdam([expected], lr=0.03)
    for ids, values in batches(10):
        for param in (first, second):
            set_grad(param, ids, values)
        for param in (weights, expected):
            param.grad = torch.from_numpy(dense(ids, values))
        ours.step()
        theirs.step()
    assert torch.equal(weights, expected)
    assert not torch.equal(first, second)
    assert ROW_STEPS in ours.state[first]
    assert ROW_STEPS not in ours.state[second]
    assert ROW_STEPS not in ours.state[weights]


@ON_ENGINES
def test_a_resumed_run_is_identical(engine: str) -> None:
    params = table(torch.float32, engine=engine), table(torch.float32, engine=engine)
    options = {"lr": 0.03, "confidence_after": AFTER, **ENGINES[engine]}
    first, resumed = (cadam.CAdam([param], **options) for param in params)
    for step, (ids, values) in enumerate(batches(20)):
        if step == 6:
            params[1].data.copy_(params[0].data)
            resumed.load_state_dict(first.state_dict())
        for param, optimizer in zip(params, (first, resumed), strict=True):
            set_grad(param, ids, values)
            if step >= 6 or optimizer is first:
                optimizer.step()
    assert torch.equal(*params)
    assert torch.equal(first.state[params[0]][ROW_STEPS], resumed.state[params[1]][ROW_STEPS])
    resumed.param_groups[0]["confidence_after"] = 0
    resumed.step()
    assert ROW_STEPS not in resumed.state[params[1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"confidence_after": -1}, "an integer from 0"),
        ({"confidence_after": 2.5}, "an integer from 0"),
        ({"confidence_after": True}, "an integer from 0"),
        ({"confidence_after": 2**23}, "4,194,304"),
        ({"confidence_after": 5, "confidence": False}, "needs confidence=True"),
        ({"confidence_after": 5, "sparse_updates": "exact"}, "does not support confidence_after"),
    ],
    ids=str,
)
def test_invalid_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cadam.CAdam([table()], **options)
    param = table()
    optimizer = cadam.CAdam([param])
    optimizer.param_groups[0].update(options)
    set_grad(param, np.array([1]), np.ones((1, WIDTH)))
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_several_sparse_dimensions_are_refused() -> None:
    param = table()
    optimizer = cadam.CAdam([param], confidence_after=AFTER)
    param.grad = torch.ones_like(param).to_sparse()
    with pytest.raises(RuntimeError, match="confidence_after is for real tables"):
        optimizer.step()


def test_explain_says_when_the_mask_begins() -> None:
    param = table()
    optimizer = cadam.CAdam([param], confidence_after=1000)
    set_grad(param, np.array([1]), np.ones((1, WIDTH)))
    optimizer.step()
    assert "confidence from update 1,000 of a row on" in str(optimizer.explain())

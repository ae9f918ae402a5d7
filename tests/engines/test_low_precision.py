"""float16 and bfloat16 parameters: float32 moments, float32 arithmetic, one rounding a step."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cadam
from tests.engines.engines_under_test import DENSE, ENGINES, served
from tests.optim.family import CONFIDENT, FAMILY, buffers, gradient, parameter, same_bits, sparse

HALVES = [torch.float16, torch.bfloat16]
STATE_DTYPES = [torch.float16, torch.bfloat16, torch.float64]
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
engines = pytest.mark.parametrize(("engine", "layout"), served(plain=True))
SHAPE = (6, 3)


def make(name: str, params: list[Tensor], engine: str = "eager", **options: Any) -> cadam.Optimizer:
    return FAMILY[name](params, **{"lr": 0.01, "weight_decay": 0.1, **options, **ENGINES[engine].options})


def start(dtype: torch.dtype) -> Tensor:
    return parameter(np.random.default_rng(0).standard_normal(SHAPE), dtype)


def grads(steps: int, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    """Gradients as a backward pass in `dtype` would leave them."""
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.standard_normal(SHAPE) * (rng.random(SHAPE) > 0.1), dtype=dtype) for _ in range(steps)]


def run(optimizer: cadam.Optimizer, param: Tensor, gradients: list[Tensor], layout: str = DENSE) -> None:
    for grad in gradients:
        param.grad = gradient(layout, grad, param)
        optimizer.step()


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@halves
@pytest.mark.parametrize("name", FAMILY)
def test_moments_are_float32(name: str, dtype: torch.dtype) -> None:
    for engine, layout in served(dtype=dtype):
        param = start(dtype)
        optimizer = make(name, [param], engine)
        run(optimizer, param, grads(2, dtype), layout)
        assert param.dtype == dtype
        assert {buffer.dtype for buffer in buffers(optimizer, param).values()} == {torch.float32}


@halves
@engines
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in FAMILY), *((name, {"momentum": 0.0}) for name in ("SGDM", "CSGDM"))]
)
def test_is_the_float32_run_rounded_once_a_step(
    name: str, options: dict[str, Any], engine: str, layout: str, dtype: torch.dtype
) -> None:
    """The result equals that of a float32 copy that is rounded to `dtype` after each step, bit for bit."""
    param = start(dtype)
    wide = torch.nn.Parameter(param.detach().float())
    half_run, wide_run = make(name, [param], engine, **options), make(name, [wide], engine, **options)
    for grad in grads(6, dtype):
        run(half_run, param, [grad], layout)
        run(wide_run, wide, [grad.float()], layout)
        assert same_bits(param, wide.to(dtype))
        wide.data = wide.data.to(dtype).float()
    for key, buffer in buffers(half_run, param).items():
        assert same_bits(buffer, buffers(wide_run, wide)[key]), key


@halves
@pytest.mark.parametrize("name", FAMILY)
def test_duplicate_rows_are_summed_in_float32(name: str, dtype: torch.dtype) -> None:
    """The gradient is 256 plus fifteen times 1/16. Added one by one in half precision, all small ones would be lost."""
    param, wide = start(dtype), start(torch.float32)
    values = torch.tensor([[256.0] * 3] + [[1 / 16] * 3] * 15)
    assert (values[0].to(dtype) + values[1].to(dtype) == 256).all()
    moments = []
    for p in (param, wide):
        optimizer = make(name, [p], weight_decay=0.0)
        p.grad = sparse([(2,)] * 16, values, p)
        optimizer.step()
        moments.append(buffers(optimizer, p))
    for key, buffer in moments[0].items():
        assert same_bits(buffer, moments[1][key]), key


@engines
def test_the_second_moment_of_bfloat16_weights_moves_where_torch_keeps_it_still(engine: str, layout: str) -> None:
    """In bfloat16, 0.999 * v rounds to v, so the second moment of torch's Adam keeps the first gradient forever."""
    ours, theirs = (parameter(torch.ones(2), torch.bfloat16) for _ in range(2))
    optimizer = make("CAdam", [ours], engine, weight_decay=0.0)
    reference = torch.optim.Adam([theirs])
    for t in range(200):
        ours.grad = gradient(layout, [float(t == 0)] * 2, ours)
        theirs.grad = torch.full_like(theirs, float(t == 0))
        optimizer.step()
        reference.step()
        if t == 0:
            first = reference.state[theirs]["exp_avg_sq"].clone()
    assert same_bits(reference.state[theirs]["exp_avg_sq"], first)
    forgotten = torch.full((2,), 0.001 * 0.999**199)
    torch.testing.assert_close(buffers(optimizer, ours)["exp_avg_sq"], forgotten, rtol=1e-4, atol=0)


@engines
@pytest.mark.parametrize("name", CONFIDENT)
def test_gradients_whose_product_underflows_move_the_weight(name: str, engine: str, layout: str) -> None:
    """In float16, m * g is zero for g = 1e-4: the mask must not depend on it."""
    param = parameter([0.0, 0.0], torch.float16)
    grad = torch.tensor([1e-4, -1e-4], dtype=torch.float16)
    assert (0.1 * grad * grad == 0).all()
    lr = 100.0 if name == "CSGDM" else 0.01
    optimizer = make(name, [param], engine, lr=lr, weight_decay=0.0)
    run(optimizer, param, [grad], layout)
    assert param[0] < 0 < param[1]
    assert optimizer.alignment().total.over_all == 1.0


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FAMILY)
def test_state_dtype_survives_a_checkpoint(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Moments are stored, saved and loaded in the requested dtype, and the run continues bit for bit."""
    param, gradients = start(dtype), grads(4, dtype)
    optimizer = make(name, [param], state_dtype=state_dtype)
    run(optimizer, param, gradients[:2])
    saved = through_a_file({"param": param.detach(), "optimizer": optimizer.state_dict()})
    resumed = torch.nn.Parameter(saved["param"])
    fresh = make(name, [resumed], state_dtype=state_dtype)
    fresh.load_state_dict(saved["optimizer"])
    for opt, p in ((optimizer, param), (fresh, resumed)):
        assert {buffer.dtype for buffer in buffers(opt, p).values()} == {state_dtype}
        run(opt, p, gradients[2:])
        assert {buffer.dtype for buffer in buffers(opt, p).values()} == {state_dtype}
    assert same_bits(param, resumed)
    for key, buffer in buffers(optimizer, param).items():
        assert same_bits(buffer, buffers(fresh, resumed)[key]), key


@pytest.mark.parametrize(
    ("engine", "layout"), [(e, layout) for e, layout in served(plain=True) if ENGINES[e].any_state]
)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILY)
def test_arithmetic_is_as_wide_as_the_widest(name: str, state_dtype: torch.dtype, engine: str, layout: str) -> None:
    """A step of bfloat16 weights with wider moments equals a step in the wider dtype whose results are rounded."""
    work = torch.promote_types(state_dtype, torch.float32)
    param = start(torch.bfloat16)
    wide = torch.nn.Parameter(param.detach().to(work))
    # A first value that every dtype can represent.
    options = {"initial_accumulator": 2.0**-20} if "initial_accumulator" in FAMILY[name].rule.defaults else {}
    narrow_run = make(name, [param], engine, state_dtype=state_dtype, **options)
    wide_run = make(name, [wide], engine, **options)
    for grad in grads(4, torch.bfloat16):
        run(narrow_run, param, [grad], layout)
        run(wide_run, wide, [grad.to(work)], layout)
        wide.data = wide.data.to(torch.bfloat16).to(work)
        assert same_bits(param.detach().to(work), wide)
        for key, buffer in buffers(wide_run, wide).items():
            buffer.copy_(buffer.to(state_dtype))
            assert same_bits(buffers(narrow_run, param)[key].to(work), buffer), key


@halves
@pytest.mark.parametrize("name", FAMILY)
def test_half_weights_follow_the_float64_run(name: str, dtype: torch.dtype) -> None:
    """With weights rounded at every step, 20 steps stay within 20 roundings of the exact ones."""
    param, exact = start(dtype), torch.nn.Parameter(start(dtype).detach().double())
    short, long = make(name, [param], weight_decay=0.0), make(name, [exact], weight_decay=0.0)
    for grad in grads(20, dtype):
        run(short, param, [grad])
        run(long, exact, [grad.double()])
    bound = 20 * torch.finfo(dtype).eps * exact.detach().abs().max()
    assert ((param.double() - exact).abs() <= bound).all()

"""The storage of moments: quantized values, their rounding, their effect on a run, and checkpoints."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cadam
from cadam.engines import quantization
from cadam.rules import RULES, Rule, moment_storage
from cadam.rules.defaults import defaults
from cadam.rules.update import ScalarFunctions

STORAGES = ("bfloat16", "int8")


# Codes ------------------------------------------------------------------------------------------------------------


def small_floats(kind: str, exponent: int) -> list[float]:
    """Return every magnitude that a quantized value of one byte can have: 32 powers of two up to the shared exponent.

    The last value stands for NaN.
    """
    steps = 4 if kind == "signed" else 8
    count = 128 if kind == "signed" else 256
    values = [2.0 ** (exponent - 127 - 31 + q // steps) * (1 + q % steps / steps) for q in range(count)]
    return [0.0, *values[1:]]


def shared_exponent(kind: str, row: list[float], noise: list[int]) -> int:
    """Return the exponent of the largest rounded element, or the next if that element would get the value of NaN."""
    steps = 4 if kind == "signed" else 8
    levels = [0]  # the number of the quantized value below each rounded element, counted from 2**-127
    for x, u in zip(row, noise, strict=True):
        if x:
            mantissa, exponent = math.frexp(abs(x))  # in [0.5, 1)
            level = (exponent - 1 + 127) * steps + (2 * mantissa - 1) * steps
            levels.append(math.floor(level) + (level % 1 + u / 65536 >= 1))
    return max((max(levels) + 1) // steps, 32)


@pytest.mark.parametrize("kind", ["signed", "positive"])
def test_the_noise_decides_which_neighbor_a_value_is_rounded_to(kind: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(50, 16) * torch.exp2(torch.randint(-60, 20, (50, 16)).float())
    values[torch.rand(50, 16) < 0.1] = 0.0
    if kind == "positive":
        values = values.abs()
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32)
    decoded = quantization.dequantize(kind, *quantization.quantize(kind, values, noise))
    for row, bits, got in zip(values.tolist(), noise.tolist(), decoded.tolist(), strict=True):
        grid = small_floats(kind, shared_exponent(kind, row, bits))
        for x, u, y in zip(row, bits, got, strict=True):
            low = max(i for i, v in enumerate(grid) if v <= abs(x))
            part = (abs(x) - grid[low]) / (grid[low + 1] - grid[low])
            if low == 0:  # values below the smallest are rounded as if there were one more power of two
                power = grid[1] / (1.25 if kind == "signed" else 1.125)
                part = (abs(x) - power) / (grid[1] - power)
            up = part + u / 65536 >= 1 or (low == 0 and kind == "positive" and x != 0)
            assert low + up < len(grid) - 1
            assert y == math.copysign(grid[low + up], x), (x, u)


@pytest.mark.parametrize("kind", ["signed", "positive"])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_mean_of_many_roundings_is_the_value(storage: str, kind: str) -> None:
    times = 100_000
    noise = moment_storage.rounding_noise(
        moment_storage.noise_key(7, torch.arange(times)), torch.zeros(times, dtype=torch.int64)
    )
    noise = (noise >> (16 if kind == "positive" else 0) & 0xFFFF).int()
    for x in (0.3, 1.03e-3, 0.77e-6, 2.3e-9):
        values = torch.tensor([1.0, x]).repeat(times, 1)  # beside a large value, so that x does not determine the scale
        if storage == "int8":
            rounded = quantization.dequantize(kind, *quantization.quantize(kind, values, noise[:, None].expand(-1, 2)))[
                :, 1
            ]
        else:
            rounded = quantization.round_to_bfloat16(values, noise[:, None].expand(-1, 2)).float()[:, 1]
        rounded = rounded.double()
        assert len(rounded.unique()) == 2
        error = abs(float(rounded.mean()) - float(values[0, 1]))
        assert error <= 4 * float(rounded.std()) / math.sqrt(times)


def test_a_second_moment_is_never_rounded_to_zero() -> None:
    values = torch.tensor([[1.0, 1e-12, 1e-30, 1e-38, 0.0]])
    for noise in (0, 1 << 15, 65535):
        decoded = quantization.dequantize("positive", *quantization.quantize("positive", values, noise))[0]
        assert (decoded[:4] > 0).all()
        assert decoded[4] == 0
        assert (decoded[1:4] >= values[0, 1:4]).all()
        assert (quantization.round_to_bfloat16(values, noise)[0, :4] > 0).all()


@pytest.mark.parametrize("kind", ["signed", "positive"])
def test_quantizing_in_chunks_gives_the_same_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for blocks, width in ((0, 5), (1, 5), (50, 7), (50, 0)):
        values = torch.randn(blocks, width).abs()
        found, scales = quantization.quantize(kind, values, 0)
        expected = quantization.dequantize(kind, found, scales)
        with monkeypatch.context() as small:
            small.setattr(quantization, "MAX_ELEMENTS_PER_CHUNK", 30)  # four rows of seven
            in_parts = quantization.quantize(kind, values, 0)
            assert torch.equal(found, in_parts[0])
            assert torch.equal(scales, in_parts[1])
            assert torch.equal(quantization.dequantize(kind, *in_parts), expected)


@pytest.mark.parametrize("kind", ["signed", "positive"])
def test_every_nan_stays_nan(kind: str) -> None:
    """The bits include those of NaNs of a GPU and of a NaN converted from half precision."""
    for bits in (0x7F800001, 0x7FC00000, 0x7FE00000, 0x7FF00000, 0x7FFFFFFF):
        bad = torch.tensor([[0x3F800000, bits]], dtype=torch.int32).view(torch.float32)
        for noise in (0, 65535):
            found, scale = quantization.quantize(kind, bad, noise)
            decoded = quantization.dequantize(kind, found, scale)[0]
            assert decoded[0] == 1
            assert decoded[1].isnan()
            assert quantization.round_to_bfloat16(bad, noise)[0, 1].isnan()


@pytest.mark.parametrize("kind", ["signed", "positive"])
def test_nonfinite_values_are_not_hidden_and_leave_those_beside_them_as_they_are(kind: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.tensor([[2.0**-30, bad], [1.0, bad], [1.75 * 2.0**100, bad], [0.0, bad], [bad, bad]])
        decoded = quantization.dequantize(kind, *quantization.quantize(kind, values, 0))
        assert torch.equal(decoded.isnan(), ~values.isfinite())
        assert torch.equal(decoded[:4, 0], values[:4, 0])
        assert not quantization.round_to_bfloat16(torch.tensor([bad]), 65535).isfinite().any()


@pytest.mark.parametrize("kind", ["signed", "positive"])
def test_only_finite_values_near_the_largest_float_may_become_nan(kind: str) -> None:
    values = torch.tensor([[2.0**127 * 1.49, 1.0], [torch.finfo(torch.float32).max, 1.0]])
    for noise in (0, 65535):
        decoded = quantization.dequantize(kind, *quantization.quantize(kind, values, noise))
        assert decoded.isnan().tolist() == [[False, False], [True, False]]


def test_the_noise_is_the_documented_hash() -> None:
    def murmur(x: int) -> int:
        with np.errstate(over="ignore"):
            h = np.uint32(x)
            h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
            h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
            return int(h ^ (h >> np.uint32(16)))

    seed, step, place = 0x123456789ABCDEF, 1000, (5 << 32) + 12345
    key = murmur((seed & 0xFFFFFFFF) ^ murmur((seed >> 32) ^ murmur(step)))
    both = murmur(((place & 0xFFFFFFFF) >> 1) ^ murmur((place >> 32) ^ key))
    assert moment_storage.rounding_noise(moment_storage.noise_key(seed, step), place) == (
        both >> 16 | (both & 0xFFFF) << 16
    )
    assert moment_storage.rounding_noise(moment_storage.noise_key(seed, step), place - 1) == both
    found = moment_storage.rounding_noise(
        moment_storage.noise_key(seed, torch.tensor(step)), torch.tensor([place - 1, place])
    )
    assert found.tolist() == [both, both >> 16 | (both & 0xFFFF) << 16]
    start, column = (7 << 32) + 120, 5
    both = murmur(((start & 0xFFFFFFFF) + 2) ^ murmur((start >> 32) ^ key))
    assert moment_storage.rounding_noise(moment_storage.noise_key(seed, step), column, start) == (
        both >> 16 | (both & 0xFFFF) << 16
    )


def test_no_two_moments_near_each_other_share_random_bits() -> None:
    """Over the elements of a few rows, each buffer uses each half once, and no element uses a half twice."""
    words = moment_storage.rounding_noise(
        moment_storage.noise_key(7, 1), torch.arange(64), 64 * torch.arange(32)[:, None]
    )
    first, second = words & 0xFFFF, words >> 16
    assert len(first.unique()) > 0.97 * first.numel()  # chance makes about 3% equal
    assert len(second.unique()) > 0.97 * second.numel()
    assert float((first == second).float().mean()) < 0.001
    assert torch.equal(first[:, 0::2], second[:, 1::2])


# Runs -------------------------------------------------------------------------------------------------------------


def run(steps: int, rows: bool = False, scale: Any = 1.0, **options: Any) -> tuple[Any, Tensor]:
    noise = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.zeros(64, 16))
    optimizer = cadam.CAdam([param], lr=1e-3, **options)
    for _ in range(steps):
        grad = (torch.randn(64, 16, generator=noise) + 0.1) * scale
        param.grad = grad.to_sparse(1) if rows else grad
        optimizer.step()
    return optimizer, param


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("options", [{"moments": s} for s in STORAGES] + [{"moments": "int8", "second_moment": "row"}])
def test_confidence_is_that_of_float32_where_gradients_are_tiny_beside_large_ones(options: Any, rows: bool) -> None:
    scale = torch.tensor([1.0, 1e-2, 1e-4, 1e-6]).repeat(4)
    full, _ = run(150, rows, scale)
    quantized, _ = run(150, rows, scale, **options)
    assert abs(quantized.alignment().total.over_touched - full.alignment().total.over_touched) < 0.01


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_long_run_does_not_drift_from_float32(storage: str, rows: bool) -> None:
    _, full = run(500, rows)
    _, quantized = run(500, rows, moments=storage)
    way = float(full.detach().mean())
    assert abs(float(quantized.detach().mean()) / way - 1) < (0.01 if storage == "bfloat16" else 0.05)


@pytest.mark.parametrize("storage", STORAGES)
def test_rounding_follows_its_own_seed_and_not_that_of_torch(storage: str) -> None:
    torch.manual_seed(0)
    _, one = run(5, moments=storage)
    torch.manual_seed(1)
    _, same = run(5, moments=storage)
    _, other = run(5, moments=storage, rounding_seed=1)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("storage", STORAGES)
def test_rounding_does_not_depend_on_the_order_of_first_gradients(storage: str) -> None:
    def seeds(order: list[int]) -> list[int]:
        params: list[Tensor] = [torch.nn.Parameter(torch.zeros(5)) for _ in range(3)]
        optimizer = cadam.CAdam([{"params": params[:1]}, {"params": params[1:]}], moments=storage)
        for i in order:
            params[i].grad = torch.ones(5)
            optimizer.step()
        return [int(optimizer.state[param][moment_storage.SEED]) for param in params]

    assert seeds([0, 1, 2]) == seeds([2, 0, 1])
    assert len(set(seeds([0, 1, 2]))) == 3


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_resumed_run_rounds_as_one_that_was_not_interrupted(storage: str, rows: bool) -> None:
    def train(optimizer: Any, params: list[Tensor], steps: range) -> None:
        for step in steps:
            noise = torch.Generator().manual_seed(step)
            for i, param in enumerate(params):
                grad = torch.randn(param.shape, generator=noise)
                if i < step:  # the last parameters have their first gradient after the interruption
                    param.grad = grad.to_sparse(1) if rows else grad
            optimizer.step()

    def new(**options: Any) -> tuple[Any, list[Tensor]]:
        params: list[Tensor] = [torch.nn.Parameter(torch.zeros(8, 16)) for _ in range(4)]
        return cadam.CAdam(params, lr=0.01, moments=storage, **options), params

    whole, expected = new(rounding_seed=5)
    train(whole, expected, range(1, 6))
    first, before = new(rounding_seed=5)
    train(first, before, range(1, 3))
    second, after = new()
    with torch.no_grad():
        for param, value in zip(after, before, strict=True):
            param.copy_(value)
    second.load_state_dict(first.state_dict())
    train(second, after, range(3, 6))
    for param, value in zip(after, expected, strict=True):
        assert torch.equal(param, value)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, None])
def test_a_rounding_seed_is_an_integer_of_63_bits(seed: Any) -> None:
    with pytest.raises(ValueError, match="rounding_seed"):
        cadam.CAdam([torch.zeros(1)], rounding_seed=seed)


def test_with_row_steps_the_first_update_of_a_row_has_the_bias_correction_of_step_one() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 4))
    optimizer = cadam.CAdam([param], lr=0.1, row_steps=True)
    for row in (0, 0, 0, 1):
        param.grad = torch.sparse_coo_tensor(torch.tensor([[row]]), torch.ones(1, 4), (2, 4), check_invariants=True)
        optimizer.step()
    assert torch.allclose(param[1], torch.full((4,), -0.1))
    assert optimizer.state[param][moment_storage.ROW_STEPS].flatten().tolist() == [3, 1]


def test_a_second_moment_by_row_is_the_mean_of_the_squares_of_the_row() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = cadam.Adam([param], lr=0.1, betas=(0.5, 0.75), second_moment="row")
    gradient = torch.tensor([[1.0, 2.0, -3.0, 4.0]])
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), gradient, (3, 4), check_invariants=True)
    optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].flatten().tolist() == [0, 0.25 * 7.5, 0]
    assert torch.allclose(param[1], -0.1 * gradient[0] / math.sqrt(7.5))


@pytest.mark.parametrize("shape", [(5, 1), (5,)])
def test_rows_of_one_element_have_their_own_second_moment(shape: tuple[int, ...]) -> None:
    ends = []
    for second in ("row", "element"):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(shape))
        optimizer = cadam.CAdam([param], moments="int8", second_moment=second)
        for _ in range(3):
            param.grad = torch.randn(shape).to_sparse(1)
            optimizer.step()
        ends.append(param.detach())
    assert torch.equal(*ends)


def test_explain_warns_of_a_row_that_mixes_scales() -> None:
    mixed, _ = run(3, True, torch.tensor([100.0] + [1.0] * 15), second_moment="row")
    assert "column 0" in str(mixed.explain()[0].warning)
    assert "column 0" in str(mixed.explain())
    even, _ = run(3, True, second_moment="row")
    assert even.explain()[0].warning is None
    own, _ = run(3, True, torch.tensor([100.0] + [1.0] * 15))
    assert own.explain()[0].warning is None


# Checkpoints, and what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_loaded_checkpoint_continues_to_the_bit_under_any_global_seed(storage: str, rows: bool) -> None:
    _, whole = run(8, rows, moments=storage)
    half, param = run(4, rows, moments=storage)
    torch.manual_seed(99)
    resumed = torch.nn.Parameter(param.detach().clone())
    optimizer = cadam.CAdam([resumed], lr=1e-3, moments=storage)
    optimizer.load_state_dict(half.state_dict())
    noise = torch.Generator().manual_seed(1)
    for step in range(8):
        grad = torch.randn(64, 16, generator=noise) + 0.1
        if step >= 4:
            resumed.grad = grad.to_sparse(1) if rows else grad
            optimizer.step()
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize(
    ("before", "after"), [("float32", "int8"), ("int8", "float32"), ("bfloat16", "int8"), ("int8", "bfloat16")]
)
def test_a_checkpoint_of_another_storage_is_converted(before: str, after: str, rows: bool) -> None:
    saved, param = run(20, rows, moments=before)
    values = dict(cadam.for_torch(saved.state_dict())["state"][0])
    loaded = cadam.CAdam([param], lr=0.0, moments=after)
    loaded.load_state_dict(saved.state_dict())
    # With these betas the moments stay the same.
    loaded.param_groups[0].update(lr=0.0, betas=(1.0 - 1e-12, 1.0 - 1e-12))
    loaded.step()
    converted = cadam.for_torch(loaded.state_dict())["state"][0]
    tolerance = 0.3 if "int8" in (before, after) else 0.01
    for name in ("exp_avg", "exp_avg_sq"):
        assert values[name].dtype == converted[name].dtype == torch.float32
        assert torch.allclose(values[name], converted[name], rtol=tolerance, atol=0)
    assert float(loaded.state[param]["step"]) == 21


@pytest.mark.parametrize("storage", STORAGES)
def test_each_parameter_loaded_from_float32_has_its_own_rounding_noise(storage: str) -> None:
    def steps(optimizer: cadam.Optimizer, params: list[Tensor]) -> list[int]:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return [int(state["rounding_seed"]) for state in optimizer.state.values() if "rounding_seed" in state]

    params: list[Tensor] = [torch.nn.Parameter(torch.zeros(5)) for _ in range(4)]
    new = steps(cadam.CAdam(params, moments=storage), params)
    saved = cadam.CAdam(params)
    steps(saved, params)
    loaded = cadam.CAdam(params, moments=storage)
    loaded.load_state_dict(saved.state_dict())
    assert steps(loaded, params) == new
    assert len(set(new)) == len(params)


@pytest.mark.parametrize("storage", ["float32", *STORAGES])
def test_torch_continues_from_second_moments_by_row(storage: str) -> None:
    saved, param = run(3, True, moments=storage, second_moment="row")
    optimizer = torch.optim.Adam([param])
    optimizer.load_state_dict(cadam.for_torch(saved.state_dict()))
    param.grad = torch.ones(64, 16)
    optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].shape == (64, 16)
    assert saved.state[param]["exp_avg_sq"].shape == (64, 1)


@pytest.mark.parametrize("cls", [cadam.CAdam, cadam.CSGDM, cadam.CLion])
def test_the_moments_of_a_narrow_table_do_not_fit_a_wide_one(cls: Any) -> None:
    narrow, wide = torch.nn.Parameter(torch.zeros(8, 1)), torch.nn.Parameter(torch.zeros(8, 16))
    saved, optimizer = cls([narrow]), cls([wide])
    narrow.grad, wide.grad = torch.ones(8, 1), torch.ones(8, 16)
    saved.step()
    with pytest.raises(ValueError, match=r"has shape \(8, 1\), the parameter \(8, 16\)"):
        optimizer.load_state_dict(saved.state_dict())
    optimizer.state[wide] = dict(saved.state[narrow])
    with pytest.raises(RuntimeError, match=r"has shape \(8, 1\), the parameter now has \(8, 16\)"):
        optimizer.step()
    assert (wide == 0).all()


def test_a_second_moment_by_row_is_only_loaded_with_second_moment_row() -> None:
    saved, param = run(3, True, second_moment="row")
    shared = saved.state[param]["exp_avg_sq"]
    element = cadam.CAdam([param])
    element.load_state_dict(saved.state_dict())  # each element gets the value of its row
    assert torch.equal(element.state[param]["exp_avg_sq"], shared.expand(64, 16))
    element.step()
    changed = saved.state_dict()  # as if the option changed and a checkpoint was written before the next step
    changed["param_groups"][0]["second_moment"] = "element"
    again = cadam.CAdam([param])
    again.load_state_dict(changed)
    assert torch.equal(again.state[param]["exp_avg_sq"], shared.expand(64, 16))
    del changed["param_groups"][0]["cadam_format"]  # as in a checkpoint of another library
    with pytest.raises(ValueError, match="exp_avg_sq has shape"):
        cadam.CAdam([param]).load_state_dict(changed)
    element.state[param]["exp_avg_sq"] = shared  # as if the option of the group had changed
    element._plan_step()
    assert torch.equal(element.state[param]["exp_avg_sq"], shared.expand(64, 16))
    element.state[param]["exp_avg"] = shared
    with pytest.raises(RuntimeError, match="exp_avg has shape"):
        element._plan_step()
    wrong = saved.state_dict()
    wrong["state"][0]["exp_avg"] = shared
    with pytest.raises(ValueError, match="exp_avg has shape"):
        cadam.CAdam([param], second_moment="row").load_state_dict(wrong)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_rule_says_whether_its_coefficients_depend_on_the_step(rule: Rule) -> None:
    more = ({"dampening": 0.5}, {"dampening": 0.0}) if rule.name == "sgdm" else ()
    for changed in ({}, *rule.variants, *more):
        o = {**defaults(rule), **changed}
        first, second = (rule.coefficients(float(t), o, ScalarFunctions) for t in (1, 2))
        assert rule.counts_steps(o) == (first != second), changed


def test_row_steps_are_rejected_if_no_coefficient_depends_on_the_step() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 2))
    for optimizer in (cadam.CLion, cadam.Lion, cadam.CSGDM):
        with pytest.raises(ValueError, match="row_steps=True"):
            optimizer([param], row_steps=True)
        changed = optimizer([param])
        changed.param_groups[0]["row_steps"] = True
        param.grad = torch.ones(3, 2).to_sparse(1)
        with pytest.raises(ValueError, match=r"row_steps=True.* no parameter was changed"):
            changed.step()
    cadam.CSGDM([param], row_steps=True, dampening=0.5)  # with dampening, the first step has another formula


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize(
    ("name", "spoil", "problem"),
    [
        ("exp_avg_scale", lambda x: None, "exp_avg is quantized and needs exp_avg_scale"),
        ("exp_avg_scale", lambda x: x[:1], "exp_avg_scale has shape"),
        ("exp_avg_sq_scale", lambda x: x.repeat(2, 1), "exp_avg_sq_scale has shape"),
        ("exp_avg_sq_scale", lambda x: x.float(), "exp_avg_sq_scale of torch.uint8; it has torch.float32"),
        ("exp_avg_sq_scale", lambda x: 5, "exp_avg_sq_scale of torch.uint8; it has int"),
        ("exp_avg", lambda x: x.float(), "exp_avg_scale in it, but exp_avg is torch.float32"),
        ("exp_avg", lambda x: x.int(), "exp_avg has dtype torch.int32"),
        ("row_steps", lambda x: torch.zeros(3, 1, dtype=torch.int32), "row_steps is torch.int32 of shape"),
        ("row_steps", lambda x: 5, "row_steps is int"),
    ],
)
def test_scales_and_step_counts_of_the_wrong_kind_are_rejected(name: str, spoil: Any, problem: str, rows: bool) -> None:
    saved, param = run(3, rows, moments="int8")
    invalid = saved.state_dict()
    invalid["state"][0][name] = spoil(invalid["state"][0].get(name))
    loaded = cadam.CAdam([param], moments="int8")
    with pytest.raises(ValueError, match=problem):
        loaded.load_state_dict(invalid)
    assert not loaded.state


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (cadam.CAdam, {"moments": "int4"}),
        (cadam.CAdam, {"second_moment": "column"}),
        (cadam.CAdam, {"moments": "int8", "differentiable": True}),
        (cadam.CAdam, {"moments": "int8", "state_dtype": torch.float32}),
        (cadam.CAmsGrad, {"moments": "int8"}),
        (cadam.CLion, {"second_moment": "row"}),
    ],
)
def test_impossible_storages_are_rejected(cls: Any, options: Any) -> None:
    with pytest.raises(ValueError, match="moment"):
        cls([torch.zeros(2)], **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_of_an_unsupported_dtype_is_rejected_before_anything_changes(dtype: torch.dtype) -> None:
    param = torch.zeros(4, dtype=dtype, requires_grad=True)
    optimizer = cadam.CAdam([param], moments="int8")
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="moments='int8'"):
        optimizer.step()
    assert not optimizer.state
    assert (param == 0).all()


def test_a_rule_without_kinds_of_buffers_cannot_be_quantized() -> None:
    rule = cadam.Rule(
        "mine", {"lr": 1e-3}, lambda o: {"m": 0.0}, lambda t, o, f: {}, lambda g, s, c, f: cadam.Step(g, g, {"m": g})
    )
    mine = type("Mine", (cadam.Optimizer,), {"rule": rule})
    mine([torch.zeros(2)])
    with pytest.raises(ValueError, match="'mine'"):
        mine([torch.zeros(2)], moments="int8")


def test_bfloat16_is_the_upper_half_of_the_bits() -> None:
    x = 1.2345678
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    for noise in (0, 0x1234, 0xFFFF):
        expected = struct.unpack("<f", struct.pack("<I", (bits + noise) & 0xFFFF0000))[0]
        assert float(quantization.round_to_bfloat16(torch.tensor([x]), noise)) == expected

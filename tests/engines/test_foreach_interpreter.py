"""The engines without kernels: which operations they call, what they overwrite, and in which blocks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import cadam
from cadam.codegen.foreach_fusion import InPlaceProgram, in_place_program
from cadam.engines import foreach_interpreter
from cadam.rules import RULES
from cadam.rules.update import ScalarFunctions, Update

HOW: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "eager": {"foreach": False}}
over_engines = pytest.mark.parametrize("how", HOW)


def program(cls: type[cadam.Optimizer], **given: Any) -> InPlaceProgram:
    options = cls.options_of(track_alignment=False, **given)
    update = Update.of(cls.rule, cls.confidence, options)
    return in_place_program(
        update, tuple(cls.rule.state(options)), tuple(update.coefficients(2.0, options, ScalarFunctions)), True
    )


def test_adam_takes_the_operations_that_torch_writes_by_hand() -> None:
    ops = program(cadam.Adam).elements
    assert [op.kind for op in ops] == ["lerp", "mul", "addcmul", "mul", "sqrt", "add", "addcdiv"]
    assert [op.kind for op in ops if op.overwritten is None] == ["mul"], "one temporary: the denominator"


def test_confidence_adds_the_sign_the_test_and_a_quotient() -> None:
    kinds = [op.kind for op in program(cadam.CAdam).elements]
    assert kinds == ["lerp", "mul", "addcmul", "mul", "sqrt", "add", "sign", "div", "mul", "mask", "add_scaled"]


@pytest.mark.parametrize("cls", [cadam.CAdam, cadam.CAmsGrad, cadam.CAdamW, cadam.CLion, cadam.CYogi, cadam.CSGDM])
def test_moments_and_parameters_are_computed_where_they_are(cls: type[cadam.Optimizer]) -> None:
    assert not program(cls).not_in_place


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_nothing_is_read_after_it_is_overwritten(rule: Any) -> None:
    options = {**cadam.CAdam.options_of(), **rule.defaults}
    for confidence, l2, maximize in ((False, 0.0, False), (True, 0.1, True)):
        changed = {**options, "weight_decay": l2, "maximize": maximize}
        update = Update.of(rule, confidence, changed)
        coefficients = tuple(update.coefficients(2.0, changed, ScalarFunctions))
        for numbers in (False, True):
            made = in_place_program(update, tuple(rule.state(changed)), coefficients, numbers)
            gone: set[str] = set()
            for op in made.elements:
                assert not gone & {arg for arg in op.args if isinstance(arg, str)}
                if op.overwritten is not None:
                    assert op.args[op.overwritten] != "g", "the gradient is the user's"
                    gone.add(op.args[op.overwritten])
            assert not gone & {*made.results.values(), made.alignment}


def trained(params: list[Tensor], how: str, cls: type[cadam.Optimizer] = cadam.CAdam) -> cadam.Optimizer:
    optimizer = cls(params, lr=0.1, **HOW[how])
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return optimizer


def tensors(optimizer: cadam.Optimizer) -> list[Tensor]:
    return list(chain.from_iterable((p, *state.values()) for p, state in optimizer.state.items()))


@over_engines
@pytest.mark.parametrize("block", [1, 7, 1 << 30])
def test_blocks_of_any_size_compute_the_same(how: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = [(5,), (0, 3), (4, 3), (), (2, 3), (21,)]

    def run() -> cadam.Optimizer:
        params = [torch.linspace(-1, 1, torch.Size(s).numel()).reshape(s) for s in shapes]
        params.append(torch.linspace(-1, 1, 24).view(1, 2, 3, 4).to(memory_format=torch.channels_last))
        params.append(torch.linspace(-1, 1, 24).view(4, 6).t())
        params.append(torch.linspace(-1, 1, 8).to(torch.bfloat16))
        return trained(params, how)

    expected = run()
    for name in ("BLOCK", "GATHERED"):
        monkeypatch.setattr(foreach_interpreter, name, block)
    found = run()
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(a, b)
    assert found.alignment() == expected.alignment()


def test_parameters_that_share_memory_are_each_updated() -> None:
    for how in HOW:
        memory = torch.ones(6)
        params = [memory[:4], memory[2:]]
        optimizer = cadam.Adam(params, lr=0.1, **HOW[how])
        for p in params:
            p.grad = torch.ones(4)
        optimizer.step()
        torch.testing.assert_close(memory, torch.tensor([0.9, 0.9, 0.8, 0.8, 0.9, 0.9]))


@over_engines
@pytest.mark.parametrize("cls", [cadam.Adam, cadam.CAdam])
def test_a_step_takes_no_memory_that_grows_with_the_parameter(cls: type[cadam.Optimizer], how: str) -> None:
    p = torch.zeros(20 * foreach_interpreter.BLOCK)
    p.grad = torch.ones_like(p)
    optimizer = cls([p], **HOW[how])
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert 0 < most < 8 * p.itemsize * foreach_interpreter.BLOCK


@over_engines
def test_more_aligned_elements_than_float32_can_count_are_counted_to_the_last(how: str) -> None:
    p = torch.zeros(foreach_interpreter.MAX_EXACT_COUNT + 1)
    p.grad = torch.ones_like(p)
    optimizer = cadam.SGDM([p], momentum=0.0, **HOW[how])
    optimizer.step()
    assert optimizer.alignment().total.aligned == foreach_interpreter.MAX_EXACT_COUNT + 1


@over_engines
def test_counts_are_kept_when_a_part_of_the_parameters_takes_a_step(how: str) -> None:
    """Some parameters have no gradient, some have taken more steps, and some have another memory layout."""
    params = [torch.zeros(2, 3), torch.zeros(5), torch.zeros(4, 6).t(), torch.zeros(7)]
    optimizer = cadam.CAdam(params, **HOW[how])
    sizes = [p.numel() for p in params]
    for stepped in ([0, 1, 2, 3], [1, 2], [0, 1, 2, 3], [3], [0, 1, 2, 3]):
        for i, p in enumerate(params):
            p.grad = torch.ones_like(p) if i in stepped else None
        optimizer.step()
    found = optimizer.alignment(reset=True).parameters.values()
    assert [(r.aligned, r.touched, r.seen) for r in found] == [
        (n * size, n * size, n * size) for n, size in zip((3, 4, 4, 4), sizes, strict=True)
    ]
    optimizer.step()
    assert optimizer.alignment().total.aligned == sum(sizes)

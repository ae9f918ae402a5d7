"""The fused engines on CUDA: equal to the reference, usable in CUDA graphs, and without writes out of bounds.

The tests with the marker `cuda` need a device; two small ones run the same kernels in Triton's interpreter.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import cadam
from cadam.codegen import triton_source as triton_source
from cadam.codegen.kernel_spec import KernelSpec
from cadam.codegen.trace import Trace, Value
from cadam.engines import selection
from cadam.engines.base import RefusalKind
from cadam.engines.cuda import dense as cuda
from cadam.engines.cuda.sparse import CudaRows, RowStrides, _make_launches
from cadam.engines.cuda.sparse_grad import check_ids
from cadam.rules import RULES, Rule, Step
from cadam.rules.defaults import defaults
from tests.engines.triton_interpreter import interpreted, needs_triton, on_cuda
from tests.optim.family import KERNEL_SPECS, OF_RULE

REFERENCE = tuple(engine for engine in selection.ENGINES if engine.name in ("rows", "eager"))
FUSED = (
    *([] if any(e.name == "cuda" for e in selection.ENGINES) else [cuda.Cuda(), CudaRows()]),
    *selection.ENGINES,
)


@pytest.fixture(autouse=True)
def _engines() -> Iterator[None]:
    before, huge = selection.ENGINES, cuda.HUGE
    selection.ENGINES, cuda.HUGE = FUSED, 20_000  # a tensor of the size of these tests gets a separate launch
    yield
    selection.ENGINES, cuda.HUGE = before, huge


def without_fused(run: Callable[[], Any]) -> Any:
    selection.ENGINES = REFERENCE
    try:
        return run()
    finally:
        selection.ENGINES = FUSED


# Every kernel specification of every rule, and options that share one. AdaBelief's default eps underflows in float32.
OPTIONS = {"sgdm": {"lr": 0.1}, "adabelief": {"eps": 1e-8}}
SETTINGS = {name: (rule, {**OPTIONS.get(rule, {}), **options}) for name, (rule, options) in KERNEL_SPECS.items()}
SETTINGS["dampened"] = ("sgdm", {"lr": 0.1, "dampening": 0.3})
DECAY = {"none": {}, "l2": {"weight_decay": 0.1, "decoupled_weight_decay": False}}
DECAY["decoupled"] = {"weight_decay": 0.1, "decoupled_weight_decay": True}
HALF = (torch.bfloat16, torch.float16)


Trained = tuple[Sequence[Tensor], cadam.Optimizer]


def chosen(setting: str, masked: bool) -> tuple[type[cadam.Optimizer], dict[str, Any]]:
    rule, options = SETTINGS[setting]
    return OF_RULE[rule, masked], options


def shapes() -> dict[str, Callable[[], Tensor]]:
    """Return tensors of every kind: small, large, unaligned, transposed, with one element and empty."""

    def random(*size: int) -> Tensor:
        return torch.randn(size, device="cuda")

    return {
        "large": lambda: random(150, 200),
        "large and odd": lambda: random(20_011),
        "medium": lambda: random(33, 100),
        **{f"small {n}": partial(random, n) for n in (1, 3, 17, 100, 1023, 1024, 1025)},
        "not aligned": lambda: random(3001)[1:],
        "channels last": lambda: random(4, 6, 5, 5).to(memory_format=torch.channels_last),
        "transposed": lambda: random(30, 40).t(),
        "scalar": lambda: random(),
        "empty": lambda: random(0, 3),
    }


def gradient(p: Tensor, kind: int) -> Tensor:
    g = torch.randn(p.shape, device=p.device).to(p.dtype)
    if kind == 1 and p.dim() == 2:
        return g.t().contiguous().t()  # transposed in memory
    if kind == 2 and p.dim() == 1 and p.numel() > 8:
        return torch.randn(p.numel() + 1, device=p.device).to(p.dtype)[1:]  # not aligned
    return torch.empty_like(p).copy_(g)


def trained(cls: type[cadam.Optimizer], options: dict[str, Any], dtype: torch.dtype, steps: int = 3) -> Trained:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(make().to(dtype)) for make in shapes().values()]
    optimizer = cls(params, **options)
    for step in range(steps):
        for p in params:
            p.grad = gradient(p, step)
        optimizer.step()
    return params, optimizer


def assert_same(ours: Trained, theirs: Trained, rtol: float = 1e-5) -> None:
    """Compare parameters, state and counters; parameters in half precision may differ by one rounding of the result."""
    for p, q in zip(ours[0], theirs[0], strict=True):
        place = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(p.dtype, rtol)
        torch.testing.assert_close(p, q, rtol=place, atol=1e-6)
        assert set(ours[1].state[p]) == set(theirs[1].state[q])
        for name, value in theirs[1].state[q].items():
            torch.testing.assert_close(ours[1].state[p][name], value, rtol=rtol, atol=1e-7, msg=name)
    assert ours[1].alignment() == theirs[1].alignment()


# Dense ---------------------------------------------------------------------------------------------------------


@on_cuda
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_every_option_of_every_rule_equals_the_reference(setting: str, dtype: torch.dtype) -> None:
    for masked in (False, True):
        for decay in DECAY.values():
            for maximize in (False, True):
                cls, options = chosen(setting, masked)
                options = {**options, **decay, "maximize": maximize}
                ours = trained(cls, options, dtype)
                assert {row.engine for row in ours[1].explain()} == {"cuda"}
                assert_same(ours, without_fused(partial(trained, cls, options, dtype)))


@on_cuda
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", [{"capturable": True}, {"track_alignment": False}], ids=str)
def test_on_the_device_and_uncounted(setting: str, options: dict[str, Any]) -> None:
    cls, own = chosen(setting, True)
    assert_same(
        trained(cls, {**own, **options}, torch.float32),
        without_fused(lambda: trained(cls, {**own, **options}, torch.float32)),
    )


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    options = {"state_dtype": state_dtype}
    # A moment in bfloat16 may be rounded to the other neighbor if it differs in its last bit before.
    rtol = 1e-2 if state_dtype == torch.bfloat16 else 1e-12 if dtype == torch.float64 == state_dtype else 1e-5
    ours = trained(cadam.CAdam, options, dtype)
    theirs = without_fused(lambda: trained(cadam.CAdam, options, dtype))
    for p, q in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=1e-3 if rtol == 1e-2 else 1e-6)


@on_cuda
def test_a_rule_of_the_users_own() -> None:
    def update(g: Any, s: Any, c: Any, f: Any) -> Step:
        second = f.maximum(s.second * c.keep, g * g)
        return Step(g / (f.sqrt(second) + 0.25), g - second, {"second": second})

    rule = Rule("mine", {"lr": 0.1}, lambda o: {"second": 0.5}, lambda t, o, f: {"keep": 1 - 1 / (t + 1)}, update)
    mine = type("Mine", (cadam.Optimizer,), {"rule": rule})
    ours = trained(mine, {}, torch.float32)
    assert {row.engine for row in ours[1].explain()} == {"cuda"}
    assert_same(ours, without_fused(lambda: trained(mine, {}, torch.float32)))


@on_cuda
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_broken_gradient_shows(setting: str, bad: float) -> None:
    p = torch.nn.Parameter(torch.ones(2000, device="cuda"))
    cls, options = chosen(setting, True)
    optimizer = cls([p], **options)
    p.grad = torch.full_like(p, 0.5)
    p.grad[7] = bad
    optimizer.step()
    assert not p[7].isfinite()
    assert p[8:].isfinite().all()


@on_cuda
def test_steps_that_differ_between_parameters() -> None:
    def run() -> Trained:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(50, device="cuda")) for _ in range(4)]
        optimizer = cadam.CAdam(params)
        for step in range(6):
            for i, p in enumerate(params):
                p.grad = torch.randn_like(p) if i <= step else None
            optimizer.step()
        return params, optimizer

    assert_same(run(), without_fused(run))


@on_cuda
def test_tensors_that_are_replaced_between_steps_are_noticed() -> None:
    def run() -> Trained:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(3)]
        optimizer = cadam.CAdam(params)
        for step in range(5):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
            if step == 1:
                params[0].data = torch.full((64, 64), 2.0, device="cuda")
                optimizer.state[params[1]]["exp_avg"].data = torch.ones(64, 64, device="cuda")
            if step == 2:
                params[2].data = torch.randn(64, 64, device="cuda").t()
                optimizer.state[params[0]]["step"].fill_(40)
        return params, optimizer

    assert_same(run(), without_fused(run))


@on_cuda
def test_a_gradient_of_another_size_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(100, device="cuda"))
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad.data = torch.ones(50, device="cuda")
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(50,\).*no parameter was changed"):
        optimizer.step()
    assert torch.equal(p, before)


@on_cuda
def test_unsupported_parameters_are_refused_with_a_reason() -> None:
    gaps = torch.nn.Parameter(torch.randn(8, 8, device="cuda")[:, ::2])
    optimizer = cadam.CAdam([gaps])
    assert "gaps" in optimizer.explain()[0].passed_over["cuda"].reason
    gaps.grad = torch.ones_like(gaps)
    optimizer.step()
    on_cpu = cadam.CAdam([torch.nn.Parameter(torch.ones(3))]).explain()[0]
    assert on_cpu.passed_over["cuda"].kind is RefusalKind.NOT_APPLICABLE


# Overflow, capture, compilation --------------------------------------------------------------------------------


@on_cuda
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("layout", ["dense", "rows"])
def test_an_overflow_changes_nothing_and_gradients_are_divided_by_the_scale(capturable: bool, layout: str) -> None:
    def run(scale: float | None, overflow: bool) -> Trained:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(64, 8, device="cuda"))
        optimizer = cadam.CAdam([p], capturable=capturable)
        for step in range(6):
            g = torch.randn_like(p) * (scale or 1)
            p.grad = g if layout == "dense" else g.to_sparse(1)
            if scale:
                optimizer.grad_scale = torch.tensor(scale, device="cuda")  # type: ignore[attr-defined]
                found = torch.tensor(float(overflow and step % 2), device="cuda")
                optimizer.found_inf = found  # type: ignore[attr-defined]
            if scale is None and overflow and step % 2:
                continue
            optimizer.step()
        return [p], optimizer

    for overflow in (False, True):
        assert_same(run(1024.0, overflow), run(None, overflow))


@on_cuda
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_graph_contains_the_step(setting: str) -> None:
    cls, options = chosen(setting, True)
    lr = torch.tensor(options.get("lr", 1e-3), device="cuda")

    def start() -> Trained:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in ((40, 50), (7,), (300, 16), (30_000,))]
        return params, cls(params, **{**options, "lr": lr.clone()}, capturable=True)

    def grads(step: int) -> list[Tensor]:
        torch.manual_seed(100 + step)
        dense = [torch.randn(s, device="cuda") for s in ((40, 50), (7,), (30_000,))]
        ids = torch.randint(0, 300, (900,), device="cuda")
        ids[: 100 * (step % 5)] = 3
        return [*dense, ids, torch.randn(900, 16, device="cuda")]

    def assign(params: Sequence[Tensor], g: list[Tensor]) -> None:
        params[0].grad, params[1].grad, params[3].grad = g[0], g[1], g[2]
        params[2].grad = torch.sparse_coo_tensor(g[3][None], g[4], (300, 16), check_invariants=False)

    params, optimizer = start()
    static = grads(0)
    assign(params, static)
    for _ in range(2):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    other, reference = start()
    for step in (0, 0, *range(1, 12)):
        assign(other, grads(step))
        reference.step()
    for step in range(1, 12):
        for to, value in zip(static, grads(step), strict=True):
            to.copy_(value)
        graph.replay()
    assert_same((params, optimizer), (other, reference))
    # A step outside of the graph continues from the state that the graph has left, and the graph from that of the step.
    for p, o in ((params, optimizer), (other, reference)):
        assign(p, grads(20))
        o.step()
    for to, value in zip(static, grads(21), strict=True):
        to.copy_(value)
    graph.replay()
    assign(other, grads(21))
    reference.step()
    assert_same((params, optimizer), (other, reference))


@on_cuda
def test_a_graph_captured_without_warming_up_the_tables() -> None:
    def start() -> tuple[Tensor, cadam.Optimizer]:
        p = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        p.grad = torch.linspace(-1, 1, 1000, device="cuda")
        return p, cadam.CAdam([p], capturable=True)

    other, reference = start()
    for _ in range(6):
        reference.step()
    p, optimizer = start()
    optimizer.step()
    optimizer._plan = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    optimizer.step()
    graph.replay()
    assert_same(([p], optimizer), ([other], reference))


@on_cuda
@pytest.mark.parametrize("layout", ["dense", "rows"])
def test_a_graph_does_not_keep_parameters_and_state_alive(layout: str) -> None:
    p = torch.nn.Parameter(torch.ones(1000, 4, device="cuda"))
    p.grad = torch.ones_like(p) if layout == "dense" else torch.ones_like(p).to_sparse(1)
    optimizer = cadam.CAdam([p], capturable=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    torch.cuda.synchronize()
    gone = [weakref.ref(p), weakref.ref(optimizer.state[p]["exp_avg"])]
    del p, optimizer, graph
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@on_cuda
@pytest.mark.parametrize("layout", ["dense", "rows"])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_does_not_synchronize(layout: str, capturable: bool) -> None:
    p = torch.nn.Parameter(torch.randn(100, 8, device="cuda"))
    optimizer = cadam.CAdam([p], capturable=capturable)
    ids, values = torch.randint(0, 100, (1, 500), device="cuda"), torch.randn(500, 8, device="cuda")
    p.grad = (
        torch.randn_like(p)
        if layout == "dense"
        else torch.sparse_coo_tensor(ids, values, (100, 8), check_invariants=False)
    )
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_cuda
def test_a_step_continues_on_another_stream() -> None:
    def run(streams: list[Any]) -> Trained:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(5000, device="cuda"))
        optimizer = cadam.CAdam([p])
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                p.grad = torch.randn(5000, device="cuda")
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
        return [p], optimizer

    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    assert_same(run([one, two, two, one]), run([one, one, one, one]))


@on_cuda
def test_compiled_training_steps() -> None:
    def run(compiled: bool) -> Trained:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, device="cuda")
        optimizer = cadam.CAdam(model.parameters(), capturable=True)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="cuda")).square().sum().backward()
            step()
        return list(model.parameters()), optimizer

    assert_same(run(True), run(False))


# Rows ----------------------------------------------------------------------------------------------------------

IDS: dict[str, Callable[[int], Tensor]] = {
    "distinct": lambda rows: torch.randperm(rows, device="cuda")[: rows // 2],
    "duplicates": lambda rows: torch.randint(0, rows, (5000,), device="cuda"),
    "all the same": lambda rows: torch.full((20_000,), rows - 1, device="cuda"),
    "hot": lambda rows: torch.cat(
        [torch.full((9000,), 7, device="cuda"), torch.randint(0, rows, (3000,), device="cuda")]
    ),
    "zipf": lambda rows: (rows * torch.rand(30_000, device="cuda", dtype=torch.float64) ** 20).long(),
    "one": lambda rows: torch.tensor([0], device="cuda"),
    "none": lambda rows: torch.zeros(0, dtype=torch.int64, device="cuda"),
}


def row_trained(
    cls: type[cadam.Optimizer],
    options: dict[str, Any],
    kind: str,
    width: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    work: torch.dtype | None = None,
) -> Trained:
    torch.manual_seed(0)
    table = torch.randn(300, *width, device="cuda").to(dtype)
    p = torch.nn.Parameter(table.to(work or dtype))
    optimizer = cls([p], **options)
    for step in range(3):
        ids = IDS[kind](300)
        values = torch.randn(len(ids), *width, device="cuda").to(dtype).to(work or dtype)
        g = torch.sparse_coo_tensor(ids[None], values, p.shape, check_invariants=False)
        p.grad = g.coalesce() if step == 2 else g
        optimizer.step()
    return [p], optimizer


@on_cuda
@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("width", [(16,), (1,), (10,), (3, 50), (64,)], ids=str)
def test_rows_equal_the_reference_in_float64(kind: str, width: tuple[int, ...]) -> None:
    ours = row_trained(cadam.CAdam, {}, kind, width)
    assert ours[1].explain()[0].engine == "cuda-rows"
    theirs = without_fused(lambda: row_trained(cadam.CAdam, {}, kind, width, work=torch.float64))
    for p, q in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-5)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours[1].state[p][name].double(), theirs[1].state[q][name], rtol=1e-4, atol=1e-4)
    a, b = ours[1].alignment().total, theirs[1].alignment().total
    assert (a.touched, a.seen) == (b.touched, b.seen)
    # The sign of a sum near zero depends on the order of its terms.
    assert abs(a.aligned - b.aligned) <= 2 + a.touched // 10_000


@on_cuda
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rows_of_every_rule(setting: str, dtype: torch.dtype) -> None:
    for masked in (False, True):
        for options in ({}, {"weight_decay": 0.1, "maximize": True}, {"capturable": True}):
            cls, own = chosen(setting, masked)
            given = {**own, **options}
            ours = row_trained(cls, given, "distinct", (16,), dtype)
            assert_same(ours, without_fused(partial(row_trained, cls, given, "distinct", (16,), dtype)))


@on_cuda
def test_rows_come_out_the_same_in_every_run() -> None:
    first, second = (row_trained(cadam.CAdam, {}, "hot", (16,))[0][0] for _ in range(2))
    assert torch.equal(first, second)


@on_cuda
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bad", [-1, 300, 2**32 + 5, -(2**40)])
def test_a_bad_id_writes_nothing_and_is_reported_by_the_next_step(bad: int, capturable: bool, distinct: bool) -> None:
    p = torch.nn.Parameter(torch.ones(300, 16, device="cuda"))
    optimizer = cadam.CAdam([p], capturable=capturable)

    def step(ids: list[int]) -> None:
        indices = torch.tensor([ids], device="cuda")
        p.grad = torch.sparse_coo_tensor(
            indices, torch.ones(len(ids), 16, device="cuda"), (300, 16), check_invariants=False
        )
        if distinct:
            p.grad._coalesced_(True)
        optimizer.step()

    step([3, 4, bad] if distinct else [3, bad, 4, bad])
    torch.cuda.synchronize()
    moved = (p != 1).any(1).nonzero().flatten().tolist()
    assert moved == [3, 4]
    with pytest.raises(IndexError, match=f"row id {bad} .* out of range for 300 rows"):
        step([5])
    assert (p != 1).any(1).sum() == 2
    assert optimizer.alignment().total.touched == 32
    step([5])
    check_ids(p)


@on_cuda
@pytest.mark.parametrize("graph", [False, True])
def test_distinct_rows_are_moved_by_the_coefficients_of_their_own_step(graph: bool) -> None:
    """Their kernel begins before the coefficients are ready, and waits for them."""
    torch.manual_seed(0)
    start, ids = torch.randn(500, 16, device="cuda"), torch.arange(0, 500, 3, device="cuda")[None]
    grads = [torch.randn(ids.shape[1], 16, device="cuda") for _ in range(60)]
    rates = [0.1 * 0.9**k for k in range(60)]
    held, found = torch.cuda.CUDAGraph(), []
    for capturable in (False, True):
        param, rate = torch.nn.Parameter(start.clone()), torch.tensor(0.0, device="cuda")
        param.grad = torch.sparse_coo_tensor(ids, grads[0].clone(), start.shape, is_coalesced=True)
        optimizer = cadam.CAdam([param], lr=rate if capturable else 0.0, capturable=capturable)
        for k, (grad, lr) in enumerate(zip(grads, rates, strict=True)):
            param.grad._values().copy_(grad)
            rate.fill_(lr)
            if not capturable:
                optimizer.param_groups[0]["lr"] = lr
            if graph and capturable and k == 1:
                torch.cuda.synchronize()
                with torch.cuda.graph(held):
                    optimizer.step()
            if graph and capturable and k >= 1:
                held.replay()
            else:
                optimizer.step()
        found.append(param)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@on_cuda
def test_a_table_of_more_than_2_31_elements() -> None:
    rows = (1 << 31) // 16 + 1000
    if torch.cuda.mem_get_info()[0] < 3 * 4 * 16 * rows + (4 << 30):
        pytest.skip("needs 30 GB of device memory")
    p = torch.nn.Parameter(torch.ones(rows, 16, device="cuda"))
    optimizer = cadam.CAdam([p], lr=0.5)
    ids = torch.tensor([[0, rows - 1, rows - 1, 1 << 27]], device="cuda")
    p.grad = torch.sparse_coo_tensor(ids, torch.ones(4, 16, device="cuda"), p.shape, check_invariants=False)
    optimizer.step()
    assert (p != 1).any(1).nonzero().flatten().tolist() == [0, 1 << 27, rows - 1]
    total = optimizer.alignment().total
    assert (total.aligned, total.touched, total.seen) == (48, 48, 16 * rows)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p[-1] < 0.6).all()
    assert (p[1] != 1).all()
    assert (p[1] == p[-2]).all()


# Stochastic rounding -------------------------------------------------------------------------------------------


def rounded(rounding_seed: int, steps: int, layout: str, capturable: bool = False) -> Tensor:
    torch.seed()  # another seed, as on another rank
    p = torch.nn.Parameter(torch.ones(200, 1024, device="cuda", dtype=torch.bfloat16))
    optimizer = cadam.SGDM([p], lr=1e-3, momentum=0.0, capturable=capturable, rounding_seed=rounding_seed)
    optimizer.param_groups[0]["stochastic_rounding"] = True
    for _ in range(steps):
        p.grad = torch.ones_like(p) if layout == "dense" else torch.ones_like(p).to_sparse(1)
        optimizer.step()
    return p.detach().float()


@on_cuda
@pytest.mark.parametrize("layout", ["dense", "rows"])
def test_stochastic_rounding_is_unbiased_and_follows_the_seed(layout: str) -> None:
    # A step of 0.001 is a quarter of the distance to the next number: rounded to nearest, nothing would move.
    p = rounded(0, 1, layout)
    assert p.unique().tolist() == [1 - 2**-8, 1.0]
    share = (p < 1).double().mean().item()
    expected = 1e-3 * 2**8
    assert abs(share - expected) < 5 * (expected * (1 - expected) / p.numel()) ** 0.5
    after = rounded(0, 50, layout)
    assert abs(after.double().mean().item() - 0.95) < 1e-4
    assert torch.equal(after, rounded(0, 50, layout))
    assert not torch.equal(after, rounded(1, 50, layout))
    assert torch.equal(after, rounded(0, 50, layout, capturable=True))
    # Neighbors, and the same element in the next step, are rounded independently.
    low = (p < 1).double() - share
    assert abs((low[:, 1:] * low[:, :-1]).mean().item()) < 0.005
    two = (rounded(0, 2, layout) - p < 0).double()
    assert abs(((two - two.mean()) * low).mean().item()) < 0.01


# Without a device ----------------------------------------------------------------------------------------------


def test_importing_cadam_does_not_import_triton() -> None:
    code = "import sys, cadam; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


INTERPRETED = """
import torch
from tests.optim.family import FAMILY
from cadam.engines import selection as choose
from cadam.engines.cuda.dense import Cuda
from cadam.engines.cuda.sparse import CudaRows
fused = [Cuda(), CudaRows()]
for engine in fused:
    engine.device = "cpu"
reference = tuple(e for e in choose.ENGINES if e.name in ("rows", "eager"))

def run(layout, cls, options):
    torch.manual_seed(0)
    several = layout == "dense" or cls.rule.name == "adam"  # rows take long, and differ in the rule alone
    ps = [torch.nn.Parameter(torch.randn(s)) for s in ((40, 3), (7, 3), (1100, 3))[: 3 if several else 1]]
    o = cls(ps, **options)
    for _ in range(2):
        for p in ps:
            ids = torch.randint(0, len(p), (1, 30))
            rows = torch.sparse_coo_tensor(ids, torch.randn(30, 3), p.shape, check_invariants=False)
            p.grad = torch.randn_like(p) if layout == "dense" else rows
        o.step()
    return ps, o

for layout, name, options in CASES:
    cls = FAMILY[name]
    choose.ENGINES = (*fused, *reference)
    ps, o = run(layout, cls, options)
    assert o.explain()[0].engine == {"dense": "cuda", "rows": "cuda-rows"}[layout]
    choose.ENGINES = reference
    qs, r = run(layout, cls, options)
    for p, q in zip(ps, qs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for name in o.state[p]:
            torch.testing.assert_close(o.state[p][name], r.state[q][name], rtol=1e-5, atol=1e-6)
    assert o.alignment() == r.alignment()
"""


@needs_triton
@pytest.mark.parametrize("layout", ["dense", "rows"])
def test_the_kernels_in_tritons_interpreter(layout: str) -> None:
    cases = [(layout, OF_RULE[rule, True].__name__, options) for rule, options in KERNEL_SPECS.values()]
    cases.append((layout, "CAmsGrad", {"capturable": True}))
    if layout == "dense":
        cases += [
            (layout, "SGDM", {"weight_decay": 0.1, "maximize": True}),
            (layout, "CLion", {"weight_decay": 0.1}),
        ]
    source = INTERPRETED.replace("CASES", repr(cases))
    done = interpreted(source)
    assert done.returncode == 0, done.stderr


COEFFICIENTS = """
import numpy as np
import torch
from cadam.codegen.kernel_spec import KernelSpec
from cadam.engines.base import KernelBatch, ParamSlot
from cadam.engines.cuda.launch import StepNumbers
from cadam.engines.resolved_group import ResolvedGroup
from cadam.rules import RULES
from cadam.rules.defaults import defaults
from cadam.rules.update import ScalarFunctions

for name, options in CASES:
    rule = RULES[name]
    given = {**defaults(rule), **options, "capturable": True}
    on_device = {key: torch.tensor(value, dtype=torch.float64) if type(value) is float else value
                 for key, value in given.items()}
    for how, overflow in ((given, None), (on_device, None), (given, 0.0), (given, 1.0)):
        found_inf = None if overflow is None else torch.tensor(overflow)
        scale = torch.tensor(8.0)
        group = ResolvedGroup.resolve(rule, how, unscale=True)
        counts = [torch.tensor(float(t)) for t in (0, 1, 6, 999, 70_000, *range(5, 45))]
        items = [ParamSlot(torch.zeros(1), {}, step, None) for step in counts]
        numbers = StepNumbers(items, group, KernelSpec.of(rule, given), torch.device("cpu"))
        before = [step.item() for step in counts]
        sent = numbers.advance(KernelBatch(group, items, grad_scale=scale, found_inf=found_inf), np.arange(45))
        assert sent.more.tolist() == list(range(45))
        assert [step.item() for step in counts] == [t + (not overflow) for t in before]
        for t, row in zip(counts, sent.rows.tolist()):
            c = group.update.general_coefficients(t.item(), given, ScalarFunctions, 8.0) if t else {}
            assert row[0] == t.item()
            np.testing.assert_allclose(row[1 : 1 + len(c)], list(c.values()), rtol=1e-9, err_msg=f"{name} {t} {c}")
"""


@needs_triton
def test_coefficients_computed_by_a_kernel_are_those_of_the_host() -> None:
    """Compare all rules and kinds of decay, with options as numbers and as tensors, at early and late steps."""
    cases = [(rule, {**options, **decay}) for rule, options in SETTINGS.values() for decay in DECAY.values()]
    done = interpreted(COEFFICIENTS.replace("CASES", repr(cases)))
    assert done.returncode == 0, done.stderr


@needs_triton
def test_numbers_reach_the_kernel_of_the_coefficients_as_all_of_their_bits() -> None:
    trace = Trace()
    source, numbers = triton_source.coefficients("some", trace, [Value(trace, "t", scalar=True) * 0.1])
    assert numbers == [0.1]
    params = {p.name: p for p in triton_source.module("some", source).some_coefficients.params}
    assert params["n0_"].annotation_type == "i64"
    assert params["n0_"].do_not_specialize


def ptx_of(spec: KernelSpec, kind: str, width: int = 64, early: bool = False) -> tuple[list[str], str]:
    """Return the arguments and the PTX code of a kernel for rows. Compiling needs no device."""
    import triton
    from triton.backends.compiler import GPUTarget

    strides, flags = RowStrides(1, 1, 1, True), (True, False, False, False, False, early)
    dtypes = (torch.float32,) * (1 + len(spec.buffers))
    launch = getattr(_make_launches(spec, dtypes, width, strides, *flags), kind)
    kinds = {"keys": "*i32", "order": "*i64", "coefficients": "*fp64", "counts": "*i64"}
    kinds |= dict.fromkeys(("seed", "n", "rows", "width"), "i32") | dict.fromkeys(("row_steps", "last_steps"), "*i32")
    constants = {**launch.constants, "sources": None, "error": None, "found_inf": None}
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    made = triton.compiler.ASTSource(launch.kernel, signature, values)
    options = {"num_warps": launch.warps, "maxnreg": launch.registers}
    text = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return [name for name in names if signature[name] != "constexpr"], text


@needs_triton
@pytest.mark.parametrize("kind", ["within_tiles", "across_tiles"])
@pytest.mark.parametrize("width", [16, 1024])
@pytest.mark.parametrize("options", [{"sparse_updates": "exact"}, {"confidence_after": 9}], ids=str)
def test_kernels_with_records_of_rows_are_compiled(options: dict[str, Any], width: int, kind: str) -> None:
    spec = KernelSpec.of(RULES["adam"], {**defaults(RULES["adam"]), **options}, rows=True)
    names, text = ptx_of(spec, kind, width)
    assert ({"last_steps", "by_missed"} <= set(names)) == ("sparse_updates" in options)
    assert ({"row_steps", "by_step"} <= set(names)) == ("confidence_after" in options)
    assert "bar.sync" in text  # all threads that share a row read its record before one of them writes to it


@needs_triton
@pytest.mark.parametrize("kind", ["within_tiles", "across_tiles"])
def test_kernels_that_begin_early_wait_before_they_read_coefficients(kind: str) -> None:
    """The kernel is only compiled, which needs no device."""
    spec = KernelSpec.of(RULES["adam"], defaults(RULES["adam"]), rows=True)
    names, text = ptx_of(spec, kind, early=True)
    place = names.index("coefficients")
    read = [m.start() for m in re.finditer(rf"ld\.param\S*\s.*_param_{place}\]", text)]
    assert text.count("griddepcontrol.wait") == 1
    assert read
    assert min(read) > text.index("griddepcontrol.wait")


NORM = """
import torch
from cadam.engines.cuda.sparse import norm
torch.manual_seed(0)
for rows, width, count in ((7, 3, 900), (50, 16, 300), (40_000, 16, 700), (5, 1, 5000), (9, 200, 40), (4, 3, 0)):
    ids, values = torch.randint(0, rows, (count,)), torch.randn(count, width)
    sums = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, ids, values.double())
    torch.testing.assert_close(norm(ids, values, rows).double(), sums.norm(), rtol=1e-6, atol=0)
beyond = torch.tensor([3, -1, 7, 3])
torch.testing.assert_close(norm(beyond, torch.ones(4, 2), 7), torch.tensor(8.0).sqrt())
assert norm(torch.tensor([0, 1]), torch.tensor([[1.0], [float("nan")]]), 2).isnan()
"""


@needs_triton
def test_the_norm_of_rows_in_tritons_interpreter() -> None:
    done = interpreted(NORM)
    assert done.returncode == 0, done.stderr


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "width"), [(50, 16), (100_000, 16), (1000, 1), (30, 200), (40, 12)])
def test_clipping_on_the_device_is_clipping_on_the_cpu(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ids, values = torch.randint(0, rows, (1, 20_000)), torch.randn(20_000, width, dtype=dtype)
    ids[0, :9000] = 3  # a row with the ids of many tiles
    found = []
    for device in ("cuda", "cpu"):
        table, weight = (torch.nn.Parameter(torch.zeros(s, device=device, dtype=dtype)) for s in ((rows, width), (5,)))
        table.grad = torch.sparse_coo_tensor(ids, values, table.shape, check_invariants=False).to(device)
        weight.grad = torch.ones_like(weight)
        norms = [cadam.clip_grad_norm_([table, weight], max_norm) for max_norm in (1e9, 1.0)]
        found.append([*norms, table.grad._values().cpu(), weight.grad.cpu()])
    again = cadam.clip_grad_norm_([table], 1e9)
    assert again < 1.001
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-2 if dtype == torch.bfloat16 else 2e-5, atol=1e-6)


@on_cuda
def test_clipping_and_a_step_of_two_tables_looked_up_with_the_same_ids_can_be_captured() -> None:
    """As in DeepFM, two tables have the same ids. They are sorted once for both, with and without the graph."""
    torch.manual_seed(0)
    ids = torch.randint(0, 5000, (64, 39), device="cuda")
    runs = []
    for captured in (False, True):
        torch.manual_seed(1)
        tables = [torch.nn.Embedding(5000, width, sparse=True, device="cuda") for width in (16, 1)]
        optimizer = cadam.CAdam([t.weight for t in tables], lr=0.1, capturable=True)
        batch = ids.clone()

        def step(tables=tables, optimizer=optimizer, batch=batch) -> None:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            sum((t(batch) ** 2).sum() for t in tables).backward()
            cadam.clip_grad_norm_([t.weight for t in tables], 1.0)
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the stream reads tensors of the current stream
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step()
            for k in range(4):
                batch.copy_(ids.roll(k, 0) if k % 2 else (ids + k) % 5000)
                graph.replay() if captured else step()
        torch.cuda.synchronize()
        runs.append([t.weight.detach().clone() for t in tables])
    for plain, replayed in zip(*runs, strict=True):
        assert torch.equal(plain, replayed)


@on_cuda
def test_tables_with_the_same_ids_are_updated_as_if_they_were_alone() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 300, (400,), device="cuda")
    start = [torch.randn(300, width, device="cuda") for width in (16, 1)]

    def trained(together: bool) -> list[torch.Tensor]:
        tables = [torch.nn.Embedding.from_pretrained(s.clone(), freeze=False, sparse=True) for s in start]
        groups = [[t.weight for t in tables]] if together else [[t.weight] for t in tables]
        optimizers = [cadam.CAdam(group, lr=0.1) for group in groups]
        for _ in range(3):
            for table in tables:
                table.weight.grad = None
                (table(ids) ** 2).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return [t.weight.detach() for t in tables]

    for ours, alone in zip(trained(True), trained(False), strict=True):
        assert torch.equal(ours, alone)

"""The requirements of PyTorch's own tests for Adam, AdamW, SGD, RAdam and SparseAdam, with the optimizers of cadam.

`tests/torch_tests.py` runs PyTorch's test files themselves, but it needs a source tree of PyTorch: wheels do not
contain them. This file needs an installed torch only, so it is part of every test run. It uses the inputs that torch
ships for its tests (`OptimizerInfo`), and goes further than they do: every configuration is tested, including those
that torch restricts to CUDA, since `capturable` works on the CPU here, and results are compared to the bit.
"""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

import cadam
from tests.optim.exact import assert_identical, present

# Whether the kernels of the implementation "fused" exist on this machine, as explain() reports.
FUSED = cadam.CAdam([torch.ones(1)]).explain()[0].engine == "native"
NOT_HERE = () if FUSED else ("fused",)


class CSGDM(cadam.CSGDM):
    """CSGDM with the defaults of torch.optim.SGD."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **common)


@dataclass(frozen=True)
class TorchConfig:
    """An optimizer of cadam, and the optimizer of torch that it replaces."""

    cls: type[cadam.Optimizer]
    info: OptimizerInfo

    @property
    def sparse(self) -> bool:
        return self.info.only_supports_sparse_grads

    def __str__(self) -> str:
        return f"{self.cls.__name__}-as-{self.info.name}"


INFOS = {info.name: info for info in optim_db}
STAND_INS = [
    TorchConfig(cadam.CAdam, INFOS["Adam"]),
    TorchConfig(cadam.CAdamW, INFOS["AdamW"]),
    TorchConfig(CSGDM, INFOS["SGD"]),
    TorchConfig(cadam.CRAdam, INFOS["RAdam"]),
    TorchConfig(cadam.CAdam, INFOS["SparseAdam"]),
]
DENSE = [config for config in STAND_INS if not config.sparse]


@dataclass(frozen=True)
class Case:
    """A configuration of an optimizer of cadam, used like the optimizer of torch."""

    config: TorchConfig
    kwargs: dict[str, Any]
    description: str

    def options(self, **other: Any) -> dict[str, Any]:
        return {**deepcopy(self.kwargs), **other}

    def optimizer(self, params: Any, **other: Any) -> cadam.Optimizer:
        return self.config.cls(params, **self.options(**other))

    @property
    def sparse(self) -> bool:
        return self.config.sparse

    @property
    def maximize(self) -> bool:
        return self.kwargs.get("maximize", False)

    def __str__(self) -> str:
        return f"{self.config}-{self.description}"


def configurations(config: TorchConfig, *skip: str) -> list[Case]:
    """Return all configurations with every implementation except the skipped ones."""
    inputs = _get_optim_inputs_including_global_cliquey_kwargs(
        "cuda", torch.float32, config.info, skip=tuple({*NOT_HERE, *skip})
    )
    return [Case(config, each.kwargs, each.desc) for each in inputs]


def over_cases(*skip: str, configs: list[TorchConfig] = STAND_INS) -> Any:
    """Run the test with every configuration, except for the skipped implementations."""
    found = [case for config in configs for case in configurations(config, *skip)]
    return pytest.mark.parametrize("case", found, ids=str)


# Autograd looks through a differentiable step, so its parameters cannot be leaves that are trained in place.
trainable = partial(over_cases, "differentiable")
over_configs = pytest.mark.parametrize("config", STAND_INS, ids=str)


class Line:
    """A least-squares problem with a weight and a bias."""

    def __init__(self, sparse: bool = False, contiguous: bool = True) -> None:
        shapes = [(10, 5), (10,)]
        if contiguous:
            self.params = [Parameter(torch.randn(shape)) for shape in shapes]
        else:
            self.params = [Parameter(torch.randn((*shape, 2))[..., 0]) for shape in shapes]
        self.x = torch.randn(5)
        self.sparse = sparse

    def copy(self) -> Line:
        other = deepcopy(self)
        for param in other.params:
            param.grad = None
        return other

    def loss(self) -> Tensor:
        weight, bias = self.params
        return (weight.mv(self.x) + bias).pow(2).sum()

    def backward(self) -> Tensor:
        for param in self.params:
            param.grad = None
        loss = self.loss()
        loss.backward()
        if self.sparse:
            for param in self.params:
                assert param.grad is not None
                param.grad = param.grad.to_sparse()
        return loss

    def train(self, optimizer: torch.optim.Optimizer, steps: int, plan: list[Any] | None = None) -> None:
        for _ in range(steps):
            loss = self.backward()
            optimizer.step()
            advance(plan or [], loss)

    def assert_moved(self, before: float, case: Case) -> None:
        after = self.loss().item()
        assert after > before if case.maximize else after < before


def advance(plan: list[Any], loss: Tensor | float) -> None:
    for scheduler in plan:
        scheduler.step(loss) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())


def gradient(param: Tensor, sparse: bool) -> Tensor:
    return torch.randn_like(param).to_sparse() if sparse else torch.randn_like(param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# What is refused -----------------------------------------------------------------------------------------------


def error_inputs() -> Iterator[Any]:
    for config in STAND_INS:
        for error in config.info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            description = error.optimizer_error_input.desc
            if description != "complex not supported":  # only SparseAdam refuses them; cadam accepts them, see below
                yield pytest.param(config, error, id=f"{config}-{description}")


@pytest.mark.parametrize(("config", "error"), list(error_inputs()))
def test_input_that_torch_refuses_is_refused_with_the_same_message(config: TorchConfig, error: Any) -> None:
    given = error.optimizer_error_input
    params = given.params if given.params is not None else [Parameter(torch.randn(1))]
    kind, words = error.error_type, error.error_regex
    if issubclass(kind, Warning):
        with pytest.warns(kind, match=words):
            config.cls(params, **given.kwargs)
        return
    if "dense parameter tensors" in words:  # the message of torch begins with the name of its class
        words = "requires dense parameter tensors"
    if error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(kind, match=words):
            config.cls(params, **given.kwargs)
    else:
        optimizer = config.cls(params, **given.kwargs)
        with pytest.raises(kind, match=words):
            optimizer.step()


def test_complex_parameters_take_sparse_gradients() -> None:
    """Where torch.optim.SparseAdam raises, the real and imaginary parts are updated like two real tables."""
    both = torch.randn(6, 3, dtype=torch.complex64)
    parts = [both.real.clone().requires_grad_(), both.imag.clone().requires_grad_()]
    table = both.clone().requires_grad_()
    optimizer, reference = (cadam.CAdam(params, lr=0.1, foreach=False) for params in ([table], parts))
    for _ in range(4):
        rows, values = torch.tensor([[4, 1, 4]]), torch.randn(3, 3, dtype=torch.complex64)
        table.grad = torch.sparse_coo_tensor(rows, values, (6, 3), check_invariants=False)
        parts[0].grad = torch.sparse_coo_tensor(rows, values.real, (6, 3), check_invariants=False)
        parts[1].grad = torch.sparse_coo_tensor(rows, values.imag, (6, 3), check_invariants=False)
        optimizer.step()
        reference.step()
    assert_identical(torch.view_as_real(table), torch.stack([p.detach() for p in parts], -1))


# Right direction -----------------------------------------------------------------------------------------------


def plans(config: TorchConfig) -> list[list[Callable[[Any], Any]]]:
    """Return lists of schedulers, the empty one first."""
    return [[], *config.info.scheduler_inputs]


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@over_cases("differentiable", "foreach", "fused")
def test_reference_goes_the_right_direction(case: Case, contiguous: bool) -> None:
    for plan in plans(case.config) if contiguous else [[]]:
        line = Line(case.sparse, contiguous)
        optimizer = case.optimizer(line.params, foreach=False)
        running = [scheduler(optimizer) for scheduler in plan]
        before = line.loss().item()
        line.train(optimizer, 12, running)
        line.assert_moved(before, case)


@over_configs
def test_groups_with_schedulers_and_closures_go_the_right_direction(config: TorchConfig) -> None:
    for plan in config.info.scheduler_inputs:
        line = Line(config.sparse)
        optimizer = config.cls([{"params": line.params[:1]}, {"params": line.params[1:], "lr": 0.01}])
        running = [scheduler(optimizer) for scheduler in plan]
        before = line.loss().item()
        for _ in range(20):
            loss = optimizer.step(line.backward)
            advance(running, loss)
        assert line.loss().item() < before


@trainable()
def test_groups_have_their_own_weight_decay(case: Case) -> None:
    line = Line(case.sparse)
    options = case.options()
    groups = [{"params": line.params[:1], **options}, {"params": line.params[1:], **options, "weight_decay": 0.0}]
    before = line.loss().item()
    line.train(case.config.cls(groups), 20)
    line.assert_moved(before, case)


@trainable()
def test_groups_have_their_own_learning_rate(case: Case) -> None:
    line, still = Line(case.sparse), Parameter(torch.randn(2))
    options = case.options()
    options.setdefault("lr", 1e-3)
    optimizer = case.config.cls([{"params": line.params, **options}, {"params": [still]}], lr=1e-28)
    before, where = line.loss().item(), still.detach().clone()
    for _ in range(20):
        line.backward()
        still.grad = gradient(still, case.sparse)
        optimizer.step()
    line.assert_moved(before, case)
    assert torch.equal(still, where)


@over_configs
def test_groups_are_as_good_as_separate_optimizers(config: TorchConfig) -> None:
    together = Line(config.sparse)
    apart = together.copy()
    own = [{"lr": 0.03, "weight_decay": 0.1}, {"lr": 0.2, "maximize": True}]
    both = config.cls([{"params": [p], **o} for p, o in zip(together.params, own, strict=True)])
    each = [config.cls([p], **o) for p, o in zip(apart.params, own, strict=True)]
    for _ in range(5):
        together.backward()
        apart.backward()
        both.step()
        for optimizer in each:
            optimizer.step()
    assert_identical(together.params, apart.params)


# Options as tensors ----------------------------------------------------------------------------------------------


@trainable()
def test_tensor_lr_equals_number(case: Case) -> None:
    line = Line(case.sparse)
    other = line.copy()
    lr = torch.tensor([[1e-3]], dtype=torch.float64)
    if case.kwargs.get("foreach") and not case.kwargs.get("capturable") and "betas" in case.config.cls.rule.defaults:
        with pytest.raises(ValueError, match="lr as a Tensor is not supported for capturable=False and foreach=True"):
            case.optimizer(other.params, lr=lr)
        return
    optimizer, tensor_optimizer = case.optimizer(line.params, lr=1e-3), case.optimizer(other.params, lr=lr)
    assert tensor_optimizer.param_groups[0]["lr"].shape == ()
    for _ in range(5):
        line.train(optimizer, 1)
        other.train(tensor_optimizer, 1)
        assert_close(line.params, other.params)


@pytest.mark.parametrize(
    "how", [{"foreach": False}, {"capturable": True}, {"capturable": True, "foreach": True}], ids=str
)
@pytest.mark.parametrize("config", [s for s in STAND_INS if s.cls is not CSGDM], ids=str)
def test_tensor_betas_equal_numbers(config: TorchConfig, how: dict[str, bool]) -> None:
    line = Line(config.sparse)
    other = line.copy()
    optimizer = config.cls(line.params, betas=(0.8, 0.95), **how)
    betas = (torch.tensor([[[0.8]]], dtype=torch.float64), torch.tensor([0.95], dtype=torch.float64))
    tensor_optimizer = config.cls(other.params, betas=betas, **how)
    assert all(beta.shape == () for beta in tensor_optimizer.param_groups[0]["betas"])
    line.train(optimizer, 8)
    other.train(tensor_optimizer, 8)
    assert_close(line.params, other.params)


@over_configs
def test_a_tensor_lr_is_read_in_every_step(config: TorchConfig) -> None:
    line = Line(config.sparse)
    other = line.copy()
    lr = torch.tensor(0.1)
    optimizer, tensor_optimizer = config.cls(line.params, lr=0.1), config.cls(other.params, lr=lr)
    for factor in (1.0, 0.5, 0.0, 2.0):
        lr.fill_(0.1 * factor)
        optimizer.param_groups[0]["lr"] = lr.item()
        line.train(optimizer, 1)
        other.train(tensor_optimizer, 1)
        assert_close(line.params, other.params)


# Rosenbrock with sparse gradients --------------------------------------------------------------------------------


def rosenbrock(point: Tensor) -> Tensor:
    x, y = point
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def coordinate_gradient(param: Tensor, coordinate: int, sparse: bool) -> Tensor:
    """Return the derivative along one coordinate. If sparse, it is uncoalesced, in two unequal parts."""
    x, y = param.tolist()
    slope = (-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2))[coordinate]
    if not sparse:
        return torch.eye(2)[coordinate] * slope
    indices = torch.tensor([[coordinate] * 2])
    return torch.sparse_coo_tensor(indices, [slope / 4, slope - slope / 4], (2,), check_invariants=True)


def rosenbrock_cases() -> Iterator[Any]:
    for config in STAND_INS:
        info = config.info
        if info.supports_sparse or info.only_supports_sparse_grads:
            tuned, sparse_plan = info.metadata_for_sparse
            seen: list[dict[str, Any]] = []
            for case in configurations(config, "differentiable"):
                rest = {k: v for k, v in case.kwargs.items() if k not in tuned}
                if rest not in seen:
                    seen.append(rest)
                    kwargs = {**rest, "lr": tuned["lr"]}
                    for plan in [[], sparse_plan] if sparse_plan else [[]]:
                        yield pytest.param(config, kwargs, plan, id=f"{config}-{rest}-{len(plan)}")


@pytest.mark.parametrize(("config", "kwargs", "plan"), list(rosenbrock_cases()))
def test_sparse_rosenbrock_by_coordinates(config: TorchConfig, kwargs: dict[str, Any], plan: list[Any]) -> None:
    """The loss decreases, and where a dense gradient means the same, the result is the same."""
    start = torch.tensor([1.5, 1.5])
    sparse_param, dense_param = start.clone(), start.clone()
    optimizers = [config.cls([param], **deepcopy(kwargs)) for param in (sparse_param, dense_param)]
    running = [[scheduler(optimizer) for scheduler in plan] for optimizer in optimizers]
    for i in range(200):
        sparse_param.grad = coordinate_gradient(sparse_param, i % 2, sparse=True)
        dense_param.grad = coordinate_gradient(dense_param, i % 2, sparse=False)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in running:
            advance(schedule, 0.0)
        if not config.sparse:
            assert_close(sparse_param, dense_param, atol=5e-6, rtol=5e-6)
    before, after = rosenbrock(start), rosenbrock(sparse_param)
    assert after > before if kwargs.get("maximize") else after < before / 10


# Complex parameters ----------------------------------------------------------------------------------------------


@over_cases("differentiable", "fused", configs=DENSE)
def test_complex_parameters_move_as_their_real_views(case: Case) -> None:
    """Complex and real parameters may be mixed; each of the two parts has its own mask."""
    mixed = [torch.randn(10, 5, dtype=torch.complex64), torch.randn(10, dtype=torch.complex64), torch.randn(10, 5)]
    real = [torch.view_as_real(p).clone() if p.is_complex() else p.clone() for p in mixed]
    mixed_optimizer, real_optimizer = case.optimizer(mixed), case.optimizer(real)
    for _ in range(3):
        for p, r in zip(mixed, real, strict=True):
            p.grad = torch.randn_like(p)
            r.grad = torch.view_as_real(p.grad).clone() if p.is_complex() else p.grad.clone()
        mixed_optimizer.step()
        real_optimizer.step()
        assert_identical([torch.view_as_real(p) if p.is_complex() else p for p in mixed], real)


@over_cases("differentiable", "fused", configs=DENSE)
def test_complex_parameters_move_as_two_real_ones(case: Case) -> None:
    point = torch.randn(2, dtype=torch.complex64, requires_grad=True)
    parts = [point.real.detach().clone().requires_grad_(), point.imag.detach().clone().requires_grad_()]
    optimizer, reference = case.optimizer([point]), case.optimizer(parts)
    for _ in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        rosenbrock(point).abs().backward()
        rosenbrock(torch.complex(*parts)).abs().backward()
        assert point.grad is not None
        for part, grad in zip(parts, (point.grad.real, point.grad.imag), strict=True):
            assert_close(part.grad, grad)
            part.grad = grad.clone()
        optimizer.step()
        reference.step()
        assert_identical(point.real, parts[0])
        assert_identical(point.imag, parts[1])


# foreach and fused equal the reference ---------------------------------------------------------------------------


def assert_same_state(ours: cadam.Optimizer, theirs: cadam.Optimizer) -> None:
    mine = [p for group in ours.param_groups for p in group["params"]]
    other = [p for group in theirs.param_groups for p in group["params"]]
    for p, q in zip(mine, other, strict=True):
        assert_close(p.detach(), q.detach())
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, value in ours.state[p].items():
            assert_close(value, theirs.state[q][name])


over_faster = pytest.mark.parametrize("faster", ["foreach", *(["fused"] if FUSED else [])])


def reference_and(faster: str, case: Case, params: list[list[Tensor]]) -> list[cadam.Optimizer]:
    """Return an optimizer with the reference engine for the first parameters, and one with the faster engine."""
    if faster == "foreach" and isinstance(case.kwargs.get("lr"), Tensor) and not case.kwargs.get("capturable"):
        pytest.skip("torch and we refuse a tensor lr with foreach, unless it is capturable")
    reference = case.optimizer(params[0], foreach=False)
    other = case.optimizer(params[1], **{faster: True})
    engines = [{row.engine for row in optimizer.explain()} for optimizer in (reference, other)]
    assert engines == [{"eager"}, {"native" if faster == "fused" else "foreach"}]
    return [reference, other]


@over_faster
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@over_cases("differentiable", "foreach", "fused", configs=DENSE)
def test_faster_engines_match_the_reference(case: Case, dtype: torch.dtype, faster: str) -> None:
    """Some steps have no gradients, a layer is frozen for a while, and there are 0-dim and empty tensors."""
    x = torch.linspace(0.1, 0.6, 6, dtype=dtype).reshape(3, 2)
    nets = [small_net().to(dtype)]
    nets.append(deepcopy(nets[0]))
    lists = []
    for net in nets:
        odd = [torch.ones((), dtype=dtype), torch.empty(0, 3, dtype=dtype)]
        for param in odd:
            param.grad = torch.full_like(param, 0.5)
        lists.append([*net.parameters(), *odd])
    optimizers = reference_and(faster, case, lists)
    for step in range(8):  # RAdam has another formula after the fifth step
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.zero_grad()
            net[2].requires_grad_(step not in (3, 4))
            if step != 2:
                net(x).sum().backward()
            optimizer.step()
        assert_same_state(*optimizers)


def assert_match(faster: str, case: Case, params: list[Tensor], steps: int) -> None:
    lists = [params, [p.clone() for p in params]]
    optimizers = reference_and(faster, case, lists)
    for _ in range(steps):
        for p, q in zip(*lists, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_state(*optimizers)


@over_faster
@over_cases("differentiable", "foreach", "fused", configs=DENSE)
def test_faster_engines_match_the_reference_over_mixed_dtypes(case: Case, faster: str) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    if faster == "foreach":  # as in torch, the fused kernels do not support complex parameters
        dtypes.append(torch.complex64)
    assert_match(faster, case, [torch.rand(2, 3, dtype=dtype) for dtype in dtypes * 2], steps=7)


@over_faster
@pytest.mark.parametrize("shapes", [[(3, 2)] * 100, [(100_003,), (300, 300)]], ids=["many", "large"])
@pytest.mark.parametrize("config", DENSE, ids=str)
def test_faster_engines_match_the_reference_on_large_lists(config: TorchConfig, shapes: list[Any], faster: str) -> None:
    assert_match(faster, Case(config, {}, ""), [torch.randn(shape) for shape in shapes], steps=2)


@pytest.mark.parametrize("config", DENSE, ids=str)
def test_fused_is_refused_on_the_meta_device(config: TorchConfig) -> None:
    param = torch.ones(3, device="meta")
    param.grad = torch.ones(3, device="meta")
    optimizer = config.cls([param], fused=True)
    with pytest.raises(RuntimeError, match="fused=True, but no fused engine can serve it"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("default", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("foreach", [False, True], ids=["reference", "foreach"])
@pytest.mark.parametrize("config", DENSE, ids=str)
def test_step_count_is_float32(config: TorchConfig, foreach: bool, default: torch.dtype) -> None:
    """The fused engines count in float32 whatever the default dtype is. torch uses float64 if it is the default."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        param = Parameter(torch.ones(3))
        param.grad = torch.ones(3)
        optimizer = config.cls([param], foreach=foreach)
        optimizer.step()
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert optimizer.state[param]["step"].dtype == torch.float32
    assert optimizer.state[param]["step"].item() == 2


# Nothing to do ---------------------------------------------------------------------------------------------------


@over_cases()
def test_step_without_gradients_changes_nothing(case: Case) -> None:
    params = [torch.randn(2, 3) for _ in range(2)]
    before = [p.clone() for p in params]
    optimizer = case.optimizer(params)
    assert optimizer.step(lambda: torch.tensor([1.0])) == torch.tensor([1.0])
    assert_identical(params, before)
    assert not any(optimizer.state.values())


@over_cases()
def test_step_with_zero_gradients_moves_nothing(case: Case) -> None:
    """A sparse gradient without rows has no effect either; without gradients, only weight decay acts."""
    param = torch.randn(5, 1)
    before = param.clone()
    optimizer = case.optimizer([param], weight_decay=0.0)
    if case.sparse:
        param.grad = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 1), (5, 1), check_invariants=False)
    else:
        param.grad = torch.zeros_like(param)
    for _ in range(2):
        optimizer.step()
    assert torch.equal(param, before)


@over_cases()
def test_scalars_and_empty_tensors_are_parameters_too(case: Case) -> None:
    scalar, empty = torch.tensor(2.0), torch.empty(0, 4)
    optimizer = case.optimizer([scalar, empty], weight_decay=0.0)
    scalar.grad, empty.grad = torch.tensor(0.5), torch.empty(0, 4)
    if case.sparse:
        scalar.grad, empty.grad = scalar.grad, empty.grad.to_sparse()
    optimizer.step()
    assert scalar > 2 if case.maximize else scalar < 2
    assert empty.shape == (0, 4)


@over_configs
def test_state_is_not_empty_after_a_step(config: TorchConfig) -> None:
    line = Line(config.sparse)
    optimizer = config.cls(line.params)
    assert not optimizer.state
    line.train(optimizer, 1)
    assert len(optimizer.state) == 2
    assert all(state["step"] == 1 for state in optimizer.state.values())


# State dicts -----------------------------------------------------------------------------------------------------


def named(params: Sequence[Tensor], wanted: bool) -> Sequence[Any]:
    return [(f"name{i}", p) for i, p in enumerate(params)] if wanted else params


def nameless(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {"state": state_dict["state"], "param_groups": groups}


def assert_goes_on_exactly(case: Case, first: bool = False, second: bool = False) -> cadam.Optimizer:
    """A new optimizer that loads the state dict continues bit for bit, and writes the same state dict."""
    line = Line(case.sparse)
    optimizer = case.optimizer(named(line.params, first))
    line.train(optimizer, 4)
    other = line.copy()
    successor = case.optimizer(named(other.params, second))
    successor.load_state_dict(deepcopy(optimizer.state_dict()))
    line.train(optimizer, 4)
    other.train(successor, 4)
    assert_identical(line.params, other.params)
    assert_identical(nameless(optimizer.state_dict()), nameless(successor.state_dict()))
    return successor


@trainable()
def test_the_state_dict_is_complete(case: Case) -> None:
    assert_goes_on_exactly(case)


@pytest.mark.parametrize("second", [True, False], ids=["to names", "to nameless"])
@pytest.mark.parametrize("first", [True, False], ids=["from names", "from nameless"])
@over_configs
def test_state_dicts_go_between_named_and_nameless(config: TorchConfig, first: bool, second: bool) -> None:
    """The names are kept, whether they come from the optimizer or the state dict."""
    successor = assert_goes_on_exactly(Case(config, {}, ""), first, second)
    names = ["name0", "name1"] if first or second else None
    assert successor.state_dict()["param_groups"][0].get("param_names") == names


@over_configs
def test_repeated_groups_are_written_alike(config: TorchConfig) -> None:
    optimizer = config.cls(Line().params)
    once = optimizer.state_dict()["param_groups"]
    optimizer.param_groups.extend(optimizer.param_groups)
    assert optimizer.state_dict()["param_groups"] == once * 2


@trainable()
def test_older_state_dicts_load(case: Case) -> None:
    """A state dict that lacks the options of later releases of torch loads everything else."""
    line = Line(case.sparse)
    optimizer = case.optimizer(line.params)
    line.train(optimizer, 3)
    old = deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in (*case.config.info.not_og_supported_flags, "state_dtype", "track_alignment"):
            group.pop(flag, None)
    other = line.copy()
    successor = case.optimizer(other.params)
    successor.load_state_dict(old)
    line.train(optimizer, 3)
    other.train(successor, 3)
    assert_identical(line.params, other.params)


@trainable()
def test_state_dict_survives_a_file(case: Case, tmp_path: Any) -> None:
    line = Line(case.sparse)
    optimizer = case.optimizer(named(line.params, True))
    line.train(optimizer, 3)
    saved = optimizer.state_dict()
    torch.save(saved, tmp_path / "state")
    for weights_only in (True, False):
        assert_identical(torch.load(tmp_path / "state", weights_only=weights_only), saved)


@trainable()
def test_step_count_loads_as_a_plain_number(case: Case) -> None:
    line = Line(case.sparse)
    optimizer = case.optimizer(line.params)
    line.train(optimizer, 3)
    plain = deepcopy(optimizer.state_dict())
    for state in plain["state"].values():
        state["step"] = state["step"].item()
    other = line.copy()
    successor = case.optimizer(other.params)
    successor.load_state_dict(plain)
    line.train(optimizer, 1)
    other.train(successor, 1)
    assert_identical(line.params, other.params)
    assert all(state["step"] == 4 for state in successor.state.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@trainable()
def test_state_dict_moves_to_another_device(case: Case) -> None:
    line = Line(case.sparse)
    optimizer = case.optimizer(line.params)
    line.train(optimizer, 3)
    saved = optimizer.state_dict()
    before = deepcopy(saved)
    there = [p.detach().cuda() for p in line.params]
    successor = case.optimizer(there)
    successor.load_state_dict(saved)
    assert_identical(saved, before)
    for state in successor.state_dict()["state"].values():
        assert state["step"].device.type == ("cuda" if case.kwargs.get("capturable") else "cpu")
    line.backward()
    for p, q in zip(line.params, there, strict=True):
        assert p.grad is not None
        q.grad = p.grad.cuda()
    optimizer.step()
    successor.step()
    assert_close([p.detach() for p in line.params], [q.cpu() for q in there])


@trainable()
def test_deepcopy_is_independent_and_complete(case: Case) -> None:
    line = Line(case.sparse)
    optimizer = case.optimizer(line.params)
    line.train(optimizer, 3)
    copy = deepcopy(optimizer)
    assert {k for k in vars(copy) if k[0] != "_"} == {k for k in vars(optimizer) if k[0] != "_"}
    assert_identical(copy.state_dict(), optimizer.state_dict())
    copied = copy.param_groups[0]["params"]
    before = [p.detach().clone() for p in line.params]
    for p in copied:
        p.grad = gradient(p, case.sparse)
    copy.step()
    assert_identical(line.params, [p.requires_grad_() for p in before])
    assert optimizer.state[line.params[0]]["step"] == 3


@over_cases()
def test_printing_shows_the_options(case: Case) -> None:
    shown = repr(case.optimizer(Line().params))
    assert shown.startswith(case.config.cls.__name__)
    for name in case.kwargs:
        assert f" {name}:" in shown


# Hooks -----------------------------------------------------------------------------------------------------------


@over_configs
def test_state_dict_hooks(config: TorchConfig) -> None:
    optimizer = config.cls(Line().params)

    def before(opt: torch.optim.Optimizer) -> None:
        opt.state["note"] = 1  # type: ignore[index]

    def after(opt: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "seen": state_dict["state"].pop("note", None)}

    last = optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["seen"] is None
    first = optimizer.register_state_dict_pre_hook(before)
    written = optimizer.state_dict()
    assert written["seen"] == 1
    assert "note" not in written["state"]
    last.remove()
    assert optimizer.state_dict()["state"]["note"] == 1
    first.remove()


@over_configs
def test_entries_of_no_parameter_are_loaded_as_they_are(config: TorchConfig) -> None:
    """A hook may store entries in the state, which are saved and loaded."""
    optimizer = config.cls(Line().params)
    optimizer.state["note"] = {"epoch": 3}  # type: ignore[index]
    successor = config.cls(Line().params)
    successor.load_state_dict(optimizer.state_dict())
    assert successor.state["note"] == {"epoch": 3}  # type: ignore[index]


@over_configs
def test_load_state_dict_hooks(config: TorchConfig) -> None:
    """Hooks run in order. They may change or replace the state dict, but not that of the caller."""
    optimizer = config.cls(Line().params, lr=0.1)
    state_dict = optimizer.state_dict()

    def with_lr(lr: float) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
        def hook(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            replaced = deepcopy(state_dict)
            replaced["param_groups"][0]["lr"] = lr
            return replaced

        return hook

    optimizer.register_load_state_dict_pre_hook(with_lr(0.2))
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.2
    optimizer.register_load_state_dict_pre_hook(with_lr(0.3), prepend=True)
    seen: list[float] = []
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(opt.param_groups[0]["lr"]))
    optimizer.load_state_dict(state_dict)
    assert seen == [0.2]
    assert state_dict["param_groups"][0]["lr"] == 0.1

    def in_place(opt: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.4

    optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.load_state_dict(deepcopy(state_dict))
    assert optimizer.param_groups[0]["lr"] == 0.4


@over_configs
def test_step_hooks_run_in_order(config: TorchConfig) -> None:
    optimizer = config.cls(Line().params)
    order: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda opt, args, kwargs: order.append(what)

    handles = [
        register_optimizer_step_pre_hook(note("all before")),
        register_optimizer_step_post_hook(note("all after")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
    ]
    try:
        optimizer.step()
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert order == ["all before", "before", "after", "all after"] * 2


@over_configs
def test_a_step_hook_can_change_the_gradient(config: TorchConfig) -> None:
    line = Line(config.sparse)
    other = line.copy()
    optimizer, reference = config.cls(line.params), config.cls(other.params)

    def halve(opt: Any, args: Any, kwargs: Any) -> None:
        for p in line.params:
            p.grad = present(p.grad) * 0.5

    optimizer.register_step_pre_hook(halve)
    line.backward()
    optimizer.step()
    other.backward()
    for p in other.params:
        p.grad = present(p.grad) * 0.5
    reference.step()
    assert_identical(line.params, other.params)


# Differentiable --------------------------------------------------------------------------------------------------

SMOOTH: dict[str, tuple[type[cadam.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "CAdam": (cadam.CAdam, {}, ("exp_avg", "exp_avg_sq")),
    "CAdam-amsgrad": (cadam.CAdam, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "CAdam-maximize": (cadam.CAdam, {"maximize": True}, ("exp_avg", "exp_avg_sq")),
    "CAdamW": (cadam.CAdamW, {}, ("exp_avg", "exp_avg_sq")),
    "CAdamW-amsgrad": (cadam.CAdamW, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "CSGDM": (CSGDM, {}, ()),
    "CSGDM-momentum": (CSGDM, {"momentum": 0.9}, ("momentum_buffer",)),
    "CSGDM-nesterov": (CSGDM, {"momentum": 0.9, "nesterov": True}, ("momentum_buffer",)),
    "CRAdam": (cadam.CRAdam, {}, ("exp_avg", "exp_avg_sq")),
    "CRAdam-decoupled": (cadam.CRAdam, {"decoupled_weight_decay": True}, ("exp_avg", "exp_avg_sq")),
    "CYogi": (cadam.CYogi, {}, ("exp_avg", "exp_avg_sq")),
    "CAdaBelief": (cadam.CAdaBelief, {}, ("exp_avg", "exp_avg_var")),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_flow_through_a_step(name: str) -> None:
    """Derivatives by parameter, gradient, moments, learning rate, betas and weight decay equal finite differences."""
    cls, options, buffers = SMOOTH[name]
    has_betas = "betas" in cls.rule.defaults
    knobs = {"lr": 0.9, "weight_decay": 0.1, **({"beta1": 0.9, "beta2": 0.99} if has_betas else {})}
    leaves = [torch.rand(10, dtype=torch.float64) for _ in range(2 + len(buffers))]
    leaves += [torch.tensor(value, dtype=torch.float64) for value in knobs.values()]

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        param, grad, *rest = inputs
        state, knob = rest[: len(buffers)], dict(zip(knobs, rest[len(buffers) :], strict=True))
        betas = {"betas": (knob.pop("beta1"), knob.pop("beta2"))} if has_betas else {}
        moved = param.clone()
        moved.grad = grad
        optimizer = cls([moved], differentiable=True, **options, **knob, **betas)
        optimizer.state[moved].update({n: b.clone() for n, b in zip(buffers, state, strict=True)})
        optimizer.state[moved]["step"] = torch.tensor(10.0)
        optimizer.step()
        return moved, *(optimizer.state[moved][n] for n in buffers)

    assert torch.autograd.gradcheck(step, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("name", SMOOTH)
def test_differentiable_steps_equal_the_reference(name: str) -> None:
    cls, options, _ = SMOOTH[name]
    start = torch.randn(6, dtype=torch.float64)
    grads = [torch.randn(6, dtype=torch.float64) for _ in range(7)]
    params = [start.clone(), start.clone()]
    for param, differentiable in zip(params, (True, False), strict=True):
        optimizer = cls([param], lr=0.1, weight_decay=0.1, differentiable=differentiable, **options)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
    assert_close(*params, rtol=1e-12, atol=0)


def test_unrolled_training_learns_its_learning_rate() -> None:
    """Take three differentiable steps and return the derivative of the last loss with respect to lr."""

    def last_loss(lr: Tensor) -> Tensor:
        param = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True).clone()
        optimizer = cadam.CAdam([param], lr=lr, differentiable=True)
        for _ in range(3):
            (param.grad,) = torch.autograd.grad(param.clone().pow(2).sum(), param, create_graph=True)
            optimizer.step()
        return param.pow(2).sum()

    assert torch.autograd.gradcheck(last_loss, [torch.tensor(0.1, dtype=torch.float64, requires_grad=True)])


# Learning rate schedulers ----------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, [lambda e: 0.95**e, lambda e: 1 / (e + 1)]),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda e: 0.95),
    "step": lambda o: schedulers.StepLR(o, step_size=3, gamma=0.1),
    "multistep": lambda o: schedulers.MultiStepLR(o, milestones=[2, 5, 9], gamma=0.1),
    "constant": lambda o: schedulers.ConstantLR(o, factor=0.5, total_iters=5),
    "linear": lambda o: schedulers.LinearLR(o, start_factor=0.5, total_iters=4),
    "exponential": lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o, total_iters=5, power=0.9),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=10, eta_min=1e-10),
    "cosine restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2, eta_min=1e-10),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, threshold=0.01, patience=2, cooldown=2),
    "cyclic": lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "cyclic without momentum": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, mode="triangular2", cycle_momentum=False),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=20, anneal_strategy="linear"),
    "three phases": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=20, three_phase=True),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 3), schedulers.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 3), schedulers.ExponentialLR(o, 0.9)]
    ),
    "swa": lambda o: swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=5),
}
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "CSGDM": (partial(CSGDM, momentum=0.9), partial(torch.optim.SGD, momentum=0.9)),
    "CAdam": (cadam.CAdam, torch.optim.Adam),
    "CAdamW": (cadam.CAdamW, torch.optim.AdamW),
    "CRAdam": (cadam.CRAdam, torch.optim.RAdam),
}
over_pairs = pytest.mark.parametrize("pair", PAIRS)


def two_groups(cls: Callable[..., Any], lr: float | Tensor) -> Any:
    return cls([{"params": [Parameter(torch.ones(2))]}, {"params": [Parameter(torch.ones(3))], "lr": 0.5}], lr=lr)


def scheduled(optimizer: Any, scheduler: Any) -> list[Any]:
    """Return the options that the scheduler set in each epoch."""
    history = []
    for epoch in range(20):
        optimizer.step()
        advance([scheduler], 1.0 if epoch < 7 else 0.5)
        seen = [{k: float(v) for k, v in g.items() if "lr" in k or k == "momentum"} for g in optimizer.param_groups]
        betas = [[float(b) for b in g.get("betas", ())] for g in optimizer.param_groups]
        history.append((seen, betas, [float(lr) for lr in scheduler.get_last_lr()]))
    return history


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@over_pairs
def test_schedulers_treat_ours_as_torchs(pair: str, schedule: str, tensor_lr: bool) -> None:
    """Learning rates, momenta, betas and the state dict of the scheduler are equal."""
    histories, states = [], []
    for cls in PAIRS[pair]:
        optimizer = two_groups(cls, torch.tensor(0.05) if tensor_lr else 0.05)
        scheduler = SCHEDULES[schedule](optimizer)
        histories.append(scheduled(optimizer, scheduler))
        states.append({k: v for k, v in scheduler.state_dict().items() if not k.startswith("_schedulers")})
    assert histories[0] == histories[1]
    assert len({str(epoch) for epoch in histories[0]}) > 1
    assert str(states[0]) == str(states[1])


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "lambda"])
def test_schedulers_continue_from_their_state_dict(schedule: str, tmp_path: Any) -> None:
    whole = two_groups(cadam.CAdam, 0.05)
    plan = SCHEDULES[schedule](whole)
    scheduled_so_far = scheduled(whole, plan) if schedule not in ("one cycle", "three phases") else []
    torch.save((whole.state_dict(), plan.state_dict()), tmp_path / "state")
    resumed = two_groups(cadam.CAdam, 0.05)
    other = SCHEDULES[schedule](resumed)
    optimizer_state, plan_state = torch.load(tmp_path / "state", weights_only=False)
    resumed.load_state_dict(optimizer_state)
    other.load_state_dict(plan_state)
    assert scheduled(whole, plan) == scheduled(resumed, other)
    assert bool(scheduled_so_far) == (schedule not in ("one cycle", "three phases"))


@over_pairs
def test_groups_added_later_are_scheduled(pair: str) -> None:
    histories = []
    for cls in PAIRS[pair]:
        optimizer = two_groups(cls, 0.5)
        plan = schedulers.ReduceLROnPlateau(optimizer, patience=1)
        seen = []
        for epoch in range(8):
            if epoch == 3:
                optimizer.add_param_group({"params": [Parameter(torch.ones(4))], "lr": 0.05})
            optimizer.step()
            plan.step(1.0)
            seen.append([group["lr"] for group in optimizer.param_groups])
        histories.append(seen)
    assert histories[0] == histories[1]


@over_pairs
def test_scheduler_warns_only_if_it_steps_first(pair: str) -> None:
    def run(first: str) -> list[str]:
        optimizer = two_groups(PAIRS[pair][0], 0.05)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = schedulers.StepLR(optimizer, 3)
            for _ in range(3):
                (plan if first == "scheduler" else optimizer).step()
                (optimizer if first == "scheduler" else plan).step()
        return [str(w.message) for w in caught]

    assert run("optimizer") == []
    assert any("lr_scheduler.step()` before `optimizer.step()" in message for message in run("scheduler"))


@over_pairs
def test_optimizer_and_scheduler_leave_no_cycles(pair: str) -> None:
    def run() -> list[weakref.ref[Any]]:
        param = Parameter(torch.ones(4))
        optimizer = PAIRS[pair][0]([param])
        plan = schedulers.LambdaLR(optimizer, lambda epoch: 1.0)
        param.sum().backward()
        optimizer.step()
        plan.step()
        return [weakref.ref(plan), weakref.ref(optimizer), weakref.ref(param)]

    run()  # the first call imports modules and fills caches
    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in run()] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("schedule", ["cyclic", "one cycle"])
def test_cycled_momentum_reaches_the_update(schedule: str) -> None:
    """Betas or momentum that a scheduler changes take effect in the next step."""
    moved = []
    for cycles in (True, False):
        line = Line()
        torch.manual_seed(1)
        line.params = [Parameter(torch.linspace(-1, 1, 50).reshape(10, 5)), Parameter(torch.zeros(10))]
        line.x = torch.ones(5)
        optimizer = cadam.CAdam(line.params, lr=0.05)
        plan: schedulers.LRScheduler
        if schedule == "cyclic":
            plan = schedulers.CyclicLR(optimizer, 0.05, 0.05, step_size_up=2, cycle_momentum=cycles)
        else:
            plan = schedulers.OneCycleLR(optimizer, 0.05, total_steps=30, cycle_momentum=cycles)
        line.train(optimizer, 6, [plan])
        moved.append(line.params[0].detach().clone())
    assert not torch.equal(*moved)


# Averaged models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["swa", "ema"])
@over_pairs
def test_averaged_model_averages_the_updated_weights(pair: str, average: str) -> None:
    net = small_net()
    optimizer = PAIRS[pair][0](net.parameters(), lr=0.1)
    function = swa_utils.get_swa_multi_avg_fn() if average == "swa" else swa_utils.get_ema_multi_avg_fn(0.9)
    model = swa_utils.AveragedModel(net, multi_avg_fn=function)
    plan = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    seen: list[list[Tensor]] = []
    for _ in range(6):
        optimizer.zero_grad()
        net(torch.randn(5, 2)).pow(2).sum().backward()
        optimizer.step()
        plan.step()
        model.update_parameters(net)
        seen.append([p.detach().clone() for p in net.parameters()])
    assert all(not torch.equal(a[0], b[0]) for a, b in pairwise(seen))
    expected = [torch.stack(each).mean(0) for each in zip(*seen, strict=True)]
    if average == "ema":
        expected = seen[0]
        for now in seen[1:]:
            expected = [0.9 * e + 0.1 * p for e, p in zip(expected, now, strict=True)]
    assert_close([p.detach() for p in model.parameters()], expected)
    again = pickle.loads(pickle.dumps(swa_utils.AveragedModel(net)))
    again.load_state_dict(model.state_dict())
    assert_close(list(again.parameters()), list(model.parameters()))


def test_update_bn_after_training() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(20, 3)), batch_size=5)
    optimizer = cadam.CAdam(net.parameters(), lr=0.1)
    model = swa_utils.AveragedModel(net)
    for (x,) in data:
        optimizer.zero_grad()
        net(x).pow(3).sum().backward()
        optimizer.step()
        model.update_parameters(net)
    layer, norm = model.module.children()
    assert isinstance(layer, nn.Linear)
    assert isinstance(norm, nn.BatchNorm1d)
    assert not torch.equal(net.get_parameter("0.weight"), layer.weight)
    swa_utils.update_bn(data, model)
    with torch.no_grad():
        inner = torch.cat([layer(x) for (x,) in data])
    assert_close(norm.running_mean, inner.mean(0))


# torch.compile ---------------------------------------------------------------------------------------------------


def assert_compiled_equals_eager(case: Case, backend: str, closure: bool, plan: Callable[[Any], Any] | None) -> None:
    """Steps with and without compilation, optionally with a scheduler, give the same parameters and state."""
    torch._dynamo.reset()
    line = Line(case.sparse)
    other = line.copy()
    line.backward()
    other.backward()
    eager, compiled = case.optimizer(line.params), case.optimizer(other.params)
    plans_ = [plan(optimizer) if plan else None for optimizer in (eager, compiled)]

    def run(optimizer: Any, problem: Line, schedule: Any) -> None:
        optimizer.step(problem.backward) if closure else optimizer.step()
        if schedule is not None:
            schedule.step()

    fast = torch.compile(run, backend=backend)
    for _ in range(3):
        run(eager, line, plans_[0])
        fast(compiled, other, plans_[1])
    assert_same_state(eager, compiled)
    assert eager.alignment() == compiled.alignment()
    torch._dynamo.reset()


TRACED = [
    Case(STAND_INS[0], {"foreach": False}, "reference"),
    Case(STAND_INS[3], {"foreach": True, "capturable": True, "lr": torch.tensor(0.1)}, "foreach"),
    Case(STAND_INS[2], {"momentum": 0.9, "nesterov": True}, "whatever engine is chosen"),
    Case(STAND_INS[4], {"foreach": False}, "rows"),
]


@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_traced_step_equals_eager(case: Case) -> None:
    """Return the graphs that torch.compile traces, before any code is generated."""
    assert_compiled_equals_eager(case, "eager", closure=False, plan=None)


@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
def test_compiled_step_equals_eager() -> None:
    assert_compiled_equals_eager(configurations(STAND_INS[0])[0], "inductor", closure=True, plan=None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
@pytest.mark.parametrize("closure", [True, False], ids=["closure", "plain"])
@trainable()
def test_compiled_step_equals_eager_always(case: Case, closure: bool) -> None:
    plan = partial(schedulers.ExponentialLR, gamma=0.5) if isinstance(case.kwargs.get("lr"), Tensor) else None
    assert_compiled_equals_eager(case, "inductor", closure, plan)

"""The optimizer together with gradient scalers, sharding, clipping, pickling, compilation and imports."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import time
import traceback
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import cadam
from cadam.distributed.process_group import leave
from cadam.optim import clip_grad
from cadam.optim.ddp import gather_rows
from cadam.optim.optimizer import _check_grad
from tests.optim.exact import assert_identical, present
from tests.optim.family import CONFIDENT

HOW: dict[str, dict[str, Any]] = {"default": {}, "reference": {"foreach": False}, "foreach": {"foreach": True}}
over_how = pytest.mark.parametrize("how", HOW)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 + step))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def sparse(ids: list[Any], rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor(ids).reshape(1, -1), rows, shape, check_invariants=True)


# Gradient scaling --------------------------------------------------------------------------------------------------


@over_how
def test_grad_scaler_changes_nothing_but_the_range(how: str) -> None:
    """A run with torch.amp.GradScaler equals one without: scales are powers of two."""
    plain, scaled = net(), net()
    optimizer = cadam.CAdam(plain.parameters(), lr=0.1, **HOW[how])
    other = cadam.CAdam(scaled.parameters(), lr=0.1, **HOW[how])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        plain(batch(step)).pow(2).sum().backward()
        optimizer.step()
        other.zero_grad()
        scaler.scale(scaled(batch(step)).pow(2).sum()).backward()
        scaler.step(other)
        scaler.update()
    assert scaler.get_scale() > 2.0**10
    assert_close(values(plain), values(scaled))
    assert_close(optimizer.state_dict()["state"], other.state_dict()["state"])


def test_grad_scaler_skips_a_step_that_overflows() -> None:
    model = net()
    optimizer = cadam.CAdam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(batch(0)).sum()).backward()
    present(model.get_parameter("0.weight").grad)[0, 0] = float("inf")
    before = values(model)
    scaler.step(optimizer)
    scaler.update()
    assert_identical(values(model), before)
    assert not optimizer.state
    assert scaler.get_scale() == 2.0


def test_grad_scaler_after_unscaling_and_clipping() -> None:
    model, other = net(), net()
    optimizer, reference = (cadam.CAdam(m.parameters(), lr=0.1) for m in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).pow(2).sum()).backward()
        scaler.unscale_(optimizer)
        cadam.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        other(batch(step)).pow(2).sum().backward()
        cadam.clip_grad_norm_(other.parameters(), 0.5)
        reference.step()
    assert_close(values(model), values(other))


@over_how
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_found_inf_and_grad_scale_by_hand(how: str, found: float) -> None:
    """The attributes that a scaler sets on optimizers that unscale gradients themselves."""
    params = [torch.ones(3), torch.ones(4, 2)]
    same = [p.clone() for p in params]
    optimizer, reference = (cadam.CAdam(p, lr=0.1, weight_decay=0.1, **HOW[how]) for p in (params, same))
    for grads in (params, same):
        grads[0].grad = torch.tensor([1.0, -2.0, 3.0])
        grads[1].grad = sparse([1, 1], torch.ones(2, 2), (4, 2))
    for p in params:
        p.grad = present(p.grad) * 8
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found)  # type: ignore[attr-defined]
    before = [p.clone() for p in params]
    optimizer.step()
    reference.step()
    if found:
        assert_identical(params, before)
        assert all(float(state.get("step", 0)) == 0 for state in optimizer.state.values())
        assert optimizer.alignment().total.aligned == 0
    else:
        assert_close(params, same)
        assert_close(optimizer.state_dict()["state"], reference.state_dict()["state"])
        assert optimizer.alignment() == reference.alignment()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    for p, q in zip(params, same, strict=True):
        p.grad = q.grad
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1 if found else 2] * 2


def test_gradients_are_left_as_they_were() -> None:
    param = torch.ones(3)
    param.grad = torch.full((3,), 8.0)
    optimizer = cadam.CAdam([param], weight_decay=0.1, maximize=True)
    optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(param.grad, torch.full((3,), 8.0))


def test_autocast_training() -> None:
    """Activations are bfloat16, parameters float32, and the loss decreases."""
    model = net()
    optimizer = cadam.CAdam(model.parameters(), lr=0.05)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step % 2)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


# Several processes -------------------------------------------------------------------------------------------------

WORLD = 2
STEPS = 4


def train_alone(cls: type[cadam.Optimizer], how: dict[str, Any]) -> list[Tensor]:
    """Train in one process with whole batches. The processes of the other tests have half of a batch each."""
    model = net()
    optimizer = cls(model.parameters(), lr=0.1, weight_decay=0.01, **how)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).pow(2).mean().backward()
        optimizer.step()
    return values(model)


def share(step: int, rank: int) -> Tensor:
    return batch(step).chunk(WORLD)[rank]


def run_ddp(rank: int) -> None:
    for cls in (cadam.CAdam, cadam.CSGDM):
        for how in HOW.values():
            model = DistributedDataParallel(net(seed=rank))
            for mine, start in zip(model.parameters(), net().parameters(), strict=True):
                assert torch.equal(mine, start)  # DDP copies the weights of rank 0
            optimizer = cls(model.parameters(), lr=0.1, weight_decay=0.01, **how)
            for step in range(STEPS):
                optimizer.zero_grad()
                model(share(step, rank)).pow(2).mean().backward()
                optimizer.step()
            assert_close(values(model), train_alone(cls, how))


def run_fsdp(rank: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    for cls in (cadam.CAdam, cadam.CAmsGrad):
        for how in HOW.values():
            model = net()
            fully_shard(model)
            optimizer = cls(model.parameters(), lr=0.1, weight_decay=0.01, **how)
            for step in range(STEPS):
                optimizer.zero_grad()
                model(share(step, rank)).pow(2).mean().backward()
                optimizer.step()
            expected = train_alone(cls, how)
            whole = [p.full_tensor().detach() for p in dtensors(model)]
            assert_close(whole, expected)
            for param in dtensors(model):
                state = optimizer.state[param]
                assert isinstance(state["exp_avg"], DTensor)
                assert state["exp_avg"].placements == param.placements
                assert state["exp_avg"].to_local().shape == param.to_local().shape
                assert not isinstance(state["step"], DTensor)
                assert state["step"].item() == STEPS
            shards = sum(p.to_local().numel() for p in dtensors(model))
            assert optimizer.alignment().total.seen == STEPS * shards
            everywhere = optimizer.alignment().over_ranks()
            assert everywhere.total.seen == STEPS * sum(p.numel() for p in model.parameters())
            assert sum(ratio.seen for ratio in everywhere.parameters.values()) == everywhere.total.seen
            saved = get_optimizer_state_dict(model, optimizer)
            again = cls(model.parameters(), lr=0.1, weight_decay=0.01, **how)
            set_optimizer_state_dict(model, again, saved)
            for param in model.parameters():
                assert_identical(again.state[param]["step"], optimizer.state[param]["step"])
                for name in ("exp_avg", "exp_avg_sq"):
                    mine, other = again.state[param][name], optimizer.state[param][name]
                    assert_identical(mine.to_local(), other.to_local())
            own = cls(model.parameters(), **how)  # the same engine for both, since engines round differently
            own.load_state_dict(optimizer.state_dict())
            for opt in (optimizer, own):
                before = [p.to_local().detach().clone() for p in dtensors(model)]
                opt.zero_grad()
                model(share(9, rank)).pow(2).mean().backward()
                opt.step()
                after = [p.to_local().detach().clone() for p in dtensors(model)]
                for param, value in zip(dtensors(model), before, strict=True):
                    param.to_local().data.copy_(value)
                if opt is optimizer:
                    stepped = after
            assert_identical(after, stepped)
            if cls is cadam.CAmsGrad:
                invalid = {
                    "state": {k: {n: unsharded(v) for n, v in s.items()} for k, s in own.state_dict()["state"].items()},
                    "param_groups": own.state_dict()["param_groups"],
                }
                with pytest.raises(ValueError, match=r"group 0, parameter 0: exp_avg is a Tensor, the parameter a"):
                    own.load_state_dict(invalid)


def dtensors(model: nn.Module) -> list[Any]:
    """Return the parameters of a sharded model, which are DTensors although their type hint does not say so."""
    return list(model.parameters())


def unsharded(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def run_dtensor(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    start, grads = torch.randn(5, 4), [torch.randn(5, 4) for _ in range(STEPS)]
    for how in HOW.values():
        plain = start.clone()
        optimizer = cadam.CAdam([plain], lr=0.1, **how)
        for grad in grads:
            plain.grad = grad
            optimizer.step()
        for placement in (Shard(0), Shard(1), Replicate()):  # 5 rows do not divide evenly
            for grad_placement in (placement, Replicate()):
                param: Any = Parameter(distribute_tensor(start.clone(), mesh, [placement]))
                other = Parameter(torch.ones(3))
                optimizer = cadam.CAdam([param, other], lr=0.1, **how)
                plans = []
                for step, grad in enumerate(grads):
                    if step == 2:  # FSDP also replaces the local tensor when it shards again
                        param._local_tensor = param._local_tensor.clone()
                    param.grad = distribute_tensor(grad, mesh, [grad_placement])
                    other.grad = torch.ones(3)
                    optimizer.step()
                    plans.append(optimizer._plan)
                assert_close(param.full_tensor().detach(), plain)
                assert plans[0] is plans[1]


def run_sparse_ddp(rank: int) -> None:
    """A table with sparse gradients, which are gathered from the processes, and a dense layer."""
    torch.manual_seed(0)
    table, layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
    model = DistributedDataParallel(nn.Sequential(table, layer))
    gather_rows(model)
    alone_table, alone_layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
    alone = nn.Sequential(alone_table, alone_layer)
    alone.load_state_dict(model.module.state_dict())
    optimizer, reference = (cadam.CAdam(m.parameters(), lr=0.1) for m in (model, alone))
    ids = torch.tensor([1, 7, 1, 3])
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(ids.chunk(WORLD)[rank]).pow(2).mean().backward()
        optimizer.step()
        reference.zero_grad()
        alone(ids).pow(2).mean().backward()
        reference.step()
    assert present(table.weight.grad).is_sparse
    assert_close(values(model), values(alone))
    untouched = [i for i in range(10) if i not in (1, 3, 7)]
    assert optimizer.state[table.weight]["exp_avg"][untouched].eq(0).all()


def run_sparse_beside_fsdp(rank: int) -> None:
    """FSDP2 cannot reduce sparse gradients, so DDP replicates the table, and both have the same optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.manual_seed(0)
    start = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    inside, alone = deepcopy(start), deepcopy(start)
    fully_shard(inside)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Ss]parse"):
        inside(torch.tensor([1, 7])).sum().backward()

    table, layer = DistributedDataParallel(start[0]), start[1]
    gather_rows(table)
    fully_shard(layer)
    optimizer = cadam.CAdam([*table.parameters(), *layer.parameters()], lr=0.1)
    reference = cadam.CAdam(alone.parameters(), lr=0.1)
    ids = torch.tensor([1, 7, 1, 3])
    for _ in range(STEPS):
        optimizer.zero_grad()
        layer(table(ids.chunk(WORLD)[rank])).pow(2).mean().backward()
        optimizer.step()
        reference.zero_grad()
        alone(ids).pow(2).mean().backward()
        reference.step()
    assert table.module.weight.grad.is_sparse
    assert_close(table.module.weight.detach(), alone.get_parameter("0.weight").detach())
    weight, _ = dtensors(layer)
    assert_close(weight.full_tensor().detach(), alone.get_parameter("1.weight").detach())

    # The optimizer refuses a sparse gradient that FSDP did not notice, and says what to use.
    sharded = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (WORLD,)), [Shard(0)])
    assert isinstance(sharded, DTensor)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=False)
    with pytest.raises(RuntimeError, match=r"sparse gradient of a DTensor is not supported; shard tables with"):
        _check_grad(sharded, sparse, {"differentiable": False}, "the parameter")


def run_zero(rank: int) -> None:
    """With ZeroRedundancyOptimizer of torch, every process has the state of its share of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=cadam.CAdam, lr=0.1, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(share(step, rank)).pow(2).mean().backward()
        optimizer.step()
    assert_close(values(model), train_alone(cadam.CAdam, {}))
    assert 0 < len(optimizer.optim.state) < len(values(model))
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        whole = cadam.CAdam(net().parameters())
        whole.load_state_dict(optimizer.state_dict())
        assert [state["step"].item() for state in whole.state.values()] == [STEPS] * len(values(model))


JOBS = {job.__name__: job for job in (run_ddp, run_dtensor, run_sparse_ddp, run_zero)}
if hasattr(torch.cpu.Stream, "record_event"):  # fully_shard needs it, and the CPU of torch 2.6 has none
    JOBS["run_fsdp"] = run_fsdp
    JOBS["run_sparse_beside_fsdp"] = run_sparse_beside_fsdp


def worker(rank: int, folder: str) -> None:
    """Run all jobs, even after one has failed, and write the errors to a file."""
    torch.set_num_threads(1)
    address, timeout = f"file://{folder}/rendezvous", timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=address, timeout=timeout)
    for name, job in JOBS.items():
        try:
            job(rank)
        except Exception:
            Path(folder, f"{name}.{rank}").write_text(traceback.format_exc())
        dist.barrier()
    leave()


def test_processes_together_equal_one_alone(tmp_path: Path) -> None:
    """DDP, FSDP2, DTensors, a sparse table under DDP, and ZeRO, on two processes with gloo."""
    context = spawn(worker, (str(tmp_path),), nprocs=WORLD, join=False)
    finished, deadline = False, time.monotonic() + 150
    try:
        while not finished and time.monotonic() < deadline:
            finished = context.join(timeout=1)
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    assert {file.name: file.read_text() for file in tmp_path.glob("run_*")} == {}
    assert finished


# Devices -----------------------------------------------------------------------------------------------------------


@over_how
def test_parameters_on_several_devices(how: str) -> None:
    """One parameter is on the CPU, the other on the meta device, which stores no values."""
    real, meta = torch.ones(3), torch.ones(4, 2, device="meta")
    optimizer = cadam.CAdam([real, meta], lr=0.1, **HOW[how])
    for _ in range(2):
        real.grad, meta.grad = torch.ones(3), torch.ones(4, 2, device="meta")
        optimizer.step()
    assert_close(real, torch.full((3,), 0.8))
    assert optimizer.state[meta]["exp_avg"].device.type == "meta"
    assert [optimizer.state[p]["step"].item() for p in (real, meta)] == [2, 2]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@over_how
def test_parameters_on_cpu_and_cuda(how: str) -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    optimizer = cadam.CAdam([here, there], lr=0.1, **HOW[how])
    for _ in range(3):
        here.grad, there.grad = torch.ones(3), torch.ones(3, device="cuda")
        optimizer.step()
    assert_close(there.cpu(), here)
    assert optimizer.alignment().total.aligned == 18


# Copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CONFIDENT.values())
def test_pickle_round_trip(cls: type[cadam.Optimizer]) -> None:
    """The copy continues exactly like the original."""
    model = net()
    optimizer = cls([("a", model[0].weight), ("b", model[2].weight)], lr=0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).sum().backward()
        optimizer.step()
    copy = pickle.loads(pickle.dumps(optimizer))
    assert type(copy) is cls
    assert_identical(copy.state_dict(), optimizer.state_dict())
    twins = list(zip(model_params(optimizer), model_params(copy), strict=True))
    for mine, other in twins:
        other.grad = present(mine.grad).clone()
    optimizer.step()
    copy.step()
    for mine, other in twins:
        assert_identical(mine, other)
    assert list(copy.alignment().parameters) == ["a", "b"]
    assert copy.alignment().total.seen == sum(p.numel() for p in model_params(copy))


def model_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_exponential_moving_average_of_the_weights() -> None:
    model = net()
    optimizer = cadam.CAdam(model.parameters(), lr=0.1)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    expected: list[Tensor] | None = None
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step)).pow(2).sum().backward()
        optimizer.step()
        ema.update_parameters(model)
        now = values(model)
        expected = now if expected is None else [0.5 * e + 0.5 * p for e, p in zip(expected, now, strict=True)]
    assert_close(values(ema.module), expected)
    assert not torch.equal(model.get_parameter("0.weight"), ema.module.get_parameter("0.weight"))


# Closures ----------------------------------------------------------------------------------------------------------


@over_how
def test_closure_is_called_once_with_gradients_enabled(how: str) -> None:
    model, other = net(), net()
    optimizer, reference = (cadam.CAdam(m.parameters(), lr=0.1, **HOW[how]) for m in (model, other))
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(batch(0)).pow(2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    expected = other(batch(0)).pow(2).sum()
    expected.backward()
    assert_close(loss, expected)
    assert reference.step() is None
    assert_identical(values(model), values(other))
    assert not torch.equal(model.get_parameter("0.weight"), net().get_parameter("0.weight"))


@over_how
def test_step_leaves_the_grad_mode_alone(how: str) -> None:
    param = Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = cadam.CAdam([param], **HOW[how])
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            optimizer.step()
            assert torch.is_grad_enabled() is enabled
    assert param.requires_grad
    assert param.grad_fn is None
    assert not any(value.requires_grad for value in optimizer.state[param].values())


# Clipping ----------------------------------------------------------------------------------------------------------

NORMS = [1.0, 2.0, 3.0, float("inf")]
over_norms = pytest.mark.parametrize("norm_type", NORMS, ids=str)


def with_grads(*grads: Tensor) -> list[Tensor]:
    params = [torch.zeros(g.shape) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


@over_norms
@pytest.mark.parametrize("max_norm", [0.1, 1e6, torch.tensor(0.1)], ids=str)
@pytest.mark.parametrize("foreach", [None, True, False], ids=str)
def test_clipping_dense_gradients_is_torchs(norm_type: float, max_norm: Any, foreach: bool | None) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(3, 2), torch.randn(5), torch.randn(())]
    ours, theirs = with_grads(*grads), with_grads(*grads)
    norm = cadam.clip_grad_norm_(ours, max_norm, norm_type, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type, foreach=foreach)
    assert_close(norm, expected)
    assert_close([p.grad for p in ours], [p.grad for p in theirs])


@over_norms
@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=str)
def test_clipping_sums_duplicates_of_sparse_gradients(norm_type: float, max_norm: float) -> None:
    """The gradients, with duplicates, are two hybrid tensors, a fully sparse one, and an empty one."""
    torch.manual_seed(0)
    hybrid, other = sparse([4, 1, 4], torch.randn(3, 2), (6, 2)), sparse([1, 5, 2], torch.randn(3, 2), (6, 2))
    full = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2], [1, 1, 1]]), torch.randn(3), (3, 3), check_invariants=True)
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 2), (4, 2), check_invariants=True)
    grads = [torch.randn(3, 2), hybrid, other, full, nothing]
    ours, dense = with_grads(*grads), with_grads(*(g.to_dense() for g in grads))
    norm = cadam.clip_grad_norm_(iter(ours), max_norm, norm_type)
    assert_close(norm, nn.utils.clip_grad_norm_(dense, max_norm, norm_type))
    assert [present(p.grad).is_sparse for p in ours] == [False, True, True, True, True]
    assert_close([present(p.grad).to_dense() for p in ours], [p.grad for p in dense])


@pytest.mark.parametrize("rows", [7, 1000], ids=["short", "long"])
def test_sums_for_clipping_on_cuda(rows: int) -> None:
    """The sums are correct, and computed without reading values, which tensors on the meta device lack."""
    torch.manual_seed(0)
    ids, values = torch.randint(rows, (60,)), torch.randn(60, 3)
    sums = clip_grad._sum_without_waiting(ids, values, rows)
    expected = torch.zeros(rows, 3).index_add_(0, ids, values)
    assert_close(sums[sums.any(1)], expected[expected.any(1)])
    assert clip_grad._sum_without_waiting(ids.to("meta"), values.to("meta"), rows).shape == sums.shape


def test_clipping_takes_a_single_tensor_and_a_module() -> None:
    param = torch.zeros(4)
    param.grad = torch.full((4,), 3.0)
    assert cadam.clip_grad_norm_(param, 1.0).item() == 6.0
    assert_close(param.grad.norm().item(), 1.0)
    model = net()
    model(batch(0)).pow(2).sum().backward()
    cadam.clip_grad_norm_(model.parameters(), 0.1)
    assert_close(torch.cat([present(p.grad).flatten() for p in model.parameters()]).norm().item(), 0.1)


@over_norms
def test_clipping_without_gradients(norm_type: float) -> None:
    """There may be no gradients, or empty ones, for which torch's clip_grad_norm_ raises with the infinity norm."""
    for params in ([], [torch.zeros(3)], with_grads(torch.empty(0, 2)), with_grads(torch.zeros(0, 2).to_sparse(1))):
        assert cadam.clip_grad_norm_(params, 1.0, norm_type).item() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_clipping_can_refuse_norms_that_are_not_finite(bad: float, layout: str) -> None:
    grad = torch.tensor([1.0, bad])
    params = with_grads(torch.ones(2), grad if layout == "dense" else grad.to_sparse())
    with pytest.raises(RuntimeError, match="non-finite"):
        cadam.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert torch.equal(present(params[0].grad), torch.ones(2))
    assert not cadam.clip_grad_norm_(params, 1.0).isfinite()


def test_clipping_then_stepping_over_dense_and_sparse() -> None:
    """With sparse gradients, clipping and a step move the touched rows of an embedding as with dense gradients."""
    torch.manual_seed(0)
    table, copy = nn.Embedding(8, 3, sparse=True), nn.Embedding(8, 3)
    copy.load_state_dict(table.state_dict())
    before, ids = table.weight.detach().clone(), torch.tensor([1, 5, 1])
    optimizers = [cadam.CAdam(m.parameters(), lr=0.1) for m in (table, copy)]
    norms = []
    for model, optimizer in zip((table, copy), optimizers, strict=True):
        model(ids).pow(2).sum().backward()
        norms.append(cadam.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    assert_close(norms[0], norms[1])
    assert_close(table.weight, copy.weight)
    assert (table.weight != before).any(1).tolist() == [i in (1, 5) for i in range(8)]


# torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False, "lr": torch.tensor(0.1)}], ids=str)
def test_a_compiled_step_is_compiled_once(options: dict[str, Any]) -> None:
    """Later steps with other counts, gradients and learning rates in a tensor do not compile again."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, other = net(), net()
    reference = cadam.CAdam(other.parameters(), **{**options, "lr": 0.1})
    optimizer = cadam.CAdam(model.parameters(), **{"lr": 0.1, **options})
    counter = CompileCounter()
    step = torch.compile(optimizer.step, backend=counter)
    frames = []
    for i in range(4):
        for each, run in ((model, step), (other, reference.step)):
            each.zero_grad()
            each(batch(i)).pow(2).sum().backward()
            run()
        if isinstance(optimizer.param_groups[0]["lr"], Tensor):
            optimizer.param_groups[0]["lr"].mul_(0.5)
            reference.param_groups[0]["lr"] *= 0.5
        frames.append(counter.frame_count)
    assert frames[1:] == frames[1:2] * 3
    assert frames[0] >= 1 or "foreach" not in options  # compiled kernels of cadam are not traced
    assert_close(values(model), values(other))
    torch._dynamo.reset()


# import ------------------------------------------------------------------------------------------------------------


def test_import_brings_in_nothing_heavy() -> None:
    """The import adds only modules that importing torch does not load."""
    code = "import torch, sys; before = set(sys.modules); import cadam; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    added = {name.split(".")[0] for name in done.stdout.split()}
    heavy = {"matplotlib", "triton", "pyarrow", "torchrec", "scipy", "pandas", "pytorch_optimizer", "expecttest"}
    assert "cadam" in added
    assert not added & heavy
    submodules = {name for name in done.stdout.split() if name.startswith("torch.")}
    assert not {name for name in submodules if name.startswith(("torch._dynamo", "torch._inductor"))}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=str)
def test_clipping_sums_half_precision_in_float32(norm_type: float) -> None:
    p = nn.Parameter(torch.ones(3, 1, dtype=torch.float16))
    ids, values = torch.tensor([[1, 1]]), torch.full((2, 1), 40_000.0, dtype=torch.float16)
    p.grad = torch.sparse_coo_tensor(ids, values, (3, 1), check_invariants=True)
    norm = cadam.clip_grad_norm_([p], 10.0, norm_type)
    assert norm.item() == 80_000
    assert p.grad.coalesce().values().item() == pytest.approx(10, rel=1e-2)


def test_clipping_rows_does_not_ask_for_the_default_device() -> None:
    table = nn.Parameter(torch.zeros(5, 2))
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2), (5, 2), check_invariants=False)
    with torch.device("meta"):
        assert cadam.clip_grad_norm_([table], 1e9).item() == pytest.approx(math.sqrt(8))

"""DynamicEmbedding learns like nn.Embedding while its rows are created, reused, saved and loaded."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cadam
from cadam.tables import Counters, DynamicEmbedding
from tests.engines.triton_interpreter import ON_CUDA, on_cuda
from tests.tables import killed_process

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "CAdam": lambda params: cadam.CAdam(params, lr=0.01),
    "CAdam, row steps": lambda params: cadam.CAdam(params, lr=0.01, row_steps=True, amsgrad=True),
    "CAdam, int8": lambda params: cadam.CAdam(params, lr=0.01, moments="int8"),
    "CAdam, int8, row moments": lambda params: cadam.CAdam(params, lr=0.01, moments="int8", second_moment="row"),
    "CAdam, bfloat16": lambda params: cadam.CAdam(params, lr=0.01, moments="bfloat16"),
    "CYogi": lambda params: cadam.CYogi(params, lr=0.01),
    "Lion": lambda params: cadam.Lion(params, lr=0.01),
    "SparseAdam": lambda params: torch.optim.SparseAdam(list(params), lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
}
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])


def attached(make: Make = OPTIMIZERS["CAdam"], **options: Any) -> tuple[DynamicEmbedding, torch.optim.Optimizer]:
    table = DynamicEmbedding(4, **{"chunk_rows": 8, **options})
    optimizer = make(table.parameters())
    table.attach(optimizer)
    return table, optimizer


def learn(table: nn.Module, optimizer: torch.optim.Optimizer, ids: Any, target: float = 1.0) -> Tensor:
    optimizer.zero_grad()
    values: Tensor = table(ids)
    (values - target).square().sum().backward()
    optimizer.step()
    return values.detach()


def rows_of(table: DynamicEmbedding) -> Tensor:
    return torch.cat([chunk.detach() for chunk in table.chunks])


def equals(x: Tensor, y: Tensor) -> bool:
    """Whether tensors are equal: to the bit on the CPU, up to rounding on CUDA, where torch may add in any order."""
    return torch.equal(x, y) if x.device.type == "cpu" else torch.allclose(x, y, rtol=1e-5, atol=1e-6)


# Learning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@on_devices
def test_a_table_of_one_chunk_learns_like_an_embedding(make: Make, device: str) -> None:
    table, optimizer = attached(make, chunk_rows=100, device=device)
    learn(table, optimizer, list(range(1000, 1050)))  # in this order, ids get the rows 1 to 50
    plain = nn.Embedding(100, 4, sparse=True, _weight=rows_of(table).clone())
    other = make(plain.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's optimizers share what they load
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        ids = torch.randint(0, 50, (3, 7), generator=random)
        assert equals(learn(table, optimizer, ids + 1000), learn(plain, other, (ids + 1).to(device)))
    assert equals(rows_of(table), plain.weight)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@on_devices
def test_chunks_are_added_and_learn_without_moving_the_others(make: Make, device: str) -> None:
    table, optimizer = attached(make, device=device)
    learn(table, optimizer, [1, 2])
    address, before = table.chunks[0].data_ptr(), table([1, 2]).detach()
    for start in range(0, 300, 20):
        learn(table, optimizer, list(range(1000 + start, 1020 + start)))
    assert table.chunks[0].data_ptr() == address
    assert torch.equal(table([1, 2]).detach(), before)
    assert [len(chunk) for chunk in table.chunks][:5] == [8, 8, 8, 12, 18]
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, table.chunks))
    ids = list(range(1000, 1300))
    losses = [float((learn(table, optimizer, ids) - 1).square().sum()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert all(p.grad is not None and p.grad.is_sparse and p.device.type == device for p in table.chunks)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@on_devices
def test_a_reused_row_has_the_state_of_a_new_one(make: Make, device: str) -> None:
    table, optimizer = attached(make, max_rows=6, chunk_rows=4, device=device)
    for _ in range(3):
        learn(table, optimizer, [1, 2, 3, 4, 5, 6])
    learn(table, optimizer, [1, 2, 3, 4])
    states = [row_state(optimizer, chunk) for chunk in table.chunks if chunk in optimizer.state]
    untouched = [{name: x[0].clone() for name, x in state.items()} for state in _states_of_new_table(make, device)]
    table([7, 8])  # evicts 5 and 6, which were seen least recently
    assert table.counters() == Counters(rows=6, admitted=8, evicted=2, expired=0, refused=0)
    new = table._index.find(np.array([7, 8], np.uint64))
    sizes = [len(chunk) for chunk in table.chunks]
    for row in new.tolist():
        chunk = 0 if row < sizes[0] else 1
        if states:
            for name, x in states[chunk].items():
                assert torch.equal(x[row - chunk * sizes[0]], untouched[0][name]), name
    fresh = DynamicEmbedding(4)
    assert torch.equal(table([7, 8]).cpu(), fresh([7, 8]))


def _states_of_new_table(make: Make, device: str) -> list[dict[str, Tensor]]:
    """Return the state of a table in which row 0 was never updated."""
    param = nn.Parameter(torch.zeros(3, 4, device=device))
    optimizer = make([param])
    grad = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.ones(1, 4), param.shape, check_invariants=True)
    param.grad = grad.to(device)
    optimizer.step()
    return [row_state(optimizer, param)]


def row_state(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a table's state that have a value for each row."""
    return {name: x for name, x in optimizer.state[param].items() if isinstance(x, Tensor) and x.dim()}


@on_cuda
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_table_on_cuda_learns_like_one_on_the_cpu_and_loads_its_state(make: Make) -> None:
    """Ids repeat first, so that the step of the optimizer is replayed, then ids come and go."""
    options = {"max_rows": 60, "expire_after": 2}
    on_cpu, on_gpu = attached(make, **options), attached(make, **options, device="cuda")
    random = torch.Generator().manual_seed(0)
    ids = [torch.arange(20)] * 10 + [torch.randint(0, 80, (40,), generator=random) + 5 * i for i in range(20)]
    for number, batch in enumerate(ids):
        if number == 20:
            state = copy.deepcopy([part.state_dict() for part in on_cpu])
            on_gpu = attached(make, **options, device="cuda")
            on_gpu[0].load_state_dict(state[0])
            on_gpu[1].load_state_dict(state[1])
        expected = learn(*on_cpu, batch)
        values = learn(*on_gpu, batch.cuda() if number % 2 else batch)
        assert values.is_cuda
        torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=0.003)  # a step moves rows by about 0.01
        assert on_gpu[0].counters() == on_cpu[0].counters()
    assert min(on_gpu[0].counters()[:4]) > 0
    assert on_gpu[0].memory()["rows"] == on_cpu[0].memory()["rows"]


def test_initial_values_depend_on_seed_and_id_alone() -> None:
    first, second = DynamicEmbedding(4, chunk_rows=8), DynamicEmbedding(4, chunk_rows=32)
    ids = torch.arange(-20, 20)
    second(ids.flip(0))
    assert torch.equal(first(ids), second(ids))
    assert not torch.equal(first(ids), DynamicEmbedding(4, seed=1)(ids))
    values = DynamicEmbedding(64, std=0.5)(torch.arange(10_000)).detach()
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 0.5) < 0.005
    assert abs(torch.corrcoef(values[:, :8].T).fill_diagonal_(0)).max() < 0.05
    assert abs((values / 0.5).pow(4).mean() - 2.7) < 0.05  # the kurtosis of a sum of four uniform numbers


@on_devices
def test_gradients_of_two_lookups_are_added_although_the_table_grows_between_them(device: str) -> None:
    table, optimizer = attached(device=device)
    first = table([1, 2, 2])
    second = table(list(range(2, 100)))
    (first.sum() + 2 * second.sum()).backward()
    grads = torch.cat([chunk.grad.to_dense() for chunk in table.chunks if chunk.grad is not None])
    row = table._index.find(np.array([1, 2, 3], np.uint64))
    assert grads[row].tolist() == [[1.0] * 4, [4.0] * 4, [2.0] * 4]
    optimizer.step()


@on_devices
def test_rows_are_not_given_away_between_a_lookup_and_its_step(device: str) -> None:
    table, optimizer = attached(max_rows=4, device=device)
    learn(table, optimizer, [1, 2, 3, 4])
    table([1, 2])
    table([3, 8, 9])  # only 4 can be evicted: 9 has no row
    assert (table._index.find(np.array([1, 2, 3, 4, 8, 9], np.uint64)) > 0).tolist() == [1, 1, 1, 0, 1, 0]
    assert table.counters().refused == 1
    optimizer.step()
    table([9])
    assert len(table._index) == 4
    assert table._index.find(np.array([9], np.uint64)) > 0


@on_devices
def test_evaluation_changes_nothing_and_unknown_ids_share_a_row(device: str) -> None:
    table, optimizer = attached(device=device)
    learn(table, optimizer, [1, 2])
    before = copy.deepcopy(table.state_dict())
    table.eval()
    values = table([5, 6, 1])
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], table.chunks[0][0])
    assert killed_process.digest(table.state_dict()) == killed_process.digest(before)


@on_devices
def test_ids_that_are_not_admitted_train_the_shared_row(device: str) -> None:
    table, optimizer = attached(admit_after=3, sketch_width=64, device=device)
    shared = table.chunks[0][0].clone()
    learn(table, optimizer, [1, 2, 2])
    assert not torch.equal(table.chunks[0][0], shared)
    assert table.counters() == Counters(rows=0, admitted=0, evicted=0, expired=0, refused=3)
    learn(table, optimizer, [2, 1])
    assert table.counters() == Counters(rows=1, admitted=1, evicted=0, expired=0, refused=4)


def test_an_id_is_admitted_after_more_sightings_than_the_table_has_rows() -> None:
    table, _ = attached(max_rows=100, admit_after=3000)
    for _ in range(30):
        table([7] * 100)
    assert table.counters()[:2] == (1, 1)


@pytest.mark.parametrize(("evict", "survivors"), [("lru", [3, 4]), ("lfu", [1, 4]), ("none", [1, 2, 3])])
def test_the_limit_is_kept_by_the_chosen_eviction(evict: str, survivors: list[int]) -> None:
    table, optimizer = attached(max_rows=2 if evict != "none" else 3, evict=evict)
    for ids in ([1, 1, 1], [2], [3], [4]):
        learn(table, optimizer, ids)
    present = table._index.find(np.arange(1, 5, dtype=np.uint64)) > 0
    assert (np.flatnonzero(present) + 1).tolist() == survivors


def test_ids_expire_in_stream_time() -> None:
    table, optimizer = attached(expire_after=64)
    for time, ids in ((1000, [1, 2]), (1040, [2]), (1064, [3]), (1062, [4])):
        table.advance(time)
        learn(table, optimizer, ids)
    assert table.counters().expired == 0  # At 1064, id 1 was exactly 64 old.
    table.advance(1066)
    assert table.counters() == Counters(rows=3, admitted=4, evicted=0, expired=1, refused=0)
    table.advance(10_000)
    assert table.counters() == Counters(rows=0, admitted=4, evicted=0, expired=4, refused=0)


def test_without_a_clock_time_is_the_number_of_lookups() -> None:
    table, optimizer = attached(expire_after=3)
    for ids in ([1], [2], [2], [2]):
        learn(table, optimizer, ids)
    assert len(table._index) == 2
    learn(table, optimizer, [2])
    assert len(table._index) == 1
    with pytest.raises(RuntimeError, match="before the first lookup"):
        table.advance(5)


def test_the_limit_can_be_given_in_bytes() -> None:
    table = DynamicEmbedding(16, max_bytes=10_400)
    assert table.max_rows == 100  # a row has 64 bytes and its id about 40
    table(torch.arange(1000))
    assert sum(table.memory()[part] for part in ("rows", "index")) < 1.5 * 10_400


def test_memory_stays_bounded_while_the_ids_turn_over() -> None:
    for options in ({"max_rows": 300}, {"max_rows": 300, "evict": "lfu", "admit_after": 2}, {"expire_after": 3}):
        table, optimizer = attached(**options)
        memory = []
        for start in range(0, 10_000, 50):
            learn(table, optimizer, list(range(start, start + 100)))
            memory.append(sum(table.memory().values()))
        assert len(set(memory[20:])) == 1
        assert table.counters().admitted > 9000


def test_a_compiled_model_looks_up_outside_of_its_graph() -> None:
    table, optimizer = attached()
    compiled = torch.compile(lambda ids: table(ids) * 2, backend="eager")
    compiled(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert table.counters().admitted == 2


@pytest.mark.parametrize("convert", [torch.jit.trace, torch.export.export])
def test_a_graph_that_would_keep_the_rows_of_its_example_is_refused(convert: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="cannot be traced or exported"):
        convert(nn.Sequential(DynamicEmbedding(4)).eval(), (torch.arange(3),))


def test_a_scheduler_and_named_parameters_follow_the_growth() -> None:
    model = nn.ModuleDict(
        {"before": nn.Linear(2, 2), "table": DynamicEmbedding(4, chunk_rows=8), "after": nn.Linear(2, 2)}
    )
    table = model["table"]
    assert isinstance(table, DynamicEmbedding)
    optimizer = cadam.CAdam(model.named_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    table.attach(optimizer)
    learn(table, optimizer, list(range(50)))
    scheduler.step()
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.05
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert list(map(id, group["params"])) == list(map(id, model.parameters()))


# Checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("is_attached_first", [True, False])
@on_devices
def test_a_loaded_table_continues_to_the_bit(make: Make, is_attached_first: bool, device: str) -> None:
    if device == "cuda" and make in (OPTIMIZERS["SparseAdam"], OPTIMIZERS["SGD"]):
        pytest.skip("on CUDA, these optimizers of torch add gradients in any order")
    options = {"device": device, "max_rows": 60, "admit_after": 2, "sketch_width": 256, "expire_after": 2}
    random = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 80, (40,), generator=random) + 5 * i for i in range(30)]
    table, optimizer = attached(make, **options)
    for ids in batches[:15]:
        learn(table, optimizer, ids)
    file = io.BytesIO()
    torch.save({"table": table.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other = DynamicEmbedding(4, chunk_rows=8, **options)  # type: ignore[arg-type]
    if is_attached_first:
        other_optimizer = make(other.parameters())
        other.attach(other_optimizer)
        other.load_state_dict(saved["table"])
    else:
        other.load_state_dict(saved["table"])
        other_optimizer = make(other.parameters())
        other.attach(other_optimizer)
    other_optimizer.load_state_dict(saved["optimizer"])
    for ids in batches[15:]:
        assert torch.equal(learn(table, optimizer, ids), learn(other, other_optimizer, ids))
    assert table.counters() == other.counters()
    assert min(table.counters()) > 0
    assert killed_process.digest(table.state_dict()) == killed_process.digest(other.state_dict())
    assert killed_process.digest(optimizer.state_dict()) == killed_process.digest(other_optimizer.state_dict())


@on_devices
def test_loading_an_earlier_state_takes_chunks_away(device: str) -> None:
    table, optimizer = attached(device=device)
    learn(table, optimizer, [1, 2])
    earlier = copy.deepcopy(table.state_dict())
    states = copy.deepcopy(optimizer.state_dict())
    values = table([1, 2]).detach()
    learn(table, optimizer, list(range(50)))
    with pytest.raises(ValueError, match="load the state dict of the model first"):
        optimizer.load_state_dict(states)
    table.load_state_dict(earlier)
    optimizer.load_state_dict(states)
    assert len(table.chunks) == len(optimizer.param_groups[0]["params"]) == len(optimizer.state) == 1
    assert torch.equal(table([1, 2]), values)


def test_assigning_parameters_is_refused_once_there_is_an_optimizer() -> None:
    table, optimizer = attached()
    learn(table, optimizer, list(range(20)))
    state = copy.deepcopy(table.state_dict())
    other = DynamicEmbedding(4, chunk_rows=8)
    other.load_state_dict(state, assign=True)
    assert torch.equal(other([5, 6]), table([5, 6]))
    with pytest.raises(RuntimeError, match="before you create the optimizer"):
        table.load_state_dict(state, assign=True)


def test_copies_and_pickles_are_independent_and_not_attached() -> None:
    table, optimizer = attached()
    first, all_ids = list(range(200)), list(range(500))
    learn(table, optimizer, first)
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    pickles = [pickle.dumps(table, protocol) for protocol in (2, 5)]
    for other in (copy.deepcopy(table), torch.load(file, weights_only=False), *map(pickle.loads, pickles)):
        assert torch.equal(other(first), table(first))
        with pytest.raises(RuntimeError, match=r"call table.attach\(optimizer\)"):
            other([1]).sum().backward()
        other(all_ids)
        assert len(other._index) == 500
    assert len(table._index) == 200
    learn(table, optimizer, all_ids)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizer_that_is_replaced_must_be_attached(make: Make) -> None:
    table, optimizer = attached(make, max_rows=16)
    learn(table, optimizer, list(range(6)))
    optimizer = make(table.parameters())
    gc.collect()
    with pytest.raises(RuntimeError, match=r"call table.attach\(optimizer\)"):
        learn(table, optimizer, list(range(6, 12)))
    assert table.memory()["optimizer"] == 0
    table.attach(make(table.parameters()))
    state = table.state_dict()
    gc.collect()
    table.load_state_dict(state)


def test_a_model_without_its_table_is_loaded_if_that_is_allowed() -> None:
    table = attached()[0]
    model = nn.ModuleDict({"table": table, "layer": nn.Linear(2, 2)})
    table([1, 2])
    state = nn.ModuleDict({"layer": nn.Linear(2, 2)}).state_dict()
    assert model.load_state_dict(state, strict=False).missing_keys == ["table._extra_state", "table.chunks.0"]
    assert table.counters().rows == 2
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)


def test_threads_may_look_up_at_the_same_time() -> None:
    table, optimizer = attached(max_rows=20_000)

    def look_up(thread: int) -> None:
        random = np.random.default_rng(thread)
        for _ in range(60):
            table(random.integers(0, 30_000, 500))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(look_up, range(8)))
    optimizer.step()
    ids, rows = table._index.items()
    assert table.counters().rows == len(set(ids.tolist())) == len(set(rows.tolist())) == 20_000
    assert np.array_equal(table._index.find(ids), rows)


@pytest.mark.parametrize("make", [OPTIMIZERS["SparseAdam"], lambda params: cadam.CAdam(params, fused=False)])
def test_a_table_that_grew_in_inference_mode_can_be_trained(make: Make) -> None:
    table, optimizer = attached(make)
    with torch.inference_mode():
        table(list(range(40)))
    optimizer.step()
    learn(table, optimizer, list(range(40)))
    assert len(table.chunks) > 1


def test_a_damaged_state_dict_leaves_the_table_as_it_is() -> None:
    table, optimizer = attached()
    learn(table, optimizer, list(range(20)))
    before = killed_process.digest(table.state_dict())
    damaged: dict[str, Callable[[dict[str, Any]], Any]] = {
        "checksum": lambda state: state["_extra_state"]["index"]["id"].view(torch.uint8)[3].add_(1),
        "has no index": lambda state: state.pop("_extra_state"),
        "no frequency": lambda state: state["_extra_state"]["index"].pop("frequency"),
        "index has 21 rows, and its chunks 8": lambda state: state.pop("chunks.1"),
        "rows have shape": lambda state: state.update({"chunks.0": torch.zeros(8, 3)}),
        "a counter or its clock is damaged": lambda state: state["_extra_state"]["counts"].pop("evicted"),
        "its index, a counter": lambda state: state["_extra_state"].update(next_sweep=None),
        "rows are of type str": lambda state: state.update({"chunks.0": "rows"}),
        "its seed is 5": lambda state: state["_extra_state"].update(seed=5),
    }
    for message, damage in damaged.items():
        state = copy.deepcopy(table.state_dict())
        damage(state)
        with pytest.raises(RuntimeError, match=f"cannot be loaded: .*{message}"):
            table.load_state_dict(state)
        assert killed_process.digest(table.state_dict()) == before


def test_a_full_disk_is_an_error_and_keeps_the_table_and_the_last_file(tmp_path: Path) -> None:
    table, optimizer = attached()
    learn(table, optimizer, list(range(2000)))
    path = tmp_path / "table.pt"
    killed_process.save(table.state_dict(), path)
    complete = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            killed_process.save(table.state_dict(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert path.read_bytes() == complete
    learn(table, optimizer, list(range(2000)))


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_process_continues_to_the_bit(kills: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tables.killed_process", str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    whole, *others = done.stdout.splitlines()
    assert others
    assert set(others) == {whole}
    chunks, *counters = map(int, re.findall(r"\d+", whole)[:6])
    assert chunks > 1
    assert min(counters) > 0  # There was growth, admission, eviction, expiry and refusal.


# Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding_dim": 0}, "embedding_dim must be a positive integer"),
        ({"max_rows": 0}, "max_rows must be a positive integer"),
        ({"max_rows": 1.5}, "max_rows must be a positive integer"),
        ({"max_bytes": 10}, "less than one row"),
        ({"max_rows": 1, "max_bytes": 1}, "not both"),
        ({"evict": "fifo"}, "one of lru, lfu, none, got 'fifo'"),
        ({"admit_after": 70_000}, "at most 65535"),
        ({"sketch_width": 1000}, "power of two"),
        ({"sketch_width": 64, "admit_after": 65}, "too small for admit_after=65"),
        ({"expire_after": 1 << 62}, "expire_after must fit into 62 bits"),
        ({"std": float("nan")}, "std must be a finite number"),
        ({"dtype": torch.int64}, "floating-point"),
        ({"expire_after": -1}, "expire_after must be a positive integer"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicEmbedding(**{"embedding_dim": 4, **options})


def test_optimizers_that_do_not_fit_are_refused() -> None:
    table = DynamicEmbedding(4)
    with pytest.raises(ValueError, match="does not have the parameters of this table"):
        table.attach(cadam.CAdam([nn.Parameter(torch.zeros(3))]))
    for optimizer in (torch.optim.Adagrad(table.parameters()), torch.optim.SGD(table.parameters(), 0.1, momentum=0.9)):
        with pytest.raises(ValueError, match="keeps the state of a row is not known"):
            table.attach(optimizer)
    resets: list[Tensor] = []
    table = DynamicEmbedding(4, max_rows=2)
    adagrad = torch.optim.Adagrad(table.parameters())
    table.attach(adagrad, reset=lambda param, rows: resets.append(rows))
    for ids in ([1], [2], [3]):
        learn(table, adagrad, ids)
    assert [rows.tolist() for rows in resets] == [[1]]


def test_times_that_are_not_integers_are_refused() -> None:
    table = DynamicEmbedding(4)
    with pytest.raises(TypeError, match=r"must be an integer, got 1\.5"):
        table.advance(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="62 bits"):
        table.advance(2**62)


def test_reset_rows_of_a_dense_table_is_refused() -> None:
    param = nn.Parameter(torch.zeros(300, 4))
    optimizer = cadam.CAdam([param], moments="int8")
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(ValueError, match="gradients are not sparse"):
        optimizer.reset_rows(param, torch.tensor([0]))
    with pytest.raises(ValueError, match="does not have the parameter"):
        optimizer.reset_rows(nn.Parameter(torch.zeros(2)), torch.tensor([0]))


def test_several_processes_evaluate_and_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    table = DynamicEmbedding(4)
    with pytest.raises(RuntimeError, match="trains in one process"):
        table([1])
    assert table.eval()([1]).shape == (1, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_devices
def test_other_dtypes(dtype: torch.dtype, device: str) -> None:
    table, optimizer = attached(dtype=dtype, device=device)
    assert learn(table, optimizer, [[1, 2], [3, 4]]).dtype == dtype
    assert table.double()([1]).dtype == torch.float64


def test_the_guide_shows_what_its_examples_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    for code, output in examples:
        exec(code.replace('"table.pt"', repr(str(tmp_path / "table.pt"))), {})
        assert capsys.readouterr().out == output


@pytest.mark.parametrize("make", [lambda p: cadam.CAdam(p, lr=0.1), lambda p: cadam.Adam(p, lr=0.1, moments="int8")])
def test_rows_in_files_learn_like_rows_in_memory(make: Make, tmp_path: Path) -> None:
    tables, losses = [], []
    for options in ({}, {"memory_rows": 40, "overflow_folder": tmp_path}):
        table = DynamicEmbedding(4, chunk_rows=40, **options)  # type: ignore[arg-type]
        optimizer = make(list(table.parameters()))
        table.attach(optimizer)
        random = torch.Generator().manual_seed(0)
        for step in range(12):
            values = table(torch.randint(0, 20, (30,), generator=random) + 10 * step)
            optimizer.zero_grad()
            loss = (values - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        tables.append(table)
    in_memory, in_files = tables
    assert losses[:12] == losses[12:]
    assert len(in_files.chunks) > 2
    assert not list(tmp_path.iterdir())  # the files have no names
    restored = DynamicEmbedding(4, chunk_rows=40, memory_rows=40, overflow_folder=tmp_path)
    restored.load_state_dict(in_files.state_dict())
    ids = torch.arange(130)
    assert torch.equal(in_memory.eval()(ids), in_files.eval()(ids))
    assert torch.equal(restored.eval()(ids), in_files(ids))


def test_a_full_disk_refuses_new_rows_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = DynamicEmbedding(4, chunk_rows=10, memory_rows=10, overflow_folder=tmp_path)
    table.attach(cadam.CAdam(table.parameters(), lr=0.1))
    table(torch.arange(5))

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", fail)
    with pytest.raises(OSError, match="no room for 160 bytes of rows"):
        table(torch.arange(15))
    assert (len(table.chunks), table.counters().rows) == (1, 5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [{"memory_rows": 5}, {"memory_rows": 5, "overflow_folder": "missing"}, {"overflow_folder": "."}]
)
def test_options_of_rows_in_files_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="overflow_folder"):
        DynamicEmbedding(4, **options)

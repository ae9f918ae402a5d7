"""Check moments in bfloat16 and int8 on a CUDA device: equal to the reference, unbiased, and how fast.

    python benchmarks/quantized_cuda.py            # about two minutes, most of it compilation
    python benchmarks/quantized_cuda.py --check    # without timing
    python benchmarks/quantized_cuda.py --times    # nothing else
    python benchmarks/quantized_cuda.py --sizes    # bytes of state, and the largest table of each storage

First the kernels are compared with the reference engines on the same device and on the CPU, bit for bit;
then with themselves in a CUDA graph and as replayed steps. Then the mean of a million roundings is compared with the
value. Then come times, interleaved with torch's fused Adam and SparseAdam, and last the sizes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import cadam
from cadam.engines import quantization
from cadam.native.tensor_snapshot import can_snapshot_in_c
from peers import cases

START = time.monotonic()
LIMIT = 140.0  # seconds after which no further case is started
REFERENCE = {"fused": False, "foreach": False}
DENSE: dict[str, dict[str, Any]] = {s: {"moments": s} for s in ("float32", "bfloat16", "int8")}
ROWS: dict[str, dict[str, Any]] = {
    **DENSE,
    "float32, row v": {"second_moment": "row"},
    "int8, row v": {"moments": "int8", "second_moment": "row"},
}
MORE_ROWS: dict[str, dict[str, Any]] = {
    **ROWS,
    "bfloat16, row v": {"moments": "bfloat16", "second_moment": "row"},
    "int8, row steps": {"moments": "int8", "row_steps": True},
}
good = True


def say(fine: bool, what: str) -> None:
    global good
    good = good and fine
    print(f"{'ok' if fine else 'FAILED'}: {what}", flush=True)


# Equal to the reference ---------------------------------------------------------------------------------------------


def gradients(rows: bool, shape: tuple[int, ...], steps: int) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        size = torch.exp2(torch.randint(-20, 3, shape[1:], device="cuda").float())
        if rows:
            # Distinct, so that the order of a sum does not matter.
            ids = torch.randperm(shape[0], device="cuda")[: shape[0] // 2]
            values = torch.randn(len(ids), *shape[1:], device="cuda") * size
            found.append(torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=False))
        else:
            found.append(torch.randn(shape, device="cuda") * size)
    return found


def trained(
    rows: bool,
    shape: tuple[int, ...],
    graph: bool = False,
    device: str = "cuda",
    distinct: bool = False,
    **options: Any,
) -> tuple[Tensor, cadam.Optimizer]:
    grads = [grad.to(device) for grad in gradients(rows, shape, 6)]
    if distinct:
        grads = [grad.coalesce() for grad in grads]
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape).to(device))
    optimizer = cadam.CAdam([param], lr=1e-2, **options)
    if not graph:
        for grad in grads:
            param.grad = grad
            optimizer.step()
        return param, optimizer
    param.grad = grads[0].clone()
    optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.CUDAGraph()
    with torch.cuda.graph(held):
        optimizer.step()
    for grad in grads[1:]:
        if rows:
            param.grad._indices().copy_(grad._indices())
            param.grad._values().copy_(grad._values())
        else:
            param.grad.copy_(grad)
        held.replay()
    torch.cuda.synchronize()
    return param, optimizer


def differences(one: tuple[Tensor, Any], other: tuple[Tensor, Any]) -> str:
    """List the number of different values by name; empty if there are none. Floats may differ by rounding."""
    found = []
    (p, a), (q, b) = one, other
    if not torch.allclose(p, q.to(p.device), rtol=1e-5, atol=1e-6):
        found.append(f"parameter {int((p != q.to(p.device)).sum())}")
    for name, value in a.state[p].items():
        expected = b.state[q][name].to(value.device)
        plain = value.dtype == torch.float32
        same = torch.allclose(value, expected, rtol=1e-5, atol=0) if plain else torch.equal(value, expected)
        if not same:
            found.append(f"{name} {int((value != expected).sum())} of {value.numel()}")
    if a.alignment() != b.alignment():
        found.append(f"alignment {a.alignment().total} and {b.alignment().total}")
    return ", ".join(found)


SHAPES = ((False, (1000, 1037)), (True, (4000, 16)), (True, (4000, 64)), (True, (600, 200)))


def compare() -> None:
    for rows, shape in SHAPES:
        for name, options in (MORE_ROWS if rows else DENSE).items():
            if name == "float32":
                continue
            kernels = trained(rows, shape, **options)
            engine = kernels[1].explain()[0].engine
            different = differences(kernels, trained(rows, shape, **REFERENCE, **options))
            say(engine.startswith("cuda") and not different, f"{name}, {shape}, {engine} as the reference {different}")
            if rows:
                known = differences(kernels, trained(rows, shape, distinct=True, **options))
                say(not known, f"{name}, {shape}, as with ids known to be distinct {known}")
            if shape in ((1000, 1037), (4000, 16)):
                steps = str(kernels[1].explain().steps)
                usual = differences(kernels, trained(rows, shape, replay=False, **options))
                say(not usual, f"{name}, {shape}, steps {steps} as the usual way {usual}")
                on_cpu = differences(kernels, trained(rows, shape, device="cpu", **options))
                say(not on_cpu, f"{name}, {shape}, as on the CPU {on_cpu}")
                in_graph = differences(kernels, trained(rows, shape, graph=True, capturable=True, **options))
                say(not in_graph, f"{name}, {shape}, in a graph {in_graph}")


def unbiased() -> None:
    for storage in ("bfloat16", "int8"):
        param = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
        optimizer = cadam.CAdam([param], betas=(0.9, 0.999), moments=storage)
        param.grad = torch.full_like(param, 0.3137)
        optimizer.step()
        state = optimizer.state[param]
        for name, kind, value in (("exp_avg", "signed", 0.3137 * 0.1), ("exp_avg_sq", "positive", 0.3137**2 * 0.001)):
            found = state[name]
            if storage == "int8":
                found = quantization.dequantize(kind, found.view(-1, 256), state[f"{name}_scale"])
            found = found.double()
            error = abs(float(found.mean()) - value) / (float(found.std()) / found.numel() ** 0.5)
            say(
                error < 4, f"{storage} {name}: the mean of {found.numel()} roundings is {error:.1f} standard errors off"
            )


# Times ------------------------------------------------------------------------------------------------------------


def interleaved(contenders: dict[str, Callable[[], Any]], rounds: int, inside: int) -> dict[str, float]:
    """Return the milliseconds of each on the device, as medians over rounds of a number of calls."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name, step in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(inside):
                step()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / inside)
    return {name: statistics.median(taken) for name, taken in times.items()}


def table(title: str, peer: str, times: dict[str, float], extra: dict[str, str] | None = None) -> None:
    print(f"\n{title} ({time.monotonic() - START:.0f} s)")
    for name, taken in times.items():
        ratios = f"{times[peer] / taken:5.2f} x {peer}, {times['float32'] / taken:5.2f} x float32"
        print(f"  {name:16} {taken:8.3f} ms  {ratios}  {(extra or {}).get(name, '')}", flush=True)


def bars(title: str, of: str, times: dict[str, float], wanted: dict[str, float]) -> None:
    """Compare the requested storage with the observed one."""
    for name, bar in wanted.items():
        seen = times[of] / times[name]
        print(f"  {'reached' if seen >= bar else 'MISSED'}: {title}, {name} {seen:.2f} x {of}, bar {bar}", flush=True)


def in_graph(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return the step captured in a CUDA graph, after taking one step without it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    held = torch.cuda.CUDAGraph()
    with torch.cuda.graph(held):
        step()

    def replay() -> Callable[[], Any]:
        held.replay()
        return step  # the reference keeps the optimizer alive, because the graph uses its memory

    return replay


def dense(title: str, shapes: list[tuple[int, ...]], of: str, wanted: dict[str, float], how: str = "") -> None:
    """Print the times of dense steps. `how` is "traffic" for bytes per second, or "graph" for steps in CUDA graphs."""
    values = [torch.randn(shape, device="cuda") for shape in shapes]
    more = {"capturable": True} if how == "graph" else {}
    grads = [torch.randn_like(value) * 0.01 for value in values]

    def contender(make: Any, **options: Any) -> Callable[[], Any]:
        params = [torch.nn.Parameter(value) for value in values]  # all move the same memory
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        step: Callable[[], Any] = make(params, lr=1e-5, **more, **options).step
        return in_graph(step) if how == "graph" else step

    contenders = {"torch fused Adam": contender(torch.optim.Adam, fused=True)}
    contenders |= {name: contender(cadam.CAdam, **options) for name, options in DENSE.items()}
    times = interleaved(contenders, rounds=7, inside=5)
    elements = sum(value.numel() for value in values)
    moved = {"torch fused Adam": 28, "float32": 28, "bfloat16": 20, "int8": 16 + 4 / 256}
    speeds = {n: f"{moved[n] * elements / t / 1e9:5.2f} TB/s" for n, t in times.items()} if how == "traffic" else {}
    table(title, "torch fused Adam", times, speeds)
    bars(title, of, times, wanted)


def rows(count: int, width: int, bar: float, distinct: bool = False) -> None:
    """Print the times of steps with rows. Each step has other rows, as in training, so that they are not in the caches.

    `distinct` is whether the gradients are coalesced, so that nothing has to be sorted and summed.
    """
    value = torch.randn(count, width, device="cuda")
    grads = []
    for seed in range(4):
        ids = cases.sample_ids("fields", count, cases.IDS_PER_BATCH, seed).cuda()
        rows = torch.randn(len(ids), width, device="cuda")
        grad = torch.sparse_coo_tensor(ids[None], rows, value.shape, check_invariants=False)
        grads.append(grad.coalesce() if distinct else grad)
    contenders: dict[str, Callable[[], Any]] = {}
    sizes = {}
    param = torch.nn.Parameter(value)
    peer = torch.optim.SparseAdam([param], lr=1e-5)
    turns = cycle(grads)

    def torchs() -> None:
        param.grad = next(turns)
        peer.step()

    contenders["SparseAdam"] = torchs
    alive = []
    for name, options in ROWS.items():
        if torch.cuda.mem_get_info()[0] < 10 * value.nbytes // 4:
            print(f"  {name}: left out, no memory")
            continue
        own = torch.nn.Parameter(value)
        own.grad = grads[0]
        optimizer = cadam.CAdam([own], lr=1e-5, capturable=True, **options)
        graphs = []
        for own.grad in grads:
            graphs.append(in_graph(optimizer.step))
        alive.append((graphs, optimizer))
        contenders[name] = partial(_replay, cycle(graphs))
        memories = [t.untyped_storage() for t in optimizer.state[own].values() if t.numel() > 1]
        held_bytes = sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
        engine = optimizer.explain()[0].engine
        sizes[name] = f"{held_bytes / count:.0f} bytes of state a row, {engine}"
    times = interleaved(contenders, rounds=9, inside=8)
    title = f"rows {count:,} x {width}, {'distinct' if distinct else 'raw'} ids, ours in a graph"
    table(title, "SparseAdam", times, sizes)
    bars(title, "float32", times, dict.fromkeys(("bfloat16", "int8"), bar))


def _replay(graphs: Iterator[Any]) -> None:
    next(graphs)()


# Sizes ------------------------------------------------------------------------------------------------------------


def stepped(count: int, width: int, **options: Any) -> int:
    """Return the bytes of state of a table after a step. Raises torch.OutOfMemoryError."""
    param = torch.nn.Parameter(torch.zeros(count, width, device="cuda"))
    before = torch.cuda.memory_allocated()
    optimizer = cadam.CAdam([param], lr=0.5, **options)
    ids = torch.randint(count, (cases.IDS_PER_BATCH,), device="cuda")
    grad = torch.ones(cases.IDS_PER_BATCH, width, device="cuda")
    param.grad = torch.sparse_coo_tensor(ids[None], grad, param.shape, check_invariants=False)
    optimizer.step()
    torch.cuda.synchronize()
    moved = param[ids[:1000]]
    if not bool(((moved < 0) & moved.isfinite()).all()):
        raise AssertionError("rows did not move")
    param.grad = None
    del ids, grad, moved
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def largest(width: int, **options: Any) -> tuple[float, int]:
    """Print the bytes of state per row, and the rows of the largest table that fits in memory and takes a step."""
    each = stepped(1_000_000, width, **options) / 1e6
    torch.cuda.empty_cache()
    count = int((torch.cuda.mem_get_info()[0] - (1 << 30)) / (each + 4 * width))
    while True:
        try:
            stepped(count, width, **options)
            return each, count
        except torch.OutOfMemoryError:
            count -= count // 50
        finally:
            torch.cuda.empty_cache()


def sizes() -> None:
    free, total = torch.cuda.mem_get_info()
    print(f"\nbytes of state a row, and the largest table that fits {free / 2**30:.0f} of {total / 2**30:.0f} GiB")
    for width in (16, 64):
        for name, options in MORE_ROWS.items():
            each, count = largest(width, **options)
            print(f"  D = {width}  {name:16} {each:6.1f} bytes, {count / 1e6:7.0f} million rows", flush=True)


def main() -> int:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if not can_snapshot_in_c():
        print("no replayed steps, so times outside of graphs are Python's: build them, python -m cadam.native.build")
    everything = not {"--check", "--times", "--sizes"} & set(sys.argv)
    checks: list[Callable[[], None]] = []
    if everything or "--check" in sys.argv:
        checks += [compare, unbiased]
    if everything or "--times" in sys.argv:
        torchs, own, network = "torch fused Adam", "float32", cases.resnet50_shapes(78)
        checks += [
            partial(dense, "537M", [(1 << 29,)], torchs, {"bfloat16": 1.65, "int8": 2.1}, "traffic"),
            partial(dense, "161 tensors, 38M", network, own, {"bfloat16": 1.0, "int8": 1.0}),
            partial(dense, "161 tensors, 38M, all in graphs", network, own, {"bfloat16": 1.0, "int8": 1.0}, "graph"),
            partial(rows, 1_000_000, 16, 1.0),
            partial(rows, 50_000_000, 16, 1.0),
            partial(rows, 50_000_000, 16, 1.0, distinct=True),
            partial(rows, 50_000_000, 64, 1.3),
            partial(rows, 50_000_000, 64, 1.3, distinct=True),
        ]
    if everything or "--sizes" in sys.argv:
        checks.append(sizes)
    for case in checks:
        if time.monotonic() - START > LIMIT:
            print("stopped: no time for the other cases")
            break
        case()
        torch.cuda.empty_cache()
    print("all the same" if good else "FAILED: see above", f"({time.monotonic() - START:.0f} s)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Ratios on a CUDA device, in one interleaved run: whole steps of CAdam against torch.optim's, dense and rows.

    python benchmarks/cuda_bench.py --json results/cuda/bench.json

A dense step is timed from the call of step() until the device is done, with gradients at new addresses each time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import cadam
from cadam import engines
from cadam.engines.cuda import Cuda
from cadam.engines.cuda_rows import CudaRows

BYTES = 28  # an element of Adam's step in float32: read p, g, m, v, write p, m, v
Contest = dict[str, Callable[[int], Any]]


def register() -> None:
    names = [engine.name for engine in engines.ENGINES]
    if "cuda" not in names:
        engines.ENGINES = (Cuda(), CudaRows(), *engines.ENGINES)


def interleaved(
    contest: Contest, rounds: int, before: Callable[[int, str], Any] = lambda i, name: None
) -> dict[str, float]:
    """Median milliseconds of each, one after the other in every round."""
    for _ in range(3):
        for name, run in contest.items():
            before(0, name)
            run(0)
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in contest}
    for i in range(rounds):
        for name, run in contest.items():
            before(i, name)
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(i)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def replayed(step: Callable[[], Any], rounds: int = 50) -> float:
    """Median milliseconds of a step inside a CUDA graph, by events around ten replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 10)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written."""
    source, target = (torch.empty(1 << 30, device="cuda") for _ in range(2))
    source.normal_()
    best = interleaved({"copy": lambda i: target.copy_(source)}, 20)["copy"]
    return 2 * source.nbytes / best * 1e3


# Dense ---------------------------------------------------------------------------------------------------------


def resnet(base: int = 78) -> list[tuple[int, ...]]:
    """The 161 parameters of a ResNet-50 with `base` channels instead of 64: 38 million."""
    shapes: list[tuple[int, ...]] = [(base, 3, 7, 7), (base,), (base,)]
    channels = base
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = base * 2**stage
        for block in range(blocks):
            for shape in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


DENSE: dict[str, list[tuple[int, ...]]] = {
    "537M in one": [(1 << 29,)],
    "161 tensors, 38M": resnet(),
    "2,000 tiny": [(100 + i % 57,) for i in range(2000)],
}


def dense(rounds: dict[str, int], bandwidth: float) -> dict[str, Any]:
    results = {}
    for name, shapes in DENSE.items():
        sets = 2 if name.startswith("537M") else 4
        grads = [[torch.randn(shape, device="cuda") for shape in shapes] for _ in range(sets)]
        makers: dict[str, Callable[[Any], Any]] = {
            "cadam": lambda ps: cadam.CAdam(ps),
            "cadam, not counted": lambda ps: cadam.CAdam(ps, track_alignment=False),
            "torch fused": lambda ps: torch.optim.Adam(ps, fused=True),
            "torch foreach": lambda ps: torch.optim.Adam(ps, foreach=True),
        }
        models = {k: [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in shapes] for k in makers}
        optimizers = {k: make(models[k]) for k, make in makers.items()}

        def before(i: int, k: str, models: Any = models, grads: Any = grads, sets: int = sets) -> None:
            for p, g in zip(models[k], grads[i % sets], strict=True):
                p.grad = g

        def run(k: str, optimizers: Any = optimizers) -> Callable[[int], Any]:
            return lambda i: optimizers[k].step()

        torch.cuda.synchronize()
        before(0, "cadam")
        optimizers["cadam"].step()
        optimizers["cadam"].step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        optimizers["cadam"].step()
        extra = torch.cuda.max_memory_allocated() - resident
        times = interleaved({k: run(k) for k in makers}, rounds[name], before)
        elements = sum(p.numel() for p in models["cadam"])
        limit = BYTES * elements / bandwidth * 1e3
        results[name] = {"ms": times, "elements": elements, "limit_ms": limit, "extra_bytes": extra}
        del optimizers, models
        graph = {}
        for k, make in {
            "cadam": lambda ps: cadam.CAdam(ps, capturable=True),
            "cadam, not counted": lambda ps: cadam.CAdam(ps, capturable=True, track_alignment=False),
            "torch fused": lambda ps: torch.optim.Adam(ps, fused=True, capturable=True),
        }.items():
            params = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in shapes]
            for p, g in zip(params, grads[0], strict=True):
                p.grad = g
            graph[k] = replayed(make(params).step)
            del params
        results[name]["graph_ms"] = graph
    return results


# Rows ----------------------------------------------------------------------------------------------------------


def ids_of(rows: int, kind: str) -> Tensor:
    """10,000 x 26 ids. Mixed: half of the fields in tiny hot vocabularies. Skewed: nearly all are a few ids."""
    if kind == "skewed":
        return (rows * torch.rand(260_000, device="cuda", dtype=torch.float64) ** 40).long().clamp_(max=rows - 1)
    fields = []
    for f in range(26):
        size = min(rows, 3 + 7 * f) if f < 13 else rows
        start = torch.randint(0, rows - size + 1, (), device="cuda")
        spread = torch.rand(10_000, device="cuda", dtype=torch.float64) ** (1 if f < 13 else 3)
        fields.append(start + (spread * size).long().clamp_(max=size - 1))
    return torch.cat(fields)


def sparse(rows: int, width: int, kind: str) -> Tensor:
    ids = ids_of(rows, kind)
    values = torch.randn(len(ids), width, device="cuda")
    return torch.sparse_coo_tensor(ids[None], values, (rows, width), check_invariants=False)


ROWS = {
    "1M x 16": (1_000_000, 16, "mixed"),
    "50M x 16": (50_000_000, 16, "mixed"),
    "5M x 64": (5_000_000, 64, "mixed"),
    "1M x 16, skewed": (1_000_000, 16, "skewed"),
}


def row_steps(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (rows, width, kind) in ROWS.items():
        grads = [sparse(rows, width, kind) for _ in range(4)]
        params = {k: torch.nn.Parameter(torch.randn(rows, width, device="cuda")) for k in ("cadam", "SparseAdam")}
        ours, theirs = cadam.CAdam([params["cadam"]]), torch.optim.SparseAdam([params["SparseAdam"]])

        def before(i: int, k: str, params: Any = params, grads: Any = grads) -> None:
            g = grads[i % len(grads)]  # again not coalesced, as autograd makes it
            params[k].grad = torch.sparse_coo_tensor(g._indices(), g._values(), g.shape, check_invariants=False)

        contest: Contest = {"cadam": lambda i, o=ours: o.step(), "SparseAdam": lambda i, o=theirs: o.step()}
        times = interleaved(contest, rounds, before)
        captured = cadam.CAdam([params["cadam"]], capturable=True)
        before(0, "cadam")
        results[name] = {"ms": times, "graph_ms": {"cadam": replayed(captured.step)}}
        results[name]["distinct"] = len(torch.unique(grads[0]._indices()))
        del ours, theirs, captured, params, grads, contest
        torch.cuda.empty_cache()
    return results


def growth(rounds: int) -> dict[str, Any]:
    """The same ids in a table of 16 million and of 8.3 billion parameters."""
    results: dict[str, Any] = {}
    for rows in (1_000_000, 519_000_000):
        param = torch.nn.Parameter(torch.empty(rows, 16, device="cuda").uniform_(-1, 1))
        optimizer = cadam.CAdam([param])
        indices, values = ids_of(rows, "mixed"), torch.randn(260_000, 16, device="cuda")

        def before(i: int, k: str, p: Tensor = param, indices: Tensor = indices, values: Tensor = values) -> None:
            p.grad = torch.sparse_coo_tensor(indices[None], values, p.shape, check_invariants=False)

        times = interleaved({"cadam": lambda i, o=optimizer: o.step()}, rounds, before)
        results[f"{rows:,} x 16"] = {"ms": times["cadam"], "distinct": len(torch.unique(indices))}
        del param, optimizer, before
        torch.cuda.empty_cache()
    return results


# Report --------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> Iterable[str]:
    yield f"copy bandwidth {results['copy_bandwidth'] / 1e12:.2f} TB/s"
    for name, r in results.get("dense", {}).items():
        ms, graph = r["ms"], r["graph_ms"]
        yield (
            f"dense {name:18} cadam {ms['cadam']:.3f} ms, {r['limit_ms'] / ms['cadam']:.2f} of the limit, "
            f"{ms['torch fused'] / ms['cadam']:.2f} x fused ({ms['torch fused']:.3f}), "
            f"{ms['torch foreach'] / ms['cadam']:.2f} x foreach, "
            f"extra {r['extra_bytes'] / 1e6:.2f} MB"
        )
        yield (
            f"      in a graph         cadam {graph['cadam']:.3f} ms, "
            f"{r['limit_ms'] / graph['cadam']:.2f} of the limit, {ms['torch fused'] / graph['cadam']:.1f} x fused, "
            f"{graph['torch fused'] / graph['cadam']:.1f} x fused in a graph ({graph['torch fused']:.3f}), "
            f"counting {100 * (graph['cadam'] / graph['cadam, not counted'] - 1):+.1f}%"
        )
    for name, r in results.get("rows", {}).items():
        ms = r["ms"]
        yield (
            f"rows {name:18} cadam {ms['cadam']:.3f} ms (graph {r['graph_ms']['cadam']:.3f}), "
            f"{ms['SparseAdam'] / ms['cadam']:.1f} x SparseAdam ({ms['SparseAdam']:.2f}), {r['distinct']:,} distinct"
        )
    for name, r in results.get("growth", {}).items():
        yield f"rows {name:18} cadam {r['ms']:.3f} ms, {r['distinct']:,} distinct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the numbers")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", choices=["dense", "rows", "growth"])
    given = parser.parse_args()
    register()
    torch.manual_seed(0)
    few = given.quick
    results: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "cadam": cadam.__version__},
        "device": torch.cuda.get_device_name(),
        "copy_bandwidth": copy_bandwidth(),
    }
    rounds = dict.fromkeys(DENSE, 8 if few else 30)
    if given.only in (None, "dense"):
        results["dense"] = dense(rounds, results["copy_bandwidth"])
        torch.cuda.empty_cache()
    if given.only in (None, "rows"):
        results["rows"] = row_steps(15 if few else 50)
    if given.only in (None, "growth"):
        results["growth"] = growth(15 if few else 50)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(results, file, indent=1)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()

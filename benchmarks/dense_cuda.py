"""Compare the replayed step with the usual step on a CUDA device: bitwise equality, and host time.

    python benchmarks/dense_cuda.py

If a step cannot be replayed or its result differs, the attributes of the compiled kernels are printed. Then whole steps
are timed, interleaved with torch's, with gradients at new addresses each time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cadam
from cadam.cli import bench, bench_cases
from cadam.codegen.c_source import header
from cadam.native import build, tensor_snapshot

NEVER = 60  # preparations after which none is tried any more


def the_usual_way(optimizer: cadam.Optimizer) -> None:
    """Keep the next step from being prepared."""
    if optimizer._plan is not None:
        optimizer._plan.again, optimizer._plan.preparations = None, NEVER


def kernels(optimizer: cadam.Optimizer) -> str:
    """Return the attributes that Triton reports for the kernels in use."""
    lines = []
    for kept in optimizer._plan.kept if optimizer._plan else []:
        for batch in kept.job.memo.get("cuda", ()):
            for launch in batch.compiled.values():
                for kind, compiled in launch.compiled.items():
                    lines.append(f"  kind {kind}, packed {compiled.packed_metadata}, function {compiled.function:#x}")
                    lines.append(f"  signature {compiled.src.signature}")
                    lines.append(f"  metadata {compiled.metadata}")
    return "\n".join(lines) or "  none compiled"


def counted(optimizer: cadam.Optimizer) -> list[bool]:
    """Whether each step was a replayed one, in order."""
    served: list[bool] = []
    once_more = optimizer._once_more

    def noted() -> bool:
        served.append(once_more())
        return served[-1]

    optimizer._once_more = noted  # type: ignore[method-assign]
    return served


def trained(
    make: Callable[[list[Tensor]], cadam.Optimizer], dtypes: Sequence[torch.dtype], prepared: bool
) -> tuple[list[Tensor], cadam.Optimizer, int]:
    """Parameters after some steps, and how many of these were prepared ones."""
    torch.manual_seed(0)
    sizes = [(1 << 24) + 3, 1 << 20, 1025, 1, 0, 100, 4096]
    params = [torch.nn.Parameter(torch.randn(n, device="cuda").to(dtype)) for dtype in dtypes for n in sizes]
    optimizer = make(params)
    served = counted(optimizer)
    for turn in range(14):
        for p in params:
            p.grad = torch.randn_like(p)
        if turn == 6:
            optimizer.param_groups[0]["lr"] *= 0.5
        if turn == 8:
            optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()
        if turn == 9:
            params[2].data = params[2].data.clone()
        if turn == 10:
            params[3].grad = None
        if turn == 11:
            optimizer.param_groups[0]["betas"] = (0.8, 0.99)
        optimizer.step()
        if not prepared:
            the_usual_way(optimizer)
    return params, optimizer, sum(served)


def compare() -> bool:
    """Whether both ways give the same bits."""
    good = True
    cases: dict[str, tuple[Any, Sequence[torch.dtype]]] = {
        "CAdam": (cadam.CAdam, [torch.float32]),
        "CAdam, two dtypes": (cadam.CAdam, [torch.float32, torch.bfloat16]),
        "CAmsGrad, decay": (partial(cadam.CAmsGrad, weight_decay=0.1), [torch.float32]),
        "Adam, not counting": (partial(cadam.Adam, track_alignment=False), [torch.float32]),
        "CAdam, stochastic": (partial(cadam.CAdam, stochastic_rounding=True), [torch.bfloat16]),
    }
    for name, (make, dtypes) in cases.items():
        (ours, a, served), (usual, b, none) = (trained(make, dtypes, prepared) for prepared in (True, False))
        torch.cuda.synchronize()
        different = []
        for i, (p, q) in enumerate(zip(ours, usual, strict=True)):
            pairs = {"parameter": (p, q)} | {k: (v, b.state[q][k]) for k, v in a.state[p].items()}
            different += [f"{what} of {i}" for what, (x, y) in pairs.items() if not torch.equal(x, y)]
        counts = a.alignment() if a.param_groups[0]["track_alignment"] else None
        if counts is not None and counts != b.alignment():
            different.append("alignment")
        fine = not different and served > 0 and none == 0
        print(f"{'same bits' if fine else 'FAILED'}: {name}: {served} of 14 steps prepared ({none} the usual way)")
        if not fine:
            good = False
            plan = a._plan
            print(f"  different: {different}; prepared: {plan is not None and plan.again is not None}")
            print(f"  why not: {plan.unprepared if plan else 'no plan'}\n{kernels(a)}")
    return good


def host_times(name: str, shapes: Sequence[Sequence[int]]) -> None:
    """Microseconds until step() returns, after the steps of others."""
    made = {
        "torch fused": lambda p: torch.optim.Adam(p, fused=True),
        "torch foreach": lambda p: torch.optim.Adam(p, foreach=True),
        "prepared": lambda p: cadam.CAdam(p),
        "usual": lambda p: cadam.CAdam(p),
    }
    contenders = {key: bench_cases.dense_contender(key, make, shapes, "cuda") for key, make in made.items()}
    times: dict[str, list[float]] = {key: [] for key in made}
    for turn in range(18):
        for key, contender in contenders.items():
            contender.prepare()
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            contender.step()
            taken = time.perf_counter_ns() - start
            if key == "usual":
                the_usual_way(contender.step.__self__)  # type: ignore[attr-defined]
            if turn >= 4:
                times[key].append(taken / 1e3)
    print(f"host, {name}: " + ", ".join(f"{key} {statistics.median(t):.0f} us" for key, t in times.items()))


def main() -> int:
    if not build.LIBRARY.exists():
        print("building the C kernels", flush=True)
        build.build(header())
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, layout {tensor_snapshot.layout()}")
    good = compare()
    host_times("one tensor of 4M", [(1 << 22,)])
    host_times("161 tensors", bench.resnet50(16))
    host_times("2,000 tiny tensors", [(100 + i % 57,) for i in range(2000)])
    makers = bench.dense_peers("cuda")
    makers = {k: v for k, v in makers.items() if k.startswith(("torch Adam f", "cadam."))}
    for name, shapes in bench_cases.dense_models("cuda", quick=False).items():
        elements = bench_cases.count_elements(shapes)
        build_all = partial(bench_cases.dense_contenders, makers, shapes, "cuda")
        case = bench_cases.Case(name, "torch Adam fused", build_all, elements if elements > 1_000_000 else 0, 15)
        results = bench.measure(case, "cuda", bench_cases.cuda_limit)
        bench.print_results(results)
    print("all the same" if good else "FAILED: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""List the kernels and copies of a step in a CUDA graph, with their times and the bytes that the step must move.

    python benchmarks/graph_nodes.py [--rounds 31]

The models have such short steps that every small kernel matters: one kernel counts the step and computes the
coefficients on the device, then one launch updates the elements. The steps are interleaved with torch's fused Adam.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

import cadam
from peers.cases import captured, dense_contender, dense_models

BYTES = 7 * 4
"""Memory traffic per element: gradient, parameter and two moments are read; the last three are written."""

TORCHS = "torch Adam fused"
MAKERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    TORCHS: lambda p: torch.optim.Adam(p, fused=True, capturable=True),
    "cadam.Adam": lambda p: cadam.Adam(p, capturable=True),
    "cadam.CAdam": lambda p: cadam.CAdam(p, capturable=True),
    "cadam.CAdam, not counting": lambda p: cadam.CAdam(p, capturable=True, track_alignment=False),
}


def show(model: str, shapes: Sequence[Sequence[int]], rounds: int) -> None:
    steps = {name: captured(dense_contender(name, make, shapes, "cuda")).step for name, make in MAKERS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, repeat = random.Random(0), 50
    for number in range(rounds + 3):
        for name in order.sample(list(steps), len(steps)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeat):
                steps[name]()
            end.record()
            end.synchronize()
            if number >= 3:
                times[name].append(start.elapsed_time(end) / repeat * 1e3)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"\n{model}: {elements:,} elements, {elements * BYTES / 1e6:.0f} MB a step")
    for name, step in steps.items():
        us = statistics.median(times[name])
        ratio = statistics.median(t / o for t, o in zip(times[TORCHS], times[name], strict=True))
        print(f"\n{name}: {us:.1f} us, {ratio:.2f} times torch's speed, {elements * BYTES / us / 1e6:.2f} TB/s")
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                step()
            torch.cuda.synchronize()
        for event in sorted(seen.key_averages(), key=lambda e: -e.device_time_total):
            if event.device_time_total:
                print(f"  {event.count / 10:5.1f} x {event.device_time_total / event.count:7.2f} us  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {rounds} interleaved rounds")
    _huge, *others = dense_models("cuda", quick=False).items()
    for model, shapes in reversed(others):
        show(model, shapes, rounds)


if __name__ == "__main__":
    main()

"""Time parameters whose view an engine updates (complex ones, shards of FSDP2) beside fused and foreach Adam of torch.

    python benchmarks/views.py [--rounds 41]

All optimizers take turns; ratios are medians over rounds. There is one process and one rank, because a step does not
communicate.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cadam

Made = Callable[[], list[Tensor]]


def some(dtypes: list[torch.dtype]) -> list[Tensor]:
    params = [nn.Parameter(torch.randn(64, dtype=dtype)) for dtype in dtypes]
    for p in params:
        p.grad = torch.randn_like(p)
    return list(params)


def sharded(layers: int) -> list[Tensor]:
    """Return the parameters of a model of FSDP2, with gradients."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.randn(4, 32)).sum().backward()
    return list(model.parameters())


CASES: dict[str, Made] = {
    "1,000 real tensors of 64": lambda: some([torch.float32] * 1000),
    "the same, one of them complex": lambda: some([torch.complex64] + [torch.float32] * 999),
    "1,000 complex tensors of 64": lambda: some([torch.complex64] * 1000),
    "FSDP2, 200 small shards": lambda: sharded(100),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("gloo", rank=0, world_size=1)
    print(f"torch {torch.__version__}, 1 thread, medians of {args.rounds} interleaved rounds, ms (min to p90)")
    order = random.Random(0)
    for case, made in CASES.items():
        steps: dict[str, Callable[[], object]] = {
            "torch Adam, foreach": torch.optim.Adam(made(), foreach=True).step,
            "torch Adam, fused": torch.optim.Adam(made(), fused=True).step,
            "cadam.Adam": cadam.Adam(made()).step,
            "cadam.CAdam": cadam.CAdam(made()).step,
        }
        if "complex" in case:
            del steps["torch Adam, fused"]  # fused Adam refuses complex parameters
        spent: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(args.rounds + 3):
            for name in order.sample(list(steps), len(steps)):
                start = time.perf_counter()
                steps[name]()
                if number >= 3:
                    spent[name].append((time.perf_counter() - start) * 1e3)
        print(f"\n{case}")
        for name, times in spent.items():
            ordered = sorted(times)
            spread = f"({ordered[0]:.2f} to {ordered[int(0.9 * (len(ordered) - 1))]:.2f})"
            ratios = [
                f"{statistics.median(a / b for a, b in zip(times, spent[other], strict=True)):.2f} times {other}"
                for other in steps
                if other.startswith("torch") and other != name
            ]
            print(f"  {name:22}{statistics.median(ordered):8.2f}  {spread:18}{', '.join(ratios)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

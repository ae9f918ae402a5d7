"""Time dense CUDA steps beside torch's fused Adam, with and without step replay.

    PYTHONPATH=src python3 benchmarks/dense_cuda.py [--rounds 30]

The cases are one huge tensor, the shapes of ResNet-50 and 2,000 tiny tensors. All optimizers take turns, with gradients
at new addresses each time. For each case the table shows the time until `step()` returns (host), the time until the
device has finished (total), and the speed relative to fused Adam. The script also compares the parameters after
replayed and planned steps bit by bit, and exits with status 1 if they differ or if a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import cadam
from cadam.codegen.c_source import header
from cadam.native import build, tensor_snapshot
from peers import cases

Shapes = Sequence[Sequence[int]]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

CASES: dict[str, tuple[Shapes, float]] = {
    "one tensor of 2**28 elements": ([(1 << 28,)], 1.2),
    "161 tensors of ResNet-50": (cases.resnet50_shapes(64), 2.5),
    "2,000 tiny tensors": ([(100 + i % 57,) for i in range(2000)], 5.0),
}
"""The shapes of each case, and the goal: how many times as fast as fused Adam a step shall be."""

REFERENCE = "torch Adam, fused"
OPTIMIZERS: dict[str, MakeOptimizer] = {
    REFERENCE: lambda params: torch.optim.Adam(params, fused=True),
    "cadam.CAdam, replay": lambda params: cadam.CAdam(params, replay=True),
    "cadam.CAdam, no replay": lambda params: cadam.CAdam(params, replay=False),
}
WARM_UP = 6
"""Rounds that are not counted. The first steps compile kernels and record the step."""


class Contender:
    """An optimizer with its parameters and the times of its steps."""

    def __init__(self, make: MakeOptimizer, shapes: Shapes) -> None:
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(tuple(shape), device="cuda")) for shape in shapes]
        self.optimizer = make(self.params)
        self.host: list[float] = []
        self.total: list[float] = []

    def step(self, grads: Sequence[Tensor]) -> None:
        """Take a step with copies of these gradients, and note the times in milliseconds."""
        for param in self.params:
            param.grad = None
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.optimizer.step()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        self.host.append(1e3 * (returned - start))
        self.total.append(1e3 * (time.perf_counter() - start))
        for param in self.params:
            param.grad = None


def run_case(name: str, shapes: Shapes, goal: float, rounds: int) -> bool:
    """Time one case and print a table. Returns whether replayed and planned steps agree and the goal is reached."""
    contenders = {label: Contender(make, shapes) for label, make in OPTIMIZERS.items()}
    for number in range(WARM_UP + rounds):
        torch.manual_seed(1000 + number)
        grads = [torch.randn(tuple(shape), device="cuda") for shape in shapes]
        for contender in contenders.values():
            contender.step(grads)
        del grads
    reference = statistics.median(contenders[REFERENCE].total[WARM_UP:])
    print(f"\n{name} (goal: {goal} times the speed of fused Adam)")
    print(f"  {'':24}{'host ms':>10}{'total ms':>10}{'(min to max)':>22}{'speed':>8}")
    speeds = {}
    for label, contender in contenders.items():
        total = contender.total[WARM_UP:]
        speeds[label] = reference / statistics.median(total)
        host = statistics.median(contender.host[WARM_UP:])
        spread = f"({min(total):.3f} to {max(total):.3f})"
        print(f"  {label:24}{host:10.3f}{statistics.median(total):10.3f}{spread:>22}{speeds[label]:8.2f}")
    _, replayed, planned = contenders.values()
    same = all(torch.equal(p, q) for p, q in zip(replayed.params, planned.params, strict=True))
    print(f"  steps of the first: {replayed.optimizer.explain().steps}")  # type: ignore[attr-defined]
    print(f"  steps of the second: {planned.optimizer.explain().steps}")  # type: ignore[attr-defined]
    print("  both give the same bits" if same else "  FAILED: replayed and planned steps differ")
    reached = [label for label in list(OPTIMIZERS)[1:] if speeds[label] >= goal]
    print(f"  goal reached by: {', '.join(reached) or 'none'}")
    return same and bool(reached)


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each optimizer")
    options = parser.parse_args()
    if not build.LIBRARY.exists():
        print("building the C kernels", flush=True)
        build.build(header())
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"compiled snapshots of tensors: {'yes' if tensor_snapshot.can_snapshot_in_c() else 'no'}")
    good = [run_case(name, shapes, goal, options.rounds) for name, (shapes, goal) in CASES.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

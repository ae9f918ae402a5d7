"""Time the engines without compiled kernels (foreach and reference) beside torch, with the peak memory of a step.

`cadam.Adam` and `cadam.CAdam` are compared with torch.optim.Adam, by lists and one tensor at a time. CAdam is also
compared with the same steps written by hand, which adds the mask and the count of aligned elements to torch's passes.
By default both count; "not counting" is ``track_alignment=False``. All contenders of a case run in turn, round after
round.

    python benchmarks/fallback.py [--rounds 25] [--threads 1]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import cadam

CASES = {"1 x 5M": [5_000_000], "1,000 x 64": [64] * 1_000, "50 x 100,000": [100_000] * 50}
LISTS, LOOP = "torch Adam, foreach", "torch Adam, single-tensor"
BETA1, BETA2, LR, EPS = 0.9, 0.999, 1e-3, 1e-8
mask = torch.ops.aten.threshold_backward  # zero where the second argument is <= 0

Step = Callable[[], object]


def parameters(sizes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


class ByHand:
    """CAdam as one would write it with list operations, or one tensor at a time."""

    def __init__(self, params: list[Tensor], foreach: bool) -> None:
        self.params = params
        self.m, self.v = ([torch.zeros_like(p) for p in params] for _ in range(2))
        self.steps = [torch.zeros(()) for _ in params]
        self.counts = [torch.zeros(3, dtype=torch.int64) for _ in params]
        self.step = torch.no_grad()(self.lists if foreach else self.loop)

    def lists(self) -> None:
        p, m, v, g = self.params, self.m, self.v, [p.grad for p in self.params]
        torch._foreach_add_(self.steps, torch.tensor(1.0), alpha=1.0)
        steps = [step.item() for step in self.steps]
        torch._foreach_lerp_(m, g, 1 - BETA1)
        torch._foreach_mul_(v, BETA2)
        torch._foreach_addcmul_(v, g, g, 1 - BETA2)
        below = torch._foreach_sqrt(v)
        torch._foreach_div_(below, [(1 - BETA2**t) ** 0.5 for t in steps])
        torch._foreach_add_(below, EPS)
        step = torch._foreach_div(m, below)
        del below
        agree = torch._foreach_sign(g)
        torch._foreach_mul_(agree, m)
        held = [mask(s, a, 0) for s, a in zip(step, agree, strict=True)]
        del step
        torch._foreach_mul_(held, [-LR / (1 - BETA1**t) for t in steps])
        torch._foreach_add_(p, held)
        torch._foreach_add_([c[0] for c in self.counts], [a.gt_(0).sum().long() for a in agree])
        torch._foreach_add_([c[1:] for c in self.counts], [x.numel() for x in p])

    def loop(self) -> None:
        for p, m, v, step, counts in zip(self.params, self.m, self.v, self.steps, self.counts, strict=True):
            g = p.grad
            assert g is not None
            step += 1
            t = step.item()
            m.lerp_(g, 1 - BETA1)
            v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
            below = (v.sqrt() / (1 - BETA2**t) ** 0.5).add_(EPS)
            agree = g.sign().mul_(m)
            p.add_(mask(m / below, agree, 0), alpha=-LR / (1 - BETA1**t))
            counts[0] += agree.gt_(0).sum().long()
            counts[1:] += p.numel()


def contenders(sizes: Sequence[int]) -> dict[str, Step]:
    def ours(cls: type[cadam.Optimizer], foreach: bool, counting: bool) -> Step:
        return cls(parameters(sizes), lr=LR, foreach=foreach, track_alignment=counting).step

    steps: dict[str, Step] = {}
    for torchs, engine, foreach in ((LISTS, "foreach", True), (LOOP, "eager", False)):
        steps[torchs] = torch.optim.Adam(parameters(sizes), lr=LR, foreach=foreach).step
        steps[f"Adam, {engine}, not counting"] = ours(cadam.Adam, foreach, False)
        steps[f"Adam, {engine}"] = ours(cadam.Adam, foreach, True)
        steps[f"CAdam by hand, {engine}"] = ByHand(parameters(sizes), foreach).step
        steps[f"CAdam, {engine}, not counting"] = ours(cadam.CAdam, foreach, False)
        steps[f"CAdam, {engine}"] = ours(cadam.CAdam, foreach, True)
    return steps


def times(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step by round. The order is random in each round."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for number in range(rounds + 3):  # the first three make the state and warm up
        for name in order.sample(list(steps), len(steps)):
            gc.collect(0)
            start = time.perf_counter()
            steps[name]()
            if number >= 3:
                found[name].append((time.perf_counter() - start) * 1e3)
    return found


def peak(step: Step) -> float:
    """Return the peak memory that torch allocates during a step, in megabytes above the level before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, threads {args.threads}, medians of {args.rounds} interleaved rounds")
    print("lists, single, by hand: times torch's two Adams and CAdam by hand of the same kind; extra: peak, in MB")
    for case, sizes in CASES.items():
        print(f"\n{case}\n  {'':30}{'ms':>8}  {'(min to p90)':20}{'lists':>7}{'single':>8}{'by hand':>9}{'extra':>9}")
        steps = contenders(sizes)
        spent = times(steps, args.rounds)
        for name, step in steps.items():
            by_hand = f"CAdam by hand, {'foreach' if 'foreach' in name else 'eager'}"
            # Ratios are taken within a round, so that a disturbance affects both sides.
            ratios = [
                statistics.median(a / b for a, b in zip(spent[name], spent[other], strict=True))
                for other in (LISTS, LOOP, *[by_hand] * ("CAdam" in name))
            ]
            to = f"{ratios[0]:7.2f}{ratios[1]:8.2f}" + (f"{ratios[2]:9.2f}" if ratios[2:] else " " * 9)
            ordered = sorted(spent[name])
            spread = f"({ordered[0]:.2f} to {ordered[int(0.9 * (len(ordered) - 1))]:.2f})"
            print(f"  {name:30}{statistics.median(ordered):8.2f}  {spread:20}{to}{peak(step):9.2f}", flush=True)


if __name__ == "__main__":
    main()

"""The engines without kernels of our own, foreach and eager, beside torch's: time and peak extra memory of a step.

`cadam.Adam` is compared with torch.optim.Adam, `cadam.CAdam` with the same steps written by hand, which adds the
mask and the count of aligned elements to torch's passes. By default both count; "not counting" is
``track_alignment=False``. All contenders of a case run in turn, round after round.

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
BETA1, BETA2, LR, EPS = 0.9, 0.999, 1e-3, 1e-8
hold = torch.ops.aten.threshold_backward  # zero where its second argument is <= 0

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
        held = [hold(s, a, 0) for s, a in zip(step, agree, strict=True)]
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
            p.add_(hold(m / below, agree, 0), alpha=-LR / (1 - BETA1**t))
            counts[0] += agree.gt_(0).sum().long()
            counts[1:] += p.numel()


def contenders(sizes: Sequence[int], foreach: bool) -> dict[str, Step]:
    def ours(cls: type[cadam.Optimizer], counting: bool) -> Step:
        return cls(parameters(sizes), lr=LR, foreach=foreach, track_alignment=counting).step

    return {
        "torch Adam": torch.optim.Adam(parameters(sizes), lr=LR, foreach=foreach).step,
        "cadam.Adam, not counting": ours(cadam.Adam, False),
        "cadam.Adam": ours(cadam.Adam, True),
        "CAdam by hand": ByHand(parameters(sizes), foreach).step,
        "cadam.CAdam, not counting": ours(cadam.CAdam, False),
        "cadam.CAdam": ours(cadam.CAdam, True),
    }


def times(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step in each round; every round has an order of its own."""
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
    """Megabytes that torch allocates during a step beyond what it held before, at the most."""
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
    print("to torch: times torch Adam's; to peer: for Adam torch's, for CAdam that by hand; extra: peak, in MB\n")
    for foreach in (True, False):
        for case, sizes in CASES.items():
            print(f"{'foreach' if foreach else 'eager'}, {case}")
            print(f"  {'':26}{'ms':>8}  {'(min to p90)':18}{'to torch':>8}{'to peer':>9}{'extra':>8}{'to peer':>9}")
            steps = contenders(sizes, foreach)
            spent = times(steps, args.rounds)
            extra = {name: peak(step) for name, step in steps.items()}
            for name in steps:
                reference = "CAdam by hand" if "CAdam" in name else "torch Adam"
                # Within a round, so that a slow moment of the machine hits both.
                to_torch, to_peer = (
                    statistics.median(a / b for a, b in zip(spent[name], spent[other], strict=True))
                    for other in ("torch Adam", reference)
                )
                ordered = sorted(spent[name])
                spread = f"({ordered[0]:.2f} to {ordered[int(0.9 * (len(ordered) - 1))]:.2f})"
                print(
                    f"  {name:26}{statistics.median(ordered):8.2f}  {spread:18}{to_torch:8.2f}{to_peer:9.2f}"
                    f"{extra[name]:8.2f}{extra[name] / extra[reference]:9.2f}"
                )
            print(flush=True)


if __name__ == "__main__":
    main()

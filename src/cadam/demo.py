"""Adam and CAdam chase a moving target, side by side: the paper's first numerical experiment.

One parameter x, two losses, three ways in which the optimum x* moves (cycle of 40 steps, 100 steps, lr 0.5).
Regret is the sum of the losses met on the way.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import Adam, CAdam

CYCLE, STEPS, LR = 40, 100, 0.5

LOSSES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "L1": lambda x, target: (x - target).abs().sum(),
    "L2": lambda x, target: (x - target).square().sum(),
}
TARGETS: dict[str, Callable[[int], float]] = {
    "sudden": lambda t: float(t // CYCLE % 2),
    "linear": lambda t: t / CYCLE,
    "sine": lambda t: math.sin(2 * math.pi * t / CYCLE),
}


@dataclass(frozen=True)
class Chase:
    """Where x went, and the regret it met."""

    path: list[float]
    regret: float
    aligned: float


def chase(
    optimizer: type[Adam], loss: Callable[[torch.Tensor, float], torch.Tensor], target: Callable[[int], float]
) -> Chase:
    """Run one optimizer after one target, from x = 0."""
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    opt = optimizer([x], lr=LR)
    path, regret = [], 0.0
    for t in range(1, STEPS + 1):
        value = loss(x, target(t))
        regret += value.item()
        opt.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        opt.step()
        path.append(x.item())
    return Chase(path, regret, opt.alignment().total.over_all)


def table() -> dict[tuple[str, str], tuple[Chase, Chase]]:
    """Both optimizers on every loss and target."""
    return {
        (loss_name, target_name): (chase(Adam, loss, target), chase(CAdam, loss, target))
        for loss_name, loss in LOSSES.items()
        for target_name, target in TARGETS.items()
    }


def draw(results: dict[tuple[str, str], tuple[Chase, Chase]], path: str) -> None:
    """The paths of both optimizers around the target, one panel each."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise SystemExit("the figure needs matplotlib (pip install matplotlib)") from error

    figure, panels = plt.subplots(2, 3, figsize=(11, 5.2), sharex=True, sharey=True, layout="constrained")
    steps = range(1, STEPS + 1)
    for panel, ((loss, target), (adam, cadam)) in zip(panels.flat, results.items(), strict=True):
        panel.plot(steps, [TARGETS[target](t) for t in steps], color="0.55", lw=1, ls="--", label="target")
        panel.plot(steps, adam.path, color="#c8553d", lw=1.6, label="Adam")
        panel.plot(steps, cadam.path, color="#2a6f97", lw=1.6, label="CAdam")
        worse = " (worse)" if cadam.regret > adam.regret else ""
        title = f"{loss}, {target}: regret Adam {adam.regret:.2f}, CAdam {cadam.regret:.2f}{worse}"
        panel.set_title(title, fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, fontsize=9)
    for panel in panels[:, 0]:
        panel.set_ylabel("x")
    for panel in panels[1]:
        panel.set_xlabel("step")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figure", metavar="PATH", help="also draw the paths (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    results = table()
    print(f"Regret over {STEPS} steps after a moving target, lr {LR}: lower is better\n")
    print("loss  target     Adam   CAdam   CAdam/Adam   aligned")
    for (loss, target), (adam, cadam) in results.items():
        ratio = cadam.regret / adam.regret
        note = "" if ratio < 1 else "   worse here"
        print(f"{loss:4}  {target:7} {adam.regret:7.2f} {cadam.regret:7.2f} {ratio:12.2f} {cadam.aligned:9.0%}{note}")
    if options.figure:
        draw(results, options.figure)
        print(f"\nfigure: {options.figure}")
    return 0

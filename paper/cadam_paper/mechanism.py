"""The figure that explains confidence: one weight, step by step, with Adam and with CAdam.

The loss is the distance of the weight to a minimum that jumps once, and its gradients are noisy. The figure is
an illustration with one fixed seed, not evidence: `numerical` measures the same kind of problem over many seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

import cadam
from cadam.ab.report import palette
from cadam.statistics.intervals import Array

from .harness.panels import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, JUMP, LR, NOISE, SEED = 48, 14, 0.1, 0.6, 0


@dataclass(frozen=True)
class Path:
    """The course of one weight.

    Attributes:
        weights: The weight before each step, and after the last one.
        gradients: The gradient of each step.
        momenta: The first moment after each step.
    """

    weights: Array
    gradients: Array
    momenta: Array

    @property
    def is_masked(self) -> Array:
        """Whether gradient and momentum of a step disagree in sign, so that CAdam does not move the weight."""
        masked: Array = self.gradients * self.momenta <= 0
        return masked


def minimum() -> Array:
    """Return the position of the minimum in each step: it jumps from 1 to -1."""
    return np.where(np.arange(STEPS) < JUMP, 1.0, -1.0)


def walk(optimizer_class: type[cadam.Optimizer]) -> Path:
    """Run an optimizer on one weight. All optimizers meet the same noise."""
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = optimizer_class([weight], lr=LR)
    noise = NOISE * np.random.default_rng(SEED).standard_normal(STEPS)
    weights, gradients, momenta = [0.0], [], []
    for target, error in zip(minimum(), noise, strict=True):
        weight.grad = torch.sign(weight.detach() - target) + error
        optimizer.step()
        gradients.append(float(weight.grad))
        momenta.append(float(optimizer.state[weight]["exp_avg"]))
        weights.append(float(weight.detach()))
    return Path(np.array(weights), np.array(gradients), np.array(momenta))


def figure(width: float = 5.8) -> Figure:
    """Draw gradient and momentum of CAdam's weight with its masked steps, and the weights of Adam and CAdam.

    Args:
        width: The width in inches.
    """
    paths = {"CAdam": walk(cadam.CAdam), "Adam": walk(cadam.Adam)}
    path, steps = paths["CAdam"], np.arange(1, STEPS + 1)
    drawn, axes = panels(2, 1, width, 3.4, sharex=True)
    top, bottom = axes[:, 0]
    # The mask changes at these edges between steps: it begins at every first and ends at every second one.
    edges = np.flatnonzero(np.diff(path.is_masked, prepend=False, append=False)) + 0.5
    for panel in (top, bottom):
        for start, end in edges.reshape(-1, 2):
            panel.axvspan(start, end, color=palette.GRID, lw=0, zorder=0)
    top.bar(steps, path.gradients, width=0.7, color=palette.TARGET, label="gradient")
    top.plot(steps, path.momenta, color=palette.INK, lw=1.6, label="momentum")
    top.axhline(0, color=palette.MUTED, lw=0.8)
    top.set_ylabel("gradient and\nmomentum (CAdam)")
    top.legend(loc="lower right", fontsize=8, ncols=2)
    bottom.step(steps, minimum(), where="mid", color=palette.TARGET, ls="--", lw=1.2, label="minimum")
    for name, of_arm in paths.items():
        color = palette.arm_colors(paths)[name]
        bottom.plot(np.arange(STEPS + 1) + 0.5, of_arm.weights, color=color, lw=1.8, label=name)
    bottom.set(xlabel="step", ylabel="weight", xlim=(0.5, STEPS + 0.5))
    bottom.legend(loc="lower left", fontsize=8, handlelength=1.2)
    top.set_title(
        "One weight, noisy gradients. Shaded: gradient\nand momentum differ in sign, CAdam waits",
        loc="left",
        fontsize=9.5,
    )
    return drawn


def numbers() -> list[str]:
    """List the numbers of the figure, to detect that the image file is outdated."""
    return [f"{walk(optimizer).weights.round(6).tolist()}" for optimizer in (cadam.CAdam, cadam.Adam)]

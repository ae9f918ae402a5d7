"""The numerical study: a moving minimum (paper fig. 2), landscapes with noise (fig. 3) and without, and sweeps.

Every update is elementwise, so a spec runs all its problems and many runs of each as one tensor: no run feels
another. What is random under a seed, and the same for every optimizer: where runs start, the phase of the moving
minimum, and the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cadam
from cadam.ab.report import palette
from cadam.ab.report.palette import panels
from cadam.ab.results import Outcome, Results, RunSpec, tuning_seeds
from cadam.ab.summary import Summary, comparison_row
from cadam.statistics import comparison as statistics
from cadam.statistics.intervals import Array, Interval
from cadam.statistics.learning_rates import RateChoice, choose_lr

from .harness.comparisons import family_row, tally
from .harness.experiment import Experiment, Plan, metric_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAIRS = (
    ("CAdam", "Adam"),
    ("CAdamW", "AdamW"),
    ("CAmsGrad", "AmsGrad"),
    ("CRAdam", "RAdam"),
    ("CYogi", "Yogi"),
    ("CAdaBelief", "AdaBelief"),
    ("CSGDM", "SGDM"),
    ("CLion", "Lion"),
)
"""Every optimizer of the catalog, with confidence and without."""
ARMS = tuple(name for pair in PAIRS for name in pair)


def descend(
    optimizer: str, start: Array, gradient: Callable[[Array, int], Array], steps: int, **options: Any
) -> tuple[Array, float]:
    """Where an optimizer goes from `start`, as an array (1 + steps, *start.shape), and its alignment ratio.

    `gradient(x, t)` is that of step t, counted from 1. Each element goes its own way.
    """
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    x.grad = torch.zeros_like(x)
    position, slope = x.detach().numpy(), x.grad.numpy()
    opt: cadam.Optimizer = getattr(cadam, optimizer)([x], **options)
    path = np.empty((1 + steps, *position.shape))
    path[0] = position
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(1, 1 + steps):
            slope[...] = gradient(position, t)
            opt.step()
            path[t] = position
    return path, opt.alignment().total.over_all


# A moving minimum ---------------------------------------------------------------------------------------------

CYCLE, SHIFT_STEPS, SHIFT_LR, SHIFT_RUNS = 40, 100, 0.5, 64
LOSSES = ("L1", "L2")
TARGETS: dict[str, Callable[[Array], Array]] = {
    "sudden": lambda cycles: np.floor(cycles) % 2,
    "linear": lambda cycles: cycles,
    "sine": lambda cycles: np.sin(2 * np.pi * cycles),
}
"""Where the minimum is after so many cycles."""
SHIFTS = tuple((loss, target) for loss in LOSSES for target in TARGETS)


@dataclass(frozen=True)
class Chase:
    """Runs after moving minima. Axes: (step,) loss and target as in SHIFTS, cycle length, run."""

    path: Array
    target: Array
    regret: Array
    aligned: float


def chase(optimizer: str, lr: float, cycles: Sequence[float], starts: Array, phases: Array, steps: int) -> Chase:
    """Follow every minimum x*(t/cycle + phase) from every start. Regret is the sum of the losses met on the way."""
    elapsed = np.arange(1, 1 + steps)[:, None, None] / np.asarray(cycles, dtype=float)[:, None] + phases
    target = np.stack([TARGETS[name](elapsed) for _, name in SHIFTS], axis=1)
    is_l1 = np.array([loss == "L1" for loss, _ in SHIFTS])[:, None, None]

    def gradient(x: Array, t: int) -> Array:
        away = x - target[t - 1]
        return np.asarray(np.where(is_l1, np.sign(away), 2 * away))

    start = np.broadcast_to(starts, target.shape[1:])
    path, aligned = descend(optimizer, start, gradient, steps, lr=lr)
    with np.errstate(over="ignore", invalid="ignore"):
        away = path[:-1] - target
        regret = np.where(is_l1, np.abs(away), away**2).sum(axis=0)
    return Chase(path, target, regret, aligned)


def random_chases(seed: int, runs: int) -> tuple[Array, Array]:
    """Starts between -1 and 1, and phases as a share of the cycle."""
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, runs), rng.uniform(0, 1, runs)


def compute_shift(spec: RunSpec) -> Outcome:
    """The paper's run (x0 = 0, phase 0: nothing random), and the mean regret over runs with random start and phase."""
    runs, steps, cycle = spec.settings["runs"], spec.settings["steps"], spec.settings["cycle"]
    starts, phases = random_chases(spec.seed, runs)
    found = chase(spec.optimizer, spec.lr, [cycle], np.append(0.0, starts), np.append(0.0, phases), steps)
    metrics = {"aligned": found.aligned}
    for (loss, target), regret in zip(SHIFTS, found.regret[:, 0], strict=True):
        metrics[metric_name("paper regret", loss, target)] = float(regret[0])
        metrics[metric_name("regret", loss, target)] = mean = float(regret[1:].mean())
        metrics[metric_name("log10 regret", loss, target)] = float(np.log10(mean))
    return Outcome(metrics, {"path": found.path[1:, :, 0, 0].T, "target": found.target[:, :, 0, 0].T})


def shift_specs(plan: Plan, _: Results) -> list[RunSpec]:
    settings = {"runs": SHIFT_RUNS, "steps": SHIFT_STEPS, "cycle": CYCLE}
    return _arm_specs("fig-shift", plan, SHIFT_LR, settings)


def _arm_specs(experiment: str, plan: Plan, lr: float, settings: Mapping[str, Any]) -> list[RunSpec]:
    """Every arm under every test seed, and Adam once more under other seeds: its noise floor."""
    return [
        RunSpec(experiment, "", "", arm, lr, "", seed, settings)
        for arm in ARMS
        for seed in (*plan.test_seeds(), *(plan.repeat_seeds() if arm == "Adam" else ()))
    ]


def _split(results: Results, arm: str) -> tuple[Results, Results]:
    """The results of an arm: under test seeds, and under the others."""
    mine = results.where(optimizer=arm)
    test = set(Plan("full", len(mine)).test_seeds())
    return Results([r for r in mine if r.spec.seed in test]), Results([r for r in mine if r.spec.seed not in test])


def _compare(results: Results, pair: tuple[str, str], metric: str) -> statistics.Comparison:
    arm, baseline = pair
    test, repeat = _split(results, baseline)
    return statistics.compare(
        _split(results, arm)[0].metric(metric),
        test.metric(metric),
        names=pair,
        better="lower",
        repeat=repeat.metric(metric) or None,
    )


def _seconds(results: Results, *arms: str) -> float:
    return sum(results.where(optimizer=arm).seconds for arm in arms)


def shift_summary(results: Results) -> Summary:
    rows, better = [], []
    first = results[0].spec.seed
    seconds = _seconds(results, "Adam", "CAdam")
    for loss, target in SHIFTS:
        name = metric_name("paper regret", loss, target)
        values = {arm: results.where(optimizer=arm, seed=first).metric(name)[first] for arm in ("CAdam", "Adam")}
        comparison = statistics.compare(
            {0: values["CAdam"]}, {0: values["Adam"]}, names=("CAdam", "Adam"), better="lower", random=False
        )
        better.append(comparison.kind == "better")
        rows.append(comparison_row(f"{loss}, {target}: the paper's run", "CAdam lower", comparison, seconds, 2))
    names = {f"{loss} {target}": metric_name("regret", loss, target) for loss, target in SHIFTS}
    random = {name: _compare(results, ("CAdam", "Adam"), metric) for name, metric in names.items()}
    for (loss, target), comparison in zip(SHIFTS, random.values(), strict=True):
        rows.append(comparison_row(f"{loss}, {target}: random starts", "CAdam lower", comparison, seconds, 2))
    for pair in PAIRS[1:]:
        compared = {name: _compare(results, pair, metric) for name, metric in names.items()}
        rows.append(family_row(f"{pair[0]} against {pair[1]}", compared, _seconds(results, *pair)))
    worse = [name for name, won in zip(names, better, strict=True) if not won]
    verdict = (
        f"CAdam has the lower regret in {sum(better)} of the paper's {len(SHIFTS)} panels, one run from x0 = 0 each"
        + (f", not in {', '.join(worse)}. " if worse else ". ")
        + f"Over random starts and phases: {tally(list(random.values()), 'panels', 'lower', 'higher')}."
    )
    if turned := [name for name in worse if random[name].kind == "better"]:
        verdict += f" So {', '.join(turned)} is higher from that one start, and lower on average."
    return Summary(verdict, rows)


def shift_figures(results: Results) -> dict[str, Figure]:
    first = results[0].spec.seed
    figure, axes = panels(2, 3, 10.5, 5.4, sharex=True, sharey=True)
    adam, cadam = (results.where(optimizer=arm, seed=first)[0].outcome for arm in ("Adam", "CAdam"))
    for number, (panel, (loss, target)) in enumerate(zip(axes.flat, SHIFTS, strict=True)):
        steps = np.arange(1, 1 + adam.curves["path"].shape[1])
        panel.plot(steps, adam.curves["target"][number], color=palette.TARGET, lw=1.2, ls="--", label="minimum x*")
        panel.plot(steps, adam.curves["path"][number], color=palette.ADAM, lw=1.5, label="Adam's x")
        panel.plot(steps, cadam.curves["path"][number], color=palette.CADAM, lw=1.5, label="CAdam's x")
        regrets = [outcome.metrics[metric_name("paper regret", loss, target)] for outcome in (adam, cadam)]
        worse = ", worse" if regrets[1] > regrets[0] else ""
        panel.set_title(f"{loss}, {target}: regret Adam {regrets[0]:.2f}, CAdam {regrets[1]:.2f}{worse}", fontsize=9)
    _legend(axes[0, 0], loc="lower left")
    for panel in axes[:, 0]:
        panel.set_ylabel("x")
    for panel in axes[-1]:
        panel.set_xlabel("step")
    ratios = {
        f"{loss}, {target}": {
            "": {p: _difference(results, p, metric_name("log10 regret", loss, target)) for p in PAIRS}
        }
        for loss, target in SHIFTS
    }
    return {
        "A minimum that moves: x* and where Adam and CAdam go (start 0, lr 0.5, cycle 40)": figure,
        "Regret with confidence over regret without, random starts and phases, with 95% intervals": forest(ratios, 3),
    }


_REGRET = (
    "Regret is the loss summed along the way: less is better. The loss is the distance to the minimum (L1) or its "
    "square (L2); the minimum jumps (sudden), drifts evenly (linear) or swings to and fro (sine)."
)
FIG_SHIFT = Experiment(
    name="fig-shift",
    title="A moving minimum (fig. 2)",
    shows="Trajectories of Adam and CAdam after a minimum that jumps, drifts or oscillates, and their regret.",
    claim="CAdam closely follows the minimum and has the lower regret, for both losses and all three kinds of change.",
    measure=_REGRET,
    run_specs=shift_specs,
    compute=compute_shift,
    summary=shift_summary,
    figures=shift_figures,
    seconds={"quick": 5, "full": 10},
    tolerance=1e-6,
    seeds={"quick": 4, "full": 10},
    notes=(
        "The paper's run is deterministic (x0 = 0). The intervals come from runs with random start (-1 to 1) and "
        f"phase, {SHIFT_RUNS} per seed, the same for every optimizer; a seed counts as one value.",
        "The paper prints no regrets; its text says CAdam's is lower throughout. The start x0 is not given; 0 is used.",
        "Every optimizer runs at the paper's lr of 0.5, which was set for Adam; sweep-cycle tunes each.",
    ),
)

# Landscapes ---------------------------------------------------------------------------------------------------

NOISE_STEPS, NOISE_LR, NOISE_RUNS, TAIL = 1500, 0.1, 64, 150
MEASURES = {
    "loss": "log10 of the mean loss",
    "end": "log10 of the loss at the end",
    "length": "log10 of the length of the path",
}
FLOOR = 1e-12
"""Losses below this count as this: beyond it, ratios say how a run rounds, not how it learns."""
Bounds = tuple[float, float, float, float]


@dataclass(frozen=True)
class Landscape:
    """A function of the plane with minimum 0, its gradient, and where runs start: drawn one, and box for the others."""

    formula: str
    value: Callable[[Array, Array], Array]
    gradient: Callable[[Array, Array], tuple[Array, Array]]
    minimum: tuple[float, float] = (0.0, 0.0)
    start: tuple[float, float] = (-1.5, 1.0)
    box: Bounds = (-2.0, 2.0, -2.0, 2.0)


def _f1(x: Array, y: Array) -> Array:
    return np.asarray(np.abs(x) + np.abs(y))


def _f1_gradient(x: Array, y: Array) -> tuple[Array, Array]:
    return np.sign(x), np.sign(y)


def _f2(x: Array, y: Array) -> Array:
    return np.asarray(np.abs(x + y) + np.abs(x - y) / 10)


def _f2_gradient(x: Array, y: Array) -> tuple[Array, Array]:
    along, across = np.sign(x + y), np.sign(x - y) / 10
    return along + across, along - across


def _f3(x: Array, y: Array) -> Array:
    return np.asarray((x + y) ** 2 + (x - y) ** 2 / 10)


def _f3_gradient(x: Array, y: Array) -> tuple[Array, Array]:
    along, across = 2 * (x + y), (x - y) / 5
    return along + across, along - across


def _f4(x: Array, y: Array) -> Array:
    return np.asarray((1 - x) ** 2 + 100 * (y - x**2) ** 2)


def _f4_gradient(x: Array, y: Array) -> tuple[Array, Array]:
    off = 200 * (y - x**2)
    return 2 * (x - 1) - 2 * x * off, off


LANDSCAPES = {
    "separable L1": Landscape("|x| + |y|", _f1, _f1_gradient),
    "inseparable L1": Landscape("|x+y| + |x-y|/10", _f2, _f2_gradient),
    "inseparable L2": Landscape("(x+y)² + (x-y)²/10", _f3, _f3_gradient),
    "Rosenbrock": Landscape("(1-x)² + 100(y-x²)²", _f4, _f4_gradient, (1.0, 1.0), (-1.5, 1.5), (-2.0, 2.0, -1.0, 3.0)),
}
READINGS = {
    "component": "each component of the gradient scaled (appendix)",
    "whole": "the whole function scaled (main text)",
}
"""The paper's two descriptions of the noise."""


@lru_cache(maxsize=4)
def noise(seed: int, runs: int, steps: int) -> Array:
    """Factors (step, reading, run, component): 1, or with probability 0.5 uniform on (-1, 1).

    Under the second reading both components share the first one's factor.
    """
    rng = np.random.default_rng(seed)
    shape = (steps, runs, 2)
    factors = np.where(rng.random(shape) < 0.5, rng.uniform(-1, 1, shape), 1.0)
    return np.stack([factors, np.broadcast_to(factors[..., :1], shape)], axis=1)


def random_starts(seed: int, runs: int) -> Array:
    """Starts (landscape, run, component): the one that is drawn, then `runs` others anywhere in the box."""
    rng = np.random.default_rng([seed, 1])
    starts = np.empty((len(LANDSCAPES), 1 + runs, 2))
    for place, landscape in zip(starts, LANDSCAPES.values(), strict=True):
        left, right, bottom, top = landscape.box
        place[0] = landscape.start
        place[1:] = rng.uniform((left, bottom), (right, top), (runs, 2))
    return starts


def compute_landscapes(spec: RunSpec) -> Outcome:
    """All landscapes at once. Over the runs with random start: the mean log10 of the mean loss, of the loss at the end
    (mean of the last tenth) and of the length of the path. Losses are those of the function itself, without noise."""
    runs, steps, readings = spec.settings["runs"], spec.settings["steps"], spec.settings["readings"]
    starts = random_starts(spec.seed, runs)[:, None].repeat(len(readings), axis=1)
    clean = readings == ["none"]
    factors = None if clean else noise(spec.seed, 1 + runs, steps)[:, [list(READINGS).index(r) for r in readings]]

    def gradient(x: Array, t: int) -> Array:
        slopes = [f.gradient(p[..., 0], p[..., 1]) for f, p in zip(LANDSCAPES.values(), x, strict=True)]
        stacked = np.stack([np.stack(slope, axis=-1) for slope in slopes])
        return stacked if factors is None else stacked * factors[t - 1]

    path, aligned = descend(spec.optimizer, starts, gradient, steps, lr=spec.lr)
    metrics, curves = {"aligned": aligned}, {}
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(np.diff(path, axis=0), axis=-1).sum(axis=0)
        for number, (name, landscape) in enumerate(LANDSCAPES.items()):
            losses = landscape.value(path[:, number, ..., 0], path[:, number, ..., 1])
            for column, reading in enumerate(readings):
                loss = losses[:, column, 1:]
                metrics[metric_name("loss", name, reading)] = _mean_log10(loss[1:].mean(axis=0))
                metrics[metric_name("end", name, reading)] = _mean_log10(loss[-(steps // 10) :].mean(axis=0))
                metrics[metric_name("length", name, reading)] = _mean_log10(lengths[number, column, 1:])
                if spec.settings["draw"]:
                    curves[metric_name("path", name, reading)] = path[:, number, column, 0].astype(np.float32)
    return Outcome(metrics, curves)


def _mean_log10(values: Array) -> float:
    return float(np.log10(np.maximum(values, FLOOR)).mean())


def _landscape_specs(experiment: str, plan: Plan, readings: Sequence[str]) -> list[RunSpec]:
    settings = {"runs": NOISE_RUNS, "steps": NOISE_STEPS, "readings": list(readings)}
    specs = _arm_specs(experiment, plan, NOISE_LR, settings)
    first = plan.test_seeds()[0]
    return [_drawn(spec, spec.seed == first and spec.optimizer in PAIRS[0]) for spec in specs]


def _drawn(spec: RunSpec, draw: bool) -> RunSpec:
    """The spec with or without the paths that the figure shows."""
    return replace(spec, settings={**spec.settings, "draw": draw})


def noise_specs(plan: Plan, _: Results) -> list[RunSpec]:
    return _landscape_specs("fig-noise", plan, list(READINGS))


def no_noise_specs(plan: Plan, _: Results) -> list[RunSpec]:
    return _landscape_specs("fig-no-noise", plan, ["none"])


def landscape_summary(results: Results) -> Summary:
    """The losses of Adam and CAdam landscape by landscape, the lengths of their paths, and how the other pairs fare."""
    readings = results[0].spec.settings["readings"]
    problems = [(name, reading) for reading in readings for name in LANDSCAPES]
    rows, ends = [], []
    seconds = _seconds(results, *PAIRS[0])
    claim = "CAdam lower" if readings != ["none"] else ""
    for measure, label in MEASURES.items():
        for name, reading in problems:
            comparison = _compare(results, PAIRS[0], metric_name(measure, name, reading))
            what = f"{label}, {name}" + ("" if reading == "none" else f", noise by {reading}")
            rows.append(comparison_row(what, claim, comparison, seconds))
            if measure == "end":
                ends.append(comparison)
    for pair in PAIRS[1:]:
        compared = {
            name if reading == "none" else f"{name} ({reading})": _compare(
                results, pair, metric_name("end", name, reading)
            )
            for name, reading in problems
        }
        what = f"{pair[0]} against {pair[1]}, loss at the end"
        rows.append(family_row(what, compared, _seconds(results, *pair)))
    counts = tally(ends, "problems", "lower", "higher")
    return Summary(f"CAdam's loss at the end, against Adam's: {counts}.", rows)


def landscape_figures(results: Results) -> dict[str, Figure]:
    readings = results[0].spec.settings["readings"]
    figures = {}
    for reading in readings:
        how = "no noise" if reading == "none" else f"noise: {READINGS[reading]}"
        figures[f"Paths from the marked start, {how}"] = _paths(results, reading)
    ratios = {
        name: {
            "" if reading == "none" else reading: {
                p: _difference(results, p, metric_name("end", name, reading)) for p in PAIRS
            }
            for reading in readings
        }
        for name in LANDSCAPES
    }
    caption = "Loss at the end with confidence over loss without, random starts, with 95% intervals"
    return {**figures, caption: forest(ratios, 4)}


def _paths(results: Results, reading: str) -> Figure:
    figure, axes = panels(2, 4, 11, 6.2)
    drawn = results.where(draw=True)
    for row, (arm, color) in zip(axes, (("Adam", palette.ADAM), ("CAdam", palette.CADAM)), strict=True):
        outcome = drawn.where(optimizer=arm)[0].outcome
        for panel, (name, landscape) in zip(row, LANDSCAPES.items(), strict=True):
            x, y = outcome.curves[metric_name("path", name, reading)].T
            _contours(panel, landscape)
            panel.plot(x, y, color=color, lw=0.8)
            panel.plot(*landscape.start, "o", color=palette.INK, ms=4)
            panel.plot(*landscape.minimum, "*", color=palette.INK, ms=9)
            end = landscape.value(x[-TAIL:].astype(float), y[-TAIL:].astype(float)).mean()
            panel.set_title(f"{arm}, {name}\nloss at the end {end:.2g}", fontsize=9)
    return figure


def _contours(panel: Axes, landscape: Landscape) -> None:
    left, right, bottom, top = landscape.box
    x, y = np.meshgrid(np.linspace(left - 0.2, right + 0.2, 161), np.linspace(bottom - 0.2, top + 0.2, 161))
    height = landscape.value(x, y)
    levels = np.quantile(height, np.linspace(0.02, 0.95, 9) ** 1.5)
    panel.contour(x, y, height, levels=levels, colors=palette.GRID, linewidths=0.8)
    panel.set_xlim(left - 0.2, right + 0.2)
    panel.set_ylim(bottom - 0.2, top + 0.2)


_NOISE_NOTES = (
    "The paper does not say where runs start. One drawn start is fixed; the numbers come from "
    f"{NOISE_RUNS} random starts per seed, the same for every optimizer; a seed counts as one value.",
    "Losses are of the function without noise; over runs, the mean of log10 is taken; below 1e-12 they count as 1e-12.",
    "Every optimizer runs at the paper's lr of 0.1, which was set for Adam; sweep-lr tunes each.",
)

_LOSS = (
    "Loss is the height above the lowest point of the landscape: less is better. It is given as log10, so that a "
    "difference of -1 means a tenth of it. L1 landscapes are sums of absolute values, L2 of squares; Rosenbrock is a "
    "bent valley."
)
FIG_NOISE = Experiment(
    name="fig-noise",
    title="Noisy landscapes (fig. 3)",
    shows="Paths of Adam and CAdam on four landscapes when half of the gradients are scaled by U(-1, 1).",
    claim="CAdam's trajectories are smoother and it outperforms Adam in stability and robustness.",
    measure=_LOSS,
    run_specs=noise_specs,
    compute=compute_landscapes,
    summary=landscape_summary,
    figures=landscape_figures,
    seconds={"quick": 28, "full": 35},
    tolerance=1e-6,
    seeds={"quick": 4, "full": 5},
    notes=(
        "The main text scales the function as a whole, the appendix each component of the gradient. Both are shown; "
        "the first rows follow the appendix.",
        *_NOISE_NOTES,
    ),
)

FIG_NO_NOISE = Experiment(
    name="fig-no-noise",
    title="The same landscapes without noise (appendix)",
    shows="Paths of Adam and CAdam on the four landscapes with exact gradients.",
    claim="The natural behavior of both optimizers; the paper draws no conclusion.",
    measure=_LOSS,
    run_specs=no_noise_specs,
    compute=compute_landscapes,
    summary=landscape_summary,
    figures=landscape_figures,
    seconds={"quick": 28, "full": 35},
    tolerance=1e-6,
    seeds={"quick": 4, "full": 5},
    notes=("Only the starts are random.", *_NOISE_NOTES),
)

# Figures ------------------------------------------------------------------------------------------------------


def _legend(panel: Axes, **options: Any) -> None:
    panel.legend(frameon=False, fontsize=8, labelcolor=palette.INK, **options)


def _difference(results: Results, pair: tuple[str, str], metric: str) -> Interval:
    """A metric with confidence minus the same without, over paired test seeds."""
    return _compare(results, pair, metric).difference


Ratios = Mapping[str, Mapping[str, Mapping[tuple[str, str], Interval]]]


def forest(ratios: Ratios, columns: int) -> Figure:
    """Intervals of log10 ratios: a panel for each problem, a line for each pair, a color for each variant."""
    rows = -(-len(ratios) // columns)
    figure, axes = panels(rows, columns, 11, 0.6 + 2.5 * rows, sharey=True)
    for panel, (title, variants) in zip(axes.flat, ratios.items(), strict=True):
        panel.axvline(0, color=palette.MUTED, lw=0.8)
        for number, (variant, pairs) in enumerate(variants.items()):
            offset = 0.3 * (number - (len(variants) - 1) / 2)
            color, marker = ((palette.SERIES[0], "o"), (palette.SERIES[4], "D"))[number]
            panel.plot([], [], marker, color=color, ms=4, ls="", label=variant)
            for line, found in enumerate(pairs.values()):
                if not found.count:
                    panel.text(0, line + offset, " diverged", color=palette.MUTED, fontsize=7, va="center")
                    continue
                panel.plot([found.low, found.high], [line + offset] * 2, color=color, lw=2)
                panel.plot(found.mean, line + offset, marker, color=color, ms=4)
        panel.set_title(title, fontsize=9)
        panel.set_yticks(range(len(PAIRS)), [arm for arm, _ in PAIRS])
        low, high = panel.get_xlim()
        panel.set_xlim(min(low, -0.1), max(high, 0.1))
        panel.set_xticks(*_factors(*panel.get_xlim()))
        panel.grid(axis="x", color=palette.GRID, lw=0.5)
        panel.set_axisbelow(True)
    axes[0, 0].invert_yaxis()
    if len(next(iter(ratios.values()))) > 1:
        _legend(axes[0, 0], title="noise by", title_fontsize=8, loc="upper right")
    for panel in axes[-1]:
        panel.set_xlabel("← confidence better      worse →")
    return figure


def _factors(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks and labels of an axis of log10 ratios: round factors that leave each other room."""
    for factors in (
        [0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2],
        [0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.2],
        [0.2, 0.3, 0.5, 0.7, 1, 1.5],
        [0.1, 0.2, 0.5, 1, 2, 5, 10],
        [10.0**n for n in range(-12, 13)],
        [10.0**n for n in range(-12, 13, 3)],
    ):
        places = [place for place in np.log10(factors) if low <= place <= high]
        if len(places) > 2 and min(np.diff(places)) > 0.12 * (high - low) and places[0] < low + 0.4 * (high - low):
            break
    return [float(place) for place in places], [f"{10**place:.2g}×" for place in places]


# Sweeps -------------------------------------------------------------------------------------------------------

CYCLES = (5, 10, 20, 40, 80, 160, 320)
SWEEP_LRS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
SWEEP_STEPS, SWEEP_RUNS = 400, 16
NOISE_LRS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def _sweep_specs(experiment: str, plan: Plan, lrs: Sequence[float], settings: Mapping[str, Any]) -> list[RunSpec]:
    """Every arm at every learning rate, under test seeds and under as many tuning seeds."""
    seeds = (*plan.test_seeds(), *tuning_seeds(plan.seeds))
    return [RunSpec(experiment, "", "", arm, lr, "", seed, settings) for arm in ARMS for lr in lrs for seed in seeds]


def cycle_specs(plan: Plan, _: Results) -> list[RunSpec]:
    return _sweep_specs("sweep-cycle", plan, SWEEP_LRS, {"runs": SWEEP_RUNS, "steps": SWEEP_STEPS, "cycles": CYCLES})


def compute_cycles(spec: RunSpec) -> Outcome:
    """log10 of the mean regret per step after every minimum, at every cycle length."""
    steps = spec.settings["steps"]
    starts, phases = random_chases(spec.seed, spec.settings["runs"])
    found = chase(spec.optimizer, spec.lr, spec.settings["cycles"], starts, phases, steps)
    with np.errstate(divide="ignore"):
        regret = np.log10(found.regret.mean(axis=-1) / steps)
    metrics = {
        metric_name(loss, target, cycle): float(regret[i, j])
        for i, (loss, target) in enumerate(SHIFTS)
        for j, cycle in enumerate(spec.settings["cycles"])
    }
    return Outcome({**metrics, "all": float(regret.mean())})


def _tuned(results: Results, arm: str, metric: str) -> tuple[RateChoice, dict[int, float]]:
    """The learning rate that tuning seeds choose, and the metric at it under test seeds."""
    test, tuning = _split(results, arm)
    choice = choose_lr(arm, tuning.metric_by_rate(metric), "lower")
    return choice, test.where(lr=choice.lr).metric(metric)


def _tuned_comparison(
    results: Results, pair: tuple[str, str], metric: str
) -> tuple[statistics.Comparison, list[RateChoice]]:
    """A pair, each arm at its own learning rate."""
    chosen = [_tuned(results, arm, metric) for arm in pair]
    arm, baseline = (values for _, values in chosen)
    return statistics.compare(arm, baseline, names=pair, better="lower"), [choice for choice, _ in chosen]


def _tuned_summary(results: Results, lines: Sequence[tuple[tuple[str, str], str, str]]) -> Summary:
    """A row for each pair, name and metric; and what the grids leave open."""
    rows, comparisons, warnings = [], [], []
    for pair, what, metric in lines:
        comparison, choices = _tuned_comparison(results, pair, metric)
        lrs = ", ".join(f"{choice.arm} lr {choice.lr:g}" for choice in choices)
        rows.append(comparison_row(f"{what} ({lrs})", "", comparison, _seconds(results, *pair)))
        comparisons.append(comparison)
        warnings += [f"{what}: {choice.warning}" for choice in choices if choice.warning]
    counts = tally(comparisons, "comparisons", "better", "worse")
    return Summary(f"Confidence, with each arm at its own best learning rate: {counts}.", rows, warnings)


def cycle_summary(results: Results) -> Summary:
    lines = [(PAIRS[0], f"{loss}, {target}, cycle 40", metric_name(loss, target, 40)) for loss, target in SHIFTS]
    return _tuned_summary(results, [*lines, *((pair, f"{pair[0]}: all minima and cycles", "all") for pair in PAIRS)])


def cycle_figures(results: Results) -> dict[str, Figure]:
    lrs = sorted({result.spec.lr for result in results})
    cycles = results[0].spec.settings["cycles"]
    heat, axes = panels(2, 3, 10.5, 5.8, sharex=True, sharey=True)
    lines, others = panels(2, 3, 10.5, 5.4, sharex=True)
    tests = {arm: _split(results, arm)[0] for arm in PAIRS[0]}
    for panel, other, (loss, target) in zip(axes.flat, others.flat, SHIFTS, strict=True):
        means = {
            arm: np.array([[_mean(test.where(lr=lr), metric_name(loss, target, c)) for c in cycles] for lr in lrs])
            for arm, test in tests.items()
        }
        ratio = means["CAdam"] - means["Adam"]
        mesh = panel.pcolormesh(ratio, cmap=_diverging(), vmin=-0.5, vmax=0.5)
        for (i, j), value in np.ndenumerate(ratio):
            text = palette.ON_PALE if abs(value) < 0.3 else palette.ON_STRONG
            panel.text(j + 0.5, i + 0.5, f"{10**value:.2g}", ha="center", va="center", fontsize=7, color=text)
        panel.set_xticks(np.arange(len(cycles)) + 0.5, cycles)
        panel.set_yticks(np.arange(len(lrs)) + 0.5, [f"{lr:g}" for lr in lrs])
        for arm, color in (("Adam", palette.ADAM), ("CAdam", palette.CADAM)):
            tuned = [np.mean(list(_tuned(results, arm, metric_name(loss, target, c))[1].values())) for c in cycles]
            other.loglog(cycles, 10 ** np.array(tuned), "o-", color=color, ms=4, lw=1.5, label=arm)
        other.set_xticks(cycles, cycles)
        other.minorticks_off()
        for each in (panel, other):
            each.set_title(f"{loss}, {target}", fontsize=9)
    _legend(others[0, 0])
    for grid, label in ((axes, "learning rate"), (others, "regret per step")):
        for panel in grid[-1]:
            panel.set_xlabel("cycle length")
        for panel in grid[:, 0]:
            panel.set_ylabel(label)
    bar = heat.colorbar(mesh, ax=axes, ticks=[-0.5, 0, 0.5], shrink=0.7)
    bar.ax.set_yticklabels(["0.3× better", "1×", "3× worse"], color=palette.INK, fontsize=8)
    return {
        "CAdam's regret over Adam's at the same learning rate: blue where CAdam wins, red where it loses": heat,
        "Regret per step with each at its own best learning rate": lines,
    }


def _mean(results: Results, metric: str) -> float:
    return float(np.mean(list(results.metric(metric).values())))


def _diverging() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("better-worse", [palette.BETTER, palette.NEUTRAL, palette.WORSE])


def lr_specs(plan: Plan, _: Results) -> list[RunSpec]:
    settings = {"runs": SWEEP_RUNS, "steps": NOISE_STEPS, "readings": ["component"], "draw": False}
    return _sweep_specs("sweep-lr", plan, NOISE_LRS, settings)


def lr_summary(results: Results) -> Summary:
    return _tuned_summary(
        results,
        [
            (pair, f"{pair[0]}, {name}: log10 of the mean loss", metric_name("loss", name, "component"))
            for pair in PAIRS
            for name in LANDSCAPES
        ],
    )


def lr_figures(results: Results) -> dict[str, Figure]:
    lrs = sorted({result.spec.lr for result in results})
    figure, axes = panels(2, 4, 11, 5.4, sharex=True)
    for row, measure in zip(axes, ("loss", "end"), strict=True):
        for panel, name in zip(row, LANDSCAPES, strict=True):
            for arm, color in (("Adam", palette.ADAM), ("CAdam", palette.CADAM)):
                test, _ = _split(results, arm)
                values = [_mean(test.where(lr=lr), metric_name(measure, name, "component")) for lr in lrs]
                panel.loglog(lrs, 10 ** np.array(values), "o-", color=color, ms=4, lw=1.5, label=arm)
            panel.set_title(name, fontsize=9)
        row[0].set_ylabel({"loss": "mean loss", "end": "loss at the end"}[measure])
    _legend(axes[0, 0])
    for panel in axes[-1]:
        panel.set_xlabel("learning rate")
    ratios = {
        name: {
            "": {
                pair: _tuned_comparison(results, pair, metric_name("loss", name, "component"))[0].difference
                for pair in PAIRS
            }
        }
        for name in LANDSCAPES
    }
    return {
        "Loss under noise over the learning rate": figure,
        "Mean loss with confidence over loss without, each arm at its own best learning rate": forest(ratios, 4),
    }


_SWEEP_NOTE = (
    "Learning rates are chosen per arm on tuning seeds and judged on others. The starts, phases and noise of a seed "
    f"are the same for every arm; {SWEEP_RUNS} runs a seed."
)

SWEEP_CYCLE = Experiment(
    name="sweep-cycle",
    title="Where CAdam wins: learning rate and cycle length",
    shows="The regret of fig-shift over learning rates and cycle lengths, with and without confidence.",
    claim="Not in the paper, which shows one learning rate and one cycle length.",
    measure=f"{_REGRET} It is given per step, as log10: a difference of -1 means a tenth of it.",
    run_specs=cycle_specs,
    compute=compute_cycles,
    summary=cycle_summary,
    figures=cycle_figures,
    seconds={"quick": 45, "full": 90},
    tolerance=1e-6,
    seeds={"quick": 2, "full": 4},
    notes=(_SWEEP_NOTE, f"{SWEEP_STEPS} steps for every cycle length."),
)

SWEEP_LR = Experiment(
    name="sweep-lr",
    title="Where CAdam wins: learning rate under noise",
    shows="The losses of fig-noise over learning rates, for every optimizer with and without confidence.",
    claim="Not in the paper, which shows one learning rate.",
    measure=_LOSS,
    run_specs=lr_specs,
    compute=compute_landscapes,
    summary=lr_summary,
    figures=lr_figures,
    seconds={"quick": 120, "full": 240},
    tolerance=1e-6,
    seeds={"quick": 2, "full": 4},
    notes=(_SWEEP_NOTE, "Noise on each component, as in the appendix."),
)

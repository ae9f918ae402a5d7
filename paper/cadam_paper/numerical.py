"""The numerical experiments of the paper, and learning-rate sweeps that extend them.

- `FIG_SHIFT` reproduces figure 2: one-dimensional losses whose minimum moves (sudden, linear or sinusoidal shift).
- `FIG_NOISE` reproduces figure 3: four two-dimensional loss landscapes with noisy gradients.
- `FIG_NO_NOISE` reproduces the figure of the appendix: the same landscapes with exact gradients.
- `SWEEP_CYCLE` and `SWEEP_LR` repeat figures 2 and 3 over learning rates and cycle lengths. They are not in the paper.

All updates are elementwise, so one optimizer run holds every problem and many random repetitions of it as the elements
of a single tensor, and the elements do not influence each other. A seed determines the starting points, the phases of
the moving minima and the gradient noise. All optimizers get the same ones.
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
from cadam.statistics import comparison as statistics
from cadam.statistics.intervals import Array, Interval

from .harness.comparisons import family_row, tally
from .harness.experiment import Experiment, Plan, metric_name
from .harness.learning_rates import RateChoice, choose_lr
from .harness.panels import BETTER, NEUTRAL, ON_PALE, ON_STRONG, WORSE, panels
from .harness.results import Outcome, Results, RunSpec, tuning_seeds
from .harness.summary import Summary, comparison_row

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
"""Every optimizer that cadam provides, as (with confidence, without confidence)."""
ARMS = tuple(name for pair in PAIRS for name in pair)


def descend(
    optimizer: str, start: Array, gradient: Callable[[Array, int], Array], steps: int, **options: Any
) -> tuple[Array, float]:
    """Run an optimizer on the elements of `start` and record its path.

    Args:
        optimizer: Name of a class of `cadam`.
        start: Initial values. Each element is optimized independently.
        gradient: Function of (x, t) that returns the gradient at step t, counted from 1.
        steps: Number of steps.
        **options: Options of the optimizer, such as `lr`.

    Returns:
        The path as an array of shape (1 + steps, *start.shape), and the alignment ratio over all steps.
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


# Figure 2: a moving minimum ------------------------------------------------------------------------------------

CYCLE, SHIFT_STEPS, SHIFT_LR, SHIFT_RUNS = 40, 100, 0.5, 64
LOSSES = ("L1", "L2")
TARGETS: dict[str, Callable[[Array], Array]] = {
    "sudden": lambda cycles: np.floor(cycles) % 2,
    "linear": lambda cycles: cycles,
    "sine": lambda cycles: np.sin(2 * np.pi * cycles),
}
"""Position of the minimum as a function of the elapsed number of cycles, by kind of shift."""
SHIFTS = tuple((loss, target) for loss in LOSSES for target in TARGETS)


@dataclass(frozen=True)
class TrackingRuns:
    """Runs of one optimizer that follow moving minima.

    The axes of the arrays are loss and kind of shift (as in `SHIFTS`), cycle length, and run. `path` and `target`
    have the steps as an additional first axis.
    """

    path: Array
    target: Array
    regret: Array
    alignment: float


def track_minima(
    optimizer: str, lr: float, cycles: Sequence[float], starts: Array, phases: Array, steps: int
) -> TrackingRuns:
    """Follow every minimum x*(t/cycle + phase) from every starting point. The regret is the sum of the losses."""
    elapsed = np.arange(1, 1 + steps)[:, None, None] / np.asarray(cycles, dtype=float)[:, None] + phases
    target = np.stack([TARGETS[name](elapsed) for _, name in SHIFTS], axis=1)
    is_l1 = np.array([loss == "L1" for loss, _ in SHIFTS])[:, None, None]

    def gradient(x: Array, t: int) -> Array:
        error = x - target[t - 1]
        return np.asarray(np.where(is_l1, np.sign(error), 2 * error))

    start = np.broadcast_to(starts, target.shape[1:])
    path, alignment = descend(optimizer, start, gradient, steps, lr=lr)
    with np.errstate(over="ignore", invalid="ignore"):
        error = path[:-1] - target
        regret = np.where(is_l1, np.abs(error), error**2).sum(axis=0)
    return TrackingRuns(path, target, regret, alignment)


def draw_starts_and_phases(seed: int, runs: int) -> tuple[Array, Array]:
    """Draw starting points between -1 and 1, and phases as fractions of a cycle."""
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, runs), rng.uniform(0, 1, runs)


def compute_shift(spec: RunSpec) -> Outcome:
    """Compute one run of figure 2.

    The first element reproduces the paper's deterministic run (x0 = 0, phase 0). The others have random starting points
    and phases, and their regret is averaged.
    """
    runs, steps, cycle = spec.settings["runs"], spec.settings["steps"], spec.settings["cycle"]
    starts, phases = draw_starts_and_phases(spec.seed, runs)
    tracked = track_minima(spec.optimizer, spec.lr, [cycle], np.append(0.0, starts), np.append(0.0, phases), steps)
    metrics = {"aligned": tracked.alignment}
    for (loss, target), regret in zip(SHIFTS, tracked.regret[:, 0], strict=True):
        metrics[metric_name("paper regret", loss, target)] = float(regret[0])
        metrics[metric_name("regret", loss, target)] = mean = float(regret[1:].mean())
        metrics[metric_name("log10 regret", loss, target)] = float(np.log10(mean))
    return Outcome(metrics, {"path": tracked.path[1:, :, 0, 0].T, "target": tracked.target[:, :, 0, 0].T})


def shift_specs(plan: Plan, _: Results) -> list[RunSpec]:
    """Return the runs of figure 2."""
    settings = {"runs": SHIFT_RUNS, "steps": SHIFT_STEPS, "cycle": CYCLE}
    return _arm_specs("fig-shift", plan, SHIFT_LR, settings)


def _arm_specs(experiment: str, plan: Plan, lr: float, settings: Mapping[str, Any]) -> list[RunSpec]:
    """Return the runs of every optimizer on the test seeds, and of Adam on repeat seeds to estimate the noise floor."""
    return [
        RunSpec(experiment, "", "", arm, lr, "", seed, settings)
        for arm in ARMS
        for seed in (*plan.test_seeds(), *(plan.repeat_seeds() if arm == "Adam" else ()))
    ]


def _split(results: Results, arm: str) -> tuple[Results, Results]:
    """Split the results of one optimizer into those of test seeds and those of all other seeds."""
    of_arm = results.where(optimizer=arm)
    test = set(Plan("full", len(of_arm)).test_seeds())
    return Results([r for r in of_arm if r.spec.seed in test]), Results([r for r in of_arm if r.spec.seed not in test])


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
    """Compare the regrets of each pair of optimizers, from the paper's starting point and from random ones."""
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
    if better_on_average := [name for name in worse if random[name].kind == "better"]:
        verdict += f" So {', '.join(better_on_average)} is higher from that one start, and lower on average."
    return Summary(verdict, rows)


def shift_figures(results: Results) -> dict[str, Figure]:
    """Draw the paths of Adam and CAdam, and the ratios of regrets for all pairs of optimizers."""
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
        "A moving minimum x*, and the trajectories of Adam and CAdam (start 0, lr 0.5, cycle 40)": figure,
        "Ratio of the regret with confidence to the regret without (random starts and phases, 95% intervals)": forest(
            ratios, 3
        ),
    }


_REGRET = (
    "Regret is the sum of the losses over all steps; lower is better. The loss is the distance to the minimum (L1) or "
    "its square (L2). The minimum jumps (sudden), moves at a constant speed (linear) or oscillates (sine)."
)
FIG_SHIFT = Experiment(
    name="fig-shift",
    title="A moving minimum (fig. 2)",
    shows="Trajectories and regret of Adam and CAdam while the minimum of the loss jumps, drifts or oscillates.",
    claim="CAdam closely follows the minimum and has the lower regret, for both losses and all three kinds of shift.",
    measure=_REGRET,
    run_specs=shift_specs,
    compute=compute_shift,
    summary=shift_summary,
    figures=shift_figures,
    seconds={"quick": 5, "full": 10},
    tolerance=1e-6,
    seeds={"quick": 4, "full": 10},
    notes=(
        "The paper's run is deterministic (x0 = 0). The intervals come from runs with a random starting point (-1 to "
        f"1) and a random phase, {SHIFT_RUNS} per seed and the same for every optimizer. Each seed counts as one "
        "value.",
        "The paper prints no regrets; its text says that CAdam's regret is always lower. It does not state the "
        "starting point x0; 0 is used here.",
        "Every optimizer runs at the paper's learning rate of 0.5, which was set for Adam. The experiment sweep-cycle "
        "tunes the learning rate of each optimizer.",
    ),
)

# Figure 3: loss landscapes -------------------------------------------------------------------------------------

NOISE_STEPS, NOISE_LR, NOISE_RUNS, TAIL = 1500, 0.1, 64, 150
MEASURES = {
    "loss": "log10 of the mean loss",
    "end": "log10 of the final loss",
    "length": "log10 of the length of the path",
}
"""Descriptions of the metrics, by the prefix of their names."""
FLOOR = 1e-12
"""Smaller losses are replaced by this value: below it, ratios of losses reflect rounding rather than learning."""
Bounds = tuple[float, float, float, float]
"""A rectangle as (left, right, bottom, top)."""


@dataclass(frozen=True)
class Landscape:
    """A function of two variables with minimum value 0, its gradient, and the starting points of its runs.

    `start` is the starting point of the run that the figure shows. The other runs start at random points of `box`,
    given as (left, right, bottom, top).
    """

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
"""The readings of the noise: the main text and the appendix of the paper describe the gradient noise differently."""


@lru_cache(maxsize=4)
def noise(seed: int, runs: int, steps: int) -> Array:
    """Draw the factors that gradients are multiplied by: 1, or with probability 0.5 a uniform number from (-1, 1).

    The axes are step, reading of the noise (as in `READINGS`), run, and component. With the reading "whole", both
    components get the factor of the first component.
    """
    rng = np.random.default_rng(seed)
    shape = (steps, runs, 2)
    factors = np.where(rng.random(shape) < 0.5, rng.uniform(-1, 1, shape), 1.0)
    return np.stack([factors, np.broadcast_to(factors[..., :1], shape)], axis=1)


def random_starts(seed: int, runs: int) -> Array:
    """Return the starting points, with axes (landscape, run, component).

    The first run starts at the point that the figure shows, the other `runs` start at random points of the box.
    """
    rng = np.random.default_rng([seed, 1])
    starts = np.empty((len(LANDSCAPES), 1 + runs, 2))
    for points, landscape in zip(starts, LANDSCAPES.values(), strict=True):
        left, right, bottom, top = landscape.box
        points[0] = landscape.start
        points[1:] = rng.uniform((left, bottom), (right, top), (runs, 2))
    return starts


def compute_landscapes(spec: RunSpec) -> Outcome:
    """Run one optimizer on all landscapes at once.

    The metrics are averages of log10 over the runs with random starting points: of the mean loss, of the final loss
    (the mean over the last tenth of the steps), and of the path length. The losses are values of the function itself,
    without noise.
    """
    runs, steps, readings = spec.settings["runs"], spec.settings["steps"], spec.settings["readings"]
    starts = random_starts(spec.seed, runs)[:, None].repeat(len(readings), axis=1)
    clean = readings == ["none"]
    factors = None if clean else noise(spec.seed, 1 + runs, steps)[:, [list(READINGS).index(r) for r in readings]]

    def gradient(x: Array, t: int) -> Array:
        slopes = [f.gradient(p[..., 0], p[..., 1]) for f, p in zip(LANDSCAPES.values(), x, strict=True)]
        stacked = np.stack([np.stack(slope, axis=-1) for slope in slopes])
        return stacked if factors is None else stacked * factors[t - 1]

    path, alignment = descend(spec.optimizer, starts, gradient, steps, lr=spec.lr)
    metrics, curves = {"aligned": alignment}, {}
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
    # Only the runs that the figure shows store their paths.
    return [
        replace(spec, settings={**spec.settings, "draw": spec.seed == first and spec.optimizer in PAIRS[0]})
        for spec in specs
    ]


def noise_specs(plan: Plan, _: Results) -> list[RunSpec]:
    """Return the runs of figure 3, for both readings of the noise."""
    return _landscape_specs("fig-noise", plan, list(READINGS))


def no_noise_specs(plan: Plan, _: Results) -> list[RunSpec]:
    """Return the runs of the experiment `fig-no-noise`: the landscapes of figure 3 with exact gradients."""
    return _landscape_specs("fig-no-noise", plan, ["none"])


def landscape_summary(results: Results) -> Summary:
    """Compare losses and path lengths of Adam and CAdam on each landscape, and the final losses of the other pairs."""
    readings = results[0].spec.settings["readings"]
    problems = [(name, reading) for reading in readings for name in LANDSCAPES]
    rows, ends = [], []
    seconds = _seconds(results, *PAIRS[0])
    claim = "CAdam lower" if readings != ["none"] else ""
    for measure, label in MEASURES.items():
        for name, reading in problems:
            comparison = _compare(results, PAIRS[0], metric_name(measure, name, reading))
            row_label = f"{label}, {name}" + ("" if reading == "none" else f", noise by {reading}")
            rows.append(comparison_row(row_label, claim, comparison, seconds))
            if measure == "end":
                ends.append(comparison)
    for pair in PAIRS[1:]:
        compared = {
            name if reading == "none" else f"{name} ({reading})": _compare(
                results, pair, metric_name("end", name, reading)
            )
            for name, reading in problems
        }
        row_label = f"{pair[0]} against {pair[1]}, final loss"
        rows.append(family_row(row_label, compared, _seconds(results, *pair)))
    counts = tally(ends, "problems", "lower", "higher")
    return Summary(f"CAdam's final loss, against Adam's: {counts}.", rows)


def landscape_figures(results: Results) -> dict[str, Figure]:
    """Draw the paths of Adam and CAdam, and the ratios of final losses for all pairs of optimizers."""
    readings = results[0].spec.settings["readings"]
    figures = {}
    for reading in readings:
        noise_text = "no noise" if reading == "none" else f"noise: {READINGS[reading]}"
        figures[f"Paths from the marked starting point, {noise_text}"] = _paths(results, reading)
    ratios = {
        name: {
            "" if reading == "none" else reading: {
                p: _difference(results, p, metric_name("end", name, reading)) for p in PAIRS
            }
            for reading in readings
        }
        for name in LANDSCAPES
    }
    caption = "Ratio of the final loss with confidence to the final loss without (random starts, 95% intervals)"
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
            panel.set_title(f"{arm}, {name}\nfinal loss {end:.2g}", fontsize=9)
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
    "The paper does not state the starting points. The figure shows one fixed starting point; the numbers come from "
    f"{NOISE_RUNS} random starting points per seed, the same for every optimizer. Each seed counts as one value.",
    "Losses are values of the function without noise. The mean of log10 is taken over runs, and losses below 1e-12 "
    "count as 1e-12.",
    "Every optimizer runs at the paper's learning rate of 0.1, which was set for Adam. The experiment sweep-lr tunes "
    "the learning rate of each optimizer.",
)

_LOSS = (
    "The loss is the height above the minimum of the landscape; lower is better. It is given as log10, so a difference "
    "of -1 means a loss ten times smaller. L1 landscapes are sums of absolute values, L2 landscapes sums of squares; "
    "the Rosenbrock function is a curved valley."
)
FIG_NOISE = Experiment(
    name="fig-noise",
    title="Noisy landscapes (fig. 3)",
    shows="Paths of Adam and CAdam on four landscapes when half of the gradients are multiplied by U(-1, 1).",
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
        "The main text scales the whole function, the appendix scales each component of the gradient. Both are shown; "
        "the first rows follow the appendix.",
        *_NOISE_NOTES,
    ),
)

FIG_NO_NOISE = Experiment(
    name="fig-no-noise",
    title="The same landscapes without noise (appendix)",
    shows="Paths of Adam and CAdam on the four landscapes with exact gradients.",
    claim="The figure shows the behavior of both optimizers without noise; the paper draws no conclusion.",
    measure=_LOSS,
    run_specs=no_noise_specs,
    compute=compute_landscapes,
    summary=landscape_summary,
    figures=landscape_figures,
    seconds={"quick": 28, "full": 35},
    tolerance=1e-6,
    seeds={"quick": 4, "full": 5},
    notes=("Only the starting points are random.", *_NOISE_NOTES),
)

# Figures ------------------------------------------------------------------------------------------------------


def _legend(panel: Axes, **options: Any) -> None:
    panel.legend(frameon=False, fontsize=8, labelcolor=palette.INK, **options)


def _difference(results: Results, pair: tuple[str, str], metric: str) -> Interval:
    """Return the difference of a metric, with confidence minus without, over paired test seeds."""
    return _compare(results, pair, metric).difference


Ratios = Mapping[str, Mapping[str, Mapping[tuple[str, str], Interval]]]
"""Intervals of log10 ratios by problem, variant of the noise, and pair of optimizers."""


def forest(ratios: Ratios, columns: int) -> Figure:
    """Draw a forest plot of log10 ratios with their intervals.

    There is a panel for each problem, a line for each pair of optimizers, and a color for each variant of the noise.

    Args:
        ratios: The intervals to draw.
        columns: Number of panels in a row.
    """
    rows = -(-len(ratios) // columns)
    figure, axes = panels(rows, columns, 11, 0.6 + 2.5 * rows, sharey=True)
    for panel, (title, variants) in zip(axes.flat, ratios.items(), strict=True):
        panel.axvline(0, color=palette.MUTED, lw=0.8)
        for number, (variant, pairs) in enumerate(variants.items()):
            offset = 0.3 * (number - (len(variants) - 1) / 2)
            color, marker = ((palette.SERIES[0], "o"), (palette.SERIES[4], "D"))[number]
            panel.plot([], [], marker, color=color, ms=4, ls="", label=variant)
            for line, ratio in enumerate(pairs.values()):
                if not ratio.count:
                    panel.text(0, line + offset, " diverged", color=palette.MUTED, fontsize=7, va="center")
                    continue
                panel.plot([ratio.low, ratio.high], [line + offset] * 2, color=color, lw=2)
                panel.plot(ratio.mean, line + offset, marker, color=color, ms=4)
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
    """Return ticks and labels for an axis of log10 ratios: the finest list of round factors whose labels fit."""
    for factors in (
        [0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2],
        [0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.2],
        [0.2, 0.3, 0.5, 0.7, 1, 1.5],
        [0.1, 0.2, 0.5, 1, 2, 5, 10],
        [10.0**n for n in range(-12, 13)],
        [10.0**n for n in range(-12, 13, 3)],
    ):
        ticks = [tick for tick in np.log10(factors) if low <= tick <= high]
        if len(ticks) > 2 and min(np.diff(ticks)) > 0.12 * (high - low) and ticks[0] < low + 0.4 * (high - low):
            break
    return [float(tick) for tick in ticks], [f"{10**tick:.2g}×" for tick in ticks]


# Sweeps over learning rates and cycle lengths ------------------------------------------------------------------

CYCLES = (5, 10, 20, 40, 80, 160, 320)
SWEEP_LRS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
SWEEP_STEPS, SWEEP_RUNS = 400, 16
NOISE_LRS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def _sweep_specs(experiment: str, plan: Plan, lrs: Sequence[float], settings: Mapping[str, Any]) -> list[RunSpec]:
    """Return the runs of every optimizer at every learning rate, on the test seeds and on as many tuning seeds."""
    seeds = (*plan.test_seeds(), *tuning_seeds(plan.seeds))
    return [RunSpec(experiment, "", "", arm, lr, "", seed, settings) for arm in ARMS for lr in lrs for seed in seeds]


def cycle_specs(plan: Plan, _: Results) -> list[RunSpec]:
    """Return the runs of the sweep over learning rates and cycle lengths."""
    return _sweep_specs("sweep-cycle", plan, SWEEP_LRS, {"runs": SWEEP_RUNS, "steps": SWEEP_STEPS, "cycles": CYCLES})


def compute_cycles(spec: RunSpec) -> Outcome:
    """Compute log10 of the mean regret per step for each loss, kind of shift and cycle length."""
    steps = spec.settings["steps"]
    starts, phases = draw_starts_and_phases(spec.seed, spec.settings["runs"])
    tracked = track_minima(spec.optimizer, spec.lr, spec.settings["cycles"], starts, phases, steps)
    with np.errstate(divide="ignore"):
        regret = np.log10(tracked.regret.mean(axis=-1) / steps)
    metrics = {
        metric_name(loss, target, cycle): float(regret[i, j])
        for i, (loss, target) in enumerate(SHIFTS)
        for j, cycle in enumerate(spec.settings["cycles"])
    }
    return Outcome({**metrics, "all": float(regret.mean())})


def _tuned(results: Results, arm: str, metric: str) -> tuple[RateChoice, dict[int, float]]:
    """Choose the learning rate on tuning seeds; return the choice and the metric at that rate by test seed."""
    test, tuning = _split(results, arm)
    choice = choose_lr(arm, tuning.metric_by_rate(metric), "lower")
    return choice, test.where(lr=choice.lr).metric(metric)


def _tuned_comparison(
    results: Results, pair: tuple[str, str], metric: str
) -> tuple[statistics.Comparison, list[RateChoice]]:
    """Compare a pair of optimizers, each at its own best learning rate."""
    chosen = [_tuned(results, arm, metric) for arm in pair]
    arm, baseline = (values for _, values in chosen)
    return statistics.compare(arm, baseline, names=pair, better="lower"), [choice for choice, _ in chosen]


def _tuned_summary(results: Results, lines: Sequence[tuple[tuple[str, str], str, str]]) -> Summary:
    """Summarize a sweep with one row for each (pair, label, metric), and warn where a grid ends too early."""
    rows, comparisons, warnings = [], [], []
    for pair, label, metric in lines:
        comparison, choices = _tuned_comparison(results, pair, metric)
        lrs = ", ".join(f"{choice.arm} lr {choice.lr:g}" for choice in choices)
        rows.append(comparison_row(f"{label} ({lrs})", "", comparison, _seconds(results, *pair)))
        comparisons.append(comparison)
        warnings += [f"{label}: {choice.warning}" for choice in choices if choice.warning]
    counts = tally(comparisons, "comparisons", "better", "worse")
    return Summary(f"Confidence, with each arm at its own best learning rate: {counts}.", rows, warnings)


def cycle_summary(results: Results) -> Summary:
    """Compare the regrets of each pair, with each optimizer at its own best learning rate."""
    lines = [(PAIRS[0], f"{loss}, {target}, cycle 40", metric_name(loss, target, 40)) for loss, target in SHIFTS]
    return _tuned_summary(
        results, [*lines, *((pair, f"{pair[0]}: all shifts and cycle lengths", "all") for pair in PAIRS)]
    )


def cycle_figures(results: Results) -> dict[str, Figure]:
    """Draw the ratio of CAdam's regret to Adam's by learning rate and cycle length.

    A second figure has the regret of each optimizer at its own best rate.
    """
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
            text = ON_PALE if abs(value) < 0.3 else ON_STRONG
            panel.text(j + 0.5, i + 0.5, f"{10**value:.2g}", ha="center", va="center", fontsize=7, color=text)
        panel.set_xticks(np.arange(len(cycles)) + 0.5, cycles)
        panel.set_yticks(np.arange(len(lrs)) + 0.5, [f"{lr:g}" for lr in lrs])
        for arm, color in (("Adam", palette.ADAM), ("CAdam", palette.CADAM)):
            tuned = [np.mean(list(_tuned(results, arm, metric_name(loss, target, c))[1].values())) for c in cycles]
            other.loglog(cycles, 10 ** np.array(tuned), "o-", color=color, ms=4, lw=1.5, label=arm)
        other.set_xticks(cycles, cycles)
        other.minorticks_off()
        for axes_of_problem in (panel, other):
            axes_of_problem.set_title(f"{loss}, {target}", fontsize=9)
    _legend(others[0, 0])
    for grid, label in ((axes, "learning rate"), (others, "regret per step")):
        for panel in grid[-1]:
            panel.set_xlabel("cycle length")
        for panel in grid[:, 0]:
            panel.set_ylabel(label)
    bar = heat.colorbar(mesh, ax=axes, ticks=[-0.5, 0, 0.5], shrink=0.7)
    bar.ax.set_yticklabels(["0.3× better", "1×", "3× worse"], color=palette.INK, fontsize=8)
    return {
        "Ratio of CAdam's regret to Adam's at the same learning rate (blue: CAdam is better, red: it is worse)": heat,
        "Regret per step, each optimizer at its own best learning rate": lines,
    }


def _mean(results: Results, metric: str) -> float:
    return float(np.mean(list(results.metric(metric).values())))


def _diverging() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("better-worse", [BETTER, NEUTRAL, WORSE])


def lr_specs(plan: Plan, _: Results) -> list[RunSpec]:
    """Return the runs of the sweep over learning rates on noisy landscapes."""
    settings = {"runs": SWEEP_RUNS, "steps": NOISE_STEPS, "readings": ["component"], "draw": False}
    return _sweep_specs("sweep-lr", plan, NOISE_LRS, settings)


def lr_summary(results: Results) -> Summary:
    """Compare the mean losses of each pair, with each optimizer at its own best learning rate."""
    return _tuned_summary(
        results,
        [
            (pair, f"{pair[0]}, {name}: log10 of the mean loss", metric_name("loss", name, "component"))
            for pair in PAIRS
            for name in LANDSCAPES
        ],
    )


def lr_figures(results: Results) -> dict[str, Figure]:
    """Draw the losses over learning rates, and the ratios of losses at the best rates."""
    lrs = sorted({result.spec.lr for result in results})
    figure, axes = panels(2, 4, 11, 5.4, sharex=True)
    for row, measure in zip(axes, ("loss", "end"), strict=True):
        for panel, name in zip(row, LANDSCAPES, strict=True):
            for arm, color in (("Adam", palette.ADAM), ("CAdam", palette.CADAM)):
                test, _ = _split(results, arm)
                values = [_mean(test.where(lr=lr), metric_name(measure, name, "component")) for lr in lrs]
                panel.loglog(lrs, 10 ** np.array(values), "o-", color=color, ms=4, lw=1.5, label=arm)
            panel.set_title(name, fontsize=9)
        row[0].set_ylabel({"loss": "mean loss", "end": "final loss"}[measure])
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
        "Loss under noise as a function of the learning rate": figure,
        "Ratio of the mean loss with confidence to the mean loss without, each at its own best learning rate": forest(
            ratios, 4
        ),
    }


_SWEEP_NOTE = (
    "The learning rate of each optimizer is chosen on tuning seeds and evaluated on test seeds. The starting points, "
    f"phases and noise of a seed are the same for every optimizer; a seed stands for {SWEEP_RUNS} runs."
)

SWEEP_CYCLE = Experiment(
    name="sweep-cycle",
    title="A moving minimum over learning rates and cycle lengths",
    shows="The regret of fig-shift as a function of learning rate and cycle length, with and without confidence.",
    claim="Not in the paper, which shows one learning rate and one cycle length.",
    measure=f"{_REGRET} It is given per step, as log10, so a difference of -1 means a regret ten times smaller.",
    run_specs=cycle_specs,
    compute=compute_cycles,
    summary=cycle_summary,
    figures=cycle_figures,
    seconds={"quick": 45, "full": 90},
    tolerance=1e-6,
    seeds={"quick": 2, "full": 4},
    notes=(_SWEEP_NOTE, f"Each run takes {SWEEP_STEPS} steps, for every cycle length."),
)

SWEEP_LR = Experiment(
    name="sweep-lr",
    title="Noisy landscapes over learning rates",
    shows="The losses of fig-noise as a function of the learning rate, for all optimizers with and without confidence.",
    claim="Not in the paper, which shows one learning rate.",
    measure=_LOSS,
    run_specs=lr_specs,
    compute=compute_landscapes,
    summary=lr_summary,
    figures=lr_figures,
    seconds={"quick": 120, "full": 240},
    tolerance=1e-6,
    seeds={"quick": 2, "full": 4},
    notes=(_SWEEP_NOTE, "Each component of the gradient has its own noise, as in the appendix."),
)

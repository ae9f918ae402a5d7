"""Continual learning on CIFAR-10: 100 or 200 tasks in turn, for Adam, CAdam, three control arms and L2 penalties.

Controls are two other masks and a longer momentum, and the penalty is that on the distance from the initial weights.

Every arm has a grid of learning rates for each condition, which is extended until its best rate is not at an end. Arms
are compared at their own best rates, and the rate of each seed is chosen on the other seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cadam.ab.report import palette

from ..harness import rate_pairs
from ..harness.experiment import Experiment, Plan, Scale
from ..harness.panels import panels
from ..harness.rates import RateCurve, compare_at_best_rates, draw, next_rates, tolerance_row
from ..harness.results import Results, RunSpec
from ..harness.summary import Row, Summary, comparison_row
from ..harness.verdict import verdict_over_seeds
from ..images.data import CIFAR10, DIGITS
from . import runs
from .arms import ARMS
from .tasks import CONDITIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "Adam"
COLORS = palette.arm_colors(ARMS)
METRICS = {"accuracy": "all tasks", "last_accuracy": "the last tenth of the tasks"}
"""Descriptions of the compared metrics, in percent."""
GRIDS: dict[Scale, tuple[float, ...]] = {
    "quick": (1e-3, 2e-3, 5e-3, 1e-2),
    "full": (1e-4, 2e-4, 5e-4, 1e-3, 2e-3),
}
"""Learning rates of every arm, before the extension."""
SMALL_GRIDS: dict[Scale, tuple[float, ...]] = {**GRIDS, "full": (5e-4, 1e-3, 2e-3, 4e-3)}
SETTINGS: dict[Scale, dict[str, Any]] = {
    "quick": {"device": "cpu", "hidden": 32, "tasks": 20, "steps": 40, "batch": 16, "precision": "float32"},
    "full": {"device": "cuda", "hidden": 256, "tasks": 200, "steps": 100, "batch": 32, "precision": "tensorfloat32"},
}
SMALL_SETTINGS: dict[Scale, dict[str, Any]] = {
    "quick": SETTINGS["quick"],
    "full": {
        "device": "cpu",
        "hidden": 64,
        "tasks": 100,
        "steps": 100,
        "batch": 32,
        "precision": "float32",
        "pool": 4,
    },
}
"""The settings of the study that needs no GPU: fewer tasks, a smaller network, and images of 8 x 8 pixels."""
NEAR = 0.5
"""A learning rate counts as near the best if it loses at most this many points of accuracy."""


def _specs(plan: Plan, settings: Mapping[str, Any], condition: str, arm: str, grid: Sequence[float]) -> list[RunSpec]:
    data = DIGITS if plan.scale == "quick" else CIFAR10
    model = f"network with 2 x {settings['hidden']} hidden units"
    return [
        RunSpec("continual", model, data.name, arm, rate, condition, seed, settings)
        for seed in plan.test_seeds()
        for rate in grid
    ]


def run_specs(plan: Plan, results: Results, *, is_small: bool = False) -> list[RunSpec]:
    """List the runs of all arms at every rate and seed, under both conditions."""
    settings, grid = (SMALL_SETTINGS, SMALL_GRIDS) if is_small else (SETTINGS, GRIDS)
    specs: list[RunSpec] = []
    for arm in ARMS:
        for condition in CONDITIONS:
            specs += rate_pairs.extended_specs(
                grid[plan.scale],
                partial(_specs, plan, settings[plan.scale], condition, arm),
                lambda of_arm, arm=arm: [_curve(of_arm, arm, "accuracy")],  # type: ignore[misc]
                results.where(optimizer=arm, condition=condition),
                partial(next_rates, ratio=2),
            )
    return specs


def _curve(results: Results, arm: str, metric: str) -> RateCurve:
    return RateCurve.of(results, arm, metric, "higher")


def summary(results: Results) -> Summary:
    """Compare each arm with Adam at their own best rates, over all tasks and over the last ones."""
    rows: list[Row] = []
    warnings, verdicts = [], []
    for condition in CONDITIONS:
        of_condition = results.where(condition=condition)
        for metric, description in METRICS.items():
            baseline = _curve(of_condition, BASELINE, metric)
            for arm in ARMS:
                if arm == BASELINE:
                    continue
                comparison = compare_at_best_rates(_curve(of_condition, arm, metric), baseline)
                label = f"{condition}, {description}: {arm}"
                rows.append(comparison_row(label, "", comparison, of_condition.seconds, digits=2))
                if metric == "accuracy" and arm == "CAdam":
                    verdicts.append(f"{condition} {comparison.difference:+.2f} ({verdict_over_seeds(comparison)})")
        for arm in ARMS:
            curve = _curve(of_condition, arm, "accuracy")
            rows.append(tolerance_row(condition, curve, NEAR))
            if curve.best_is_at_an_end:
                warnings.append(f"{condition}: the best rate of {arm}, {curve.best():g}, is at an end of its grid")
    return Summary(
        f"Accuracy of CAdam over all tasks minus that of {BASELINE}, each at its own best rate: {'; '.join(verdicts)}.",
        rows,
        warnings,
    )


def figures(results: Results) -> Mapping[str, Figure]:
    """Draw the accuracy over learning rates, and accuracy and inactive units over the tasks at the best rates."""
    by_rate, rate_axes = panels(1, 2, 10, 4.6)
    by_task, task_axes = panels(2, 2, 10, 6.8, sharex=True)
    for column, condition in enumerate(CONDITIONS):
        of_condition = results.where(condition=condition)
        curves = {arm: _curve(of_condition, arm, "accuracy") for arm in ARMS}
        draw(rate_axes[0, column], {COLORS[arm]: curve for arm, curve in curves.items()})
        rates = sorted({rate for curve in curves.values() for rate in curve.rates})
        rate_axes[0, column].minorticks_off()
        rate_axes[0, column].set_xticks(rates, [f"{rate:g}" for rate in rates])
        rate_axes[0, column].set(title=condition, xlabel="learning rate", ylabel="accuracy over all tasks, %")
        for arm, curve in curves.items():
            at_best = of_condition.where(optimizer=arm, lr=curve.best())
            for row, (name, factor) in enumerate((("accuracy", 1), ("inactive", 100))):
                values = factor * at_best.curve(name).astype(float).mean(0)
                window = max(1, len(values) // 10)
                smooth = np.convolve(values, np.full(window, 1 / window), mode="valid")
                progress = np.arange(len(smooth)) + (window + 1) / 2
                task_axes[row, column].plot(progress, smooth, color=COLORS[arm], lw=1.5, label=arm)
        task_axes[0, column].set(title=condition, ylabel="accuracy, %")
        task_axes[1, column].set(xlabel="task", ylabel="hidden units that are always 0, %")
    for figure, axes in ((by_rate, rate_axes), (by_task, task_axes)):
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return {
        "Accuracy by learning rate, with 95% intervals over seeds; a ring marks the best rate.": by_rate,
        "Accuracy and share of inactive hidden units over the tasks, each arm at its best learning rate; mean over "
        "seeds, moving average over a tenth of the tasks.": by_task,
    }


def _experiment(name: str, shown: str, network: str, *, is_small: bool = False, **fields: Any) -> Experiment:
    settings = (SMALL_SETTINGS if is_small else SETTINGS)["full"]
    return Experiment(
        name=name,
        title=f"Continual learning: {settings['tasks']} tasks in turn on {shown}",
        shows=f"{', '.join(ARMS)} over learning rates, on tasks that permute labels or pixels.",
        claim="The paper has no sequence of many tasks; its images rotate by a fixed angle at each epoch.",
        run_specs=partial(run_specs, is_small=is_small),
        compute=runs.compute,
        compute_many=runs.compute_many,
        side_by_side=runs.shares_program,
        summary=summary,
        figures=figures,
        tolerance=0.05,
        data=CIFAR10,
        quick_data=DIGITS,
        packages=("jax", "optax"),
        measure=(
            "Accuracy in percent: share of images whose label the network predicted before it learned from them; "
            "higher is better. Inactive units: hidden units that are 0 for all of 256 images at the end of a task."
        ),
        notes=(
            "--quick trains a tiny network on handwritten digits on the CPU. It demonstrates the experiment and is not "
            f"evidence. --full trains {network} on {settings['tasks']} tasks. A task has 3,200 images in 100 batches "
            "of 32, and each image is shown once.",
            "Each task permutes the ten labels, or all pixels, at random. The network and the optimizer state continue "
            "from task to task.",
            "The runs of an arm are one program of JAX, vectorized over learning rates, seeds and conditions. The same "
            "run in another program can differ by rounding, which grows over many steps.",
            "The L2 penalty has the strengths of the arms' names, and no other strength was tried. Only the learning "
            "rate is tuned. The best rate is chosen by the accuracy that is compared; the rate of each seed on the "
            "other seeds.",
        ),
        **fields,
    )


CONTINUAL = _experiment(
    "continual",
    "CIFAR-10",
    "a network with two hidden layers of 256 units",
    seconds={"quick": 120, "full": 240},
    seeds={"quick": 2, "full": 5},
    cuda=("full",),
)
CONTINUAL_SMALL = _experiment(
    "continual-small",
    "CIFAR-10 of 8 x 8 pixels",
    "a network with two hidden layers of 64 units, on images whose squares of 4 x 4 pixels are averaged,",
    is_small=True,
    seconds={"quick": 120, "full": 2400},
    seeds={"quick": 2, "full": 6},
)

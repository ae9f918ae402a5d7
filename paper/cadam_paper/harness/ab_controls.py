"""The control arms on the stream of an A/B study: every arm at every learning rate with every seed.

The runs of Adam and CAdam are those of the study's learning-rate curves. A control arm runs at the same rates, and its
grid is extended while its best rate is at an end. Arms are compared at their own best rates, and the rate of each seed
is chosen on the other seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cadam.ab.report import palette

from . import ab_rates
from .ab_evidence import BETTER, MAIN_METRIC, METRIC_NAMES
from .ab_study import Study
from .control_arms import CAUTIOUS, CONTROL_ARMS, LONG_MOMENTUM, RANDOM
from .panels import panels
from .rate_pairs import extended_specs
from .rates import RateCurve, compare_at_best_rates, draw, tolerance_row
from .results import Results, RunSpec, evaluation_seeds
from .summary import Row, Summary, comparison_row
from .verdict import verdict_over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CADAM = "CAdam"
ARMS = ("Adam", CADAM, *CONTROL_ARMS)
PAIRS = (
    (CADAM, "Adam"),
    *((arm, "Adam") for arm in CONTROL_ARMS),
    *((CADAM, arm) for arm in (CAUTIOUS, RANDOM, LONG_MOMENTUM)),
)
"""The compared pairs: each arm with Adam, and CAdam with each control arm."""


def run_specs(study: Study, seeds: int, results: Results) -> Sequence[RunSpec]:
    """Return the runs of Adam and CAdam over learning rates, and those of the control arms at these rates and more.

    All runs of the first seed come first, so that a study that was stopped can be reported with fewer seeds.
    """
    specs = list(ab_rates.run_specs(study, seeds, results))
    grid = sorted({spec.lr for spec in specs})
    for arm in CONTROL_ARMS:
        specs += extended_specs(
            grid,
            partial(_specs, study, seeds, arm),
            partial(_grid_curves, arm),
            results.where(optimizer=arm),
        )
    return sorted(specs, key=lambda spec: spec.seed)


def _specs(study: Study, seeds: int, arm: str, grid: Sequence[float]) -> list[RunSpec]:
    return [study.spec(arm, lr, seed) for seed in evaluation_seeds(seeds) for lr in grid]


def _grid_curves(arm: str, results: Results) -> list[RateCurve]:
    """Return the curves by which the grid of an arm is extended."""
    return [_curve(results, arm, metric) for metric in ab_rates.METRICS]


def _curve(results: Results, arm: str, metric: str) -> RateCurve:
    return RateCurve.of(results, arm, metric, BETTER[metric])


def summary(results: Results) -> Summary:
    """Compare the arms at their own best rates, by GAUC and by log loss."""
    rows: list[Row] = []
    warnings, verdicts = [], []
    for metric in ab_rates.METRICS:
        curves = {arm: _curve(results, arm, metric) for arm in ARMS}
        name = METRIC_NAMES[metric]
        for arm, other in PAIRS:
            comparison = compare_at_best_rates(curves[arm], curves[other])
            label = f"{name}, each at its own best rate: {arm} minus {other}"
            rows.append(comparison_row(label, "", comparison, results.seconds, digits=4))
            if metric == MAIN_METRIC and other == "Adam":
                verdicts.append(f"{arm} {comparison.difference:+.4f} ({verdict_over_seeds(comparison)})")
        for arm, curve in curves.items():
            if metric == MAIN_METRIC:
                rows.append(tolerance_row(name, curve, ab_rates.NEAR))
            if curve.best_is_at_an_end:
                warnings.append(f"{name}: the best rate of {arm}, {curve.best():g}, is at an end of its grid")
    text = f"{METRIC_NAMES[MAIN_METRIC]} minus that of Adam, each at its own best rate: {'; '.join(verdicts)}."
    return Summary(text, rows, warnings)


def figures(results: Results) -> Mapping[str, Figure]:
    """Draw the GAUC of all arms over learning rates."""
    figure, axes = panels(1, 1, 6.4, 4.2)
    colors = palette.arm_colors(ARMS)
    draw(axes[0, 0], {colors[arm]: _curve(results, arm, MAIN_METRIC) for arm in ARMS})
    axes[0, 0].set(xlabel="learning rate", ylabel=METRIC_NAMES[MAIN_METRIC])
    axes[0, 0].legend(loc="best", fontsize=8)
    return {"Over learning rates, with 95% intervals over seeds; a ring marks the best rate.": figure}

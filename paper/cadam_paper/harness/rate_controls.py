"""The control arms under several conditions, beside the runs of Adam and CAdam over learning rates.

The runs of Adam and CAdam are those of another experiment. Each control arm has its own grid of learning rates, which
begins around the best rate of Adam or CAdam and is extended while the best rate of the arm is at an end. The conditions
are computed one after the other, so that a computation that was stopped leaves complete conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cadam.ab.report import palette

from .control_arms import CAUTIOUS, LONG_MOMENTUM, RANDOM
from .experiment import Plan
from .panels import panels
from .rate_pairs import extended_specs
from .rates import RateCurve, compare_at_best_rates, draw, tolerance_row
from .results import Results, RunSpec
from .summary import Row, Summary, comparison_row
from .verdict import verdict_over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADAM, CADAM = "Adam", "CAdam"
MASKS = (CAUTIOUS, RANDOM)
REFERENCES = {CAUTIOUS: ADAM, RANDOM: CADAM, LONG_MOMENTUM: ADAM}
"""The arm around whose best learning rate the grid of a control arm begins.

The cautious mask rescales its updates to about the size of Adam's, and the random mask skips as many elements as CAdam.
"""


@dataclass(frozen=True)
class Condition:
    """A condition under which the arms are compared.

    Attributes:
        label: Its name in tables and figures.
        name: Its name in the run specs.
        metric: The compared metric; higher is better.
        main_specs: Returns the runs of Adam and CAdam over learning rates.
        spec: Returns the run of an arm at a learning rate with a seed.
    """

    label: str
    name: str
    metric: str
    main_specs: Callable[[Plan, Results], list[RunSpec]]
    spec: Callable[[Plan, str, float, int], RunSpec]

    def curve(self, results: Results, arm: str) -> RateCurve:
        """Return the learning-rate curve of an arm under this condition."""
        return RateCurve.of(results.where(condition=self.name), arm, self.metric, "higher")


@dataclass(frozen=True)
class Controls:
    """The conditions and the control arms of an experiment.

    Attributes:
        conditions: The conditions, in the order in which they are computed.
        rounds: The control arms. Those of a round are computed under all conditions before the next round begins.
        measure: The name of the metric in figures.
        near: A learning rate counts as near the best if it loses at most this much.
        digits: The number of digits after the decimal point in tables.
    """

    conditions: Sequence[Condition]
    measure: str
    near: float
    rounds: Sequence[Sequence[str]] = (MASKS,)
    digits: int = 2

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms, Adam and CAdam first."""
        return (ADAM, CADAM, *(arm for arms in self.rounds for arm in arms))


def run_specs(plan: Plan, results: Results, controls: Controls) -> list[RunSpec]:
    """Return the runs up to the first condition that has no results yet."""
    specs: dict[RunSpec, None] = {}
    for arms in controls.rounds:
        for condition in controls.conditions:
            of_condition = results.where(condition=condition.name)
            main = condition.main_specs(plan, of_condition)
            specs |= dict.fromkeys(main)
            if not results.has(main):
                return list(specs)
            of_arms = [spec for arm in arms for spec in _specs(plan, of_condition, condition, arm)]
            specs |= dict.fromkeys(of_arms)
            if not results.has(of_arms):
                return list(specs)
    return list(specs)


def _specs(plan: Plan, results: Results, condition: Condition, arm: str) -> list[RunSpec]:
    """Return the runs of a control arm under a condition, from the results under this condition."""
    reference = condition.curve(results, REFERENCES[arm])
    best = reference.rates.index(reference.best())

    def specs(grid: Sequence[float]) -> list[RunSpec]:
        return [condition.spec(plan, arm, lr, seed) for seed in plan.test_seeds() for lr in grid]

    grid = reference.rates[max(0, best - 1) : best + 2]
    return extended_specs(grid, specs, lambda of_grid: [condition.curve(of_grid, arm)], results.where(optimizer=arm))


def complete_curves(results: Results, missing: Collection[RunSpec], condition: Condition) -> dict[str, RateCurve]:
    """Return the curves by arm, or nothing if runs of Adam, CAdam or an arm of `MASKS` are missing.

    Args:
        results: The results of the experiment.
        missing: The runs without results. Arms with missing runs under this condition are omitted.
        condition: The condition.
    """
    of_condition = results.where(condition=condition.name)
    incomplete = {spec.optimizer for spec in missing if spec.condition == condition.name}
    arms = dict.fromkeys(result.spec.optimizer for result in of_condition)
    curves = {arm: condition.curve(of_condition, arm) for arm in arms if arm not in incomplete}
    return curves if {ADAM, CADAM, *MASKS} <= curves.keys() else {}


def summary(results: Results, controls: Controls) -> Summary:
    """Compare the arms with Adam and with CAdam under each condition, each at its own best rate."""
    rows: list[Row] = []
    warnings, verdicts = [], []
    others = controls.arms[2:]
    for condition in controls.conditions:
        curves = {arm: condition.curve(results, arm) for arm in controls.arms}
        seconds, differences = results.where(condition=condition.name).seconds, []
        for arm, other in [(CADAM, ADAM), *((arm, ADAM) for arm in others), *((CADAM, arm) for arm in others)]:
            comparison = compare_at_best_rates(curves[arm], curves[other])
            label = f"{condition.label}, each at its own best rate: {arm} minus {other}"
            rows.append(comparison_row(label, "", comparison, seconds, controls.digits))
            if other == ADAM:
                difference = f"{comparison.difference:+.{controls.digits}f}"
                differences.append(f"{arm} {difference} ({verdict_over_seeds(comparison)})")
        verdicts.append(f"{condition.label}: {', '.join(differences)}")
        for arm, curve in curves.items():
            rows.append(tolerance_row(condition.label, curve, controls.near))
            if curve.best_is_at_an_end:
                warnings.append(
                    f"{condition.label}: the best rate of {arm}, {curve.best():g}, is at an end of its grid"
                )
    return Summary(f"Minus Adam, each at its own best rate. {'; '.join(verdicts)}.", rows, warnings)


def figures(results: Results, controls: Controls) -> Mapping[str, Figure]:
    """Draw the metric of all arms over learning rates, one panel for each condition."""
    conditions, colors = controls.conditions, palette.arm_colors(controls.arms)
    figure, axes = panels(1, len(conditions), 2.9 * len(conditions), 3.6)
    for panel, condition in zip(axes[0], conditions, strict=True):
        draw(panel, {colors[arm]: condition.curve(results, arm) for arm in controls.arms})
        panel.set(title=condition.label, xlabel="learning rate")
    axes[0, 0].set_ylabel(controls.measure)
    axes[0, 0].legend(loc="best", fontsize=8)
    return {"Over learning rates, with 95% intervals over seeds; a ring marks the best rate.": figure}


def functions(controls: Controls) -> dict[str, Callable[..., object]]:
    """Return the functions of an experiment with these controls, by the names of the fields of `Experiment`."""
    return {
        "run_specs": partial(run_specs, controls=controls),
        "summary": partial(summary, controls=controls),
        "figures": partial(figures, controls=controls),
    }


NOTES = (
    "Cautious Adam divides the masked update by the share of elements that are not masked. The random mask keeps the "
    "same share of elements of each tensor, chosen at random.",
    "The runs of Adam and CAdam are those of the curves over learning rates. The grid of a control arm begins with the "
    "best rate of Adam (for the random mask, of CAdam) and its neighbors, and is extended while its best rate is at an "
    "end.",
    "In the comparison at the best rates, the rate of each seed is chosen on the other seeds.",
)

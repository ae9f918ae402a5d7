"""Test accuracy over a grid of learning rates, for pairs of optimizers with and without confidence.

The paper compares the optimizers at a single learning rate, which it does not state (figures 4 and 5, table 4). These
experiments run both optimizers of a pair at every rate of a grid, without change and under the paper's three
conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..harness import rate_controls, rate_pairs
from ..harness.experiment import Experiment, Plan, Scale
from ..harness.rate_pairs import Pair
from ..harness.rates import RateCurve
from ..harness.results import Results, RunSpec
from ..harness.summary import Summary
from . import streams, study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONDITIONS = {
    "without change": streams.sudden(0),
    "sudden 80°": streams.sudden(80),
    "continuous 2°": streams.continuous(2),
    "noise 40%": streams.noisy(40),
}
GRIDS: dict[str, dict[Scale, tuple[float, ...]]] = {
    "Adam": {"quick": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "full": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)},
    "AmsGrad": {"quick": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "full": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)},
    "SGDM": study.SGDM_GRIDS,
    "Lion": {"quick": (3e-4, 1e-3, 3e-3), "full": (1e-5, 3e-5, 1e-4, 3e-4)},
    "RAdam": {"quick": (3e-3, 1e-2, 3e-2), "full": (1e-4, 3e-4, 1e-3, 3e-3)},
}
"""Initial grids of learning rates by baseline.

A grid is extended until the best rates of both optimizers are inside it and not at one of its ends.
"""
FEWER: dict[Scale, tuple[float, ...]] = {"quick": (3e-3, 1e-2, 3e-2), "full": (1e-4, 3e-4, 1e-3)}
"""Initial grid of learning rates for the larger models."""
NEAR = 1.0
"""A learning rate counts as near the best if it loses at most this many points of accuracy."""
CAPTION = (
    "Top: mean test accuracy over learning rates, with 95% intervals over seeds; a ring marks the best rate, dotted "
    "lines mark the paper's accuracies. Bottom: the difference at each common rate; the dashed line is the paper's."
)


@dataclass(frozen=True)
class Curves:
    """A family of models and a pair of optimizers: the one with confidence first, then the one without."""

    family: str
    arms: tuple[str, str]

    def grid(self, scale: Scale) -> tuple[float, ...]:
        """Return the initial grid of learning rates."""
        return GRIDS[self.arms[1]][scale] if self.family == "vgg" else FEWER[scale]


def run_specs(plan: Plan, results: Results, curves: Curves) -> list[RunSpec]:
    """Return the runs of both optimizers at every learning rate, condition and seed."""
    all_specs: list[RunSpec] = []
    for stream in CONDITIONS.values():
        all_specs += condition_specs(plan, _of_condition(results, stream), curves, stream)
    return all_specs


def condition_specs(plan: Plan, results: Results, curves: Curves, stream: streams.Stream) -> list[RunSpec]:
    """Return the runs of both optimizers under one condition, from the results under this condition."""
    specs = partial(_specs, plan, curves, stream)
    return rate_pairs.extended_specs(curves.grid(plan.scale), specs, partial(_curves, curves=curves), results)


def _specs(plan: Plan, curves: Curves, stream: streams.Stream, grid: Sequence[float]) -> list[RunSpec]:
    return [
        study.spec(plan, curves.family, arm, rate, stream, seed)
        for seed in plan.test_seeds()
        for rate in grid
        for arm in curves.arms
    ]


def _of_condition(results: Results, stream: streams.Stream) -> Results:
    return results.where(condition=str(stream))


def _curves(results: Results, curves: Curves) -> list[RateCurve]:
    return [RateCurve.of(results, arm, "accuracy", "higher") for arm in curves.arms]


def pairs(results: Results, curves: Curves, missing: Iterable[RunSpec] = ()) -> dict[str, Pair]:
    """Return the learning-rate curves of both optimizers by condition. Those of VGG include the paper's accuracies.

    Args:
        results: The results of the experiment.
        curves: The family of models and the pair of optimizers.
        missing: The runs without results. Conditions with missing runs are omitted.
    """
    pairs_by_condition, incomplete = {}, {spec.condition for spec in missing}
    for name, stream in CONDITIONS.items():
        if str(stream) in incomplete:
            continue
        of_condition = _of_condition(results, stream)
        treatment, baseline = _curves(of_condition, curves)
        paper = study.PAPER.get((name.split()[0], curves.arms[1])) if curves.family == "vgg" else None
        pairs_by_condition[name] = Pair(treatment, baseline, paper, of_condition.seconds)
    return pairs_by_condition


def summary(results: Results, curves: Curves) -> Summary:
    """Summarize the comparison of both optimizers over learning rates."""
    summary = rate_pairs.summary(pairs(results, curves), NEAR, same_data=True)
    return replace(summary, verdict=f"{study.disclaimer(results)}{summary.verdict}")


def figures(results: Results, curves: Curves) -> Mapping[str, Figure]:
    """Draw the accuracy of both optimizers over learning rates, and their difference."""
    return {CAPTION: rate_pairs.figure(pairs(results, curves), "mean test accuracy, %", same_data=True)}


def _experiment(suffix: str, curves: Curves, seconds: Mapping[Scale, float], seeds: int) -> Experiment:
    model, (treatment, baseline) = study.MODELS[curves.family]["full"], curves.arms
    return Experiment(
        name=f"fig-rates{suffix}",
        title=f"Accuracy over learning rates, {model}: {baseline} and {treatment}",
        shows=f"{baseline} and {treatment} over learning rates, without change and under the paper's three conditions.",
        claim="The paper compares the optimizers at one learning rate, which it does not state.",
        run_specs=partial(run_specs, curves=curves),
        summary=partial(summary, curves=curves),
        figures=partial(figures, curves=curves),
        seconds=seconds,
        seeds={"quick": 3, "full": seeds},
        notes=(
            *study.NOTES[:2],
            "In the comparison at the best rates, the rate of each seed is chosen on the other seeds.",
            "Learning rates are chosen on the same 10,000 test images that results are measured on, with other seeds.",
            "The grid is extended if the best rate is at its end.",
        ),
        **study.SHARED,
    )


FIG_RATES = _experiment("", Curves("vgg", study.ARMS), {"quick": 60, "full": 2660}, seeds=5)
FIG_RATES_AMSGRAD = _experiment(
    "-amsgrad", Curves("vgg", ("CAmsGrad", "AmsGrad")), {"quick": 60, "full": 1600}, seeds=3
)
FIG_RATES_SGDM = _experiment("-sgdm", Curves("vgg", ("CSGDM", "SGDM")), {"quick": 60, "full": 1600}, seeds=3)
FIG_RATES_RESNET = _experiment("-resnet", Curves("resnet", study.ARMS), {"quick": 60, "full": 1730}, seeds=3)
FIG_RATES_LION = _experiment("-lion", Curves("vgg", ("CLion", "Lion")), {"quick": 60, "full": 1300}, seeds=3)
FIG_RATES_RADAM = _experiment("-radam", Curves("vgg", ("CRAdam", "RAdam")), {"quick": 60, "full": 1300}, seeds=3)


# Control arms --------------------------------------------------------------------------------------------------


def _control_spec(plan: Plan, arm: str, lr: float, seed: int, family: str, stream: streams.Stream) -> RunSpec:
    return study.spec(plan, family, arm, lr, stream, seed)


def _controls(family: str) -> rate_controls.Controls:
    """Return the control arms of a family of models. The condition without change is computed last."""
    curves = Curves(family, study.ARMS)
    conditions = [
        rate_controls.Condition(
            label,
            str(stream),
            "accuracy",
            partial(condition_specs, curves=curves, stream=stream),
            partial(_control_spec, family=family, stream=stream),
        )
        for label, stream in CONDITIONS.items()
    ]
    return rate_controls.Controls([*conditions[1:], conditions[0]], "mean test accuracy, %", NEAR)


CONTROLS = {"fig-rates-controls": _controls("vgg"), "fig-rates-resnet-controls": _controls("resnet")}
"""The control arms by the name of their experiment."""


def _controls_experiment(name: str, family: str, seconds: Mapping[Scale, float]) -> Experiment:
    model, controls = study.MODELS[family]["full"], CONTROLS[name]
    return Experiment(
        name=name,
        title=f"Accuracy over learning rates, {model}: control arms",
        shows=f"{', '.join(controls.arms)} over learning rates, without change and under the paper's three conditions.",
        claim="The paper does not compare the mask with other masks.",
        seconds=seconds,
        seeds={"quick": 2, "full": 3},
        notes=(study.NOTES[0], study.NOTES[1], *rate_controls.NOTES),
        **rate_controls.functions(controls),  # type: ignore[arg-type]
        **study.SHARED,
    )


FIG_RATES_CONTROLS = _controls_experiment("fig-rates-controls", "vgg", {"quick": 60, "full": 2600})
FIG_RATES_RESNET_CONTROLS = _controls_experiment("fig-rates-resnet-controls", "resnet", {"quick": 60, "full": 3600})

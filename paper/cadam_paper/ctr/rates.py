"""AUC over a grid of learning rates: Adam and CAdam with DeepFM, on one shuffled epoch and on streams with drift.

This experiment is not in the paper, which gives each optimizer the best of five learning rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..harness import rate_controls, rate_pairs
from ..harness.control_arms import LONG_MOMENTUM
from ..harness.experiment import Experiment, Plan
from ..harness.rate_pairs import Pair
from ..harness.rates import RateCurve
from ..harness.results import Results, RunSpec
from ..harness.summary import Summary
from . import study
from .study import Condition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "DeepFM"
CONDITIONS: dict[str, Condition] = {
    **{f"drift, {drift}": stream for drift, stream in zip(study.DRIFTS, study.STREAMS, strict=True)},
    "no drift": study.TABLE,
    "no drift, 1% noise": study.TABLE_NOISY,
}
"""The conditions by label.

Conditions with drift use prequential evaluation. The others train on one shuffled epoch before they are evaluated, as
in the paper.
"""
NEAR = 0.1
"""A learning rate counts as near the best if it loses at most this many points of AUC."""
CAPTION = (
    "Top: AUC x 100 over learning rates, with 95% intervals over seeds; a ring marks the best rate. Bottom: the "
    "difference at each common rate; the dashed line is the paper's, on other data."
)


def run_specs(plan: Plan, results: Results) -> list[RunSpec]:
    """Return the runs of both optimizers at every learning rate, condition and seed."""
    all_specs: list[RunSpec] = []
    for condition in [study.STREAM] if plan.data else CONDITIONS.values():
        all_specs += condition_specs(plan, results.where(condition=condition.name), condition)
    return all_specs


def condition_specs(plan: Plan, results: Results, condition: Condition) -> list[RunSpec]:
    """Return the runs of both optimizers under one condition, from the results under this condition."""
    specs, curves = partial(_specs, plan, condition), partial(_curves, condition=condition)
    return rate_pairs.extended_specs(study.GRIDS[plan.scale], specs, curves, results)


def _specs(plan: Plan, condition: Condition, grid: Sequence[float]) -> list[RunSpec]:
    return [
        study.spec(plan, MODEL, arm, rate, condition, seed)
        for seed in plan.test_seeds()
        for rate in grid
        for arm in study.ARMS
    ]


def _curves(results: Results, condition: Condition) -> list[RateCurve]:
    return [RateCurve.of(results, arm, condition.result, "higher") for arm in study.ARMS]


def pairs(results: Results) -> dict[str, Pair]:
    """Return the learning-rate curves of CAdam and Adam by condition, with the paper's AUC of DeepFM on Criteo."""
    tables = {study.TABLE.name: study.PAPER, study.TABLE_NOISY.name: study.PAPER_NOISY}
    pairs_by_condition, column = {}, study.MODELS.index(MODEL)
    for name, condition in {**CONDITIONS, "as it comes": study.STREAM}.items():
        if of_condition := results.where(condition=condition.name):
            treatment, baseline = _curves(of_condition, condition)
            table = tables.get(condition.name)
            paper = None if table is None else (table["Adam"][column], table["CAdam"][column])
            pairs_by_condition[name] = Pair(treatment, baseline, paper, of_condition.seconds)
    return pairs_by_condition


def summary(results: Results) -> Summary:
    """Summarize the comparison of Adam and CAdam over learning rates."""
    summary = rate_pairs.summary(pairs(results), NEAR, same_data=False, digits=3)
    return replace(summary, verdict=f"{study.describe_data(results)}{summary.verdict}")


def figures(results: Results) -> Mapping[str, Figure]:
    """Draw the AUC of Adam and CAdam over learning rates, and their difference."""
    return {CAPTION: rate_pairs.figure(pairs(results), "AUC x 100", same_data=False)}


FIG_RATES_CLICKS = Experiment(
    name="fig-rates-clicks",
    title="AUC over learning rates: DeepFM on clicks",
    shows="Adam and CAdam over learning rates, on clicks with three kinds of drift, without drift, and with noise.",
    claim="The paper gives each optimizer the best of five rates on test data; it has no numbers for streams.",
    run_specs=run_specs,
    summary=summary,
    figures=figures,
    seconds={"quick": 60, "full": 3300},
    seeds={"quick": 3, "full": 3},
    notes=(
        *study.NOTES[:3],
        "In the comparison at the best rates, the rate of each seed is chosen on the other seeds, by the same metric: "
        "AUC over the stream, or test AUC after a shuffled epoch.",
        "The grid is extended if the best rate is at its end.",
    ),
    **study.SHARED,
)


# Control arms --------------------------------------------------------------------------------------------------


def _control_spec(plan: Plan, arm: str, lr: float, seed: int, condition: Condition) -> RunSpec:
    return study.spec(plan, MODEL, arm, lr, condition, seed)


CONTROLS = rate_controls.Controls(
    [
        rate_controls.Condition(
            label,
            condition.name,
            condition.result,
            partial(condition_specs, condition=condition),
            partial(_control_spec, condition=condition),
        )
        for label, condition in CONDITIONS.items()
    ],
    "AUC x 100",
    NEAR,
    rounds=(rate_controls.MASKS, (LONG_MOMENTUM,)),
    digits=3,
)
FIG_RATES_CLICKS_CONTROLS = Experiment(
    name="fig-rates-clicks-controls",
    title="AUC over learning rates: control arms with DeepFM on clicks",
    shows=f"{', '.join(CONTROLS.arms)} over learning rates, on clicks with drift, without drift, and with noise.",
    claim="The paper does not compare the mask with other masks.",
    seconds={"quick": 90, "full": 6600},
    seeds={"quick": 2, "full": 3},
    notes=(*study.NOTES[:3], *rate_controls.NOTES),
    **rate_controls.functions(CONTROLS),  # type: ignore[arg-type]
    **study.SHARED,
)

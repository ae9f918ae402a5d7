"""AUC over learning rates: Adam and CAdam on a DeepFM, on a shuffled epoch and on streams that drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cadam.ab.results import Results, RunSpec
from cadam.ab.summary import Summary

from ..harness import rate_pairs
from ..harness.experiment import Experiment, Plan
from ..harness.rate_pairs import Pair
from ..harness.rates import RateCurve
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
"""Streams are predicted, then learned from; without drift a shuffled epoch is learned first, as in the paper."""
NEAR = 0.1
"""Points of AUC within which a rate counts as near the best."""
CAPTION = (
    "Above: AUC x 100 over learning rates, with 95% intervals over seeds; a ring marks the best rate. Below: the "
    "difference at each rate for both; the dashed line is the paper's, on other data."
)


def run_specs(plan: Plan, found: Results) -> list[RunSpec]:
    """Both arms at every rate under every condition and seed."""
    named: list[RunSpec] = []
    for condition in [study.STREAM] if plan.data else CONDITIONS.values():
        here, curves = partial(_specs, plan, condition), partial(_curves, condition=condition)
        named += rate_pairs.extended_specs(study.GRIDS[plan.scale], here, curves, found.where(condition=condition.name))
    return named


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
    """The curves of CAdam and of Adam by condition, beside what the paper has for DeepFM on Criteo's clicks."""
    tables = {study.TABLE.name: study.PAPER, study.TABLE_NOISY.name: study.PAPER_NOISY}
    found, place = {}, study.MODELS.index(MODEL)
    for name, condition in {**CONDITIONS, "as it comes": study.STREAM}.items():
        if here := results.where(condition=condition.name):
            treatment, baseline = _curves(here, condition)
            table = tables.get(condition.name)
            paper = None if table is None else (table["Adam"][place], table["CAdam"][place])
            found[name] = Pair(treatment, baseline, paper, here.seconds)
    return found


def summary(results: Results) -> Summary:
    found = rate_pairs.summary(pairs(results), NEAR, same_data=False, digits=3)
    return replace(found, verdict=f"{study.about(results)}{found.verdict}")


def figures(results: Results) -> Mapping[str, Figure]:
    return {CAPTION: rate_pairs.figure(pairs(results), "AUC x 100", same_data=False)}


FIG_RATES_CLICKS = Experiment(
    name="fig-rates-clicks",
    title="AUC over learning rates: DeepFM on clicks",
    shows="Adam and CAdam over learning rates, on clicks that drift in three ways, and without drift and with noise.",
    claim="The paper gives each optimizer the best of five rates on test data; it has no numbers for streams.",
    run_specs=run_specs,
    summary=summary,
    figures=figures,
    seconds={"quick": 60, "full": 3300},
    seeds={"quick": 3, "full": 3},
    notes=(
        *study.NOTES[:3],
        "Best against best, the rate of each seed is chosen on the other seeds, by the metric that is given: AUC over "
        "the stream, or test AUC after a shuffled epoch.",
        "The grid grows where a best rate stands at its end.",
    ),
    **study.SHARED,
)

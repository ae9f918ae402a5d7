"""Learning-rate curves of an A/B study: every arm at every learning rate with every seed, on the unchanged stream.

The A/B chooses learning rates on the first part of the stream, because in practice the rest is not available yet. Here
the rest of the stream decides which rate is best, on other seeds. This shows what each arm can reach, and how much a
wrong rate costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cadam.ab.report import palette

from .ab_evidence import BETTER, MAIN_METRIC, METRIC_NAMES, compare_runs, decide, evidence_rows
from .ab_study import Study
from .panels import panels
from .rate_pairs import extended_specs
from .rates import RateCurve, draw, tolerance_row
from .results import Results, RunSpec, evaluation_seeds
from .summary import Row, Summary, comparison_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = (MAIN_METRIC, "log_loss")
"""The metrics that decide which rate is best. The grid is extended until the best rate by each metric is inside it."""
NEAR = 0.01
"""A rate counts as near the best if its GAUC is lower by at most this number, which is one point."""
MAX_RELATIVE_LOSS = 1.4
"""The figure shows log losses up to this multiple of the lowest, because the highest rates have far larger ones."""


def run_specs(study: Study, seeds: int, results: Results) -> Sequence[RunSpec]:
    """Return the runs of all arms at every rate of the grid, which is extended while a best rate is at an end of it."""

    def specs(grid: Sequence[float]) -> list[RunSpec]:
        return [study.spec(arm, lr, seed) for seed in evaluation_seeds(seeds) for lr in grid for arm in study.arms]

    def all_curves(grid_results: Results) -> list[RateCurve]:
        return [curve for metric in METRICS for curve in curves(study, grid_results, metric).values()]

    return extended_specs(sorted(study.grid), specs, all_curves, results)


def curves(study: Study, results: Results, metric: str = MAIN_METRIC) -> dict[str, RateCurve]:
    """Return a metric over learning rates for each arm."""
    return {arm: RateCurve.of(results, arm, metric, BETTER[metric]) for arm in study.arms}


def pairs(study: Study, results: Results, arm: str, metric: str = MAIN_METRIC) -> dict[str, tuple[Results, Results]]:
    """Return the runs of an arm and of the baseline, at three choices of the learning rates.

    The choices are: each at its own best rate, both at the best rate of the baseline, and both at three times that
    rate. They are the keys of the result.
    """
    by_arm = curves(study, results, metric)
    base = by_arm[study.baseline]
    rate = base.best()

    def runs_at(name: str, rates: Mapping[int, float]) -> Results:
        runs = results.tests().where(optimizer=name)
        return Results([result for result in runs if result.spec.lr == rates[result.spec.seed]])

    names = (arm, study.baseline)
    rates_of = {"each at its own best rate": {name: by_arm[name].rate_by_seed() for name in names}}
    for words, lr in ((f"{study.baseline}'s best rate", rate), ("three times that", base.nearest_to_triple(rate))):
        rates_of[f"both at {words}, {lr:g}"] = dict.fromkeys(names, dict.fromkeys(base.seeds, lr))
    return {
        label: (runs_at(arm, rates[arm]), runs_at(study.baseline, rates[study.baseline]))
        for label, rates in rates_of.items()
    }


def summary(study: Study, results: Results) -> Summary:
    """Summarize the comparison of the arms at their best rates and at common rates."""
    rows: list[Row] = []
    verdicts, sentences, warnings = {}, [], []
    for arm in study.arms[1:]:
        for metric in METRICS:
            for rates, pair in pairs(study, results, arm, metric).items():
                label, seconds = f"{METRIC_NAMES[metric]}: {rates}", pair[0].seconds + pair[1].seconds
                if metric != MAIN_METRIC:
                    rows.append(comparison_row(label, "", compare_runs(pair, metric), seconds, digits=4))
                    continue
                decision = decide(pair, study.matters)
                rows.append(decision.row(label, "", seconds))
                rows += evidence_rows(rates, decision.evidence, len(pair[0]))
                verdicts[rates if len(study.arms) == 2 else f"{arm}, {rates}"] = decision.verdict
                difference = f"{decision.seeds.difference:+.4f}"
                sentences.append(f"{rates[0].upper()}{rates[1:]}: {decision.verdict} ({difference}).")
    for metric in METRICS:
        for curve in curves(study, results, metric).values():
            if metric == MAIN_METRIC:
                rows.append(tolerance_row(METRIC_NAMES[MAIN_METRIC], curve, NEAR))
            if curve.best_is_at_an_end:
                name = METRIC_NAMES[metric]
                warnings.append(f"{name}: the best rate of {curve.arm}, {curve.best():g}, is at an end of the grid")
    arms = " and ".join(reversed(study.arms))
    text = f"{METRIC_NAMES[MAIN_METRIC]} of {arms} over learning rates. {' '.join(sentences)}"
    return Summary(text, rows, warnings, verdicts)


def figures(study: Study, results: Results) -> Mapping[str, Figure]:
    """Draw GAUC and log loss over learning rates."""
    figure, axes = panels(1, len(METRICS), 9, 3.4)
    colors = palette.arm_colors(study.arms)
    for panel, metric in zip(axes[0], METRICS, strict=True):
        by_arm = curves(study, results, metric)
        draw(panel, {colors[arm]: curve for arm, curve in by_arm.items()})
        panel.set(title=METRIC_NAMES[metric], xlabel="learning rate")
        if metric == "log_loss":
            lowest = min(curve.at(curve.best()).mean for curve in by_arm.values())
            panel.set_ylim(0.97 * lowest, MAX_RELATIVE_LOSS * lowest)
    axes[0, 0].legend(loc="best", fontsize=8)
    return {"Over learning rates, with 95% intervals over seeds; a ring marks the best rate.": figure}

"""The arms of an A/B over learning rates: every arm at every rate under every seed, on the stream as it is.

The A/B itself chooses a rate on the first part of the stream, as one has to who cannot see the rest. Here rates are
judged by what is measured, under other seeds: what each arm can reach, and how much a rate that is off costs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cadam.ab.report import palette
from cadam.ab.results import Results, RunSpec, evaluation_seeds
from cadam.ab.study import AS_IT_IS, BETTER, MAIN, NAMES, Study, compared, decide, evidence_rows
from cadam.ab.summary import Row, Summary, comparison_row

from .rate_pairs import grown
from .rates import RateCurve, draw, tolerance_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = (MAIN, "log_loss")
"""What rates are judged by, each on its own; the grid grows until it holds the best rate by either."""
NEAR = 0.01
"""A point of GAUC: a rate that costs no more than this is near the best."""
HIGHEST_LOSS = 1.4
"""The figure shows log losses up to so many times the least: the highest rates are far off."""


def run_specs(study: Study, seeds: int, found: Results) -> Sequence[RunSpec]:
    """Both arms at every rate of the grid, seed by seed, and at rates beyond it while the best one is at its end."""

    def named(grid: Sequence[float]) -> list[RunSpec]:
        return [
            study.spec(arm, lr, seed, AS_IT_IS) for seed in evaluation_seeds(seeds) for lr in grid for arm in study.arms
        ]

    def judged(results: Results) -> list[RateCurve]:
        return [curve for metric in METRICS for curve in curves(study, results, metric).values()]

    return grown(sorted(study.grid), named, judged, found)


def curves(study: Study, results: Results, metric: str = MAIN) -> dict[str, RateCurve]:
    """A metric of each arm over learning rates."""
    return {arm: RateCurve.of(results, arm, metric, BETTER[metric]) for arm in study.arms}


def pairs(study: Study, results: Results, arm: str, metric: str = MAIN) -> dict[str, tuple[Results, Results]]:
    """The runs of an arm and of the baseline, seed by seed: each at its own best rate, and both at one."""
    both = curves(study, results, metric)
    base = both[study.baseline]
    rate = base.best()

    def at(name: str, rates: Mapping[int, float]) -> Results:
        mine = results.tests().where(optimizer=name)
        return Results([result for result in mine if result.spec.lr == rates[result.spec.seed]])

    found = {"each at its own best rate": {name: both[name].chosen() for name in (arm, study.baseline)}}
    for words, lr in ((f"{study.baseline}'s best rate", rate), ("three times that", base.above(rate))):
        found[f"both at {words}, {lr:g}"] = dict.fromkeys((arm, study.baseline), dict.fromkeys(base.seeds, lr))
    return {what: (at(arm, rates[arm]), at(study.baseline, rates[study.baseline])) for what, rates in found.items()}


def summary(study: Study, results: Results) -> Summary:
    rows: list[Row] = []
    verdicts, sentences, warnings = {}, [], []
    for arm in study.arms[1:]:
        for metric in METRICS:
            for what, pair in pairs(study, results, arm, metric).items():
                line, seconds = f"{NAMES[metric]}: {what}", pair[0].seconds + pair[1].seconds
                if metric != MAIN:
                    rows.append(comparison_row(line, "", compared(pair, metric), seconds, digits=4))
                    continue
                decision = decide(study, pair)
                rows += [decision.row(line, "", seconds), *evidence_rows(what, decision.found, len(pair[0]))]
                verdicts[what if len(study.arms) == 2 else f"{arm}, {what}"] = decision.verdict
                sentences.append(f"{what[0].upper()}{what[1:]}: {decision.verdict} ({decision.seeds.difference:+.4f}).")
    for metric in METRICS:
        for curve in curves(study, results, metric).values():
            if metric == MAIN:
                rows.append(tolerance_row(NAMES[MAIN], curve, NEAR))
            if curve.best_is_at_an_end:
                warnings.append(
                    f"{NAMES[metric]}: the best rate of {curve.arm}, {curve.best():g}, is at an end of the grid"
                )
    arms = " and ".join(reversed(study.arms))
    return Summary(f"{NAMES[MAIN]} of {arms} over learning rates. {' '.join(sentences)}", rows, warnings, verdicts)


def figures(study: Study, results: Results) -> Mapping[str, Figure]:
    figure, axes = palette.panels(1, len(METRICS), 9, 3.4)
    colours = (study.arms[-1], study.baseline, *study.arms[1:-1])
    for panel, metric in zip(axes[0], METRICS, strict=True):
        found = curves(study, results, metric)
        draw(panel, {colour: found[arm] for arm, colour in zip(colours, palette.SERIES, strict=False)})
        panel.set(title=NAMES[metric], xlabel="learning rate")
        if metric == "log_loss":
            least = min(curve.at(curve.best()).mean for curve in found.values())
            panel.set_ylim(0.97 * least, HIGHEST_LOSS * least)
    axes[0, 0].legend(loc="best", fontsize=8)
    return {"Over learning rates, with 95% intervals over seeds; a ring marks the best rate.": figure}

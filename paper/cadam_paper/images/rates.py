"""Accuracy over learning rates: both optimizers of a pair at every rate, under four conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cadam.trials import palette, statistics
from cadam.trials.experiment import Cell, Experiment, Plan, Results, Row, Scale, Summary
from cadam.trials.palette import panels
from cadam.trials.rates import RateCurve, at_one_rate, best_against_best, draw

from . import streams, study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONDITIONS = {
    "without change": streams.sudden(0),
    "sudden 80°": streams.sudden(80),
    "continuous 2°": streams.continuous(2),
    "noise 40%": streams.noisy(40),
}
PAPERS = {"sudden 80°": "+0.98", "continuous 2°": "+4.52", "noise 40%": "+3.34"}
"""What the paper's ablation table has for CAdam minus Adam; it does not say at which rate."""
RATES: dict[Scale, tuple[float, ...]] = {
    "quick": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "full": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
}
NEAR = 1.0
"""Points of accuracy within which a rate counts as near the best."""


def cells(plan: Plan, found: Results, family: str, arms: Sequence[str]) -> list[Cell]:
    """Every arm at every rate under every condition, seed by seed."""
    return [
        study.cell(plan, family, arm, rate, stream, seed)
        for seed in plan.test_seeds()
        for rate in RATES[plan.scale]
        for stream in CONDITIONS.values()
        for arm in arms
    ]


def curves(results: Results, arms: Sequence[str]) -> dict[str, tuple[RateCurve, RateCurve]]:
    """The curves of the treatment and of the baseline, by condition."""
    found = {}
    for name, stream in CONDITIONS.items():
        here = results.where(condition=str(stream))
        treatment, baseline = (RateCurve.of(here, arm, "accuracy", "higher") for arm in arms)
        found[name] = treatment, baseline
    return found


def summary(results: Results, arms: Sequence[str]) -> Summary:
    rows: list[Row] = []
    warnings, ahead = [], []
    for name, pair in curves(results, arms).items():
        baseline = pair[1]
        seconds = results.where(condition=str(CONDITIONS[name])).seconds
        own = best_against_best(*pair)
        rows.append(statistics.row(f"{name}: each at its own best rate", PAPERS.get(name, ""), own, seconds, 2))
        ahead.append(f"{name} {own.difference:+.2f} ({own.verdict})")
        rate = baseline.best()
        above = min(baseline.rates, key=lambda r: abs(r / rate - 3))
        for words, at in ((f"{baseline.arm}'s best rate", rate), ("three times that", above)):
            row = statistics.row(f"{name}: both at {words}, {at:g}", "", at_one_rate(*pair, at), seconds, 2)
            rows.append(row)
        for curve in pair:
            low, high = curve.tolerance(NEAR)
            rows.append(
                Row(
                    f"{name}: {curve.arm} within {NEAR:g} point of its best",
                    "",
                    f"{low:g} to {high:g}",
                    "",
                    len(curve.seeds),
                    seconds,
                    values={"low": low, "high": high, "best": curve.best()},
                )
            )
            if curve.best_is_at_an_end:
                warnings.append(f"{name}: the best rate of {curve.arm}, {curve.best():g}, is at an end of the grid")
    return Summary(f"Each at its own best rate, CAdam minus Adam: {'; '.join(ahead)}.", rows, warnings)


def figures(results: Results, arms: Sequence[str]) -> Mapping[str, Figure]:
    figure, axes = panels(1, len(CONDITIONS), 12, 3.4)
    for panel, (name, pair) in zip(axes[0], curves(results, arms).items(), strict=True):
        draw(panel, dict(zip((palette.CADAM, palette.ADAM), pair, strict=True)))
        panel.set(title=name, xlabel="learning rate")
    axes[0, 0].set_ylabel("mean test accuracy, %")
    axes[0, 0].legend(loc="lower center", fontsize=8)
    return {"Mean test accuracy over learning rates, with 95% intervals over seeds; a ring marks the best rate": figure}


FIG_RATES = Experiment(
    name="fig-rates",
    title="Accuracy over learning rates, VGG-16",
    shows="Adam and CAdam at five learning rates, without change and under the three conditions of the paper.",
    claim="The paper compares at one rate for both, which it does not give.",
    cells=partial(cells, family="vgg", arms=study.ARMS),
    summary=partial(summary, arms=study.ARMS),
    figures=partial(figures, arms=study.ARMS),
    seconds={"quick": 60, "full": 2600},
    seeds={"quick": 3, "full": 5},
    notes=(
        *study.NOTES[:2],
        "Best against best, the rate of each seed is chosen on the other seeds.",
        "Rates are judged on the same 10,000 test images that results are measured on, under other seeds.",
    ),
    **study.SHARED,
)
